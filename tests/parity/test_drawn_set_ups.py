"""Drawn comparisons: healthy set-ups of many models and lengths never fail, planted bugs do not pass.

More of them: HEALTHY_PAIRS=1600 python -m pytest -m "" -k healthy tests/parity/test_drawn_set_ups.py
"""

import copy
import os
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradguard as gg
from gradguard.parity.compare import compare

WIDTH = 8
HEALTHY_PAIRS = int(os.environ.get("HEALTHY_PAIRS", "320"))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, vocabulary, norm=nn.LayerNorm, places=True):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH) * 0.3) if places else None
        self.before, self.qkv, self.out = norm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after, self.head = norm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens) + (0 if self.places is None else self.places)
        q, k, v = (t[:, None] for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return self.head(self.after(x))


class Bag(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.head = kind, nn.Linear(WIDTH, 5)
        self.embed = nn.EmbeddingBag(30, WIDTH, mode="mean") if kind == "bag" else nn.Embedding(30, WIDTH)

    def forward(self, words):
        if self.kind == "indexed":
            return self.head(self.embed.weight[words].mean(1))
        found = self.embed(words)
        return self.head(found if self.kind == "bag" else found.mean(1))


def images(norm):
    layers = [nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), norm(8), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def vectors():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 5))


def of_tokens(vocabulary, ragged=False):
    def draw(times):
        tokens, targets = torch.randint(vocabulary, (2, 8 * times, 64))
        for i in range(8 * times if ragged else 0):
            targets[i, 1 + 7 * i % 61 :] = -100
        return tokens, targets

    return draw


def of_words(times):
    words = torch.randint(1, 30, (16 * times, 32))
    return words.masked_fill(torch.rand(words.shape) < 0.7, 0), torch.randint(5, (len(words),))


def of_images(times):
    return torch.randn(8 * min(times, 8), 3, 8, 8), torch.randint(5, (8 * min(times, 8),))


def of_vectors(times):
    return torch.randn(512 * times, 16), torch.randint(5, (512 * times,))


def one_class(times):
    return torch.randn(512 * times, 16), torch.zeros(512 * times, dtype=torch.long)


MODELS = {
    "attention": (lambda: Attention(40), of_tokens(40)),
    "attention over padding": (lambda: Attention(40), of_tokens(40, ragged=True)),
    "a vocabulary of 4": (lambda: Attention(4), of_tokens(4)),
    "without places": (lambda: Attention(4, places=False), of_tokens(4)),
    "RMS norms": (lambda: Attention(40, RMSNorm), of_tokens(40)),
    "words": (lambda: Bag("embedding"), of_words),
    "a bag of words": (lambda: Bag("bag"), of_words),
    "indexed words": (lambda: Bag("indexed"), of_words),
    "group norms": (lambda: images(lambda c: nn.GroupNorm(2, c)), of_images),
    "batch norms": (lambda: images(nn.BatchNorm2d), of_images),
    "vectors": (vectors, of_vectors),
    "vectors of one class": (vectors, one_class),
}
TIMES = {"short": 1, "512 samples": 8, "16,384 tokens": 32}


def loss_of(model, x, y, reduction="mean"):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)


def whole(model, x, y):
    return lambda: loss_of(model, x, y).backward()


def permuted(model, x, y):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(9))
    return whole(model, x[order], y[order])


def summed(model, x, y):
    return lambda: (loss_of(model, x, y, "sum") / (y >= 0).sum()).backward()


def micro_batches(count, bug=""):
    def of(model, x, y):
        def step():
            for i, (a, b) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
                share = {"sum": 1.0, "mean": 1 / count}.get(bug, (b >= 0).sum() / (y >= 0).sum())
                if bug == "last":
                    model.zero_grad()
                if bug != "first lost" or i:
                    (share * loss_of(model, a, b)).backward()

        return step

    return of


HEALTHY = {
    "the same": whole,
    "permuted": permuted,
    "reversed": lambda model, x, y: whole(model, x.flip(0), y.flip(0)),
    "2 micro-batches": micro_batches(2),
    "8 micro-batches": micro_batches(8),
    "a sum, divided": summed,
    "float64": whole,
}


def made(kind, times, seed):
    torch.manual_seed(seed)
    build, draw = MODELS[kind]
    return build(), *draw(TIMES[times])


def healthy_cases(count):
    draws = random.Random(0)
    for seed in range(count):
        kind, times, how = (draws.choice(list(table)) for table in (MODELS, TIMES, HEALTHY))
        yield kind, times, "permuted" if kind == "batch norms" and "micro" in how else how, seed


