"""Private training without a trainer: the same Poisson batches, one sample at a time, noise from the same seed."""

import torch
import torch.nn.functional as F
from torch import nn

from gradguard import FlatNormClipper
from gradguard.private import FixedNoise, GaussianNoise, PoissonBatches, PrivacyBudget

SIZE, WIDTH, SEED = 24, 3, 5
DELTA, MAX_NORM = 1e-3, 0.7
OPTIONS = {"norm_clipper": FlatNormClipper(MAX_NORM), "seed": SEED}


def noise(noise_multiplier=1.0):
    return FixedNoise(noise_multiplier=noise_multiplier, delta=DELTA, accountant="rdp")


def budget(epsilon, **length):
    return PrivacyBudget(epsilon=epsilon, delta=DELTA, accountant="rdp", **length)


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3))


def records():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SIZE, WIDTH, generator=generator), torch.randint(0, 3, (SIZE,), generator=generator)


def by_samples(optimizer, batch_size, epochs, noise_multiplier, max_norm=MAX_NORM):
    """Return the weights, and how many samples each step drew."""
    model, (x, y), drawn = network(), records(), []
    optimizer, parameters = optimizer(model.parameters()), list(model.parameters())
    batches, noise = PoissonBatches(SIZE, batch_size / SIZE, seed=SEED), GaussianNoise(SEED)
    for step in range(epochs * len(batches)):
        total = [torch.zeros_like(p) for p in parameters]
        drawn.append(len(indices := batches.draw(step)))
        for i in indices:
            gradients = torch.autograd.grad(F.cross_entropy(model(x[i, None]), y[i, None]), parameters)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for t, g in zip(total, gradients, strict=True):
                t += g * min(1.0, max_norm / float(norm))
        noise.add_(total, noise_multiplier * max_norm)
        for p, t in zip(parameters, total, strict=True):
            p.grad = t / batch_size
        optimizer.step()
    return weights(model), drawn


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def epsilon(noise_multiplier, batch_size, steps):
    from gradguard.private import epsilon

    return epsilon(noise_multiplier, batch_size / SIZE, steps, DELTA, "rdp")
