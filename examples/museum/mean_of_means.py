"""Accumulation changes the loss curve, though each micro-batch is divided by their number.

huggingface/transformers#34191 (October 2024), NVIDIA/Megatron-LM#7452: micro-batches have different
numbers of tokens, so the mean of their means gives tokens of short ones too much weight::

    python mean_of_means.py && gradguard parity reference.safetensors new.safetensors
    python mean_of_means.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import cross_entropy

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
tokens, targets = torch.randint(20, (2, 4, 8))
for i, length in enumerate((8, 2, 5, 1)):
    targets[i, length:] = -100  # padding
total = (targets >= 0).sum()


def loss_of(i):
    return cross_entropy(model(tokens[i]), targets[i])


def whole_batch():
    cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()


def accumulated():
    for i in range(4):
        share = (targets[i] >= 0).sum() / total if HEALTHY else 1 / 4
        (loss_of(i) * share).backward()


parts = {f"micro-batch {i}": lambda i=i: loss_of(i).backward() for i in range(4)}
gg.save_gradients("reference.safetensors", model, whole_batch, parts=parts)
gg.save_gradients("new.safetensors", model, accumulated)
