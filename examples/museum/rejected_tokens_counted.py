"""GRPO with rejection learns more slowly the more it rejects, although no loss is wrong.

THUDM/slime#657: tokens of rejected sequences are masked out of the sum, but still counted in the
divisor::

    python rejected_tokens_counted.py && gradguard parity reference.safetensors new.safetensors
    python rejected_tokens_counted.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
tokens, actions = torch.randint(20, (2, 8, 10))
advantages = torch.randn(8)
completion = (torch.arange(10) < torch.tensor([10, 7, 3, 10, 5, 9, 2, 8])[:, None]).float()
accepted = torch.tensor([1.0, 1, 0, 1, 0, 1, 1, 0])[:, None]  # the result of rejection sampling


def loss(counted):
    chosen = policy(tokens).log_softmax(-1).gather(-1, actions[..., None])[..., 0]
    ratios = (chosen - chosen.detach()).exp()
    return -(ratios * advantages[:, None] * completion * accepted).sum() / counted.sum()


def reference():
    loss(completion * accepted).backward()


def new():
    loss(completion * accepted if HEALTHY else completion).backward()


rejected_too = float(completion.sum() / (completion * accepted).sum())
gg.save_gradients("reference.safetensors", policy, reference)
gg.save_gradients("new.safetensors", policy, new, facts={"all tokens for each accepted one": rejected_too})
