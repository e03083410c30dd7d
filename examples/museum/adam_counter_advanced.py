"""The gradients are equal, but the updates are 1.3 times smaller than with DDP and FSDP2.

NVIDIA/Megatron-LM#5974, NVIDIA-NeMo/Automodel#3191: to create the state into which a checkpoint is
loaded, the optimizer first makes a step with gradients of zero. It changes no weight, but advances
Adam's counter, so the bias of the moments is corrected as in the second step::

    python adam_counter_advanced.py && gradguard parity reference.safetensors new.safetensors
    python adam_counter_advanced.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


def saved(file, initialised, healthy=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    if initialised:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for state in optimizer.state.values():
            state["step"] *= not healthy
    gg.save_gradients(file, model, lambda: mse_loss(model(x), y).backward(), optimizer=optimizer)


saved("reference.safetensors", initialised=False)
saved("new.safetensors", initialised=True, healthy=HEALTHY)
