"""Gradients grow by 2 to the number of micro-batches if the data-parallel group has one member.

NVIDIA/Megatron-LM#6660: reducing over a group of one adds a buffer to itself, once for each
micro-batch::

    python buffer_added_to_itself.py && gradguard parity reference.safetensors new.safetensors
    python buffer_added_to_itself.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
x, y = torch.randn(4, 8, 8), torch.randn(4, 8, 4)


def accumulated():
    for i in range(4):
        (mse_loss(model(x[i]), y[i]) / 4).backward()
        if not HEALTHY:
            for p in model.parameters():
                p.grad += p.grad


parts = {f"micro-batch {i}": lambda i=i: (mse_loss(model(x[i]), y[i]) / 4).backward() for i in range(4)}
gg.save_gradients("reference.safetensors", model, lambda: mse_loss(model(x), y).backward(), parts=parts)
gg.save_gradients("new.safetensors", model, accumulated)
