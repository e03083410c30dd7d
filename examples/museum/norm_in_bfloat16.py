"""The norm of a bfloat16 model depends on how many tensors there are, and on the split over stages.

pytorch/pytorch#194033, NVIDIA-NeMo/Automodel#825: squares are added up in bfloat16, where a sum
stops growing as soon as each term is less than half a unit in its last place::

    python norm_in_bfloat16.py
    python norm_in_bfloat16.py --healthy
"""

import sys

import torch

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
model = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(80)).bfloat16()
for p in model.parameters():
    p.grad = torch.randn_like(p)
model[0].weight.grad *= 25


def norm():
    total = torch.zeros((), dtype=torch.float32 if HEALTHY else torch.bfloat16)
    for p in model.parameters():
        total += p.grad.float().square().sum().to(total.dtype)
    return total.sqrt()


print(gg.audit_norm(model, norm))
