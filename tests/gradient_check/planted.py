"""Mistakes planted in sound backwards, drawn as tables: what each needs to show, and how large it is.

Each runs in float64, and again as a kernel that takes nothing but float32, where differences are taken in float32.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gradient_check.problem import Case, Problem

D = torch.float64


def normal(g: Generator, *shape: int, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, generator=g, dtype=dtype)


def only_float32(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refuses float64, as most kernels do."""

    def kernel(*inputs: Tensor) -> Any:
        if any(one.dtype not in (torch.float32, torch.complex64) for one in inputs):
            raise TypeError("float32 only")
        return fn(*inputs)

    return kernel


def kernel(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    jvp: Callable[..., Any] | None = None,
    *,
    materialize: bool = True,
) -> Callable[..., Any]:
    """Return a function whose gradients are ``backward(ctx, *cotangents)``; ``ctx.given`` are its inputs."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.given = inputs
            ctx.set_materialize_grads(materialize)
            return forward(*inputs)

        @staticmethod
        def backward(ctx, *cotangents):
            return backward(ctx, *cotangents)

    if jvp is not None:
        Kernel.jvp = staticmethod(jvp)
    return Kernel.apply


def vjp(fn: Callable[..., Any], inputs: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the right gradients."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        outputs = fn(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, materialize_grads=True)


def planted(fn: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with a backward that ``change(gradients, ctx, cotangents)`` has touched."""

    def backward(ctx, *cotangents):
        found = change(list(vjp(fn, ctx.given, cotangents)), ctx, cotangents)
        return found[0] if len(found) == 1 else tuple(found)

    return kernel(fn, backward)


SMOOTH: dict[str, Callable[..., Any]] = {
    "sin": torch.sin,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "silu": F.silu,
    "softmax": lambda x: x.softmax(-1),
    "cube": lambda x: x * x * x,
}


def scaled_element(position: int, factor: float) -> Callable[..., Any]:
    def change(grads, ctx, cotangents):
        scale = torch.ones_like(grads[0])
        scale.view(-1)[position % scale.numel()] = factor
        return [grads[0] * scale, *grads[1:]]

    return change


def elements() -> Iterator[tuple[str, Callable[..., Any], Callable[[Generator], Any]]]:
    for (name, fn), factor, position in itertools.product(SMOOTH.items(), (1.01, 1.03, 1.1), (3, 11)):
        yield (
            f"{name}, element {position} times {factor}",
            planted(fn, scaled_element(position, factor)),
            lambda g: normal(g, 20),
        )


def when(condition: Callable[..., bool], factor: float = 2.0) -> Callable[..., Any]:
    """Multiply all gradients where ``condition(ctx, cotangents)`` holds."""
    return lambda grads, ctx, cotangents: [g * factor for g in grads] if condition(ctx, cotangents) else grads


def pair(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.sin(), a.exp()


def triple(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a.sin(), a.exp(), a * a


def unmaterialized(fn: Callable[..., Any], condition: Callable[..., bool]) -> Callable[..., Any]:
    """Return a function that is wrong where ``condition(cotangents)`` holds, None standing for an unused output."""

    def backward(ctx, *cotangents):
        outputs = fn(*ctx.given)
        zeros = tuple(torch.zeros_like(o) if v is None else v for v, o in zip(cotangents, outputs, strict=True))
        (grad,) = vjp(fn, ctx.given, zeros)
        return 0.5 * grad if condition(cotangents) else grad

    return kernel(fn, backward, materialize=False)


def unused(v: Tensor | None) -> bool:
    return v is None


def zero(v: Tensor | None) -> bool:
    return v is not None and not bool(v.any())


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
    "first of two zero": (pair, lambda c: zero(c[0])),
    "second of two zero": (pair, lambda c: zero(c[1])),
    "first of two unused": (pair, lambda c: unused(c[0])),
    "second of two unused": (pair, lambda c: unused(c[1])),
    "first of two unused or zero": (pair, lambda c: unused(c[0]) or zero(c[0])),
    "third of three unused": (triple, lambda c: unused(c[2]) and not unused(c[0]) and not unused(c[1])),
    "third of three zero": (triple, lambda c: zero(c[2]) and c[0] is not None and bool(c[0].any())),
    "only the third of three used": (triple, lambda c: unused(c[0]) and unused(c[1])),
    "first of three unused or zero": (triple, lambda c: unused(c[0]) or zero(c[0])),
}


def four(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return (x @ w + b).sin() * s


def affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x @ w + b).sin()


def doubled_for(needed: set[int], which: int) -> Callable[..., Any]:
    def change(grads, ctx, cotangents):
        now = {i for i, needs in enumerate(ctx.needs_input_grad) if needs}
        return [2 * g if i == which and now == needed else g for i, g in enumerate(grads)]

    return change


SUBSETS = [
    (affine, {1, 2}, 1), (affine, {0, 1}, 0), (affine, {0, 2}, 2), (affine, {1}, 1),
    (four, {1, 2}, 1), (four, {0, 3}, 0), (four, {1, 3}, 3), (four, {0, 1, 2}, 2), (four, {1, 2, 3}, 1), (four, {3}, 3),
]  # fmt: skip


def of_four(g: Generator) -> tuple[Tensor, ...]:
    return normal(g, 5, 4), normal(g, 4, 3), normal(g, 3), normal(g, 3)


def is_channels_last(t: Tensor) -> bool:
    return not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)


