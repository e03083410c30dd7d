"""Solvers stop at a tolerance, and their gradient is no more exact than that: `rtol=` says so."""

import re

import pytest
import torch

import gradguard as gg
from gradguard.errors import InvalidValueError

D = torch.float64


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def solved(step, start, tolerance):
    z = start
    for _ in range(500):
        last, z = z, step(z)
        if (z - last).abs().max() <= tolerance * z.abs().max():
            break
    return z


def fixed_point(tolerance, factor=1.0):
    """z = tanh(z w + x), and its gradient, both by iteration; with ``factor``, one element is that much too large."""

    class FixedPoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            z = solved(lambda z: torch.tanh(z @ w + x), torch.zeros_like(x), tolerance)
            ctx.save_for_backward(z, w)
            return z

        @staticmethod
        def backward(ctx, v):
            z, w = ctx.saved_tensors
            slope = 1 - z * z
            u = solved(lambda u: v + (u * slope) @ w.T, v, tolerance) * slope
            of_w = z.T @ u
            of_w[1, 2] *= factor
            return u, of_w

    return lambda x, w: FixedPoint.apply(x, w)


X, W = normal(3, 4), 0.3 * normal(4, 4, seed=1)


@pytest.mark.parametrize("tolerance", [1e-6, 1e-8])
def test_a_solver_fails_and_the_proposed_tolerance_accepts_it(tolerance):
    report = gg.gradcheck(fixed_point(tolerance), X, W)
    assert report.verdict == "FAIL"
    proposed = float(re.search(r"if this is the error of a solver, rtol=(\S+) allows it", str(report))[1])
    assert tolerance <= proposed <= 1000 * tolerance
    accepted = gg.gradcheck(fixed_point(tolerance), X, W, rtol=proposed)
    assert accepted.verdict == "PASS"
    assert accepted.power >= proposed  # the price is told


def test_a_wrong_element_of_a_solver_still_fails():
    report = gg.gradcheck(fixed_point(1e-8, factor=1.01), X, W, rtol=1e-6)
    assert (1, 2) in [one.index for one in report.findings if one.input == "w"]


def test_a_solver_in_float32():
    assert gg.gradcheck(fixed_point(1e-6), X.float(), W.float(), rtol=1e-4).verdict == "PASS"
    assert gg.gradcheck(fixed_point(1e-6, factor=1.1), X.float(), W.float(), rtol=1e-4).verdict == "FAIL"


def test_one_wrong_element_is_not_called_a_solver():
    assert "solver" not in str(gg.gradcheck(fixed_point(1e-14, factor=1 + 1e-6), X, W))


@pytest.mark.parametrize("rtol", [-0.1, 1.0, float("nan")])
def test_no_such_tolerance(rtol):
    with pytest.raises(InvalidValueError, match=r"rtol is .*at least 0 and below 1"):
        gg.gradcheck(torch.sin, X, rtol=rtol)
