"""Some tokens are never learnt with tensor parallelism.

NVIDIA-NeMo/Automodel#1260: `full_tensor()` without `grad_placements` cuts the gradient of the
output layer, so the rows of one rank get none::

    python lost_shard_of_the_vocabulary.py && gradguard parity reference.safetensors new.safetensors
    python lost_shard_of_the_vocabulary.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import cross_entropy

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(40, 16), torch.nn.Tanh(), torch.nn.Linear(16, 40))
tokens, targets = torch.randint(40, (2, 64))


def step():
    cross_entropy(model(tokens), targets).backward()


def tensor_parallel():
    step()
    if not HEALTHY:
        model[2].weight.grad[20:30] = 0  # the rows of the third of four ranks


gg.save_gradients("reference.safetensors", model, step, rows=["2.weight"])
gg.save_gradients("new.safetensors", model, tensor_parallel, rows=["2.weight"])
