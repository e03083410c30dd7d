"""After one bad batch, every checkpoint is NaN.

Lightning-AI/pytorch-lightning#21928, kyutai-labs/pocket-tts#262 in kind: a gradient that is not
finite passes the clip and the optimizer, and no error is raised::

    gradguard run --out nan nan_in_the_weights.py
    gradguard run --out healthy nan_in_the_weights.py --healthy
"""

import sys

import torch

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

for step in range(30):
    x = torch.randn(32, 8)
    if step == 20 and not HEALTHY:
        x[3, 2] = torch.inf
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
