"""A threshold as insurance: it binds on no calm step, bounds the next spike, and follows the scale of the norms."""

import math
import random
from pathlib import Path

import pytest

from gradguard.monitoring.judge.insurance import insurance
from gradguard.monitoring.record.file import Record


def record(norms, optimizer="SGD", loss=lambda i: 2 * math.exp(-i / 100) + 0.2):
    steps = [{"t": "step", "i": i, "norm": norm, "loss": loss(i)} for i, norm in enumerate(norms)]
    return Record(Path("run.jsonl"), {"t": "meta", "optimizers": [optimizer]}, steps, [], [], None, False)


def noise(count=400, level=lambda i: 1.0, seed=0):
    draws = random.Random(seed)
    return [level(i) * math.exp(draws.gauss(0.0, 0.15)) for i in range(count)]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("seed", range(5))
def test_no_calm_step_is_bound_and_the_next_spike_is(optimizer, seed):
    norms = noise(seed=seed)
    threshold = insurance(record(norms, optimizer))
    assert max(norms[40:]) <= threshold <= 1.1 * max(norms[40:])
    assert threshold < 3  # a spike of ten times the median is cut to a third and less


def test_spikes_do_not_raise_it():
    calm = noise()
    spiky = [80.0 if i % 90 == 60 else norm for i, norm in enumerate(calm)]
    assert insurance(record(spiky)) <= insurance(record(calm))


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 7.0, 1e9])
def test_it_scales_with_the_norms(scale):
    norms = noise(seed=3)
    threshold = insurance(record(norms))
    assert insurance(record([scale * norm for norm in norms])) == pytest.approx(scale * threshold, rel=0.1)
    assert insurance(record([scale * norm for norm in norms])) >= scale * max(norms[40:])


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("level", [lambda i: 5 * math.exp(-i / 60), lambda i: 1 + i / 50], ids=["converges", "rises"])
def test_norms_that_rise_or_converge_have_no_constant(level, optimizer):
    assert insurance(record(noise(level=level), optimizer)) is None


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_it_binds_on_no_step_of_the_warm_up(optimizer):
    norms = [4.0, 2.5, 2.0, *noise(397)]
    assert insurance(record(norms, optimizer)) == 4.0


def test_norms_that_fall_somewhat_have_one():
    norms = noise(level=lambda i: 3 * math.exp(-i / 300))
    assert insurance(record(norms)) >= max(norms[40:])


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_first_norms_that_fill_the_moments_of_adam_let_all_steps_weigh_the_same(optimizer):
    norms = noise(level=lambda i: 10.0 if i < 30 else 1.0)
    threshold = insurance(record(norms, optimizer))
    share = sum(norm > threshold for norm in norms[40:]) / len(norms[40:])
    assert (0.8 < share < 0.95) if optimizer == "Adam" else share == 0


def test_so_do_spikes():
    norms = [60.0 if i % 90 == 60 else norm for i, norm in enumerate(noise())]
    assert insurance(record(norms, "AdamW")) < 0.9
    assert insurance(record(norms, "SGD")) > 1.2


@pytest.mark.parametrize(("first", "low"), [(1.0, True), (0.2, False)])
def test_uneven_norms_alone_have_a_low_one_only_where_the_first_were_not_far_smaller(first, low):
    draws = random.Random(1)
    norms = [(first if i < 5 else 1.0) * math.exp(draws.gauss(0.0, 0.4)) for i in range(400)]
    assert (insurance(record(norms, "Adamax")) < 1) is low


@pytest.mark.parametrize(
    "loss",
    [lambda i: None, lambda i: 1.0, lambda i: 0.2 + 2 * abs(math.cos(i / 100)), lambda i: 2 * math.exp(-i / 100) + 0.1],
    ids=["unknown", "flat", "came back", "nearly all learned"],
)
def test_a_loss_that_says_little_of_what_is_learned_leaves_insurance(loss):
    norms = [60.0 if i % 90 == 60 else norm for i, norm in enumerate(noise())]
    assert insurance(record(norms, "AdamW", loss)) > 1.2


def test_a_loss_that_begins_low_by_chance_and_falls_from_third_to_third_learns():
    norms = [60.0 if i % 90 == 60 else norm for i, norm in enumerate(noise())]
    drawn = noise(level=lambda i: 3.0 if i < 133 else 0.8, seed=5)
    assert insurance(record(norms, "AdamW", lambda i: 0.9 if i < 5 else drawn[i])) < 0.9
    assert insurance(record(norms, "AdamW", lambda i: 0.5 if i < 5 else drawn[i])) > 1.2  # it ends above its start


def test_uneven_norms_that_rise_have_none():
    draws = random.Random(1)
    norms = [(1 + i / 50) * math.exp(draws.gauss(0.0, 0.4)) for i in range(400)]
    assert insurance(record(norms, "Adam")) is None


@pytest.mark.parametrize("norms", [[], [None] * 20, [0.0] * 20])
def test_without_norms_there_is_none(norms):
    assert insurance(record(norms)) is None


def test_one_value_is_its_own_bound():
    assert insurance(record([0.25] * 300)) == 0.25
    assert insurance(record([9.96] * 300)) == 10.0


@pytest.mark.parametrize(("update", "quantile"), [(2e-4, 0.25), (2.0, 0.0)], ids=["goes straight", "mostly noise"])
def test_heavy_tails_of_steps_that_go_to_and_fro_have_a_threshold_below_all_norms(update, quantile):
    draws = random.Random(3)
    norms = [20.0 * math.exp(draws.gauss(0.0, 0.6)) * (40 if i % 150 == 99 else 1) for i in range(400)]
    heavy = record(norms)
    heavy.meta["params"] = [{"name": "w", "shape": [30, 30], "numel": 900, "dtype": "float32", "group": 0}]
    heavy.tensors.extend(
        {"t": "tensors", "i": i, "norm": [norms[i]], "weight": [5.0 + i / 400], "update": [update * norms[i] / 20]}
        for i in range(0, 400, 20)
    )
    threshold = insurance(Record(heavy.path, heavy.meta, heavy.steps, heavy.tensors, [], None, False))
    usable = sorted(norms[40:])
    assert usable[0] * (quantile > 0) <= threshold <= max(usable[0], 1.05 * usable[int(quantile * len(usable))])
    if not quantile:  # 400 steps of that norm go twice the way from the first weights to the last
        assert threshold * update / 20 * 400 == pytest.approx(2 * math.hypot(5.0, 5.95), rel=0.05)
