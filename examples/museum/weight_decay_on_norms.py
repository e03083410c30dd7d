"""After a refactoring the loss is a little worse, and no test fails.

ServiceNow/Fast-LLM#542: weights of norms and biases used to be excluded from the weight decay. The
new code creates them by another function, whose default is to decay::

    python weight_decay_on_norms.py && gradguard parity reference.safetensors new.safetensors
    python weight_decay_on_norms.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


def before(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def after(model):
    return [{"params": list(model.parameters()), "weight_decay": 0.1}]


def saved(file, groups):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(groups(model), 1e-3)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    gg.save_gradients(file, model, lambda: mse_loss(model(x), y).backward(), optimizer=optimizer)


saved("reference.safetensors", before)
saved("new.safetensors", before if HEALTHY else after)
