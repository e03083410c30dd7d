"""`gradcheck`: dtypes, other kernels, every element, second order, the place of one wrong element, and refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradient_check.correct_modules import only
from gradient_check.test_gradcheck import HALVED, normal, numbers, scaled_sine
from gradient_check.wrong_kernels import wrong

D = torch.float64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = [torch.bfloat16, torch.float16]
WRONG_SILU = wrong(F.silu, lambda v, y, x: v * x.sigmoid())


def wrong_in(dtype, factor):
    """The sine, whose gradient is multiplied by the factor in one dtype only."""
    return scaled_sine(lambda x: factor if x.dtype is dtype else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_low_dtype_is_checked_in_float64(dtype):
    report = gg.gradcheck(F.silu, normal(32).to(dtype))
    assert (report.verdict, report.dtype) == ("PASS", "float64")
    assert report.power < 1e-7
    assert gg.gradcheck(scaled_sine(1 + 1e-6), normal(32).to(dtype)).verdict == "FAIL"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_in_the_low_dtype_alone_is_seen(dtype):
    report = gg.gradcheck(wrong_in(dtype, 1.5), normal(32).to(dtype))
    assert report.verdict == "FAIL"
    assert report.findings[0].kind == "precision"


@pytest.mark.parametrize("shape", [(32,), (8, 16)])
def test_a_function_of_float32_alone(shape):
    x = normal(*shape).float()
    report = gg.gradcheck(only(torch.float32, F.silu), x)
    assert (report.verdict, report.dtype) == ("PASS", "float32")
    assert 1e-6 < report.power < 1e-2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(3,), (32,), (8, 16)])
@pytest.mark.parametrize("factor", [0.5, -1.0, 1.01, 0.0])
def test_a_wrong_function_of_float32_alone(factor, shape):
    assert gg.gradcheck(only(torch.float32, scaled_sine(factor)), normal(*shape).float()).verdict == "FAIL"


@pytest.mark.parametrize("fn", [F.silu, HALVED], ids=["right", "wrong"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_alone_says_nothing(dtype, fn):
    report = gg.gradcheck(only(dtype, fn), normal(32).to(dtype))
    assert (report.verdict, report.dtype) == ("INCONCLUSIVE", str(dtype).removeprefix("torch."))
    assert "give reference=" in str(report)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reference_in_float64(dtype):
    x = normal(64).to(dtype)
    assert gg.gradcheck(only(dtype, F.silu), x, reference=F.silu).verdict == "PASS"
    report = gg.gradcheck(only(dtype, WRONG_SILU), x, reference=F.silu)
    assert (report.verdict, report.findings[0].kind) == ("FAIL", "precision")


def test_backends_that_agree():
    kernels = {"first": torch.sin, "second": lambda x: (x / 2).sin() * (x / 2).cos() * 2}
    assert gg.gradcheck(torch.sin, normal(32).float(), backends=kernels).verdict == "PASS"


@pytest.mark.parametrize("factor", [0.5, 1.001])
def test_a_wrong_backend_is_named(factor):
    kernels = {"good": torch.sin, "bad": wrong_in(torch.float32, factor), "also good": lambda x: x.sin()}
    report = gg.gradcheck(torch.sin, normal(32).float(), backends=kernels)
    assert report.verdict == "FAIL"
    said = [one.message.split(",")[0] for one in report.findings]
    assert said == ["bad against float64", "good against bad", "bad against also good"]
    assert {one.kind for one in report.findings} == {"backends"}


# every element


def error_in_a_tiny_element(count, weight):
    """One element, of tiny weight, is half as large again: far below what a random direction can see."""
    weights, factors = torch.ones(count, dtype=D), torch.ones(count, dtype=D)
    weights[7], factors[7] = weight, 1.5
    return wrong(lambda x: x * weights, lambda v, y, x: v * weights * factors)


def test_exhaustive_sees_an_error_that_hides_from_six_directions():
    fn, x = error_in_a_tiny_element(400, 1e-10), normal(400)
    assert gg.gradcheck(fn, x).verdict == "PASS"
    report = gg.gradcheck(fn, x, exhaustive=True)
    assert report.verdict == "FAIL"
    assert [(one.index, "ratio 1.5000" in one.guess) for one in report.findings] == [((7,), True)]


GROUPED = {
    "linear": (F.linear, (normal(16, 20), normal(12, 20))),
    "conv2d": (F.conv2d, (normal(1, 4, 12, 12), normal(8, 4, 3, 3))),
    "conv2d, padded": (lambda x, w: F.conv2d(x, w, padding=1), (normal(2, 4, 12, 12), normal(8, 4, 3, 3))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED)
def test_exhaustive_shares_forwards(name):
    fn, inputs = GROUPED[name]
    report = gg.gradcheck(fn, *inputs, exhaustive=True)
    assert report.verdict == "PASS"
    assert report.forwards - gg.gradcheck(fn, *inputs).forwards < sum(x.numel() for x in inputs)


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_exhaustive_finds_one_tiny_element_among_those_that_share(name):
    fn, (x, w) = GROUPED[name]
    weights, factors = torch.ones_like(w), torch.ones_like(w)
    weights.view(-1)[11], factors.view(-1)[11] = 1e-6, 1.5
    hidden = wrong(lambda w: w * weights, lambda v, y, w: v * weights * factors)
    report = gg.gradcheck(lambda x, w: fn(x, hidden(w)), x, w, exhaustive=True)
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(11), w.shape))
    assert {(one.input, one.index) for one in report.findings} == {("w", index)}


@pytest.mark.slow
def test_one_wrong_element_among_fifty_thousand_is_located():
    first, second = 0.1 * normal(64, 512), 0.05 * normal(512, 32, seed=2)
    factors = torch.ones_like(first)
    factors[30, 17] = 0.5
    part = wrong(torch.clone, lambda v, y, w: v * factors)
    report = gg.gradcheck(lambda x, w1, w2: (x @ part(w1)).tanh() @ w2, normal(16, 64, seed=3), first, second)
    (found,) = report.findings
    assert (found.input, found.index) == ("w1", (30, 17))
    assert "ratio 0.5000" in found.guess
    assert report.forwards < 1000


# second order


class Sine(torch.autograd.Function):
    """Right once; its backward has no graph to the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, v):
        return v * ctx.saved_tensors[0].detach().cos()


