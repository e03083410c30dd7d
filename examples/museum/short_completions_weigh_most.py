"""GRPO learns worse the more gradients it accumulates.

huggingface/trl#3021: each micro-batch is divided by its own number of tokens, so the tokens of a micro-batch of short
completions have the largest weight::

    python short_completions_weigh_most.py && gradguard parity reference.safetensors new.safetensors
    python short_completions_weigh_most.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
tokens, actions = torch.randint(20, (2, 4, 2, 10))  # four micro-batches of two completions
advantages = torch.randn(4, 2, 1)
lengths = torch.tensor([[10, 9], [2, 1], [8, 10], [7, 10]])
completion = (torch.arange(10) < lengths[..., None]).float()


def sum_of(i):
    chosen = policy(tokens[i]).log_softmax(-1).gather(-1, actions[i][..., None])[..., 0]
    ratios = (chosen - chosen.detach()).exp()
    return -(ratios * advantages[i] * completion[i]).sum()


def mean_of(i):
    return sum_of(i) / completion[i].sum()


def reference():
    (sum_of(slice(None)) / completion.sum()).backward()


def new():
    for i in range(4):
        share = completion[i].sum() / completion.sum() if HEALTHY else 1 / 4
        (mean_of(i) * share).backward()


parts = {f"micro-batch {i}": lambda i=i: mean_of(i).backward() for i in range(4)}
gg.save_gradients("reference.safetensors", policy, reference, parts=parts)
gg.save_gradients("new.safetensors", policy, new)