def image(g: Generator) -> Tensor:
    return normal(g, 2, 3, 4, 5)


def complex_vector(g: Generator) -> Tensor:
    return torch.randn(6, generator=g, dtype=torch.complex128)


def cube(g: Generator) -> Tensor:
    return normal(g, 3, 4, 5)


def two_alike(g: Generator) -> tuple[Tensor, ...]:
    return normal(g, 4, 5), normal(g, 4, 5)


def is_same(ctx: Any) -> bool:
    return ctx.given[0].data_ptr() == ctx.given[1].data_ptr()


def last_two_swapped(t: Tensor) -> bool:
    return t.dim() == 3 and t.stride(-2) == 1 and t.stride(0) > t.stride(-1)


def first_two_swapped(t: Tensor) -> bool:
    return t.dim() == 3 and t.stride(-1) == 1 and t.stride(1) > t.stride(0) > 0


def product(a: Tensor, b: Tensor) -> Tensor:
    return a.sin() * b


def of_input(test: Callable[[Tensor], bool]) -> Callable[..., bool]:
    return lambda ctx, cotangents: test(ctx.given[0])


def of_cotangent(test: Callable[[Tensor], bool]) -> Callable[..., bool]:
    return lambda ctx, cotangents: test(cotangents[0])


LAYOUTS: dict[str, tuple[Callable[..., Any], Callable[..., bool], Callable[[Generator], Any]]] = {
    "channels_last input": (torch.sin, of_input(is_channels_last), image),
    "channels_last grad_output": (torch.sin, of_cotangent(is_channels_last), image),
    "conjugate input": (torch.sin, of_input(Tensor.is_conj), complex_vector),
    "conjugate grad_output": (torch.sin, of_cotangent(Tensor.is_conj), complex_vector),
    "negative bit of the input": (torch.sin, of_input(Tensor.is_neg), lambda g: normal(g, 6)),
    "negative bit of grad_output": (torch.sin, of_cotangent(Tensor.is_neg), lambda g: normal(g, 6)),
    "strided input": (torch.sin, of_input(lambda t: t.stride(-1) == 2), lambda g: normal(g, 3, 4)),
    "strided grad_output": (torch.sin, of_cotangent(lambda t: t.stride(-1) == 2), lambda g: normal(g, 3, 4)),
    "offset of the input": (torch.sin, of_input(lambda t: t.storage_offset() == 1), lambda g: normal(g, 6)),
    "dense input with an offset": (
        torch.sin, of_input(lambda t: t.storage_offset() == 1 and t.is_contiguous()), lambda g: normal(g, 6),
    ),
    "last two dimensions of the input swapped": (torch.sin, of_input(last_two_swapped), cube),
    "last two dimensions of grad_output swapped": (torch.sin, of_cotangent(last_two_swapped), cube),
    "first two dimensions of the input swapped": (torch.sin, of_input(first_two_swapped), cube),
    "first two dimensions of grad_output swapped": (torch.sin, of_cotangent(first_two_swapped), cube),
    "input of stride 0 along dimension 0": (torch.sin, of_input(lambda t: t.stride(0) == 0), lambda g: normal(g, 3, 4)),
    "input of stride 0 along dimension 1": (torch.sin, of_input(lambda t: t.stride(1) == 0), lambda g: normal(g, 3, 4)),
    "grad_output of stride 0 along dimension 1": (
        torch.sin, of_cotangent(lambda t: t.stride(1) == 0 and t.stride(0) != 0), lambda g: normal(g, 3, 4),
    ),
    "one tensor twice": (product, lambda ctx, cotangents: is_same(ctx), two_alike),
    "one tensor three times": (
        lambda a, b, c: a.sin() * b + c * c * b,
        lambda ctx, cotangents: ctx.given[0].data_ptr() == ctx.given[2].data_ptr(),
        lambda g: (normal(g, 4), normal(g, 4), normal(g, 4)),
    ),
}  # fmt: skip


def cached(dim: int) -> Callable[[Tensor], Tensor]:
    """A rotary embedding that keeps its angles, made at whatever length came last, and continues them wrongly."""
    kept: list[Tensor] = []

    def angles(length: int, like: Tensor) -> Tensor:
        fresh = torch.arange(length, dtype=like.dtype)
        if not kept or len(kept[0]) > length:
            kept[:] = [fresh]
        elif len(kept[0]) < length:
            kept[:] = [torch.cat([kept[0], kept[0][: length - len(kept[0])]])]
        return kept[0].cos().to(like).view([-1 if i == dim else 1 for i in range(like.dim())])

    return lambda x: x.sin() * angles(x.shape[dim], x)


def right_jvp(ctx, tangent):
    return tangent * ctx.given[0].cos()


