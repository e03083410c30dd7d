"""Muon and AdamW stop learning, although the clip looks harmless.

NVIDIA/Megatron-LM#5394: the gradients of one module are a million million times the others'. A clip
by the global norm divides all by it, and the others' gradients fall below the optimizer's epsilon::

    gradguard run --out stalled stalled_by_a_clip.py
    gradguard run --out healthy stalled_by_a_clip.py --healthy
"""

import sys

import torch

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
auxiliary = torch.nn.Linear(8, 1)
model = torch.nn.ModuleDict({"body": body, "head": head, "auxiliary": auxiliary})
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-8)
factor = 1.0 if HEALTHY else 1e12

for _step in range(60):
    x = torch.randn(32, 8)
    features = torch.tanh(body(x))
    loss = (head(features) - x.sum(1, keepdim=True)).square().mean()
    loss = loss + factor * (auxiliary(features.detach()) - 1).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
