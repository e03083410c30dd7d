"""The rules, row by row of the table of edge cases, against Python's own arithmetic."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gradguard as gg
from cases import DTYPES, GRADIENTS, random
from gradguard.errors import GradguardError, InvalidTypeError, InvalidValueError, NonFiniteGradientError

HALF, BRAIN = torch.float16, torch.bfloat16
INF, NAN = math.inf, math.nan
DENSE = {f"{name} {i}": g for name, gs in GRADIENTS.items() for i, g in enumerate(gs) if not g.is_sparse}
BOUNDS = [0.0, 1e-30, 1e-3, 1.0, 1e25, INF]


def parts_of(grad: Tensor) -> list[float]:
    grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    return grad.double().flatten().tolist()


def rounded(bound: float, dtype: torch.dtype) -> float:
    return torch.tensor(bound, dtype=torch.float64).to(dtype).item()


def scaled_by_hand(grad: Tensor, bound: float) -> Tensor:
    norm = math.hypot(*parts_of(grad))
    wide = torch.promote_types(grad.dtype, torch.float64)
    return (grad.to(wide) * (bound / norm)).to(grad.dtype) if norm > bound else grad


def close(ours: Tensor, theirs: Tensor) -> None:
    """Within a few roundings; below the smallest normal number roundings are absolute."""
    info = torch.finfo(ours.dtype)
    torch.testing.assert_close(ours, theirs, rtol=8 * info.eps, atol=8 * info.smallest_normal * info.eps)


@pytest.mark.parametrize("name", DENSE)
def test_norm_is_that_of_python(name):
    grad = DENSE[name]
    before = grad.clone()
    for bound in BOUNDS:
        close(gg.ErrorClipByNorm(bound).clip(grad), scaled_by_hand(grad, bound))
    assert torch.equal(grad, before)


@pytest.mark.parametrize("dim", [0, 1, -1, 7])
@pytest.mark.parametrize("name", DENSE)
def test_sample_norm_is_that_of_python(name, dim):
    grad = DENSE[name]
    if grad.numel() > 1100:  # a sample of few elements each: Python needs too long
        grad = grad[:1100]
    for bound in BOUNDS:
        if -grad.dim() <= dim < grad.dim():
            samples = [scaled_by_hand(sample, bound) for sample in grad.unbind(dim)]
            expected = torch.stack(samples, dim) if samples else grad
        else:
            expected = scaled_by_hand(grad, bound)
        close(gg.rules.ErrorClipBySampleNorm(bound, dim).clip(grad), expected)


@pytest.mark.parametrize("name", DENSE)
def test_value_is_that_of_python(name):
    grad = DENSE[name]
    for bound in (*BOUNDS, 5 * 65536.0):
        clipped = gg.ErrorClipByValue(bound).clip(grad)
        if grad.is_complex():
            close(clipped, torch.stack([scaled_by_hand(element, bound) for element in grad]))
            continue
        limit = rounded(min(bound, torch.finfo(grad.dtype).max), grad.dtype)
        expected = torch.tensor([min(max(g, -limit), limit) for g in parts_of(grad)], dtype=torch.float64)
        torch.testing.assert_close(clipped, expected.to(grad.dtype).reshape(grad.shape), rtol=0, atol=0)


@pytest.mark.parametrize("name", DENSE)
def test_zero_above_keeps_what_is_within_and_drops_the_rest(name):
    grad = DENSE[name]
    for bound in BOUNDS:
        keep = grad.abs().double() <= rounded(bound, grad.dtype.to_real())
        torch.testing.assert_close(gg.rules.ErrorClipZeroAbove(bound).clip(grad), grad * keep, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [1e39, 1e300])
def test_a_bound_beyond_the_dtype_clips_no_finite_element(bound, dtype):
    grad = torch.tensor([0.5, -3.0, min(torch.finfo(dtype).max, 1e38)], dtype=dtype)
    for rule in (gg.ErrorClipByValue(bound), gg.ErrorClipByNorm(bound), gg.rules.ErrorClipZeroAbove(bound)):
        torch.testing.assert_close(rule.clip(grad), grad, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (gg.ErrorClipByValue(2.0), [NAN, 2.0, -2.0, 0.0, 1.5]),
        (gg.ErrorClipByValue(1.0, min=0.5), [NAN, 1.0, 0.5, 0.5, 1.0]),
        (gg.ErrorClipByValue(-1.0, min=-2.0), [NAN, -1.0, -2.0, -1.0, -1.0]),
        (gg.ErrorClipByValue(0.0), [NAN, 0.0, 0.0, 0.0, 0.0]),
        (gg.rules.ErrorClipZeroAbove(2.0), [0.0, 0.0, 0.0, 0.0, 1.5]),
        (gg.rules.ErrorClipZeroAbove(INF), [0.0, INF, -INF, 0.0, 1.5]),
        (gg.ErrorClipByNorm(0.5), [NAN, INF, -INF, 0.0, 1.5]),
        (gg.ErrorClipByNorm(0.0), [NAN, INF, -INF, 0.0, 1.5]),
        (gg.rules.ErrorClipBySampleNorm(0.5), [NAN, INF, -INF, 0.0, 0.5]),
        (gg.rules.ErrorClipNonfinite("zero"), [0.0, 0.0, 0.0, 0.0, 1.5]),
        (gg.rules.ErrorClipNonfinite("keep"), [NAN, INF, -INF, 0.0, 1.5]),
    ],
    ids=str,
)
def test_nan_infinity_and_zero(rule, expected, dtype):
    grad = torch.tensor([NAN, INF, -INF, 0.0, 1.5], dtype=dtype)
    torch.testing.assert_close(rule.clip(grad), torch.tensor(expected, dtype=dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, complex(0, INF)])
def test_raise_counts_what_is_not_finite(bad):
    grad = torch.tensor([1.0, bad, 2.0])
    words = "1 NaN and 0 infinite of 3" if bad != bad else "0 NaN and 1 infinite of 3"
    with pytest.raises(NonFiniteGradientError, match=words):
        gg.rules.ErrorClipNonfinite("raise").clip(grad)


def test_raise_does_not_take_a_sum_that_overflows_for_an_element():
    grad = torch.full((3,), 3e38)
    assert gg.rules.ErrorClipNonfinite("raise").clip(grad) is grad


def test_raise_names_the_operation():
    x = torch.ones(2, requires_grad=True)
    loss = (x * 2 * INF).sum()
    rule = gg.rules.ErrorClipNonfinite("raise")
    words = "gradient of the output of MulBackward0: 0 NaN and 2 infinite of 2 elements"
    with pytest.raises(NonFiniteGradientError, match=words), gg.error_clip(loss, rule):
        loss.backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_are_rounded_to_the_dtype(dtype):
    clipped = gg.ErrorClipByValue(0.3).clip(torch.tensor([7.0, -7.0], dtype=dtype))
    assert clipped.tolist() == [torch.tensor(0.3, dtype=dtype).item(), -torch.tensor(0.3, dtype=dtype).item()]


def test_bounds_that_are_written_out_bound_a_modulus_as_one_does():
    grad = torch.tensor([3 + 4j, 0.1j])
    one, two = gg.ErrorClipByValue(0.5), gg.ErrorClipByValue(max=0.5, min=-0.5)
    assert repr(one) == repr(two)
    torch.testing.assert_close(two.clip(grad), one.clip(grad), rtol=0, atol=0)
    torch.testing.assert_close(two.scaled(8.0).clip(grad), one.scaled(8.0).clip(grad), rtol=0, atol=0)
    two.max = 2.0
    with pytest.raises(InvalidValueError, match=r"min=-0.5\) on a complex gradient: a modulus has one bound"):
        two.clip(grad)
    two.min = -2.0
    assert two.clip(grad).abs().max() == 2.0


def test_bounds_that_are_not_symmetric_refuse_complex_gradients():
    with pytest.raises(InvalidValueError, match=r"min=-2.0\) on a complex gradient: a modulus has one bound"):
        gg.ErrorClipByValue(1.0, min=-2.0).clip(torch.tensor([3 + 4j]))


MANY, NUMBER = torch.ones(2), "expected a number, got"
CONSTRUCTIONS = {
    "max < min": (lambda: gg.ErrorClipByValue(1, 2), InvalidValueError, r"cannot clip to \[2.0, 1.0\]"),
    "max < 0 alone": (lambda: gg.ErrorClipByValue(-1), InvalidValueError, r"cannot clip to \[1.0, -1.0\]"),
    "max NaN": (lambda: gg.ErrorClipByValue(NAN), InvalidValueError, "max is NaN, expected a number"),
    "max NaN tensor": (lambda: gg.ErrorClipByValue(torch.tensor(NAN)), InvalidValueError, "max is NaN"),
    "min NaN": (lambda: gg.ErrorClipByValue(1, NAN), InvalidValueError, "min is NaN, expected a number"),
    "max None": (lambda: gg.ErrorClipByValue(None), InvalidTypeError, f"max=None: {NUMBER} NoneType"),
    "max string": (lambda: gg.ErrorClipByValue("5"), InvalidTypeError, f"max='5': {NUMBER} str"),
    "min string": (lambda: gg.ErrorClipByValue(1, "0"), InvalidTypeError, f"min='0': {NUMBER} str"),
    "max list": (lambda: gg.ErrorClipByValue([1]), InvalidTypeError, rf"max=\[1\]: {NUMBER} list"),
    "max complex": (lambda: gg.ErrorClipByValue(1j), InvalidTypeError, f"max=1j: {NUMBER} complex"),
    "max of many elements": (lambda: gg.ErrorClipByValue(MANY), GradguardError, "max"),
    "norm of many elements": (lambda: gg.ErrorClipByNorm(MANY), GradguardError, "max_norm"),
    "norm < 0": (lambda: gg.ErrorClipByNorm(-1), InvalidValueError, "max_norm=-1.0, expected a number >= 0"),
    "norm NaN": (lambda: gg.ErrorClipByNorm(NAN), InvalidValueError, "max_norm is NaN"),
    "norm None": (lambda: gg.ErrorClipByNorm(None), InvalidTypeError, f"max_norm=None: {NUMBER} NoneType"),
    "sample norm < 0": (lambda: gg.rules.ErrorClipBySampleNorm(-1), InvalidValueError, "max_norm=-1.0, expected"),
    "zero above < 0": (
        lambda: gg.rules.ErrorClipZeroAbove(-0.1),
        InvalidValueError,
        "max=-0.1, expected a number >= 0",
    ),
    "policy": (
        lambda: gg.rules.ErrorClipNonfinite("drop"),
        InvalidValueError,
        "policy='drop': expected 'keep', 'zero'",
    ),
}


@pytest.mark.parametrize(("make", "error", "words"), CONSTRUCTIONS.values(), ids=CONSTRUCTIONS)
def test_what_is_no_threshold_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


REPRS = {
    "ErrorClipByValue(max=5.0, min=-5.0)": gg.ErrorClipByValue(torch.tensor(5)),
    "ErrorClipByValue(max=inf, min=-1.0)": gg.ErrorClipByValue(INF, min=-1),
    "ErrorClipByNorm(max_norm=1.0)": gg.ErrorClipByNorm(1),
    "ErrorClipBySampleNorm(dim=-1, max_norm=0.0)": gg.rules.ErrorClipBySampleNorm(0, dim=-1),
    "ErrorClipZeroAbove(max=0.01)": gg.rules.ErrorClipZeroAbove(0.01),
    "ErrorClipNonfinite(policy=zero)": gg.rules.ErrorClipNonfinite(),
}


@pytest.mark.parametrize(("shown", "rule"), REPRS.items())
def test_rules_show_their_thresholds_and_can_be_copied(shown, rule):
    for one in (rule, copy.copy(rule), copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert repr(one) == shown
        grad = random(3, 4)
        assert torch.equal(one.clip(grad), rule.clip(grad))


def test_a_new_max_takes_min_with_it_where_min_was_not_given():
    rule = gg.ErrorClipByValue(5.0)
    rule.max = 2
    assert (rule.max, rule.min) == (2.0, -2.0)
    given = gg.ErrorClipByValue(5.0, min=-1.0)
    given.max = 0.5
    assert (given.max, given.min) == (0.5, -1.0)
    rule.min = -7.0
    rule.max = 3.0
    assert (rule.max, rule.min) == (3.0, -7.0)


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("max", -1.0, InvalidValueError, r"cannot clip to \[1.0, -1.0\]"),
        ("max", NAN, InvalidValueError, "max is NaN"),
        ("max", "9", InvalidTypeError, "max='9': expected a number"),
        ("min", 9.0, InvalidValueError, r"cannot clip to \[9.0, 5.0\]"),
        ("min", NAN, InvalidValueError, "min is NaN"),
    ],
)
def test_a_threshold_that_is_refused_changes_nothing(name, value, error, words):
    rule = gg.ErrorClipByValue(5.0)
    with pytest.raises(error, match=words):
        setattr(rule, name, value)
    assert (rule.max, rule.min) == (5.0, -5.0)
    rule.max = 3.0
    assert (rule.max, rule.min) == (3.0, -3.0)


def test_a_new_threshold_counts_from_the_next_block():
    x, rule = torch.ones(1, requires_grad=True), gg.ErrorClipByValue(5.0)
    for bound in (5.0, 2.0):
        rule.max = bound
        loss = (x * 1 * 10).sum()
        with gg.error_clip(loss, rule):
            assert torch.autograd.grad(loss, x)[0].item() == bound


class Named(gg.BaseErrorClip):
    thresholds = ("bound",)

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def clip(self, grad: Tensor) -> Tensor:
        return torch.where(grad.abs() > self.bound, grad / 2, grad)


class Unnamed(Named):
    thresholds = None


class NoClip(gg.BaseErrorClip):
    pass


def gradient(rule: gg.BaseErrorClip, made: list[float], dtype: torch.dtype, **options: object) -> list[float]:
    """What the rule makes of one gradient on its way."""
    x = torch.ones(len(made), dtype=dtype, requires_grad=True)
    h = x * 1
    loss = h.sum()
    h.register_hook(lambda grad: torch.tensor(made, dtype=dtype))
    with gg.error_clip(loss, rule, **options):
        loss.backward()
    return x.grad.tolist()


SCALES = {
    "number": 1024.0,
    "tensor": torch.tensor(1024.0),
    "GradScaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (gg.ErrorClipByValue(0.5), [512.0, -512.0, 100.0]),
        (gg.ErrorClipByValue(1.0, min=-0.25), [1024.0, -256.0, 100.0]),
        (gg.rules.ErrorClipZeroAbove(1.0), [0.0, 0.0, 100.0]),
        (gg.rules.ErrorClipBySampleNorm(0.5), [512.0, -512.0, 100.0]),
        (Named(1.0), [1536.0, -1024.0, 100.0]),
        (Unnamed(1.0), [1536.0, -1024.0, 100.0]),
    ],
    ids=str,
)
def test_thresholds_are_in_units_of_the_unscaled_loss(rule, expected, dtype, scale):
    assert gradient(rule, [3072.0, -2048.0, 100.0], dtype, scale=scale) == expected


def test_a_rule_without_clip_says_what_to_write():
    with pytest.raises(NotImplementedError, match=r"NoClip has no clip\(grad\): write one"):
        NoClip().clip(torch.ones(1))


@pytest.mark.parametrize("scale", [-2.0, 0.0, NAN, INF, "1024", torch.ones(2)], ids=str)
def test_what_is_no_loss_scale_is_refused(scale):
    with pytest.raises(GradguardError, match="scale"):
        gradient(gg.ErrorClipByValue(1.0), [1.0], torch.float32, scale=scale)


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rule", [gg.ErrorClipByValue(2.0), gg.rules.ErrorClipZeroAbove(2.0), gg.rules.ErrorClipNonfinite("zero")]
)
def test_infinity_stays_visible_as_nan_in_float16_and_under_a_scale(rule, dtype, scale):
    found = gradient(rule, [INF, -INF, NAN, 1.0], dtype, **({} if scale is None else {"scale": scale}))
    assert found[3] == 1.0
    if dtype is HALF or scale is not None:
        assert [math.isnan(value) for value in found] == [True, True, True, False]
    else:
        assert all(math.isfinite(value) for value in found[:2])


def lowered_scales(rule: gg.BaseErrorClip, loss_of: Callable[[Tensor], Tensor], give_scale: bool) -> list[float]:
    """Train for a few steps, and return the scales at which the GradScaler backed off."""
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    lowered = []
    for _ in range(8):
        loss = scaler.scale(loss_of(w))
        with gg.error_clip(loss, rule, **({"scale": scaler} if give_scale else {})):
            loss.backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        lowered += [scale] if scaler.get_scale() < scale else []
    assert w.isfinite().all()
    return lowered


TWENTY_TIMES = [65536.0, 32768.0, 16384.0, 8192.0, 4096.0]
"""The scales S at which 20 · S is beyond the largest float16, 65504."""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (gg.ErrorClipByValue(1.0), TWENTY_TIMES),
        (gg.ErrorClipByNorm(10.0), TWENTY_TIMES),
        (gg.rules.ErrorClipZeroAbove(100.0), TWENTY_TIMES),
        (gg.rules.ErrorClipNonfinite("zero"), TWENTY_TIMES),
        (gg.rules.ErrorClipNonfinite("keep"), TWENTY_TIMES),
        (Named(1.0), TWENTY_TIMES),
        (Unnamed(1.0), TWENTY_TIMES),
    ],
    ids=str,
)
def test_a_grad_scaler_backs_off_where_an_intermediate_value_overflows(rule, expected):
    assert lowered_scales(rule, lambda w: ((w * 1).half() * 20).float().sum(), give_scale=True) == expected


@pytest.mark.parametrize(
    "rule", [gg.ErrorClipByValue(1e6), gg.rules.ErrorClipZeroAbove(1e6), gg.rules.ErrorClipNonfinite("zero")], ids=str
)
def test_within_float16_it_backs_off_also_if_the_clip_is_not_told_of_it(rule):
    assert lowered_scales(rule, lambda w: (w.half() * 2 * 10).float().sum(), give_scale=False) == TWENTY_TIMES


def test_what_a_clip_keeps_from_overflowing_needs_no_lower_scale():
    """Unclipped, float16 would be asked for 65536 and for 20 · 65536."""
    assert lowered_scales(gg.ErrorClipByValue(1.0), lambda w: (w.half() * 2 * 10).float().sum(), False) == []


def test_a_bound_beyond_float16_times_the_scale_does_not_fail():
    made = gradient(gg.ErrorClipByValue(5.0), [6e4, -6e4, 1.0], HALF, scale=65536.0)
    assert made == [60000.0, -60000.0, 1.0]
    assert gradient(gg.ErrorClipByValue(1e-3), [6e4, -6e4, 1.0], HALF, scale=65536.0) == [65.5625, -65.5625, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_a_bound_beyond_the_dtype_times_the_scale_does_not_fail(dtype):
    assert gradient(gg.ErrorClipByValue(1e36), [2.0], dtype, scale=65536.0) == [2.0]
