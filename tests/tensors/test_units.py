"""Unit-wise norms against plain loops over the units."""

import math

import pytest
import torch

from cases import DTYPES, random
from gradguard.tensors.units import WHOLE, UnitLayout, scale_units_, unit_norms

CASES = {
    "scalar": (random(()), WHOLE, lambda t: [t.reshape(-1)]),
    "bias": (random(7), WHOLE, lambda t: [t]),
    "rows": (random(5, 3), UnitLayout(), list),
    "rows of a transposed matrix": (random(3, 5).t(), UnitLayout(), list),
    "filters": (random(4, 3, 2, 2), UnitLayout(), list),
    "filters, channels last": (random(4, 3, 2, 2).to(memory_format=torch.channels_last), UnitLayout(), list),
    "columns": (random(5, 3), UnitLayout(1), lambda t: list(t.t())),
    "output channels of a transposed convolution": (
        random(6, 4, 3, 3),
        UnitLayout(1),
        lambda t: [t[:, o] for o in range(4)],
    ),
    "the same, two groups": (
        random(6, 4, 3),
        UnitLayout(1, groups=2),
        lambda t: [t[g * 3 : g * 3 + 3, o] for g in range(2) for o in range(4)],
    ),
    "long rows, cut evenly": (random(2, 5000), UnitLayout(), list),
    "long rows of a prime length": (random(2, 5003), UnitLayout(), list),
    "no rows": (torch.zeros(0, 3), UnitLayout(), list),
    "empty rows": (torch.zeros(3, 0), UnitLayout(), list),
}


@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25])
@pytest.mark.parametrize("case", CASES)
def test_norms_and_scaling_of_units(case, scale, path):
    tensor, layout, units = CASES[case]
    tensor = (tensor * scale).clone(memory_format=torch.preserve_format)
    (norms,) = unit_norms([tensor], [layout])
    expected = [math.sqrt(math.fsum(x * x for x in u.double().reshape(-1).tolist())) for u in units(tensor)]
    assert norms.tolist() == pytest.approx(expected, rel=2e-6, abs=0)

    factors = torch.arange(1, len(expected) + 1, dtype=torch.float64) / 100
    scaled = [u.double() * f for u, f in zip(units(tensor), factors, strict=True)]
    scale_units_([tensor], [layout], [factors])
    for unit, was in zip(units(tensor), scaled, strict=True):
        torch.testing.assert_close(unit.double(), was, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_every_dtype(dtype, path):
    tensor = random(4, 6).to(dtype)
    (norms,) = unit_norms([tensor], [UnitLayout()])
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    torch.testing.assert_close(norms, torch.linalg.vector_norm(wide, dim=1), rtol=1e-6, atol=0)


def test_float16_norms_do_not_overflow(path):
    (norms,) = unit_norms([torch.full((2, 4), 4e4, dtype=torch.float16)], [UnitLayout()])
    assert norms.tolist() == pytest.approx([8e4, 8e4])


def test_nonfinite_units_are_told_and_the_others_are_right(path):
    tensor = torch.tensor([[1.0, math.nan], [math.inf, 1.0], [3.0, 4.0], [1e25, 0.0], [0.0, 0.0]])
    (norms,) = unit_norms([tensor], [UnitLayout()])
    assert norms.tolist() == pytest.approx([math.nan, math.inf, 5.0, 1e25, 0.0], nan_ok=True)


@pytest.mark.parametrize("layout", [UnitLayout(), UnitLayout(1)])
def test_constants_do_not_build_up_rounding(layout):
    for shape in ((3072, 40), (40, 3072), (2048, 8), (8, 2048), (4096, 8), (8, 4096)):
        tensor = torch.full(shape, 1.9831)
        (norms,) = unit_norms([tensor], [layout])
        exact = float(tensor[0, 0].double()) * math.sqrt(tensor.numel() / len(norms))
        assert norms.tolist() == pytest.approx([exact] * len(norms), rel=2e-6, abs=0)


def test_tiny_gradients_are_not_nothing():
    (norms,) = unit_norms([torch.full((2, 4), 1e-25)], [UnitLayout()])
    assert norms.tolist() == pytest.approx([2e-25, 2e-25], rel=2e-6, abs=0)
