"""``strict_paper=True`` is the published update to the last digit, step by step, where that update fails too."""

import math

import numpy as np
import pytest
import threshold_twins as twins
import torch
from torch import Tensor, nn

from gradguard import AdaGC, AutoClip, ClipByMedian, ZClip


def noise(count: int, seed: int = 0, level: float = 1.0) -> list[float]:
    draws = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (level * (0.15 * draws).exp()).tolist()


SEQUENCES = {
    "noise": noise(70),
    "long": noise(130),
    "rise": noise(40) + noise(40, 1, 3.0),
    "spike": [*noise(40), 200.0, *noise(20, 1), 200.0, 200.0, *noise(10, 2)],
    "spike in the warm-up": [*noise(10), 9000.0, *noise(40, 1), 500.0, *noise(10, 2)],
    "constant": [1.5] * 40 + [1.6] * 5,
    "zeros": [0.0, 0.0, *noise(40), 0.0, *noise(10, 1)],
    "NaN": [*noise(40), math.nan, *noise(20, 1), 1000.0, *noise(10, 2)],
    "NaN in the warm-up": [*noise(5), math.nan, *noise(40, 1), 1000.0],
    "NaN first": [math.nan, *noise(10)],
    "inf": [*noise(40), math.inf, *noise(10, 1), 1000.0],
    "tiny": [1e-9 * n for n in noise(40)],
}


def same(ours: float | Tensor, twin: float) -> bool:
    return float(ours) == twin or (math.isnan(float(ours)) and math.isnan(twin))


def steps(clipper, norms):
    """Feed norms to ``clipper``, and yield its results."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    for norm in norms:
        p.grad = torch.full((1,), norm, dtype=torch.float64)
        yield clipper([p])


@pytest.mark.parametrize(
    ("percent", "name"),
    [(p, n) for p in (0.0, 10.0, 37.5, 100.0) for n in SEQUENCES if p == 10 or n in ("spike", "NaN", "inf")],
)
def test_autoclip(percent, name):
    twin = twins.AutoClip(percent)
    for t, result in enumerate(steps(AutoClip(percent, strict_paper=True), SEQUENCES[name])):
        coefficient = twin.step(float(result.norm))
        assert same(result.threshold, twin.threshold), t
        assert same(result.coefficient, coefficient), t


@pytest.mark.parametrize("percent", [0.0, 10.0, 37.5, 50.0, 90.0, 100.0])
def test_the_twin_has_the_percentile_of_numpy(percent):
    for name in ("noise", "rise", "spike"):
        assert twins.percentile(SEQUENCES[name], percent) == np.percentile(SEQUENCES[name], percent)


ZCLIPS = {
    "published": {},
    "no ceiling": {"ceiling": None},
    "mean": {"ceiling": None, "mode": "mean"},
    "percentile": {"ceiling": None, "mode": "percentile"},
    "low ceiling": {"ceiling": 0.7},
    "harder": {"ceiling": 2.0, "clip_factor": 0.7, "z_threshold": 1.5, "alpha": 0.9},
    "spikes skipped": {"ceiling": None, "skip_update_on_spike": True},
    "short warm-up": {"ceiling": None, "warmup": 3},
}


@pytest.mark.parametrize(
    ("options", "name"),
    [(o, n) for o in ZCLIPS for n in SEQUENCES if o == "no ceiling" or n in ("rise", "spike", "NaN")],
)
def test_zclip(options, name):
    twin, clipper = twins.ZClip(**ZCLIPS[options]), ZClip(**ZCLIPS[options], strict_paper=True)
    for t, result in enumerate(steps(clipper, SEQUENCES[name])):
        coefficient = twin.step(float(result.norm))
        assert same(result.coefficient, coefficient), t
        assert same(clipper.state["mean"], twin.mean), t
        assert same(clipper.state["variance"], twin.variance), t


ADAGCS = {
    "published": {},
    "short warm-up": {"warmup": 10},
    "tight": {"absolute": 0.3, "relative": 1.03, "beta": 0.9, "warmup": 10},
}


@pytest.mark.parametrize(
    ("options", "name"),
    [("published", "long"), ("short warm-up", "rise"), ("short warm-up", "inf")]
    + [("tight", name) for name in SEQUENCES if name not in ("long", "NaN first")],
)
def test_adagc(options, name):
    twin, clipper = twins.AdaGC(**ADAGCS[options]), AdaGC(**ADAGCS[options], strict_paper=True)
    sizes = list(zip(SEQUENCES[name], noise(len(SEQUENCES[name]), 7, 0.2), [0.0] * 200, strict=False))
    tensors = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    for t, norms in enumerate(sizes):
        for p, n in zip(tensors, norms, strict=True):
            p.grad = torch.full((1,), n, dtype=torch.float64)
        before = [p.grad.clone() for p in tensors]
        result = clipper(tensors)
        factors = twin.step(result.tensor_norms.tolist(), float(result.norm))
        assert all(same(p.grad, float(g) * h) for p, g, h in zip(tensors, before, factors, strict=True)), t
        assert all(map(same, clipper.averages.values(), twin.averages)), t


@pytest.mark.parametrize("name", ["noise", "rise", "spike", "spike in the warm-up", "constant", "zeros", "tiny"])
def test_the_median_rule(name):
    twin = twins.ClipByMedian(window=50)
    for t, result in enumerate(steps(ClipByMedian(window=50), SEQUENCES[name])):
        assert float(result.coefficient) == pytest.approx(twin.step(float(result.norm)), rel=1e-12, abs=0), t
        assert float(result.threshold) == pytest.approx(twin.threshold, rel=1e-12, abs=0), t


def test_one_nan_ruins_what_is_published():
    sequence = [*noise(40), math.nan, *noise(20, 1), 1000.0]
    z = list(steps(ZClip(ceiling=None, strict_paper=True), sequence))
    assert float(z[-1].coefficient) == 1.0  # a spike of 1000 passes
    auto = list(steps(AutoClip(strict_paper=True), sequence))
    assert all(math.isnan(float(r.coefficient)) for r in auto[40:])
