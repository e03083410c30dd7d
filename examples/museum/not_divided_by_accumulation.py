"""Loss and gradient norm are multiplied as soon as gradients are accumulated.

axolotl-ai-cloud/axolotl#2262, deepspeedai/DeepSpeed#7773: the loss of each micro-batch is a mean,
and their sum is not divided by their number::

    python not_divided_by_accumulation.py && gradguard parity reference.safetensors new.safetensors
    python not_divided_by_accumulation.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv
MICRO_BATCHES = 8

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
x, y = torch.randn(32, 8), torch.randn(32, 4)


def accumulated():
    for a, b in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        (mse_loss(model(a), b) / (MICRO_BATCHES if HEALTHY else 1)).backward()


gg.save_gradients("reference.safetensors", model, lambda: mse_loss(model(x), y).backward())
gg.save_gradients("new.safetensors", model, accumulated, facts={"micro-batches": MICRO_BATCHES})
