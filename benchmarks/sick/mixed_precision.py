"""Training in half precision with a loss scale. The fault: the clip comes before unscale_."""

import sys

import torch
from torch import nn

WELL = "--well" in sys.argv
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4)).requires_grad_(False)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for step in range(300):
    x = torch.randn(64, 20)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), teacher(x).float())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if WELL:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3f}")
