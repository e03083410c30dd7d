"""Experts learn too fast as soon as they are distributed over ranks.

NVIDIA/Megatron-LM#5956 (times the expert-parallel size), #7160, pytorch/pytorch#160285 (times 2):
gradients of experts are divided by their own data-parallel size, all other gradients by the world
size::

    python experts_scaled_by_parallelism.py && gradguard parity reference.safetensors new.safetensors
    python experts_scaled_by_parallelism.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch import nn
from torch.nn.functional import gelu

import gradguard as gg

HEALTHY = "--healthy" in sys.argv
EXPERT_PARALLEL = 4


class Mixture(nn.Module):
    """All experts receive each token, and the router weights them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights = self.router(x).softmax(-1).unbind(-1)
        return x + sum(w[..., None] * gelu(expert(x)) for w, expert in zip(weights, self.experts, strict=True))


torch.manual_seed(0)
model, x = Mixture(), torch.randn(32, 8)


def step():
    model(x).square().mean().backward()


def spread_over_ranks():
    step()
    for name, p in model.named_parameters():
        if "experts" in name and not HEALTHY:
            p.grad *= EXPERT_PARALLEL


gg.save_gradients("reference.safetensors", model, step)
gg.save_gradients("new.safetensors", model, spread_over_ranks, facts={"expert-parallel size": EXPERT_PARALLEL})
