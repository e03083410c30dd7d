"""The rules of others, against slow twins that are written from their sources, and what they are known for."""

import math
import random
import statistics

import pytest
import torch

from gradguard.errors import InvalidValueError
from gradguard.spikes.presets import LightningRule, OlmoRule

NAN, INF = math.nan, math.inf


def olmo(history, value):
    past = history[-16:]
    return len(past) >= 8 and value > statistics.mean(past) + 3 * statistics.stdev(past)


def lightning(history, value):
    past = history[-10:]
    return bool(past) and abs(value - statistics.mean(past)) >= abs(2 * statistics.mean(past)) and value > history[-1]


RULES = {"OLMo": (lambda: OlmoRule(16, 3.0), olmo), "Lightning": (LightningRule, lightning)}


def see(rule, *values):
    return bool(rule.observe(torch.tensor(values, dtype=torch.float64)))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_it_decides_as_its_source(name, seed):
    make, twin = RULES[name]
    rule, history, draw, spikes = make(), [[], []], random.Random(seed), 0
    for _ in range(200):
        values = [math.exp(draw.gauss(0, 0.3)) * (9 if draw.random() < 0.1 else 1) for _ in range(2)]
        if draw.random() < 0.1:
            values[draw.randrange(2)] = draw.choice([NAN, INF])
        expected = any([math.isfinite(v) and twin(h, v) for h, v in zip(history, values, strict=True)])
        assert see(rule, *values) == expected
        spikes += expected
        for past, value in zip(history, values, strict=True):
            if math.isfinite(value) and (name == "OLMo" or not expected):
                past.append(value)
    assert 5 < spikes < 100


def test_olmo_accepts_a_lasting_rise_after_four_steps_and_hides_small_spikes_behind_large_ones():
    draw = random.Random(0)
    usual = [10 + draw.gauss(0, 1) for _ in range(128)]
    rise, masked = OlmoRule(), OlmoRule()
    assert sum(see(rise, value) for value in [*usual, *[1000.0] * 20]) == 4
    assert [see(masked, value) for value in [*usual, 60.0, 35.0]][-2:] == [True, False]
    clean = OlmoRule()
    assert [see(clean, value) for value in [*usual, 35.0]][-1]


def test_a_nan_does_not_make_spikes_of_what_follows():
    rule = OlmoRule(8)
    told = [see(rule, value) for value in [1.0, 1.1, 0.9, 1.0, 1.1, NAN, 1.0, 0.9, 1.05]]
    assert not any(told)


@pytest.mark.parametrize("make", [make for make, _ in RULES.values()])
def test_their_state_loads(make):
    draw = random.Random(1)
    values = [math.exp(draw.gauss(0, 1)) for _ in range(60)]
    whole, first, second = make(), make(), make()
    expected = [see(whole, value) for value in values]
    assert [see(first, value) for value in values[:30]] == expected[:30]
    second.load_state_dict(first.state_dict())
    assert [see(second, value) for value in values[30:]] == expected[30:]
    assert any(expected[30:])


def test_lightning_rejects_a_lasting_rise_for_ever_and_knows_losses_below_0():
    rule = LightningRule()
    assert [see(rule, value) for value in [1.0] * 5 + [9.0, 8.0, 9.0, 9.0] * 10] == [False] * 5 + [True] * 40
    assert [see(LightningRule(), value) for value in (-1.0, 5.0)] == [False, False]  # the first is accepted unseen
    below = LightningRule()
    assert [see(below, value) for value in (-1.0, -1.0, -0.1, 5.0)] == [False, False, False, True]


def test_arguments_are_checked_and_repr_is_the_call():
    with pytest.raises(InvalidValueError, match="window=1: expected a whole number >= 2"):
        OlmoRule(1)
    with pytest.raises(InvalidValueError, match="rtol=0: expected a finite number > 0"):
        LightningRule(rtol=0)
    assert repr(OlmoRule()) == "OlmoRule(window=128, sigmas=6.0)"
    assert repr(LightningRule()) == "LightningRule(window=10, rtol=2.0, warmup=1)"