def sine_with(jvp: Callable[..., Any]) -> Callable[..., Any]:
    return kernel(torch.sin, lambda ctx, v: v * ctx.given[0].cos(), jvp)


def one_element_of(tangent: Tensor) -> Tensor:
    scale = torch.ones_like(tangent)
    scale.view(-1)[2] = 1.05
    return scale


def product_backward(ctx, v):
    a, b = ctx.given
    return v * a.cos() * b, v * a.sin()


FORWARD_MODE: dict[str, tuple[Callable[..., Any], Callable[[Generator], Any]]] = {
    "too large": (sine_with(lambda ctx, t: 1.1 * right_jvp(ctx, t)), lambda g: normal(g, 8)),
    "sign": (sine_with(lambda ctx, t: -right_jvp(ctx, t)), lambda g: normal(g, 8)),
    "of the wrong function": (sine_with(lambda ctx, t: t * ctx.given[0].sin()), lambda g: normal(g, 8)),
    "one element": (sine_with(lambda ctx, t: right_jvp(ctx, t) * one_element_of(t)), lambda g: normal(g, 8)),
    "second input forgotten": (
        kernel(product, product_backward, lambda ctx, s, t: s * ctx.given[0].cos() * ctx.given[1]), two_alike,
    ),
    "constant added": (sine_with(lambda ctx, t: right_jvp(ctx, t) + 0.01), lambda g: normal(g, 8)),
}  # fmt: skip


def tiny_at(value: float) -> Callable[[Generator], Tensor]:
    return lambda g: torch.cat([torch.tensor([value], dtype=D), normal(g, 5)])


def outside(fn: Callable[..., Any], factor: float) -> Callable[..., Any]:
    return planted(fn, lambda grads, ctx, cotangents: [factor * grads[0]])


KINKS: dict[str, tuple[Callable[..., Any], Callable[[Generator], Any]]] = {
    "amax of equal values": (outside(lambda x: x.amax(), 1.5), lambda g: torch.ones(4, dtype=D)),
    "max of rows of equal values": (outside(lambda x: x.max(-1).values, 1.3), lambda g: torch.ones(3, 4, dtype=D)),
    "median of equal values": (outside(lambda x: x.median(), 1.2), lambda g: torch.ones(5, dtype=D)),
    "relu at 0": (
        kernel(F.relu, lambda ctx, v: v * torch.where(ctx.given[0] == 0, 1.5, (ctx.given[0] > 0).to(v.dtype))),
        lambda g: torch.cat([torch.zeros(2, dtype=D), normal(g, 4)]),
    ),
    "singular values of the identity": (outside(torch.linalg.svdvals, 1.05), lambda g: torch.eye(3, dtype=D)),
    "eigenvalues of the identity": (
        outside(lambda x: torch.linalg.eigvalsh(x + x.mT), 1.05), lambda g: torch.eye(3, dtype=D),
    ),
}  # fmt: skip


def _as_float32(value: Any) -> Any:
    tensors = value if isinstance(value, tuple) else (value,)
    return tuple(t.to(torch.complex64 if t.is_complex() else torch.float32) for t in tensors)


def _cases(category: str, name: str, fn: Any, make: Callable[[Generator], Any], *, low: bool = True) -> Iterator[Case]:
    def wide(g: Generator) -> Problem:
        value = make(g)
        return Problem(fn() if category == "cache" else fn, value if isinstance(value, tuple) else (value,))

    def narrow(g: Generator) -> Problem:
        return Problem(only_float32(fn() if category == "cache" else fn), _as_float32(make(g)))

    yield Case(name, category, wide)
    if low:
        yield Case(f"{name}, float32", category, narrow)


def _all() -> Iterator[Case]:
    for name, fn, make in elements():
        yield from _cases("element", name, fn, make)
    for name, (fn, condition) in OUTPUTS.items():
        yield from _cases("outputs", name, unmaterialized(fn, condition), lambda g: normal(g, 6))
    for fn, needed, which in SUBSETS:
        inputs = (lambda g: of_four(g)[:3]) if fn is affine else of_four
        name = f"{len(needed)} of {3 if fn is affine else 4} inputs: {sorted(needed)}"
        yield from _cases("subset", name, planted(fn, doubled_for(needed, which)), inputs)
    for name, (fn, condition, make) in LAYOUTS.items():
        yield from _cases("layout", name, planted(fn, when(condition)), make)
    for dim in range(3):
        yield from _cases("cache", f"made at a shorter dimension {dim}", lambda d=dim: cached(d), cube)
    for name, (fn, make) in FORWARD_MODE.items():
        yield from _cases("forward mode", name, fn, make)
    for value in (1e-310, -1e-310, 1e-300, 1e-200, 5e-324):
        fn = planted(torch.sin, scaled_element(0, 2.0))
        yield from _cases("tiny", f"wrong at {value}", fn, tiny_at(value), low=value == 1e-310)
    for name, (fn, make) in KINKS.items():
        yield from _cases("kink", name, fn, make)


PLANTED = list(_all())
"""All mistakes, by class and name."""
