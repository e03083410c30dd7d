"""The arithmetic of the rules that choose a threshold: the same on plain numbers as on tensors."""

import inspect
import itertools
import math
import random
from typing import get_args

import pytest
import torch
from torch import Tensor

import gradguard as gg
from gradguard import threshold_formulas
from gradguard.clip.thresholds.zclip import Mode
from gradguard.tensors.number_operations import TENSORS
from gradguard.threshold_formulas import PLAIN, PerTensorRule
from gradguard.threshold_rules import Fraction, LockInAlarm, Median, Percentile, PerTensor, ZScore

NORMS = (0.0, 1e-30, 0.3, 1.0, 2.5, 1e30, math.inf)
POSITIVE = NORMS[1:-1]
TRUTHS = (True, False)

MODES = list(get_args(Mode))

FORMULAS = {
    "coefficient_of": (NORMS, NORMS),
    "pytorch_coefficient": (NORMS, POSITIVE),
    "update_bound": (POSITIVE, (0.5, math.inf), (0.0, 0.5, 20.0), [0.1]),
    "z_score_bounds": (NORMS[:-1], POSITIVE, (0.0, 0.01, 4.0), [2.5], [1.0, 0.5], MODES),
    "factor": (NORMS[:-1], (0.5, math.inf), TRUTHS, (0.1, 1.0, math.inf)),
    "next_average": (POSITIVE, (0.5, math.inf), (0, 3), TRUTHS),
}  # fmt: skip
"""The values of each argument; those in lists are settings, which are plain numbers in both. AdaGC's are last."""


def results(value) -> list[float]:
    return [float(one) for one in (value if isinstance(value, tuple) else (value,))]


def as_tensor(value) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_gives_the_same_for_numbers_and_tensors(name):
    values = FORMULAS[name]
    formula = getattr(threshold_formulas, name, None) or getattr(PerTensorRule(), name)
    count = sum(not isinstance(v, list) for v in values)
    for given in itertools.product(*values):
        numbers, plain = given[:count], given[count:]
        expected = results(formula(TENSORS, *map(as_tensor, numbers), *plain))
        assert results(formula(PLAIN, *given)) == pytest.approx(expected, rel=1e-15, abs=0, nan_ok=True), given


def history(seed):
    """Norms with zeros, spikes, a rise and extremes."""
    draw = random.Random(seed)
    for i in range(150):
        norm = (1.0 if i < 90 else 5.0) * math.exp(draw.gauss(0, 0.3))
        yield draw.choice([norm] * 12 + [0.0, 40 * norm, 1e-30, 1e30])


STEPS = {
    "median": (lambda: Median(), lambda: gg.ClipByMedian()),
    "median, small": (lambda: Median(2.0, 20, 11, 0.0, 0.7), lambda: gg.ClipByMedian(2.0, 20, 11, 0.0, start=0.7)),
    "percentile": (lambda: Percentile(), lambda: gg.AutoClip()),
    "percentile, upper": (lambda: Percentile(97.5), lambda: gg.AutoClip(97.5)),
    "z-score": (lambda: ZScore(), lambda: gg.ZClip()),
    "z-score, another limit": (lambda: ZScore(30.0, 1.5, 0.9, 6), lambda: gg.ZClip(0.9, 1.5, 6, 30.0)),
    "fraction": (lambda: Fraction(0.2, 0.5), lambda: gg.ClipFraction(0.2, 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seed", range(3))
def test_a_rule_has_the_same_thresholds_for_numbers_and_tensors(name, seed):
    plain, clipper = (make() for make in STEPS[name])
    for i, norm in enumerate(history(seed)):
        tensor = torch.tensor(norm, dtype=torch.float64)
        threshold = float(clipper.choose(tensor, tensor > 0))
        assert plain.choose(norm) == pytest.approx(threshold, rel=1e-12, abs=0), i


def test_a_threshold_does_not_depend_on_the_default_dtype():
    """In bfloat16, 998 / 1000 is 1: the start of the rule would have ended before its time."""
    thresholds = []
    for dtype in (torch.float64, torch.bfloat16):
        clipper, one = gg.ClipByMedian(warmup=1000, window=1000), torch.ones((), dtype=torch.float64)
        clipper.state["logarithms"].zero_()
        clipper.state["count"].fill_(998)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            thresholds.append(float(clipper.choose(one, one > 0)))
        finally:
            torch.set_default_dtype(before)
    assert thresholds == pytest.approx([1.5 * 0.1**0.002] * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("seen", "bound", "least", "most", "expected"),
    [
        (100, 51, 1.0, 1.01, True),
        (99, 51, 1.0, 1.0, False),
        (100, 50, 1.0, 1.0, False),
        (100, 51, 1.0, 1.02, False),
        (100, 100, 0.0, 0.0, True),
    ],
)
def test_locked_in(seen, bound, least, most, expected):
    assert threshold_formulas.locked_in(seen, bound, least, most, 100) is expected
    tensors = torch.tensor(seen), torch.tensor(bound), torch.tensor(least), torch.tensor(most)
    assert bool(threshold_formulas.locked_in(*tensors, 100)) is expected


@pytest.mark.parametrize(
    ("plain", "clipper", "same"),
    [
        (Median, gg.ClipByMedian, ("k", "window", "warmup", "floor", "start", "update", "ceiling")),
        (Percentile, gg.AutoClip, ("percentile",)),
        (
            ZScore,
            gg.ZClip,
            ("ceiling", "z_threshold", "alpha", "warmup", "clip_factor", "mode", "skip_update_on_spike"),
        ),
        (Fraction, gg.ClipFraction, ("target", "learning_rate", "floor", "ceiling")),
        (PerTensor, gg.AdaGC, ("absolute", "relative", "beta", "warmup")),
    ],
)
def test_the_defaults_on_plain_numbers_are_the_clippers(plain, clipper, same):
    ours, theirs = inspect.signature(plain).parameters, inspect.signature(clipper).parameters
    none = {a: math.inf for a in same if theirs[a].default is None}  # a ceiling that is none
    assert {a: ours[a].default for a in same} == {a: theirs[a].default for a in same} | none
    assert set(ours) == set(same)


@pytest.mark.parametrize("bound", [0.3, 0.5, 0.52, 0.6, 1.0])
@pytest.mark.parametrize("moves", [0.0, 0.01, 0.3, 1.0])
def test_the_alarm_says_what_its_window_says(bound, moves):
    draw, alarm, threshold = random.Random(3), LockInAlarm(), 1.0
    clipped, thresholds = [], []
    for place in range(900):
        threshold *= draw.choice((1.004, 0.997, 1.2)) if draw.random() < moves else 1.0
        thresholds.append(math.inf if 300 < place < 430 else threshold)
        clipped.append(draw.random() < bound)
        recent, on = thresholds[-100:], sum(clipped[-100:])
        expected = place >= 99 and on > 50 and max(recent) <= 1.01 * min(recent)
        assert alarm.follow(clipped[-1], thresholds[-1]) == expected, place
