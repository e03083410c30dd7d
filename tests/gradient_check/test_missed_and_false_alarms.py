"""Wrong backwards that once passed, right functions that once failed, and state that was once left changed."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import InvalidValueError
from gradient_check.wrong_kernels import wrong


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def only_bfloat16(fn):
    def kernel(x):
        if x.dtype is not torch.bfloat16:
            raise TypeError("bfloat16 only")
        return fn(x)

    return kernel


def silu_backward(v, y, x):
    s = torch.sigmoid(x)
    return v * (s + x * s * (1 - s))


def silu_backward_for_dense(v, y, x):
    return silu_backward(torch.as_strided(v, v.shape, x.stride()) if v.stride(-1) != 1 else v, y, x)


def silu_backward_in_place(v, y, x):
    s = torch.sigmoid(x)
    return v.mul_(s + x * s * (1 - s))


def one_wrong_kink(v, y, x):
    return v * torch.where(torch.arange(len(x)) == 900, 3.0, (x > 0).double())


def one_nan(v, y, x):
    return torch.where(torch.arange(len(x)) == 25, math.nan, v / (2 * x.sqrt()))


HALF = normal(8, 8, dtype=torch.bfloat16)
WRONG = {
    "strides, in bfloat16": (only_bfloat16(wrong(F.silu, silu_backward_for_dense)), HALF, {"reference": F.silu}),
    "in place, in bfloat16": (only_bfloat16(wrong(F.silu, silu_backward_in_place)), HALF, {"reference": F.silu}),
    "strides, in a backend": (
        F.silu,
        normal(8, 8, dtype=torch.float32),
        {"backends": {"mine": wrong(F.silu, silu_backward_for_dense)}},
    ),
    "gradients whose squares overflow": (wrong(lambda x: x * 1e160, lambda v, y, x: v * -3e160), normal(6), {}),
    "values whose squares overflow": (wrong(lambda x: x * x, lambda v, y, x: v * x), normal(6) * 1e80, {}),
    "all tied get the whole": (
        wrong(lambda x: x.amax(), lambda v, y, x: v * (x == x.amax())),
        torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0], dtype=torch.float64),
        {},
    ),
    "one of a thousand kinks": (wrong(F.relu, one_wrong_kink), torch.zeros(1000, dtype=torch.float64), {}),
    "NaN behind many poles": (
        wrong(torch.sqrt, one_nan),
        torch.cat([torch.zeros(16, dtype=torch.float64), normal(10).abs() + 0.1]),
        {},
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "one of a thousand kinks")) for name in WRONG]
)
def test_found(name):
    fn, x, options = WRONG[name]
    assert gg.gradcheck(fn, x, **options).verdict == "FAIL"


def test_a_jump_on_both_sides_everywhere_is_no_pass():
    fn = wrong(lambda x: x.sign() + x, lambda v, y, x: v * 7)
    report = gg.gradcheck(fn, torch.zeros(4, dtype=torch.float64))
    assert report.verdict == "INCONCLUSIVE"
    assert "jumps and poles" in str(report)


RIGHT = {
    "dropout, float32": lambda: (nn.Dropout(0.5), normal(4, 5, dtype=torch.float32)),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16), normal(3, 2, 8, dtype=torch.float32)),
    "noise of its own dtype": lambda: (lambda x: x * torch.rand_like(x), normal(4, 5, dtype=torch.float32)),
    "a sum that cancels": lambda: (lambda x: (x + x.sum() * 0).softmax(-1), normal(32, 8, dtype=torch.float32)),
    "packed sequence": lambda: (nn.LSTM(5, 4), nn.utils.rnn.pack_padded_sequence(normal(3, 2, 5).float(), [3, 2])),
    "subnormal": lambda: (torch.sin, normal(4) * 1e-310),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RIGHT)
def test_not_flagged(name):
    fn, x = RIGHT[name]()
    assert gg.gradcheck(fn, x).verdict == "PASS"


@pytest.mark.parametrize("seed", [9, 11, 15, 16, 18])
def test_medians_with_ties_are_not_flagged(seed):
    x = torch.randint(0, 3, (6, 6), generator=torch.Generator().manual_seed(seed)).double()
    assert gg.gradcheck(lambda x: x.median(-1)[0], x).verdict == "PASS"


@pytest.mark.parametrize("seed", range(4))
def test_batch_norm_in_a_closure_is_not_flagged(seed):
    norm = nn.BatchNorm1d(5)
    assert gg.gradcheck(lambda x: norm(x), normal(8, 5, dtype=torch.float32, seed=seed)).verdict == "PASS"


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


HELD = {
    "list in a closure": lambda norm: (lambda x, held=[norm]: held[0](x), (), {}),
    "dict": lambda norm: (lambda x, held={"norm": norm}: held["norm"](x), (), {}),
    "object's method": lambda norm: (Holder(norm).forward, (), {}),
    "argument": lambda norm: (lambda x, module: module(x), (norm,), {}),
    "keyword argument": lambda norm: (lambda x, module: module(x), (), {"kwargs": {"module": norm}}),
    "partial": lambda norm: (partial(lambda x, module: module(x), module=norm), (), {}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HELD)
def test_buffers_stay_as_they_were_wherever_the_module_is_held(name):
    norm = nn.BatchNorm1d(5).double()
    mean = norm.running_mean
    fn, arguments, options = HELD[name](norm)
    assert gg.gradcheck(fn, normal(4, 5), *arguments, **options).verdict == "PASS"
    assert norm.num_batches_tracked.item() == 0
    assert norm.running_mean is mean
    assert not mean.any()


@pytest.mark.parametrize("factor", [1.2, 0.0])
def test_a_wrong_gradient_shows_beside_one_that_is_a_thousand_million_times_larger(factor):
    faulty = wrong(torch.sin, lambda v, y, x: v * x.cos() * factor)
    report = gg.gradcheck(lambda a, b: faulty(a) + 1e9 * b.sin(), normal(4), normal(4))
    assert report.verdict == "FAIL"
    assert {one.input for one in report.findings} == {"a"}
    assert "rtol=" not in str(report)
    assert gg.gradcheck(lambda a, b: a.sin() + 1e9 * b.sin(), normal(4), normal(4)).verdict == "PASS"


def test_an_input_whose_gradient_is_rounding_beside_another_is_named():
    report = gg.gradcheck(lambda a, b: a.sin() + 1e14 * b.sin(), normal(4), normal(4))
    assert (report.verdict, [(one.input, one.message) for one in report.notes]) == (
        "PASS",
        [("a", "not judged: its gradient is within the rounding of the others")],
    )


ILL_CONDITIONED = {
    "sin of large numbers": lambda: (lambda x: torch.sin(x * 1e7), normal(5, dtype=torch.float32)),
    "rows near 1,000": lambda: (nn.BatchNorm1d(3), normal(5, 3, dtype=torch.float32) * 1e-4 + 1000),
}


@pytest.mark.parametrize("name", ILL_CONDITIONED)
def test_values_that_float32_rounds_away_are_judged_in_float64(name):
    fn, x = ILL_CONDITIONED[name]()
    report = gg.gradcheck(fn, x)
    assert report.verdict == "PASS"
    assert "only the float64 gradient was judged" in str(report)


def test_a_function_that_is_another_one_in_float32_is_refused():
    with pytest.raises(InvalidValueError, match="expected the same function, or inputs in float64"):
        gg.gradcheck(lambda x: x.sin() if x.dtype is torch.float64 else x.cos(), normal(5, dtype=torch.float32))


def test_another_reference_is_refused():
    with pytest.raises(InvalidValueError, match="it is not the same function as the float64 one"):
        gg.gradcheck(lambda x: x.sum(0), normal(4, 5), reference=torch.sin)
    with pytest.raises(InvalidValueError, match="have different values"):
        gg.gradcheck(torch.cos, normal(4, 5), reference=torch.sin)


def test_the_class_of_a_function_is_taken_for_its_apply():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, v):
            return 2 * v

    assert gg.gradcheck(Twice, normal(3)).verdict == "PASS"


def hooked(hook):
    """Return a sine of PyTorch's own nodes alone, whose gradient a hook changes on its way."""

    def fn(x):
        y = x.sin()
        if y.requires_grad:
            y.register_hook(hook)
        return y * 1.0

    return fn


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (hooked(lambda grad: grad.clamp(-5, 5)), "linearity"),
        (hooked(lambda grad: torch.where(grad.abs() < 1e-3, 0.0, grad)), "linearity"),
        (lambda x: x.sin() if x.is_contiguous() else x.detach().sin() + 0.0 * x, "layout"),
    ],
    ids=["a hook clamps", "a hook drops little gradients", "transposed inputs are detached"],
)
def test_code_around_pytorchs_own_nodes_is_probed(fn, kind):
    report = gg.gradcheck(fn, normal(4, 3))
    assert report.verdict == "FAIL"
    assert {one.kind for one in report.findings} == {kind}


@pytest.mark.parametrize("left_over", [0, 1])
def test_numpys_generator_is_as_before(left_over):
    np.random.seed(3)
    np.random.randn(left_over)
    before = np.random.get_state()
    gg.gradcheck(lambda x: x.sin() + 0.0 * float(np.random.randn()), normal(3))
    for now, then in zip(np.random.get_state(), before, strict=True):
        np.testing.assert_array_equal(now, then)
