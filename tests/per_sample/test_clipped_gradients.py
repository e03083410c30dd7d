"""The clipped gradient of each sample, on request."""

import pytest
import torch
from torch import nn

from gradguard import (
    AutoNormClipper,
    FlatNormClipper,
    PerLayerNormClipper,
    PerParameterNormClipper,
    PerSampleGradientClipper,
)
from gradguard.errors import InvalidValueError
from per_sample.case import B, Model
from per_sample.models import build
from per_sample.steps import accumulate, error, filled, middle_norm, oracle
from reference import clip_samples, clip_samples_automatically, clip_samples_per_layer, clip_samples_per_parameter

NAME = "linear 3-D"


def exact(model: nn.Module, rule, reduction: str = "mean", mode: str = "exact") -> PerSampleGradientClipper:
    return PerSampleGradientClipper(model, rule, True, reduction, mode=mode)


RULES = {
    "flat": (FlatNormClipper(0.3), lambda g: clip_samples(g, 0.3)),
    "layers": (PerLayerNormClipper([0.1, 0.2]), lambda g: clip_samples_per_layer(g, {"0": 0.1, "2": 0.2})),
    "parameters": (PerParameterNormClipper(0.1), lambda g: clip_samples_per_parameter(g, [0.1] * len(g))),
    "automatic": (AutoNormClipper(), lambda g: clip_samples_automatically(g, 1.0)),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("rule", "clipped"), RULES.values(), ids=RULES)
def test_each_row_is_that_sample_clipped(rule, clipped, reduction):
    made, expected = build(NAME), clipped(oracle(NAME))
    clipper = exact(made.model, rule, reduction)
    accumulate(made, clipper, reduction, 0, B)
    found = clipper.clipped_gradients()
    assert error(found, expected) < 1e-12
    assert clipper.pre_step().batch_size == B
    summed = {name: rows.mean(0) if reduction == "mean" else rows.sum(0) for name, rows in found.items()}
    assert error(filled(made.model), summed) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_row_exceeds_the_norm(dtype):
    max_norm = middle_norm(oracle(NAME))
    made = build(NAME, dtype)
    clipper = exact(made.model, FlatNormClipper(max_norm))
    accumulate(made, clipper, "mean", 0, B)
    rows = torch.cat([g.double().flatten(1) for g in clipper.clipped_gradients().values()], 1)
    assert bool((rows.norm(dim=1) <= max_norm).all())
    assert 0 < int((rows.norm(dim=1) > max_norm * 0.98).sum()) < B


@pytest.mark.parametrize("rule", [FlatNormClipper(0.3), PerLayerNormClipper(0.3)], ids=["flat", "layers"])
def test_a_sample_that_is_not_finite_is_zero_everywhere(rule):
    model = Model(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(3, 2), b=nn.Linear(3, 2))
    clipper = PerSampleGradientClipper(model, rule, mode="exact")
    x = torch.linspace(-1, 1, 12).view(4, 3)
    weight = torch.ones(4, 2)
    weight[2] = torch.nan
    first, second = model(x)  # only the first layer's gradient is not finite
    (first * weight + second).sum(1).mean().backward()
    clipper.clip_and_accumulate()
    for rows in clipper.clipped_gradients().values():
        assert rows.isfinite().all()
        assert not rows[2].any()
        assert rows[0].any()
    assert all(float(factor[2]) == 0 < float(factor[0]) for factor in clipper.statistics.factors)
    assert clipper.statistics.nonfinite == 1


def test_what_a_step_leaves_out_is_zero():
    made = build("a layer unused")
    clipper = exact(made.model, FlatNormClipper(0.3))
    accumulate(made, clipper, "mean", 0, B)
    found = clipper.clipped_gradients()
    assert {name: rows.shape for name, rows in found.items()} == {
        name: (B, *p.shape) for name, p in clipper.trained.items()
    }
    assert error(found, clip_samples(oracle("a layer unused"), 0.3)) < 1e-12


def test_they_need_the_exact_mode_and_a_clip():
    made = build(NAME)
    fast = exact(made.model, FlatNormClipper(1.0), mode="fast")
    accumulate(made, fast, "mean", 0, B)
    with pytest.raises(InvalidValueError, match=r"mode='exact'"):
        fast.clipped_gradients()
    fast.detach()
    clipper = exact(made.model, FlatNormClipper(0.3))
    for _ in range(2):  # the second time with what an earlier mini-batch has left
        made.losses(made.inputs).mean().backward()
        clipper.per_sample_gradients()
        with pytest.raises(InvalidValueError, match=r"call clip_and_accumulate\(\) first"):
            clipper.clipped_gradients()
        clipper.clip_and_accumulate()
        assert len(clipper.clipped_gradients()) == 4
    clipper.discard()
    with pytest.raises(InvalidValueError, match=r"call clip_and_accumulate\(\) first"):
        clipper.clipped_gradients()


def test_they_stay_until_the_next_clip():
    made = build(NAME)
    clipper = exact(made.model, FlatNormClipper(0.3))
    accumulate(made, clipper, "mean", 0, B)
    before = clipper.clipped_gradients()
    clipper.pre_step()
    assert error(clipper.clipped_gradients(), before) == 0
    accumulate(made, clipper, "mean", 0, 2)
    assert {len(rows) for rows in clipper.clipped_gradients().values()} == {2}
