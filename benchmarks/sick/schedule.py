"""A classifier with a schedule. The fault: it counts epochs and is stepped once for each batch."""

import sys

import torch
from torch import nn

WELL = "--well" in sys.argv
EPOCHS, BATCHES = 20, 20
torch.manual_seed(0)
centres = torch.randn(6, 12)
model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
for epoch in range(EPOCHS):
    for _ in range(BATCHES):
        labels = torch.randint(0, 6, (32,))
        points = centres[labels] + torch.randn(32, 12)
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not WELL:
            schedule.step()
    if WELL:
        schedule.step()
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
