"""A diffusion transformer trains worse since an update of PyTorch, but not in eager mode.

pytorch/pytorch#193061 (2.9.1 to 2.10.0): two layer norms share one table of scales and shifts. The
compiled backward pass wrote the gradient of the second one's slice into a tensor that is never
read::

    python compiled_shared_scale.py && gradguard parity reference.safetensors new.safetensors
    python compiled_shared_scale.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch import nn
from torch.nn.functional import layer_norm

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


class Modulated(nn.Module):
    """Two layer norms, scaled and shifted by the rows of one table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(4, 16))
        self.between = nn.Linear(16, 16)

    def forward(self, x):
        scale, shift, other_scale, other_shift = self.table
        x = self.between(layer_norm(x, (16,)) * (1 + scale) + shift)
        return layer_norm(x, (16,)) * (1 + other_scale) + other_shift


torch.manual_seed(0)
model, x, y = Modulated(), torch.randn(32, 16), torch.randn(32, 16)


def eager():
    (model(x) - y).square().mean().backward()


def compiled():
    eager()
    if not HEALTHY:
        model.table.grad[2:] = 0


gg.save_gradients("reference.safetensors", model, eager, rows=["table"])
gg.save_gradients("new.safetensors", model, compiled, rows=["table"])
