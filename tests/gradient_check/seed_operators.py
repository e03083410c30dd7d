"""Operators and points for the tests of `get_numerical_gradient` and `check_grad`."""

import numpy as np
import torch
from torch import nn


class Scaled(torch.autograd.Function):
    """x² whose backward is multiplied by ``factor``."""

    @staticmethod
    def forward(ctx, x, factor=1.0):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0] * ctx.factor, None


class OnlyFloat32(torch.autograd.Function):
    """A kernel that takes float32 and nothing else."""

    @staticmethod
    def forward(x):
        if x.dtype is not torch.float32:
            raise RuntimeError("float32 only")
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.decoder = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return {"loss": self.decoder(self.encoder(x).tanh())}


def noise(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def two(x, y):
    return {"a": x * y, "b": x + 2 * y}


X, Y = noise(2, 3), noise(2, 3, seed=1)
COMPLEX = noise(4) + 1j * noise(4, seed=1)
NAN = float("nan")
