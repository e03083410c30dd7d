"""A recurrent net that has to remember. The fault: its recurrent weight begins too large."""

import sys

import torch
from torch import nn

WELL = "--well" in sys.argv
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 48, batch_first=True, nonlinearity="relu")
        self.out = nn.Linear(48, 1)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)
        if not WELL:
            with torch.no_grad():
                self.rnn.weight_hh_l0.mul_(2.5)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(1)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(300):
    values = torch.rand(32, 30)
    marks = torch.zeros(32, 30)
    marks[torch.arange(32), torch.randint(0, 15, (32,))] = 1
    loss = nn.functional.mse_loss(net(torch.stack([values, marks], dim=2)), (values * marks).sum(1))
    optimizer.zero_grad()
    loss.backward()
    if WELL:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3g}")
