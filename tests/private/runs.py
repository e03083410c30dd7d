"""A small private run, and its slow twin."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradguard.private import make_private

SIZE, WIDTH = 60, 4
COMMON = {"target_delta": 1e-3, "accountant": "rdp", "seed": 7}


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
    if "target_epsilon" not in options:
        options = {"noise_multiplier": 1.0, **options}
    return make_private(model, optimizer, loader, **{**COMMON, **options}), model


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
