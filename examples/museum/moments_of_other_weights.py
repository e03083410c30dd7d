"""A resumed run goes on, and trains another model than the one that was saved.

NVIDIA/Megatron-LM#6920 in kind: the optimizer's state is written by number, and the resumed run
numbers its parameters in another order, so that a moment belongs to another weight of the same
shape::

    python moments_of_other_weights.py && gradguard parity reference.safetensors new.safetensors
    python moments_of_other_weights.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import copy
import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
x, y = torch.randn(32, 8), torch.randn(32, 8)


def fresh(reverse):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    parameters = list(model.parameters())
    return model, torch.optim.SGD(parameters[::-1] if reverse else parameters, 0.1, momentum=0.9)


def save(file, model, optimizer):
    gg.save_gradients(file, model, lambda: mse_loss(model(x), y).backward(), optimizer=optimizer)


model, optimizer = fresh(reverse=False)
for _ in range(5):
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
save("reference.safetensors", model, optimizer)  # goes on

resumed, optimizer = fresh(reverse=not HEALTHY)
resumed.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
save("new.safetensors", resumed, optimizer)