def rows(cases, quick):
    return [pytest.param(*case, marks=[] if i < quick else pytest.mark.exhaustive) for i, case in enumerate(cases)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "times", "how", "seed"), rows(healthy_cases(HEALTHY_PAIRS), quick=12))
def test_a_healthy_set_up_passes(kind, times, how, seed):
    model, x, y = made(kind, times, seed)
    other = copy.deepcopy(model)
    if how == "float64":
        other, x64 = other.double(), x.double() if x.is_floating_point() else x
    step = HEALTHY[how](other, x64 if how == "float64" else x, y)
    report = compare(gg.save_gradients(None, model, whole(model, x, y)), gg.save_gradients(None, other, step))
    assert report.verdict == "PASS", str(report)


@pytest.mark.parametrize(
    ("kind", "times", "how", "seed"),
    [
        ("vectors of one class", "512 samples", "float64", 74),
        pytest.param("a vocabulary of 4", "512 samples", "8 micro-batches", 78, marks=pytest.mark.exhaustive),
        pytest.param("words", "16,384 tokens", "float64", 20, marks=pytest.mark.exhaustive),
    ],
)
def test_what_fails_in_bfloat16_is_far_from_the_truth(kind, times, how, seed):
    """Kernels that add up a whole batch in 16 bits lose much of it; all that is not blamed is near the truth."""
    model, x, y = made(kind, times, seed)
    model = model.bfloat16()
    low, wide = (x.bfloat16(), x.double()) if x.is_floating_point() else (x, x)
    truth, again = copy.deepcopy(model).double(), copy.deepcopy(model)
    other, given = (truth, wide) if how == "float64" else (again, low)
    step = HEALTHY[how](other, given, y)
    report = compare(gg.save_gradients(None, model, whole(model, low, y)), gg.save_gradients(None, other, step))
    assert report.verdict == "FAIL"
    for m, inputs in ((model, low), (truth, wide)):
        m.zero_grad()
        whole(m, inputs, y)()
    pairs = zip(truth.named_parameters(), model.parameters(), strict=True)
    off = {name: float((q.grad.double() - p.grad).norm() / p.grad.norm()) for (name, p), q in pairs}
    blamed = [name for finding in report.findings for name in finding.parameters]
    assert blamed
    assert min(off[name] for name in blamed) > 0.1


def after_backward(change):
    """The gradient of one parameter, another one for each seed, is changed after backward."""

    def of(model, x, y, seed):
        def step():
            whole(model, x, y)()
            there = [p for p in model.parameters() if p.grad.norm() > 1e-6]
            change(there[seed % len(there)].grad)

        return step

    return of


def rescaled(factor):
    return after_backward(lambda g: g.mul_(factor))


def rows_times(factor):
    return after_backward(lambda g: g[: max(1, len(g) // 8)].mul_(factor))


def with_noise(g):
    drawn = torch.randn(g.shape, generator=torch.Generator().manual_seed(3))
    g += 1e-3 * g.norm() * drawn / drawn.norm()


PLANTED = {
    "twice": rescaled(2.0),
    "half": rescaled(0.5),
    "an eighth": rescaled(1 / 8),
    "a part in a thousand": rescaled(1.001),
    "the sign": rescaled(-1.0),
    "dead": rescaled(0.0),
    "rows doubled": rows_times(2.0),
    "rows lost": rows_times(0.0),
    "one element": after_backward(lambda g: g.view(-1)[g.abs().argmax()].mul_(1.05)),
    "noise": after_backward(with_noise),
    "a sample lost": lambda model, x, y, seed: whole(model, x[1:], y[1:]),
    "a sample twice": lambda model, x, y, seed: whole(model, torch.cat([x, x[:1]]), torch.cat([y, y[:1]])),
    "micro-batches added up": lambda model, x, y, seed: micro_batches(4, "sum")(model, x, y),
    "the last micro-batch alone": lambda model, x, y, seed: micro_batches(4, "last")(model, x, y),
    "the first one lost": lambda model, x, y, seed: micro_batches(4, "first lost")(model, x, y),
}


def planted_cases(count):
    draws = random.Random(1)
    for seed in range(count):
        yield draws.choice(list(MODELS)), draws.choice(list(TIMES)), list(PLANTED)[seed % len(PLANTED)], seed


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("kind", "times", "bug", "seed"), rows(planted_cases(90), quick=15))
def test_a_planted_bug_fails(kind, times, bug, seed):
    model, x, y = made(kind, times, seed)
    other = copy.deepcopy(model)
    right = gg.save_gradients(None, model, whole(model, x, y), perturbed=2)
    report = compare(right, gg.save_gradients(None, other, PLANTED[bug](other, x, y, seed), perturbed=2))
    assert report.verdict == "FAIL", str(report)
