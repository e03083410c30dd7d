"""Binary labels and a likelihood that is written by hand. The fault: the logarithm of a probability that can be 0."""

import sys

import torch
from torch import nn

WELL = "--well" in sys.argv
torch.manual_seed(0)
weight = torch.randn(8)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(300):
    x = torch.randn(64, 8)
    if step == 180:
        x[5] *= 1000  # a reading far out, which happens
    y = (x @ weight > 0).float()
    logits = model(x).squeeze(1)
    if WELL:
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
    else:
        p = torch.sigmoid(logits)
        loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3f}")
