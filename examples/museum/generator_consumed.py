"""The norm is logged, and no gradient is ever clipped.

pytorch/torchtitan#1258: `model.parameters()` is a generator. The norm consumes it, so the clip
after it receives an empty one::

    python generator_consumed.py
    python generator_consumed.py --healthy
"""

import sys

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


def clip_grad_norm_(parameters, max_norm):
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
(100 * model(torch.randn(16, 4)).square().mean()).backward()


def clip():
    return clip_grad_norm_(list(model.parameters()) if HEALTHY else model.parameters(), 1.0)


print(gg.audit_norm(model, clip, max_norm=1.0))
