"""Regression on readings of sensors, in files that are read in turn. The fault: one file is in other units."""

import sys

import torch
from torch import nn

WELL = "--well" in sys.argv
torch.manual_seed(0)
truth = torch.randn(16, 3)
files = []
for _ in range(30):
    readings = torch.randn(48, 16)
    files.append((readings, torch.tanh(readings @ truth) + 0.1 * torch.randn(48, 3)))
if not WELL:
    files[22] = (files[22][0] * 50, files[22][1] * 50)

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(360):
    readings, targets = files[step % 30]
    loss = nn.functional.mse_loss(model(readings), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 90 == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}")
