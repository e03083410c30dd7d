"""The ported loop trains well for a day, and then a spike ends it.

karpathy/autoresearch#287, meta-pytorch/torchforge#704: the recipe clips gradients, but the new loop
does not::

    python clip_missing_after_the_port.py && gradguard parity reference.safetensors new.safetensors
    python clip_missing_after_the_port.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


def saved(file, clips):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(32, 8), 10 * torch.randn(32, 4)

    def update():
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    gg.save_gradients(file, model, lambda: mse_loss(model(x), y).backward(), optimizer=optimizer, update=update)


saved("reference.safetensors", clips=True)
saved("new.safetensors", clips=HEALTHY)
