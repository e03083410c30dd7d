"""A small private run, and its slow twin."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradguard import FlatNormClipper, PerSampleGradientClipper
from gradguard.private import FixedNoise, PrivacyBudget, make_private

SIZE, WIDTH = 60, 4
COMMON = {"delta": 1e-3, "accountant": "rdp", "seed": 7}
_OF_THE_CLIPPER = ("batch_first", "loss_reduction", "mode", "scaler")


def taken(options, *names):
    return {name: options.pop(name) for name in names if name in options}


def privacy_of(options):
    """Take what is spent out of ``options``: ``epsilon`` with its steps, or else ``noise_multiplier``."""
    common = taken(options, "delta", "accountant")
    if "epsilon" in options:
        return PrivacyBudget(**taken(options, "epsilon", "epochs", "steps"), **common)
    return FixedNoise(noise_multiplier=options.pop("noise_multiplier", 1.0), **common)


def made_private(model, optimizer, loader, norm_clipper=None, max_norm=1.0, **options):
    """Call `make_private` with the parts that are made of ``options``."""
    privacy = privacy_of(options)
    rule = FlatNormClipper(max_norm) if norm_clipper is None else norm_clipper
    clipper = PerSampleGradientClipper(model, rule, **taken(options, *_OF_THE_CLIPPER))
    return make_private(clipper, optimizer, loader, privacy, **options)


def data_set(size=SIZE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, WIDTH, generator=generator).to(dtype)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=generator), torch.arange(size))


def network(dtype=torch.float32):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def private_run(model=None, batch_size=12, data=None, lr=0.5, loader=None, **options):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = loader if loader is not None else DataLoader(data or data_set(), batch_size=batch_size, shuffle=True)
    return made_private(model, optimizer, loader, **{**COMMON, **options}), model


def one_step(private, model, batch, reduction="mean"):
    x, y = batch[:2]
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    return private.step()


def train(private, model, epochs=1, **options):
    return [one_step(private, model, batch, **options) for _ in range(epochs) for batch in private.loader]


def weights(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def clipped_sum(model, batches, max_norm):
    """The slow twin: one sample after the other."""
    total = torch.zeros_like(weights(model))
    for batch in batches:
        for x, y in zip(*batch[:2], strict=True):
            grads = torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), list(model.parameters()))
            flat = torch.cat([g.flatten() for g in grads]).double()
            total += flat * min(1.0, max_norm / float(flat.norm()))
    return total
