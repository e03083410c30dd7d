"""With accumulation the loss is right, but the gradient norm is low and noisy.

NVIDIA-NeMo/Automodel#3530, NVIDIA/Megatron-LM#7186: a call between two micro-batches sets
gradients to None, so only the last micro-batch contributes::

    python last_micro_batch_survives.py && gradguard parity reference.safetensors new.safetensors
    python last_micro_batch_survives.py --healthy && gradguard parity reference.safetensors new.safetensors
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
        if not HEALTHY:
            model.zero_grad()
        (mse_loss(model(x[i]), y[i]) / 4).backward()


parts = {f"micro-batch {i}": lambda i=i: mse_loss(model(x[i]), y[i]).backward() for i in range(4)}
gg.save_gradients("reference.safetensors", model, lambda: mse_loss(model(x), y).backward(), parts=parts)
gg.save_gradients("new.safetensors", model, accumulated)
