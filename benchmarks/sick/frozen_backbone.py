"""A classifier of small images. The fault: features are detached from the backbone, as if it were frozen."""

import sys

import torch
from torch import nn

WELL = "--well" in sys.argv
torch.manual_seed(0)
prototypes = torch.randn(5, 1, 12, 12)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        features = self.backbone(x)
        return self.head(features if WELL else features.detach())


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(300):
    labels = torch.randint(0, 5, (32,))
    images = prototypes[labels] + 1.5 * torch.randn(32, 1, 12, 12)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3f}")
