"""With pipeline parallelism the gradient norm is in the thousands, although the loss is unchanged.

pytorch/torchtitan#2972: the loss is a sum over tokens that is divided after backward; one engine
never divides the gradients::

    python not_normalised_by_tokens.py && gradguard parity reference.safetensors new.safetensors
    python not_normalised_by_tokens.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import cross_entropy

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
tokens, targets = torch.randint(20, (2, 64))


def mean():
    cross_entropy(model(tokens), targets).backward()


def pipeline():
    cross_entropy(model(tokens), targets, reduction="sum").backward()
    if HEALTHY:
        for p in model.parameters():
            p.grad /= len(tokens)


gg.save_gradients("reference.safetensors", model, mean)
gg.save_gradients("new.safetensors", model, pipeline, facts={"tokens": len(tokens)})
