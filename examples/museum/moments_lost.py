"""After each resume the loss jumps, and falls again.

ace-step/ACE-Step-1.5#742, TrenTorch/TrenTorch#187: the checkpoint has the weights but not the
optimizer's moments, or they are not loaded::

    python moments_lost.py && gradguard parity reference.safetensors new.safetensors
    python moments_lost.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import copy
import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
x, y = torch.randn(32, 8), torch.randn(32, 4)


def fresh():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def save(file, model, optimizer):
    gg.save_gradients(file, model, lambda: mse_loss(model(x), y).backward(), optimizer=optimizer)


model, optimizer = fresh()
for _ in range(5):
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
save("reference.safetensors", model, optimizer)  # the uninterrupted run

resumed, optimizer = fresh()
resumed.load_state_dict(checkpoint["model"])
if HEALTHY:
    optimizer.load_state_dict(checkpoint["optimizer"])
save("new.safetensors", resumed, optimizer)
