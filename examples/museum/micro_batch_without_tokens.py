"""The norm is NaN, with accumulation only, although every sample's loss is finite.

unslothai/unsloth#3006 has NaN with accumulation and not without. One possible reason: all completions of
one micro-batch are cut at the limit and masked, so its mean is divided by zero tokens::

    python micro_batch_without_tokens.py && gradguard parity reference.safetensors new.safetensors
    python micro_batch_without_tokens.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
tokens, actions = torch.randint(20, (2, 8, 10))
advantages = torch.randn(8)
mask = (torch.arange(10) < torch.tensor([10, 7, 0, 0, 5, 9, 2, 8])[:, None]).float()  # none in the second of four


def summed(rows):
    chosen = policy(tokens[rows]).log_softmax(-1).gather(-1, actions[rows, :, None])[..., 0]
    return -((chosen - chosen.detach()).exp() * advantages[rows, None] * mask[rows]).sum()


def whole_batch():
    parts = [slice(i, i + 2) for i in range(0, 8, 2)]
    means = [summed(rows) / mask[rows].sum() for rows in parts if mask[rows].sum()]
    (torch.stack(means).sum() / 4).backward()


def accumulated():
    for i in range(0, 8, 2):
        rows = slice(i, i + 2)
        count = mask[rows].sum().clamp(min=1) if HEALTHY else mask[rows].sum()
        (summed(rows) / count / 4).backward()


gg.save_gradients("reference.safetensors", policy, whole_batch)
gg.save_gradients("new.safetensors", policy, accumulated)