class SineOnce(Sine):
    """Right once, and says so."""

    backward = staticmethod(once_differentiable(Sine.backward))


LAYERS = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize(
    ("fn", "x"),
    [(torch.tanh, normal(6)), (torch.relu, normal(6)), (lambda x: 2 * x, normal(6)), (LAYERS, normal(2, 3))],
    ids=["tanh", "relu", "linear", "module"],
)
def test_second_order_passes(fn, x):
    assert gg.gradcheck(fn, x, order=2).verdict == "PASS"


@pytest.mark.parametrize("fn", [Sine.apply, SineOnce.apply], ids=["no graph", "once differentiable"])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_second_order_fails(fn, dtype):
    x = normal(6).to(dtype)
    assert gg.gradcheck(fn, x).verdict == "PASS"
    report = gg.gradcheck(fn, x, order=2)
    assert report.verdict == "FAIL"
    assert "second order" in str(report) or "cannot be differentiated" in str(report)


# refusals


def raising(x):
    raise ZeroDivisionError("of the function itself")


REFUSED = {
    "not callable": (3, (normal(3),), {}, InvalidTypeError, "fn is int: expected a function or a module"),
    "a number": (lambda x: 3.0, (normal(3),), {}, InvalidTypeError, "returned no floating or complex tensor"),
    "None": (lambda x: None, (normal(3),), {}, InvalidTypeError, "expected a tensor, or tensors in a tuple"),
    "an index": (torch.argmax, (normal(3),), {}, InvalidTypeError, "argmax returned no floating or complex tensor"),
    "integer asked for": (
        lambda x, i: x[i],
        (normal(3), torch.tensor([0])),
        {"inputs_to_check": "i"},
        InvalidTypeError,
        r"input 'i' is torch.int64.*call i.double\(\) first",
    ),
    "unknown name": (
        lambda first, second: first * second,
        (normal(3), normal(3)),
        {"inputs_to_check": ["first", "third"]},
        InvalidValueError,
        r"'third', which is not among the inputs: \['first', 'second'\]",
    ),
    "no graph": (
        lambda x: x.detach().sin(),
        (normal(3),),
        {},
        InvalidValueError,
        r"no graph.*is there a detach\(\)",
    ),
    "NaN in": (lambda x: x, (numbers(1, float("nan")),), {}, InvalidValueError, r"input 'x' is nan at index \[1\]"),
    "NaN out": (
        torch.log,
        (numbers(1, -1),),
        {},
        InvalidValueError,
        r"of log is nan at index \[1\]: choose another",
    ),
    "NaN in float32": (torch.log, (numbers(1, -1).float(),), {}, InvalidValueError, "of log is nan at index"),
    "sparse": (lambda x: x * 2, (torch.eye(3).to_sparse(),), {}, InvalidTypeError, r"'x' is .*x.to_dense\(\)"),
    "no tensor": (lambda x: x, ([1.0],), {}, InvalidTypeError, "nothing to check: expected a floating or complex"),
    "integers": (lambda x: x, (torch.tensor([1]),), {}, InvalidTypeError, "nothing to check"),
    "all frozen": (nn.Embedding(3, 2).requires_grad_(False), (torch.tensor([1]),), {}, InvalidTypeError, "nothing"),
    "own error": (raising, (normal(3),), {}, ZeroDivisionError, "of the function itself"),
    "own error in float32": (raising, (normal(3).float(),), {}, ZeroDivisionError, "of the function itself"),
    "unknown dtype": (
        lambda x: x,
        (normal(3).to(torch.float8_e4m3fn),),
        {},
        InvalidTypeError,
        "'x' is torch.float8",
    ),
    "backend": (torch.sin, (normal(3),), {"backends": {"cuda": 3}}, InvalidTypeError, "cuda"),
    "order": (torch.sin, (normal(3),), {"order": 3}, InvalidValueError, "order is 3"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_words(name):
    fn, inputs, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        gg.gradcheck(fn, *inputs, **options)


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_a_backward_that_raises_is_a_finding(dtype):
    report = gg.gradcheck(wrong(torch.sin, lambda v, y, x: raising(x)), normal(3).to(dtype))
    assert (report.verdict, report.findings[0].kind) == ("FAIL", "error")
    assert "ZeroDivisionError: of the function itself" in str(report)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_although_the_function_is_smooth(value):
    report = gg.gradcheck(scaled_sine(lambda x: torch.where(torch.arange(5) == 2, value, 1.0)), normal(5))
    assert (report.verdict, [one.index for one in report.findings]) == ("FAIL", [(2,)])
    assert report.findings[0].kind == "nan"


@pytest.mark.parametrize("x", [numbers(0.7), normal(12)], ids=["one", "twelve"])
def test_a_fast_oscillation_is_no_kink(x):
    assert gg.gradcheck(lambda x: (1000 * x).sin(), x).verdict == "PASS"
    report = gg.gradcheck(wrong(lambda x: (1000 * x).sin(), lambda v, y, x: v * 999 * (1000 * x).cos()), x)
    assert report.verdict == "FAIL"


def test_the_continuous_side_of_a_jump_is_checked():
    backward = lambda v, y, x: v * x.cos() * torch.where(x == 1, 3.0, 1.0)  # noqa: E731
    fn = wrong(lambda x: (x >= 1).to(D) + x.sin(), backward)
    assert gg.gradcheck(fn, numbers(1, 0.3, 2, 4)).verdict == "FAIL"


def test_random_numbers_that_cannot_be_seeded():
    state = torch.Generator().manual_seed(0)
    report = gg.gradcheck(lambda x: x * torch.rand(3, generator=state), normal(3))
    assert (report.verdict, report.findings[0].kind) == ("INCONCLUSIVE", "random")


@pytest.mark.parametrize("fn", [torch.sin, lambda x: x[:0]], ids=["input", "output"])
def test_without_elements_nothing_is_wrong(fn):
    x = normal(0) if fn is torch.sin else normal(3)
    assert gg.gradcheck(fn, x).verdict != "FAIL"


def test_two_inputs_of_one_name_are_checked_each():
    def named(a, /, **kwargs):
        return a * kwargs["a"].sin()

    def halved(a, /, **kwargs):
        return a * HALVED(kwargs["a"])

    one, other = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gg.gradcheck(named, one, kwargs={"a": other}).verdict == "PASS"
    assert gg.gradcheck(halved, one, kwargs={"a": other}).verdict == "FAIL"
