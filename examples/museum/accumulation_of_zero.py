"""The norm is NaN on four GPUs, and finite on one with the same settings.

verl-project/verl#2505: the mini-batch is divided by the number of GPUs, and then by the micro-batch, in whole numbers.
If a GPU's share is smaller than the micro-batch, there are 0 steps of accumulation, and the loss is divided by 0::

    python accumulation_of_zero.py && gradguard parity reference.safetensors new.safetensors
    python accumulation_of_zero.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch

import gradguard as gg

HEALTHY = "--healthy" in sys.argv
MINI_BATCH, MICRO_BATCH = 8, 4

torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
tokens, actions = torch.randint(20, (2, MINI_BATCH, 10))
advantages = torch.randn(MINI_BATCH)


def loss_of(rows):
    chosen = policy(tokens[rows]).log_softmax(-1).gather(-1, actions[rows, :, None])[..., 0]
    return -((chosen - chosen.detach()).exp() * advantages[rows, None]).mean()


def step_on(gpus):
    share = MINI_BATCH // gpus
    micro = min(MICRO_BATCH, share) if HEALTHY else MICRO_BATCH
    accumulation = share // micro
    for own in torch.arange(MINI_BATCH).chunk(gpus):  # simulates the GPUs one by one and averages their gradients
        for rows in own.split(micro):
            (loss_of(rows) / accumulation / gpus).backward()


gg.save_gradients("reference.safetensors", policy, lambda: step_on(gpus=1))
gg.save_gradients("new.safetensors", policy, lambda: step_on(gpus=4))
