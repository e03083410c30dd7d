"""With mixed precision the loss hardly falls: every step is reduced to the threshold of the clip.

Lightning-AI/pytorch-lightning#9599: gradients are clipped while they are still multiplied by the
loss scale::

    gradguard run --audit-norm clip_before_unscale.py
    gradguard run --audit-norm clip_before_unscale.py --healthy
"""

import sys

import torch

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

for _step in range(4):
    loss = model(torch.randn(16, 8)).square().mean()
    scaler.scale(loss).backward()
    if HEALTHY:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
