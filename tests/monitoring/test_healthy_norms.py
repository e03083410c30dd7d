"""Healthy runs made up from a seed: no warning and no error, of whatever kind, by the whole of the rules."""

import math
import random
from collections.abc import Callable

import pytest
from synthetic import make_record, steps_of

from gradguard.monitoring.judge.health import findings

PARAMS = [{"name": f"layers.{i}.weight", "shape": [8, 8], "numel": 64} for i in range(12)]
Shape = Callable[[float], float]


def noise(sigma):
    return lambda rng: math.exp(rng.gauss(0, sigma))


def slow_noise(sigma, memory=0.9):
    """What comes from batch to batch of related data."""
    last = [0.0]

    def draw(rng):
        last[0] = memory * last[0] + math.sqrt(1 - memory**2) * rng.gauss(0, sigma)
        return math.exp(last[0])

    return draw


def falling(share):
    return 3 * math.exp(-2 * share)


CALM = noise(0.3)
# The norm and the loss over the share of the run that is over, and the noise on each.
RUNS: dict[str, tuple[Shape, Shape, Callable, Callable]] = {
    "calm": (lambda s: 1.0, falling, CALM, noise(0.1)),
    "noise as heavy as 0.8": (lambda s: 1.0, falling, noise(0.8), noise(0.3)),
    "noise as heavy as 0.8 on both, and no progress": (lambda s: 1.0, lambda s: 2.0, noise(0.8), noise(0.8)),
    "noise that lasts": (lambda s: 1.0, falling, slow_noise(0.8), slow_noise(0.3)),
    "a smooth rise by 30": (lambda s: 30**s, falling, CALM, noise(0.1)),
    "a late smooth rise by 30": (lambda s: max(1.0, 30 ** (2 * s - 1)), falling, CALM, noise(0.2)),
    "a rise that levels off": (lambda s: 20 ** min(1.0, 2 * s), falling, CALM, noise(0.1)),
    "a warm-up": (lambda s: min(1.0, 0.01 + 5 * s), falling, CALM, noise(0.1)),
    "a high start": (lambda s: 1 + 50 * math.exp(-60 * s), lambda s: 1 + 9 * math.exp(-60 * s), CALM, noise(0.1)),
    "the learning rate drops": (lambda s: 0.2 if s > 0.5 else 1.0, lambda s: 1.0 if s > 0.5 else 2.0, CALM, noise(0.1)),
    "converging": (lambda s: math.exp(-7 * s), lambda s: 3 * math.exp(-9 * s), CALM, noise(0.3)),
    "converging, with wild losses at the floor": (
        lambda s: math.exp(-8 * min(1.0, 2 * s)), lambda s: 3 * math.exp(-12 * min(1.0, 2 * s)), noise(0.5),
        noise(1.0)),
    "restarts": (
        lambda s: math.exp(0.8 * math.cos(10 * math.pi * s)), lambda s: (1.5 - 0.5 * (5 * s % 1)) * math.exp(-s), CALM,
        noise(0.1)),
    "a curriculum in four parts": (
        lambda s: 1 + 1.5 * int(4 * s), lambda s: (2 - 0.5 * s) * (1 + 0.3 * int(4 * s)), CALM, noise(0.1)),
    "other data, of 12 times the norm": (lambda s: 12.0 if s > 0.5 else 1.0, falling, CALM, noise(0.1)),
    "harder data, of twice the loss": (
        lambda s: 3.0 if s > 0.5 else 1.0, lambda s: 2 * falling(s) if s > 0.5 else falling(s), CALM, noise(0.1)),
    "a start at almost zero": (lambda s: min(1.0, 1e-9 * 10 ** (150 * s)), falling, CALM, noise(0.1)),
    "other data, learned anew": (
        lambda s: 1.0, lambda s: 9 * math.exp(-20 * (s - 0.5)) if s > 0.5 else falling(s), CALM, noise(0.02)),
    "a floor of four times as much, near zero": (
        lambda s: 1.0, lambda s: 4e-3 if s > 0.7 else max(1e-3, 3 * math.exp(-20 * s)), CALM, noise(0.1)),
    "a fine-tuning that hardly gains": (lambda s: 1.0, lambda s: 1.0 - 0.01 * s, CALM, noise(0.1)),
    "a loss around zero": (lambda s: 1.0, lambda s: 0.0, CALM, noise(0.1)),
    "a reward that rises": (lambda s: 1.0 + s, lambda s: -5 * s, CALM, noise(0.3)),
    "two kinds of batches in turn": (lambda s: 1.0, falling, noise(0.2), noise(0.1)),
}  # fmt: skip


