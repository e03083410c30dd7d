"""Losses agree to four digits, but training with context parallelism is worse.

NVIDIA/Megatron-LM#1464, huggingface/diffusers in kind: the backward pass of attention over a ring
uses keys and values that another rank has already overwritten::

    python stale_keys.py && gradguard parity reference.safetensors new.safetensors
    python stale_keys.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


class RingAttention(torch.autograd.Function):
    """Attention whose backward uses other keys than its forward."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return attention(q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            k_seen = k if HEALTHY else k + 0.02 * k.detach().roll(1, 1)
            return torch.autograd.grad(attention(q, k_seen, v), (q, k, v), gradient)


class Block(nn.Module):
    """One head of attention."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(16, 48), nn.Linear(16, 16), attend

    def forward(self, x):
        return x + self.out(self.attend(*self.qkv(x).chunk(3, -1)))


def saved(file, attend):
    torch.manual_seed(0)
    model, x = Block(attend), torch.randn(4, 12, 16)
    gg.save_gradients(file, model, lambda: model(x).square().mean().backward())


saved("reference.safetensors", attention)
saved("new.safetensors", RingAttention.apply)
