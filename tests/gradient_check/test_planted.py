"""Planted mistakes and sound functions, drawn as tables: a part of each here, all of them when that is asked for."""

import warnings

import pytest
import torch

import gradguard as gg
from gradient_check.healthy import HEALTHY
from gradient_check.planted import (
    FORWARD_MODE,
    PLANTED,
    kernel,
    only_float32,
    planted,
    right_jvp,
    scaled_element,
    sine_with,
)
from gradient_check.problem import Case


def named(case: Case) -> str:
    return f"{case.category}: {case.name}"


def checked(case: Case, seed: int = 0) -> gg.results.GradientReport:
    problem = case.problem(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gg.gradcheck(problem.fn, *problem.inputs, **problem.options)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("case", PLANTED, ids=named)
def test_a_planted_mistake_is_found(case):
    report = checked(case)
    assert report.verdict != "PASS", str(report)
    if case.category != "element" or "float32" not in case.name:
        assert report.verdict == "FAIL", str(report)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", HEALTHY, ids=named)
def test_a_sound_function_is_not_rejected(case):
    report = checked(case)
    assert report.verdict == "PASS" or (case.may_be_undecided and report.verdict == "INCONCLUSIVE"), str(report)


@pytest.mark.parametrize(("cases", "least"), [(PLANTED, 150), (HEALTHY, 400)], ids=["planted", "healthy"])
def test_the_tables_are_large_and_their_names_distinct(cases, least):
    assert len(cases) >= least
    assert len({(case.category, case.name) for case in cases}) == len(cases)


def normal(*shape, dtype=torch.float64, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("factor", [1.01, 1.1])
def test_what_smooth_derivatives_nearby_differ_by_is_no_tie(factor):
    """In float32 steps are large, and so is what the derivatives of a sine differ by within one."""
    fn = only_float32(planted(torch.sin, scaled_element(2, factor)))
    report = gg.gradcheck(fn, 0.5 + normal(20, dtype=torch.float32).abs())
    assert report.verdict == "FAIL"
    assert [(one.kind, one.index) for one in report.findings] == [("mismatch", (2,))]
    assert not report.notes


def test_a_tie_says_between_what_and_the_power_leaves_it_out():
    x = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 7.0, 8.0], dtype=torch.float64)
    report = gg.gradcheck(lambda x: x[:5].median() + x[5:].square().sum(), x)
    assert report.verdict == "PASS"
    assert {one.kind for one in report.notes} <= {"kink", "tie"} != set()
    assert f", except for {len(report.notes)} at kinks or ties" in str(report)


def test_forward_mode_is_reported():
    x = normal(8)
    assert gg.gradcheck(torch.sin, x).forward_mode == "not checked"  # which is PyTorch's own
    right = gg.gradcheck(sine_with(right_jvp), x)
    assert (right.verdict, right.forward_mode) == ("PASS", "agrees")
    without = gg.gradcheck(kernel(torch.sin, lambda ctx, v: v * ctx.given[0].cos()), x)
    assert (without.verdict, without.forward_mode) == ("PASS", "not defined")
    assert "float64, forward mode not defined" in str(without)
    fn, point = FORWARD_MODE["one element"]
    wrong = gg.gradcheck(fn, point(torch.Generator().manual_seed(0)))
    assert (wrong.verdict, wrong.forward_mode) == ("FAIL", "wrong")
    assert [(one.kind, one.place) for one in wrong.findings] == [("forward mode", "the output[2]")]


def test_what_a_jvp_raises_is_noted():
    def jvp(ctx, tangent):
        raise KeyError("nothing saved")

    report = gg.gradcheck(kernel(torch.sin, lambda ctx, v: v * ctx.given[0].cos(), jvp), normal(8))
    assert (report.verdict, report.forward_mode) == ("PASS", "not checked")
    assert "forward mode: not checked, it raises" in str(report)


def test_operators_of_pytorch_that_are_wrong_for_rare_layouts_are_no_fault_of_a_function_of_them():
    """In PyTorch 2.13 the gradient of a determinant is transposed where the input has the negative bit."""
    assert gg.gradcheck(torch.linalg.det, normal(3, 3) + 4 * torch.eye(3)).verdict == "PASS"


@pytest.mark.parametrize("value", [1e-310, -1e-310, 1e-300, 5e-324])
def test_a_wrong_gradient_at_a_number_next_to_nothing(value):
    x = torch.cat([torch.tensor([value], dtype=torch.float64), normal(5)])
    report = gg.gradcheck(planted(torch.sin, scaled_element(0, 2.0)), x)
    assert [one.index for one in report.findings] == [(0,)]
    assert gg.gradcheck(torch.sin, x).verdict == "PASS"