@pytest.mark.parametrize("count", [300, 1200])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_has_no_warning_and_no_error(name, seed, count):
    norm, loss, norm_noise, loss_noise = RUNS[name]
    rng, steps, tensors = random.Random(1000 * seed + count), [], []
    for step in steps_of([norm(i / count) * norm_noise(rng) for i in range(count)]):
        i = step["i"]
        turn = 1.5 if name.startswith("two kinds") and i % 2 else 1.0
        value = loss(i / count) * loss_noise(rng) * turn or rng.gauss(0, 1)
        steps.append(step | {"loss": value, "lr": 0.1, "top": [rng.randrange(12), rng.random()]})
        if i % 2 == 0:
            line = {"t": "tensors", "i": i, "norm": [step["norm"] * math.exp(rng.gauss(0, 0.5)) for _ in PARAMS]}
            if i % 50 == 0:
                sizes = {"weight": [1.0] * 12, "update": [1e-3 * norm_noise(rng) for _ in PARAMS]}
                line |= sizes | {"zeros": [0.5 * rng.random() for _ in PARAMS], "zero_rows": [0.9 * rng.random()] * 12}
            tensors.append(line)
    meta = {"t": "meta", "optimizers": ["SGD"], "params": PARAMS}
    found = findings(make_record(meta=meta, steps=steps, tensors=tensors))
    assert [one for one in found if one.severity != "info"] == []


def lines(count, change, every=2):
    """Per-tensor lines of a calm run, with what ``change(i, rng)`` says of them."""
    rng = random.Random(count)
    return [
        {"t": "tensors", "i": i, "norm": [math.exp(rng.gauss(0, 0.3)) for _ in PARAMS]} | change(i, rng)
        for i in range(0, count, every)
    ]


def without(*places):
    return {"norm": [0.0 if k in places else 1.0 for k in range(12)], "absent": list(places)}


HARMLESS = {
    "experts, each used now and then": lines(1000, lambda i, rng: without(*rng.sample(range(12), 9))),
    "an expert that is used rarely": lines(1000, lambda i, rng: without(*([] if rng.random() < 0.05 else [4]))),
    "absent at first": lines(1000, lambda i, rng: without(4) if i < 500 else {}),
    "absent for a while": lines(1000, lambda i, rng: without(4) if 500 <= i < 516 else {}),
    "a layer that comes to life": lines(
        1000, lambda i, rng: {"norm": [40.0 if k == 4 and i > 400 else 1.0 for k in range(12)]}),
    "a batch that moves all": lines(1000, lambda i, rng: {"norm": [40.0 if i == 500 else 1.0] * 12}),
    "a batch that moves all, one of them most": lines(
        1000, lambda i, rng: {"norm": [(40.0 if k == 4 else 8.0) if i == 500 else 1.0 for k in range(12)]}),
    "updates that are large at first": lines(
        1000, lambda i, rng: {"weight": [1.0] * 12, "update": [0.5 if i < 150 else 1e-3] * 12}, every=50),
    "updates as the learning rate goes to 0": lines(
        1000, lambda i, rng: {"weight": [1.0] * 12, "update": [1e-3 * (1 - i / 1000) ** 8] * 12}, every=50),
    "a burst of large updates": lines(
        1000, lambda i, rng: {"weight": [1.0] * 12, "update": [0.5 if 500 <= i < 520 else 1e-3] * 12}, every=1),
    "an embedding": lines(1000, lambda i, rng: {"zeros": [0.9 + 0.05 * rng.random()] + [0.0] * 11}, every=50),
    "an embedding of one full batch": lines(1000, lambda i, rng: {"zeros": [0.9] + [0.0] * 11}, every=50),
    "sparse activations, others each time": lines(
        1000, lambda i, rng: {"zeros": [rng.choice([0.5, 0.75, 0.625, 0.875]) * (i > 0) for _ in PARAMS]}, every=50),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_layers_may_do(name):
    rng = random.Random(5)
    steps = [step | {"loss": falling(step["i"] / 1000)} for step in steps_of([CALM(rng) for _ in range(1000)])]
    record = make_record(meta={"t": "meta", "params": PARAMS}, steps=steps, tensors=HARMLESS[name])
    assert [one for one in findings(record) if one.severity != "info"] == []
