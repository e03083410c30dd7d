"""What clippers and guards show of themselves can be typed, and makes an equal one."""

import math

import pytest
import torch
from torch import nn

import gradguard as gg

CLIPPERS = [
    "ClipByGlobalNorm(max_norm=1.0)",
    "ClipByGlobalNorm(max_norm=float('inf'), norm_type=float('inf'))",
    "ClipByGlobalNorm(max_norm=torch.tensor(0.5))",
    "ClipByGlobalNorm(max_norm=torch.tensor(0.5, dtype=torch.float64))",
    "ClipByNorm(max_norm=2.0, norm_type=1.0)",
    "ClipByRMS(max_rms=2.0)",
    "ClipByValue(max=1.0)",
    "ClipByValue(max=1.0, min=-0.5)",
    "ClipAdaptive()",
    "ClipAdaptive(threshold=0.1, eps=0.01, exclude='fc')",
    "ClipAdaptive(exclude=('fc', '*.bias'))",
    "ClipByMedian()",
    "ClipByMedian(k=3.0, window=64, ceiling=2.0)",
    "AutoClip(percentile=50.0, window=10, strict_paper=True)",
    "ZClip()",
    "ZClip(ceiling=float('inf'), mode='mean')",
    "AdaGC(absolute=float('inf'), beta=0.9)",
    "ClipFraction(target=0.1)",
    "ClipFraction(target=0.1, initial=2.0, ceiling=3.0)",
    "Chain(ClipByValue(max=1.0), ClipByGlobalNorm(max_norm=1.0))",
    "Groups({'head': ClipByMedian(), ('a', 'b.*'): None})",
    "Groups({'head': None}, rest=Chain(ClipByNorm(max_norm=1.0)))",
    "Groups({'head': ClipByMedian()}, rest=None)",
]


@pytest.mark.parametrize("text", CLIPPERS)
def test_what_a_clipper_shows_makes_an_equal_one(text):
    names = {name: getattr(gg, name) for name in gg.__all__} | {"torch": torch}
    clipper = eval(text, names)
    assert repr(clipper) == text
    again = eval(repr(clipper), names)
    assert (type(again), again.settings()) == (type(clipper), clipper.settings())


def test_what_cannot_be_typed_is_named():
    layer = nn.Linear(2, 1)
    shown = repr(gg.Groups([([layer, layer.weight], gg.ClipByMedian())], rest=None))
    assert shown == "Groups({<a parameter of shape (1, 2), a Linear>: ClipByMedian()}, rest=None)"
    assert repr(gg.ClipAdaptive(exclude=layer)) == "ClipAdaptive(exclude=<a Linear>)"


def test_a_rule_of_ones_own_shows_what_it_keeps():
    class Mine(gg.rules.Clipper):
        def __init__(self, limit, unkept=3, *others, power=math.inf):
            self.limit, self.power = limit, power

        def decide(self, grads, scale=1.0):
            raise NotImplementedError

    assert repr(Mine(1.5)) == "Mine(limit=1.5)"
    assert repr(Mine(1, power=2)) == "Mine(limit=1, power=2)"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "Guard(optimizer, ClipByMedian())"),
        (
            {"nonfinite": "raise", "max_consecutive_skips": None},
            "Guard(optimizer, ClipByMedian(), nonfinite='raise', max_consecutive_skips=None)",
        ),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_guard_shows_the_call_that_makes_it(options, shown, named):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByMedian(), model=model if named else None, **options)
    expected = shown.replace("ClipByMedian()", "ClipByMedian(), model=model") if named else shown
    assert repr(guard) == expected
    guard.detach()
    again = eval(
        repr(guard), {"Guard": gg.Guard, "ClipByMedian": gg.ClipByMedian, "optimizer": optimizer, "model": model}
    )
    assert repr(again) == expected
