"""A numerical derivative is no further off than its bar says, and single directions are diagnosed for what they are."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gradguard.check.differences import Differences, directions
from gradguard.check.direction_verdict import examine
from gradguard.check.function import Function
from gradient_check.correct_modules import only

D = torch.float64


def differences_of(fn, *inputs, gradient=None, seed=0) -> Differences:
    """Prepare what `gradcheck` prepares; with ``gradient``, that is the gradient which is checked."""
    function = Function(fn, inputs, {}, wide=False)
    leaves = function.leaves()
    outputs = function.record(leaves)
    function.learn_outputs(outputs)
    cotangent = torch.randn(function.size, generator=torch.Generator().manual_seed(seed), dtype=D)
    if gradient is None:
        checked = function.backward(outputs, leaves, function.shaped(cotangent))
    else:
        checked = torch.full((sum(function.sizes),), float(gradient), dtype=D) * cotangent.sum()
    return Differences(function, cotangent, checked)


def random_signs(differences: Differences, seed: int) -> list[torch.Tensor]:
    drawn = directions(differences.function, torch.Generator().manual_seed(seed))
    return [next(drawn) for _ in range(2)]


# smooth functions with a known derivative


SMOOTH = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp": lambda x: (-x * x).exp(),
    "square": lambda x: x * x,
    "root": lambda x: (1 + x * x).sqrt(),
    "softmax": lambda x: x.softmax(-1),
}


@st.composite
def compositions(draw):
    """Up to four smooth functions with products by random matrices between them, at a point of any scale."""
    parts = [SMOOTH[name] for name in draw(st.lists(st.sampled_from(["sin", "tanh", "root"]), min_size=1, max_size=3))]
    parts.insert(draw(st.integers(0, len(parts))), SMOOTH[draw(st.sampled_from(["sin", "square", "softmax"]))])
    size, seed = draw(st.integers(1, 24)), draw(st.integers(0, 2**31))
    scale, gain = 10.0 ** draw(st.integers(-6, 6)), 10.0 ** draw(st.integers(-6, 6))
    generator = torch.Generator().manual_seed(seed)
    matrices = [torch.randn(size, size, generator=generator, dtype=D) / size**0.5 for _ in parts]
    point = scale * torch.randn(size, generator=generator, dtype=D)

    def fn(x):
        y = x / scale
        for part, matrix in zip(parts, matrices, strict=True):
            y = part(matrix @ y)
        return gain * y

    return fn, point, seed


@given(compositions())
def test_a_numerical_derivative_is_off_by_no_more_than_its_bar(drawn):
    fn, point, seed = drawn
    differences = differences_of(fn, point, seed=seed)
    for direction in random_signs(differences, seed):
        found = differences.along(direction, with_noise=True)
        # Noise is estimated from few samples: 1 case in 2,000 is off by 4.1 bars. A gradient is judged from 5e-9 on.
        assert abs(found.error) <= 4 * found.bar + 1e-12 * found.scale
        assert math.isfinite(found.bar)


@given(compositions(), st.floats(-1, 1), st.sampled_from([1e-3, 1e-5]))
def test_a_gradient_that_is_off_is_seen_to_be_off_by_as_much(drawn, share, size):
    fn, point, seed = drawn
    differences = differences_of(fn, point, seed=seed)
    # sqrt(1 + x * x) at 1e-9 is 1 in float64: no difference shows the derivative.
    assume(float(differences.gradient.abs() @ point.abs()) > 1e-13 * float(fn(point).abs().max()))
    wrong = differences.gradient * size * (1 if share >= 0 else -1)
    differences.gradient = differences.gradient + wrong
    for direction in random_signs(differences, seed):
        found = differences.along(direction, with_noise=True)
        expected = -float(wrong @ direction)
        assert abs(found.error - expected) <= 4 * found.bar + 1e-13 * found.scale


@pytest.mark.parametrize("scale", [10.0**k for k in range(-6, 7, 2)])
@pytest.mark.parametrize("name", SMOOTH)
def test_bars_are_narrow_for_smooth_functions(name, scale):
    x = scale * torch.randn(40, generator=torch.Generator().manual_seed(3), dtype=D)
    differences = differences_of(lambda x: SMOOTH[name](x / scale), x)
    for direction in random_signs(differences, 1):
        found = differences.along(direction, with_noise=True)
        assert abs(found.error) <= 4 * found.bar
        assert found.bar <= 1e-8 * found.scale


@pytest.mark.parametrize("fn", [torch.sin, torch.tanh, lambda x: (x * x).mean()], ids=["sin", "tanh", "mean square"])
def test_bars_hold_in_float32(fn):
    x = torch.randn(64, generator=torch.Generator().manual_seed(3))
    for seed in range(5):
        differences = differences_of(only(torch.float32, fn), x, seed=seed)
        for direction in random_signs(differences, seed):
            found = differences.along(direction, with_noise=True)
            assert abs(found.error) <= 4 * found.bar
            assert found.bar <= 1e-2 * found.scale


# one element, looked at closely


def quantised(x):
    return (x * 1e6).round() / 1e6


def half_line(x):
    """A root: nothing to the left of 1, a slope to the right of it that has no bound."""
    return (x - 1).sqrt()


LOOKED_AT = {
    # what: (function, point, gradient that is checked, kinds that are right, whether it is wrong)
    "smooth": (torch.sin, 0.7, math.cos(0.7), {"ok"}, False),
    "smooth, wrong by 1e-6": (torch.sin, 0.7, math.cos(0.7) * (1 + 1e-6), {"mismatch"}, True),
    "smooth, wrong sign": (torch.sin, 0.7, -math.cos(0.7), {"mismatch"}, True),
    "smooth, zero": (torch.sin, 0.7, 0.0, {"mismatch"}, True),
    "smooth at 0": (torch.sin, 0.0, 1.0, {"ok"}, False),
    "smooth at 1e-9": (torch.exp, 1e-9, math.exp(1e-9), {"ok"}, False),
    "smooth at 1e9": (lambda x: (x / 1e9).exp(), 1e9, math.exp(1) / 1e9, {"ok"}, False),
    "smooth, not finite": (torch.sin, 0.7, math.nan, {"nan"}, True),
    "smooth, infinite": (torch.sin, 0.7, math.inf, {"nan"}, True),
    "kink, left": (torch.relu, 0.0, 0.0, {"ok", "kink"}, False),
    "kink, middle": (torch.relu, 0.0, 0.3, {"kink"}, False),
    "kink, right": (torch.relu, 0.0, 1.0, {"kink"}, False),
    "kink, above": (torch.relu, 0.0, 1.01, {"kink"}, True),
    "kink, below": (torch.relu, 0.0, -0.01, {"kink"}, True),
    "kink of |x|": (torch.abs, 0.0, -1.0, {"kink"}, False),
    "kink of |x|, outside": (torch.abs, 0.0, 3.0, {"kink"}, True),
    "kink at 1": (lambda x: (x - 1).abs(), 1.0, 0.2, {"kink"}, False),
    "kink 1e-9 away, right of it": (torch.relu, 1e-9, 1.0, {"ok", "kink"}, False),
    "kink 1e-9 away, left of it": (torch.relu, -1e-9, 0.0, {"ok", "kink"}, False),
    "kink 1e-9 away, wrong": (torch.relu, 1e-9, 3.0, {"kink", "mismatch"}, True),
    "jump, slope right": (lambda x: x.floor() + x, 1.0, 1.0, {"jump"}, False),
    "jump at 0": (lambda x: (x > 0).to(D) + 2 * x, 0.0, 2.0, {"jump"}, False),
    "jump, slope wrong": (lambda x: (x >= 1).to(D) + x.sin(), 1.0, 3 * math.cos(1), {"mismatch"}, True),
    "jump on both sides": (torch.sign, 0.0, 0.0, {"jump"}, False),
    "smooth, minus infinite": (torch.sin, 0.7, -math.inf, {"nan"}, True),
    "pole": (lambda x: x.abs().sqrt(), 0.0, math.inf, {"singular"}, False),
    "cube root": (lambda x: x.sign() * x.abs() ** (1 / 3), 0.0, math.inf, {"singular"}, False),
    "domain that ends, infinite slope": (half_line, 1.0, math.inf, {"singular"}, False),
    "domain that ends, finite slope": (lambda x: half_line(x) ** 2, 1.0, 1.0, {"singular"}, False),
    "domain that ends, wrong slope": (lambda x: half_line(x) ** 2, 1.0, 2.0, {"mismatch"}, True),
    "quantised, slope of 1": (quantised, 0.7, 1.0, {"ok", "undecided"}, False),
    "flat": (lambda x: 0 * x + 3, 0.7, 0.0, {"ok"}, False),
    "flat, gradient 1": (lambda x: 0 * x + 3, 0.7, 1.0, {"mismatch"}, True),
    "constant 1": (lambda x: x.sin() ** 2 + x.cos() ** 2, 0.7, 0.0, {"ok"}, False),
    "constant 1, gradient 1": (lambda x: x.sin() ** 2 + x.cos() ** 2, 0.7, 1.0, {"mismatch"}, True),
    "offset": (lambda x: x.sin() + 1e8, 0.7, math.cos(0.7), {"ok"}, False),
    "offset, wrong": (lambda x: x.sin() + 1e8, 0.7, 2 * math.cos(0.7), {"mismatch"}, True),
    "oscillating": (lambda x: (1000 * x).sin(), 0.7, 1000 * math.cos(700), {"ok"}, False),
    "oscillating, wrong": (lambda x: (1000 * x).sin(), 0.7, 999 * math.cos(700), {"mismatch"}, True),
}


def looked_at(name):
    """Return what two cotangents show, of either sign, and these."""
    fn, point, gradient, _, _ = LOOKED_AT[name]
    found = []
    for seed in (0, 4):
        differences = differences_of(fn, torch.tensor([point], dtype=D), gradient=gradient, seed=seed)
        differences.measure_noise(torch.ones(1, dtype=D), torch.ones_like(differences.usable))
        shown = examine(differences, torch.ones(1, dtype=D), [abs(point), 1.0])
        found.append((shown, float(differences.cotangent[0])))
    return found


def test_the_cotangents_have_either_sign():
    assert [v > 0 for _, v in looked_at("smooth")] == [True, False]


@pytest.mark.parametrize("name", LOOKED_AT)
def test_one_element_is_diagnosed(name):
    _, _, _, kinds, is_wrong = LOOKED_AT[name]
    for one, _ in looked_at(name):
        assert one.kind in kinds, one
        assert one.is_wrong == is_wrong, one


@pytest.mark.parametrize("name", [name for name, row in LOOKED_AT.items() if row[3] == {"mismatch"}])
def test_what_is_numerically_right_is_said_with_a_bar(name):
    fn, point, gradient, _, _ = LOOKED_AT[name]
    at = torch.tensor([point + (1e-12 if "domain" in name else 0)], dtype=D, requires_grad=True)
    (slope,) = torch.autograd.grad(fn(at).sum(), at)
    for one, v in looked_at(name):
        assert one.analytical == pytest.approx(gradient * v, rel=1e-12)
        value, bar, step, _ = one.numerical
        assert abs(value - slope.item() * v) <= 5 * bar + 1e-9 * abs(v)
        assert bar < 0.3 * max(abs(one.analytical), abs(value))
        assert step > 0


@pytest.mark.parametrize("name", ["kink, middle", "kink, above", "kink of |x|", "kink of |x|, outside"])
def test_a_kink_has_both_one_sided_derivatives(name):
    slopes = (-1.0, 1.0) if "|x|" in name else (0.0, 1.0)
    for one, v in looked_at(name):
        assert (one.low, one.high) == pytest.approx(sorted(slope * v for slope in slopes), abs=1e-6)


def test_one_element_is_extrapolated():
    """One step of extrapolation brings a smooth derivative below 4e-12; differences alone reach about 2e-11."""
    assert all(one.numerical.bar < 4e-12 for one, _ in looked_at("smooth"))
