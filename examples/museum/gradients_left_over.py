"""The first step is right; from the second on the norm grows with each step.

A forgotten `zero_grad`, the most frequent question in forums: the gradients of one step are added
to those of the next::

    python gradients_left_over.py && gradguard parity reference.safetensors new.safetensors
    python gradients_left_over.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


def saved(file, zeroes):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(32, 8), torch.randn(32, 4)

    def update():
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()

    gg.save_gradients(file, model, lambda: mse_loss(model(x), y).backward(), optimizer=optimizer, update=update)


saved("reference.safetensors", zeroes=True)
saved("new.safetensors", zeroes=HEALTHY)
