"""The multiply and the clamp: rounding once, writing nothing when nothing changes."""

import math

import pytest
import torch

from cases import GRADIENTS, random
from gradguard.tensors.scaling import clamp_, clip_coefficient, exceeds, scale_


def fresh(case: str) -> list[torch.Tensor]:
    """Copies that keep strides, so that expanded stays expanded."""
    copies = []
    for g in GRADIENTS[case]:
        if g.layout is not torch.strided or 0 not in g.stride():
            copies.append(g.clone())
            continue
        distinct = [1 if stride == 0 else size for size, stride in zip(g.shape, g.stride(), strict=True)]
        copies.append(g.as_strided(distinct, g.stride()).clone().expand(g.shape))
    return copies


def writes(tensors: list[torch.Tensor]) -> int:
    return sum(t._version for t in tensors)


@pytest.mark.parametrize("case", GRADIENTS)
def test_scale_multiplies_every_element_once(case, path):
    gradients = fresh(case)
    expected = [g.to_dense() if g.layout is torch.sparse_coo else g.clone() for g in gradients]
    scale_(gradients, torch.tensor(0.3, dtype=torch.float64))
    for got, before in zip(gradients, expected, strict=True):
        dense = got.to_dense() if got.layout is torch.sparse_coo else got
        wide = torch.complex128 if before.is_complex() else torch.float64
        torch.testing.assert_close(dense.to(wide), (before.to(wide) * 0.3).to(dense.dtype).to(wide))


def test_a_coefficient_too_small_for_float16_is_applied_in_float32(path):
    gradient = torch.full((4,), 4e4, dtype=torch.float16)
    scale_([gradient], torch.tensor(1.25e-5, dtype=torch.float64))
    assert gradient.tolist() == [0.5] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_coefficient_of_one_writes_nothing_on_the_cpu(dtype):
    gradients = [random(4).to(dtype), random(20_000).to(dtype)]
    before = writes(gradients)
    scale_(gradients, torch.tensor(1.0, dtype=torch.float64))
    clamp_(gradients, -100.0, 100.0)
    assert writes(gradients) == before


@pytest.mark.parametrize("case", [c for c in GRADIENTS if c != "sparse"])
def test_clamp_bounds_every_element(case, path):
    gradients = fresh(case)
    before = [g.clone() for g in gradients]
    assert bool(exceeds(gradients, -0.5, 0.7)) == any(
        bool(((r < -0.5) | (r > 0.7)).any()) for r in (torch.view_as_real(b) if b.is_complex() else b for b in before)
    )
    clamp_(gradients, -0.5, 0.7)  # which bfloat16 rounds down
    for got, was in zip(gradients, before, strict=True):
        if was.is_complex():
            torch.testing.assert_close(torch.view_as_real(got), torch.view_as_real(was).clamp(-0.5, 0.7))
        else:
            torch.testing.assert_close(got, was.clamp(-0.5, 0.7))


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_clamp_of_several_layouts(kind, path):
    gradients = [random(33, 31), random(10), random(40, 9).t(), random(30, 8)[::2]]
    expected = [g.clamp(-1, 0.5) for g in gradients]
    bounds = (-1.0, 0.5) if kind == "number" else (torch.tensor(-1.0), torch.tensor(0.5))
    clamp_(gradients, *bounds)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_clamp_keeps_nan_and_never_makes_infinity(path):
    gradient = torch.tensor([3.0, math.nan, math.inf, -math.inf])
    clamp_([gradient], -1.0, 1.0)
    torch.testing.assert_close(gradient, torch.tensor([1.0, math.nan, 1.0, -1.0]), equal_nan=True)
    half = torch.tensor([math.inf, 1.0], dtype=torch.float16)
    clamp_([half], -1e5, 1e5)  # 1e5 itself would round to infinity
    assert half.tolist() == [65504.0, 1.0]


@pytest.mark.parametrize(
    ("norm", "max_norm", "expected"),
    [
        (5.0, 1.0, 1 / 5.000001),
        (0.5, 1.0, 1.0),
        (0.0, 0.0, 0.0),
        (0.0, 1.0, 1.0),
        (1.0, 0.0, 0.0),
        (math.inf, 1.0, 0.0),
        (math.nan, 1.0, math.nan),
        (math.inf, math.inf, 1.0),
        (math.nan, math.inf, 1.0),
    ],
)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_coefficient(norm, max_norm, expected, kind):
    found = clip_coefficient(torch.tensor(norm, dtype=torch.float64), kind(max_norm))
    assert found.shape == ()
    assert float(found) == pytest.approx(expected, rel=1e-12, abs=0, nan_ok=True)
