"""GRPO's steps are too short once the completions of one generation are used for two steps.

huggingface/trl#5619: each token is divided by the number of tokens of the whole generation, but a step
accumulates half of its micro-batches::

    python tokens_of_the_generation.py && gradguard parity reference.safetensors new.safetensors
    python tokens_of_the_generation.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
tokens, actions = torch.randint(20, (2, 4, 2, 10))  # four micro-batches of two completions
advantages = torch.randn(4, 2, 1)
lengths = torch.tensor([[10, 7], [3, 9], [8, 10], [2, 5]])
completion = (torch.arange(10) < lengths[..., None]).float()
of_the_step, of_the_generation = completion[:2].sum(), completion.sum()


def sum_of(i):
    chosen = policy(tokens[i]).log_softmax(-1).gather(-1, actions[i][..., None])[..., 0]
    ratios = (chosen - chosen.detach()).exp()
    return -(ratios * advantages[i] * completion[i]).sum()


def reference():
    (sum_of(slice(0, 2)) / of_the_step).backward()


def new():
    for i in range(2):
        (sum_of(i) / (of_the_step if HEALTHY else of_the_generation)).backward()


generated = float(of_the_generation / of_the_step)
gg.save_gradients("reference.safetensors", policy, reference)
gg.save_gradients("new.safetensors", policy, new, facts={"generated tokens for each of the step": generated})
