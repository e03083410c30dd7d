"""The router of a mixture of experts never learns, although the loss falls.

huggingface/transformers#48205, #48687 in kind: the weights of experts are detached from the graph,
here by `.data`::

    python router_without_gradient.py && gradguard parity reference.safetensors new.safetensors
    python router_without_gradient.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch import nn
from torch.nn.functional import gelu

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


class Mixture(nn.Module):
    """All experts receive each token, and the router weights them."""

    def __init__(self, cut):
        super().__init__()
        self.router, self.cut = nn.Linear(8, 4), cut
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        scores = scores.data if self.cut else scores
        y = sum(w[..., None] * gelu(expert(x)) for w, expert in zip(scores.unbind(-1), self.experts, strict=True))
        return x + y


def saved(file, cut):
    torch.manual_seed(0)
    model, x = Mixture(cut), torch.randn(32, 8)
    gg.save_gradients(file, model, lambda: model(x).square().mean().backward())


saved("reference.safetensors", cut=False)
saved("new.safetensors", cut=not HEALTHY)
