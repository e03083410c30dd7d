"""Regression on a table. The fault: gradients are never cleared."""

import sys

import torch
from torch import nn

WELL = "--well" in sys.argv
torch.manual_seed(0)
x = torch.randn(2000, 10)
price = (x[:, :1] * 2 + x[:, 1:2] * x[:, 2:3] - x[:, 3:4].abs()) + 0.1 * torch.randn(2000, 1)

model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(300):
    rows = torch.randint(0, 2000, (64,))
    loss = nn.functional.mse_loss(model(x[rows]), price[rows])
    if WELL:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3f}")
