"""`gradguard.testing.assert_grad` raises what `gg.gradcheck` finds."""

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import GradientCheckError, InvalidValueError
from gradguard.testing import assert_grad


class Halved(torch.autograd.Function):
    """x² with half its derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class OnlyHalf(torch.autograd.Function):
    """x² for bfloat16 only: differences of its outputs say nothing."""

    @staticmethod
    def forward(ctx, x):
        if x.dtype is not torch.bfloat16:
            raise RuntimeError("bfloat16 only")
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


POINT = torch.linspace(-1, 1, 6, dtype=torch.float64)


def test_a_right_gradient_gives_the_report():
    report = assert_grad(nn.Linear(6, 2, dtype=torch.float64), POINT)
    assert isinstance(report, gg.results.GradientReport)
    assert report.verdict == "PASS"


def test_a_wrong_gradient_raises_the_report():
    with pytest.raises(GradientCheckError, match=r"(?s)FAIL +x\[\d\] .*analytical .*numerical") as caught:
        assert_grad(lambda x: Halved.apply(x), POINT)
    assert isinstance(caught.value, AssertionError)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["FAIL"] * 6 + ["note"]
    assert lines[-1].endswith("stopped: after 5 wrong elements, and there may be more")


def test_pytest_shows_the_line_of_the_test_and_not_this_function():
    with pytest.raises(GradientCheckError, match="FAIL") as caught:
        assert_grad(Halved.apply, POINT)
    assert [entry.name for entry in caught.traceback if not entry.ishidden(caught)] == [caught.traceback[0].name]


def test_a_wrong_gradient_raises_also_where_undecided_ones_are_allowed():
    with pytest.raises(GradientCheckError, match="FAIL"):
        assert_grad(Halved.apply, POINT, allow_inconclusive=True)


def test_an_undecided_gradient_raises_unless_it_may_be():
    with pytest.raises(GradientCheckError, match=r"INCONCLUSIVE .*give reference="):
        assert_grad(OnlyHalf.apply, POINT.bfloat16())
    assert assert_grad(OnlyHalf.apply, POINT.bfloat16(), allow_inconclusive=True).verdict == "INCONCLUSIVE"


def test_options_reach_gradcheck():
    assert assert_grad(OnlyHalf.apply, POINT.bfloat16(), reference=torch.square)
    assert assert_grad(lambda x, y: x * Halved.apply(y), POINT, kwargs={"y": POINT}, inputs_to_check=["x"])
    with pytest.raises(InvalidValueError, match="inputs_to_check has 'z'"):
        assert_grad(torch.sin, POINT, inputs_to_check=["z"])
