"""A small language model and ways to make its gradients, healthy ones and those of real bugs."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH, SAMPLES = 40, 16, 8, 8


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.by_hand = False

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        attend = attention_by_hand if self.by_hand else F.scaled_dot_product_attention
        x = x + self.out(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.after(x)))))


def attention_by_hand(q, k, v, is_causal):
    assert is_causal
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


class LanguageModel(nn.Module):
    def __init__(self, blocks=2, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.checkpointed = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def language_model(seed=0, dtype=torch.float32, **arguments):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LanguageModel(**arguments)
        for p in model.parameters():  # biases and norms as after some training
            nn.init.normal_(p, float(p.detach().mean()), 0.1) if p.dim() == 1 else None
    return model.to(dtype)


def batch(seed=0, samples=SAMPLES, unequal=False):
    """Tokens and targets; with ``unequal`` most of some samples are padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, samples, LENGTH), generator=generator)
    if unequal:
        for i in range(samples):
            targets[i, 1 + 3 * i % LENGTH :] = -100
    return tokens, targets


def loss_of(model, tokens, targets, reduction="mean"):
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten(), reduction=reduction)


def step_of(model, data):
    def step():
        loss = loss_of(model, *data)
        loss.backward()
        return loss

    return step


def accumulated(model, data, count=4, *, scale=None, between=lambda: None, weigh=False):
    """Micro-batches one after another, each loss times ``scale`` (1/count), or by its tokens with ``weigh``."""

    def step():
        total = (data[1] >= 0).sum()
        for tokens, targets in zip(*(part.chunk(count) for part in data), strict=True):
            share = (targets >= 0).sum() / total if weigh else 1 / count if scale is None else scale
            between()
            (share * loss_of(model, tokens, targets)).backward()

    return step
