"""Gradients of every magnitude, dtype, layout and size, with and without the compiled kernels, against scaled float64.

The property: after a clip each element is the one before times min(1, bound / norm), rounded once to its dtype, for all
finite gradients. So the norm is the bound, to rounding, also where sums of squares leave float64, and where what
gradients are multiplied by is too small for float32, or for float64 itself.
"""

import math
import random as rnd
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import gradguard as gg
from cases import parameter
from gradguard import native

LAYOUTS = ["transposed", "sliced", "expanded", "offset", "permuted", "sparse", "conj", "neg"]
EDGES = [0, 1, 3, 63, 64, 65, 1000, 2047, 2048, 2049, 4100, 16_385, 20_480, 32_767, 32_768, 32_769, 66_000, 131_073]
RANGES = {
    torch.float64: (-320, 300),
    torch.float32: (-44, 38),
    torch.bfloat16: (-39, 38),
    torch.float16: (-7, 4),
    torch.complex64: (-44, 37),
    torch.complex128: (-320, 299),
}
DIGITS = {
    torch.float64: 2.0**-50,
    torch.complex128: 2.0**-50,
    torch.float32: 2.0**-22,
    torch.complex64: 2.0**-22,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
"""Largest relative error of an element, beside that of the norm."""

SPACING = {
    torch.float64: 2.0**-1074,
    torch.complex128: 2.0**-1074,
    torch.float32: 2.0**-149,
    torch.complex64: 2.0**-149,
    torch.bfloat16: 2.0**-133,
    torch.float16: 2.0**-24,
}
"""Between the smallest numbers."""


def laid_out(x: Tensor, choice: rnd.Random) -> Tensor:
    """The elements of ``x`` in some layout, or most of them."""
    n = x.numel()
    kind = choice.choice(
        ["plain"] * 4 + ["transposed", "sliced", "expanded", "offset", "permuted", "sparse", "conj", "neg"]
    )
    if kind == "transposed" and n >= 4:
        return x[: n // 4 * 4].view(4, -1).t()
    if kind == "sliced" and n >= 4:
        return x[::2]
    if kind == "expanded" and n >= 2:
        return x[:1].expand(3) if choice.random() < 0.5 else x[: min(n, 500), None].expand(-1, 4)
    if kind == "offset" and n >= 2:
        return x[1:]
    if kind == "permuted" and n >= 8:
        return x[: n // 8 * 8].view(2, 2, -1, 2).permute(0, 3, 1, 2)
    if kind == "sparse" and n >= 4 and x.dtype in (torch.float32, torch.float64):
        x = x[: min(n, 4000) // 4 * 4].view(-1, 4)
        at = torch.arange(len(x))
        return torch.sparse_coo_tensor(at[None], x.clone(), (len(x) + 3, 4), is_coalesced=True, check_invariants=True)
    if kind == "conj" and x.is_complex():
        return x.conj()
    if kind == "neg":
        return torch._neg_view(x)
    return x


def some_gradients(choice: rnd.Random, dtypes: Sequence[torch.dtype], most: int = 6) -> list[Tensor]:
    """Tensors of finite elements whose norm is finite in float64."""
    made, generator = [], torch.Generator().manual_seed(choice.randrange(1 << 40))
    usual = choice.random() < 0.3
    for _ in range(choice.choice([1, 1, 2, 3, most])):
        dtype = choice.choice(dtypes)
        size = choice.choice(EDGES)
        low, high = RANGES[dtype]
        exponent = 0.0 if usual and choice.random() < 0.8 else choice.uniform(low, high)
        if low < -300 and choice.random() < 0.4:  # squares of these leave float64 here and there
            exponent = choice.choice([choice.uniform(148, 155), choice.uniform(-165, -138)])
        real = torch.float64
        form = choice.choice(["constant", "normal", "spread"])
        if form == "constant":
            x = torch.full((size,), 1.0, dtype=real)
        elif form == "normal":
            x = torch.randn(size, generator=generator, dtype=real).clamp_(-3, 3) / 3
        else:
            x = torch.pow(10.0, -choice.uniform(0, 30) * torch.rand(size, generator=generator, dtype=real))
        x = x * 10.0**exponent if exponent > -300 else x * 1e-300 * 10.0 ** (exponent + 300)
        if dtype.is_complex:
            angle = torch.rand(size, generator=generator, dtype=real) * 6.28
            x = torch.complex(x * angle.cos(), x * angle.sin())
        x = x.to(dtype)
        real_parts = torch.view_as_real(x) if dtype.is_complex else x
        largest = torch.finfo(dtype).max
        real_parts.copy_(real_parts.nan_to_num(largest, largest, -largest))
        made.append(laid_out(x, choice))
    return made


def elements(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor as float64 numbers, complex ones as pairs."""
    dense = [(t.to_dense() if t.layout is not torch.strided else t).detach() for t in tensors]
    return [torch.view_as_real(t.resolve_conj()).double() if t.is_complex() else t.double() for t in dense]


def scaled_norm(tensors: Sequence[Tensor], p: float = 2.0) -> tuple[float, float]:
    """A norm as (largest, rest), whose product it is: neither leaves float64."""
    wide = [t.to(torch.complex128) if t.is_complex() else t.double() for t in tensors]
    dense = [t.to_dense() if t.layout is not torch.strided else t for t in wide]
    magnitudes = torch.cat([t.detach().reshape(-1).abs() for t in dense]) if dense else torch.zeros(0)
    largest = float(magnitudes.max()) if magnitudes.numel() else 0.0
    if largest == 0 or math.isinf(p):
        return largest, 1.0
    return largest, math.fsum(((magnitudes / largest) ** p).tolist()) ** (1 / p)


def times(x: Tensor, bound: float, norm: tuple[float, float], epsilon: float = 1e-6) -> Tensor:
    """x * min(1, bound / (norm + epsilon)), no step of which leaves float64."""
    largest, rest = norm
    if largest < 1:
        return x * min(1.0, bound / (largest * rest + epsilon)) if largest * rest + epsilon else x
    if bound / largest >= rest + epsilon / largest:
        return x
    coefficient = bound / (rest + epsilon / largest) / largest
    return x * coefficient if coefficient > 1e-290 else x / largest * (bound / (rest + epsilon / largest))


def assert_elements(
    found: Sequence[Tensor], expected: Sequence[Tensor], dtypes: Sequence[torch.dtype], what: str
) -> None:
    for i, (a, b, dtype) in enumerate(zip(elements(found), expected, dtypes, strict=True)):
        allowed = (DIGITS[dtype] + 3e-6) * b.abs() + 1.01 * SPACING[dtype]
        wrong = ~((a - b).abs() <= allowed)
        if bool(wrong.any()):
            at = int(wrong.flatten().nonzero()[0])
            pytest.fail(f"{what}: tensor {i} ({dtype}): {float(a.flatten()[at])} in place of {float(b.flatten()[at])}")


FARTHEST = 1e-307
"""The smallest coefficient that is right to rounding: float64 has fewer digits of smaller ones."""


def a_bound(choice: rnd.Random, norm: tuple[float, float]) -> float:
    size = norm[0] * norm[1]
    if not size or choice.random() < 0.3:
        return choice.choice([1.0, 0.1, 1e-4, 1e-40, 1e-310, 10 ** choice.uniform(-300, 300)])
    return min(size * 10.0 ** choice.uniform(-12, 2), 1e308)


def norm_rule(parameters: list[nn.Parameter], bound: float, p: float) -> Tensor:
    return gg.clip_grad_norm_(parameters, bound, p)


def as_object(parameters: list[nn.Parameter], bound: float, p: float) -> Tensor:
    return gg.ClipByGlobalNorm(bound, p)(parameters).norm


def in_a_guard(parameters: list[nn.Parameter], bound: float, p: float) -> Tensor:
    guard = gg.Guard(torch.optim.SGD(parameters, lr=0.0), gg.ClipByGlobalNorm(bound, p), nonfinite="raise")
    guard.optimizer.step()
    assert guard.last is not None
    return guard.last.norm


def in_a_group(parameters: list[nn.Parameter], bound: float, p: float) -> Tensor:
    if p != 2:  # the norm that they tell is of order 2
        return norm_rule(parameters, bound, p)
    return gg.Groups([(parameters, gg.ClipByGlobalNorm(bound))])(parameters).norm


def in_a_chain(parameters: list[nn.Parameter], bound: float, p: float) -> Tensor:
    return gg.Chain(gg.ClipByGlobalNorm(math.inf, p), gg.ClipByGlobalNorm(bound, p))(parameters).norm


RULES: dict[str, Callable[[list[nn.Parameter], float, float], Tensor]] = {
    "function": norm_rule,
    "object": as_object,
    "guard": in_a_guard,
    "groups": in_a_group,
    "chain": in_a_chain,
}
KINDS = {
    "all": list(RANGES),
    "float64": [torch.float64],
    "float32": [torch.float32],
    "halves": [torch.bfloat16, torch.float16, torch.float32],
}
ENGINES = ["kernels", "torch"] if native.status().in_use else ["torch"]


@pytest.fixture
def engine(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


def check_one(seed: int, kind: str, rule: str) -> None:
    choice = rnd.Random(f"{seed} {kind} {rule}")
    gradients = some_gradients(choice, KINDS[kind])
    if rule == "guard":
        gradients = [g for g in gradients if g.layout is torch.strided]
    p = choice.choice([2.0, 2.0, 2.0, 1.0, math.inf, 3.0, 0.5])
    norm = scaled_norm(gradients, p)
    if not norm[0] * norm[1] < 1e308:
        return
    bound, dtypes = a_bound(choice, norm), [g.dtype for g in gradients]
    if bound < FARTHEST * norm[0] * norm[1]:
        return
    expected = [times(x, bound, norm) for x in elements(gradients)]
    parameters = [parameter(g) for g in gradients]
    if not parameters:
        return
    what = f"seed {seed}, {kind}, {rule}, p = {p}, bound {bound}, norm {norm[0] * norm[1]}"
    found = RULES[rule](parameters, bound, p)
    size = norm[0] * norm[1]
    if found.dtype is torch.float64 or size < 3.4028e38:
        tiny = 2.0**-1074 if found.dtype is torch.float64 else 2.0**-149
        assert float(found) == pytest.approx(size, rel=3e-6, abs=tiny), what
    elif size > 3.4029e38:
        assert float(found) == math.inf, what
    assert_elements([p.grad for p in parameters], expected, dtypes, what)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_a_norm_clip_is_right_for_every_magnitude(seed, kind, rule, engine):
    for one in range(seed, seed + 10):
        check_one(one, kind, rule)


def unit_rows(x: Tensor) -> list[Tensor]:
    return [x] if x.dim() <= 1 else list(x)


def check_units(seed: int, kind: str) -> None:
    """Adaptive clipping, each unit against its own weight."""
    choice = rnd.Random(f"{seed} {kind} units")
    kinds = [dtype for dtype in KINDS[kind] if not dtype.is_complex]
    shapes = [(3, 70), (2, 33_000), (20_480,), (40, 3, 5), (5, 1), (70_001,)]
    parameters, threshold = [], 10.0 ** choice.uniform(-3, 3)
    eps = choice.choice([1e-3, 0.0, 1e-300])
    for _ in range(choice.choice([1, 2, 4])):
        dtype, shape = choice.choice(kinds), choice.choice(shapes)
        one, two = (some_gradients(choice, [dtype], most=1)[0] for _ in range(2))
        sized = [
            (x.to_dense() if x.layout is not torch.strided else x).reshape(-1)[:1].repeat(math.prod(shape)).view(shape)
            if x.numel()
            else torch.zeros(shape, dtype=dtype)
            for x in (one, two)
        ]
        parameters.append(parameter(sized[0], sized[1]))
    if choice.random() < 0.5:  # laid out as another dimension's columns
        parameters = [parameter(p.grad.t().contiguous().t(), p.detach()) if p.dim() == 2 else p for p in parameters]
    expected = []
    for p in parameters:
        rows = []
        for weight, gradient in zip(unit_rows(p.detach()), unit_rows(p.grad), strict=True):
            bound, norm = scaled_norm([weight]), scaled_norm([gradient])
            limit = max(bound[0] * bound[1], eps) * threshold
            if not limit < 1e307 or not norm[0] * norm[1] < 1e308:
                return
            clipped = norm[0] > 0 and norm[0] * norm[1] > limit
            if clipped and limit < FARTHEST * norm[0] * norm[1]:
                return
            rows.append(gradient.double() / norm[0] * (limit / norm[1]) if clipped else gradient.double())
        expected.append(torch.stack(rows) if p.dim() > 1 else rows[0])
    gg.clip_grad_adaptive_(parameters, threshold, eps=eps)
    assert_elements(
        [p.grad for p in parameters], expected, [p.dtype for p in parameters], f"seed {seed}, {kind}, units"
    )


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(0, 40, 20))
def test_adaptive_clipping_is_right_for_every_magnitude(seed, kind, engine):
    for one in range(seed, seed + 20):
        check_units(one, kind)


def check_each(seed: int, kind: str, rule: type) -> None:
    """Each tensor by itself."""
    choice = rnd.Random(f"{seed} {kind} each")
    gradients = [g for g in some_gradients(choice, KINDS[kind]) if g.numel()]
    if not gradients:
        return
    bound = a_bound(choice, scaled_norm(gradients[:1]))
    norms = [scaled_norm([g]) for g in gradients]
    if any(bound < FARTHEST * largest * rest for largest, rest in norms):
        return
    expected = [times(x, bound, norm) for x, norm in zip(elements(gradients), norms, strict=True)]
    parameters = [parameter(g) for g in gradients]
    rule(bound)(parameters)
    dtypes = [g.dtype for g in gradients]
    assert_elements([p.grad for p in parameters], expected, dtypes, f"seed {seed}, {kind}, {rule.__name__}, {bound}")


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_by_itself_is_right_for_every_magnitude(kind, engine):
    for seed in range(20):
        check_each(seed, kind, gg.ClipByNorm)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_what_was_found(engine):
    """Squares of several blocks beyond float64 together; coefficients that float32 does not hold."""
    p = parameter(torch.full((20_480,), 2e152, dtype=torch.float64))
    assert float(gg.clip_grad_norm_([p], 1.0)) == pytest.approx(2.862167e154, rel=1e-6)
    assert scaled_norm([p.grad])[0] * scaled_norm([p.grad])[1] == pytest.approx(1.0, rel=1e-12)
    for count, size, bound in ((10**6, 3e38, 1.0), (10**6, 3e38, 1e-4), (4, 1e38, 1e-5)):
        p = parameter(torch.full((count,), size))
        gg.clip_grad_norm_([p], bound)
        assert float(p.grad.double().norm()) == pytest.approx(bound, rel=1e-6)
    p = parameter(torch.full((20_480,), 1e148, dtype=torch.float64), torch.full((20_480,), 1e150, dtype=torch.float64))
    gg.clip_grad_adaptive_([p], 1e-3)
    assert p.grad.tolist() == pytest.approx([1e147] * 20_480, rel=1e-9)


def norm_of_moduli(parameters: Sequence[nn.Parameter], order: float) -> float:
    moduli = [abs(z) for p in parameters for z in p.grad.tolist()]
    return max(moduli) if order == math.inf else math.fsum(m**order for m in moduli) ** (1 / order)


@pytest.mark.parametrize("order", [0.5, 1.0, 3.0, 4.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_norms_of_complex_gradients_are_those_of_the_moduli(engine, dtype, order):
    for seed, size in enumerate((1e-3, 1.0, 1e3)):
        draws = torch.Generator().manual_seed(seed)
        drawn = [size * torch.randn(n, dtype=torch.complex128, generator=draws) for n in (1, 37, 1100)]
        parameters = [parameter(one.to(dtype)) for one in drawn]
        for limit in (math.inf, 0.3):
            norm = norm_of_moduli(parameters, order)
            found = float(gg.clip_grad_norm_(parameters, limit, norm_type=order))
            assert found == pytest.approx(norm, rel=1e-5 if dtype is torch.complex64 else 1e-11)
        assert norm_of_moduli(parameters, order) <= 0.3 * (1 + 1e-5)


class Clipped(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000, dtype=dtype))


@pytest.mark.parametrize("bound", [1.0, 1e-4, 1e-12])
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_guard_on_a_fused_optimizer(bound, engine):
    """What its kernel cannot divide by in float32 is multiplied before."""
    net = Clipped(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, fused=True)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(bound))
    net.weight.grad = torch.full((1000,), 2e38)
    optimizer.step()
    assert float(net.weight.detach().double().norm()) == pytest.approx(bound, rel=3e-6)
    assert guard.skipped_steps == 0
