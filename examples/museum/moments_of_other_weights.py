"""A resumed run trains a model other than the saved one.

NVIDIA/Megatron-LM#6920 in kind: the optimizer's state is written by number, but the resumed run
numbers its parameters in another order, so a moment belongs to another weight of the same
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
save("reference.safetensors", model, optimizer)  # the uninterrupted run

resumed, optimizer = fresh(reverse=not HEALTHY)
resumed.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
save("new.safetensors", resumed, optimizer)
