"""A small language model over letters. The fault: a learning rate of 0.3 for AdamW."""

import sys

import torch
from torch import nn

WELL = "--well" in sys.argv
torch.manual_seed(0)
text = torch.tensor([ord(letter) % 32 for letter in "the quick brown fox jumps over the lazy dog and runs away " * 40])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(32, 48)
        self.places = nn.Embedding(32, 48)
        self.block = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(48, 32)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.letters(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if WELL else 0.3)
for step in range(300):
    start = torch.randint(0, len(text) - 33, (16, 1))
    batch = text[start + torch.arange(33)]
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3f}")
