"""Functions whose backward is right although they make gradient checkers cry wolf: single operations.

The gradient is always the derivative, a one-sided derivative, a subgradient or the true limit at the point.
`CORRECT` holds these cases and those of `correct_modules`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gradient_check.correct_modules import CORRECT_MODULES, at, group, module, normal, of, only, uniform
from gradient_check.problem import Case, Problem

D = torch.float64


def beside(*values: float, distance: float = 0.0, scale: float = 2.0) -> Callable[[Generator], Tensor]:
    """A vector of normal numbers, among which are both neighbours of each value, this far from it."""

    def point(g: Generator) -> Tensor:
        x = scale * torch.randn(16, generator=g, dtype=D)
        special = torch.tensor([v + s * distance for v in values for s in (-1, 1)], dtype=D)
        return torch.cat([special, x])[torch.randperm(len(special) + 16, generator=g)]

    return point


def close(value: float, distance: float, n: int = 12, sides: int = 1) -> Callable[[Generator], Tensor]:
    """A vector whose elements are all ``distance``, times a factor between 1 and 2, above (or on a side of) a value."""

    def point(g: Generator) -> Tensor:
        side = torch.randint(0, sides, (n,), generator=g) * -2 + 1
        return value + side * distance * (1 + torch.rand(n, generator=g, dtype=D))

    return point


def pairs(distance: float = 0.0) -> Callable[[Generator], Tensor]:
    """A matrix of 5 rows, each with three values that occur twice, the second this much larger."""

    def point(g: Generator) -> Tensor:
        x = torch.randn(5, 3, generator=g, dtype=D)
        order = torch.rand(5, 6, generator=g).argsort(-1)
        return torch.cat([x, x + distance], -1).gather(-1, order)

    return point


def whole(*shape: int, high: int = 3) -> Callable[[Generator], Tensor]:
    """Small whole numbers, so that many are equal."""
    return lambda g: torch.randint(0, high, shape, generator=g).to(D)


def magnitudes(g: Generator) -> Tensor:
    """Elements of both signs from 1e-12 to 1e12."""
    x = 10 ** torch.linspace(-12, 12, 25, dtype=D) * (1 + torch.rand(25, generator=g, dtype=D))
    return (x * torch.randn(25, generator=g, dtype=D).sign())[torch.randperm(25, generator=g)]


def in_dtype(dtype: torch.dtype, point: Callable[[Generator], Any]) -> Callable[[Generator], Any]:
    """The same point rounded to a dtype."""

    def rounded(g: Generator) -> Any:
        x = point(g)
        return tuple(t.to(dtype) for t in x) if isinstance(x, tuple) else x.to(dtype)

    return rounded


def complex_normal(*shape: int) -> Callable[[Generator], Tensor]:
    return lambda g: torch.randn(*shape, generator=g, dtype=torch.complex128)


def zero(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def kink_cases() -> list[Case]:
    """Each function with a kink at its kinks and 1e-9 from them."""
    label = torch.tensor([1.0, -1.0], dtype=D)
    functions: list[tuple[str, Callable[..., Any], tuple[float, ...]]] = [
        ("relu", F.relu, (0,)),
        ("abs", torch.abs, (0,)),
        ("leaky relu", F.leaky_relu, (0,)),
        ("clamp", lambda x: x.clamp(-1, 1), (-1, 1)),
        ("clamp from below, summed", lambda x: x.clamp(min=0.5).sum(), (0.5,)),
        ("maximum with zero", lambda x: torch.maximum(x, zero(x)), (0,)),
        ("huber loss", lambda x: F.huber_loss(x, zero(x), reduction="none"), (-1, 1)),
        ("hinge loss", lambda x: F.relu(1 - x.view(-1, 2) * label).mean(), (1, -1)),
        ("softshrink", F.softshrink, (-0.5, 0.5)),
        ("relu times the input plus one", lambda x: F.relu(x) * (x + 1), (0,)),
    ]
    return [
        Case(f"{name} {'1e-9 from' if distance else 'at'} the kink", "kinks", at(beside(*kinks, distance=distance), fn))
        for name, fn, kinks in functions
        for distance in (0.0, 1e-9)
    ]


def on_pixel_centres(g: Generator) -> tuple[Tensor, Tensor]:
    """An image of 5 × 5 pixels, and places that are exactly the centres of inner pixels."""
    return normal(1, 2, 5, 5)(g), torch.randint(-1, 2, (1, 3, 3, 2), generator=g).to(D) / 2


def relu_net(g: Generator) -> Problem:
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))  # noqa: E731
    return module(layers, normal(8, 32), scale=0.2)(g)


KINKS = [
    *kink_cases(),
    *group(
        "kinks",
        {
            "relu network with 3152 parameters": relu_net,
            "bilinear sampling on pixel centres": at(on_pixel_centres, F.grid_sample, kwargs={"align_corners": True}),
        },
    ),
]


def tie_cases() -> list[Case]:
    """Selections among values that occur twice, or nearly."""
    functions: list[tuple[str, Callable[..., Any]]] = [
        ("max of rows", lambda x: x.max(-1).values),
        ("min of rows", lambda x: x.min(-1).values),
        ("sort", lambda x: x.sort(-1, descending=True).values),
        ("topk", lambda x: x.topk(3).values),
        ("median of rows", lambda x: x.median(-1).values),
        ("amax", lambda x: x.amax(-1)),  # splits evenly
        ("cummax", lambda x: x.cummax(-1).values),
        ("minimum of halves", lambda x: torch.minimum(x, x.roll(1, -1))),
        ("quantile", lambda x: x.quantile(0.3, dim=-1)),
    ]
    return [
        Case(f"{name}, values {'1e-9 apart' if distance else 'equal'}", "ties", at(pairs(distance), fn))
        for name, fn in functions
        for distance in (0.0, 1e-9)
    ]


def nearly_equal_eigenvalues(x: Tensor) -> Tensor:
    """Eigenvalues 1e-4 apart: smooth, but only over steps shorter than that."""
    return torch.linalg.eigvalsh(torch.diag(torch.tensor([1, 1 + 1e-4, 2], dtype=D)) + 1e-5 * (x + x.mT))


TIES = [
    *tie_cases(),
    *group(
        "ties",
        {
            "max_pool2d of whole numbers": at(whole(2, 2, 6, 6), lambda x: F.max_pool2d(x, 3, stride=1)),
            "amax of whole numbers, scattered": lambda g: scattered_amax(g),
            "max of everything equal": at(whole(7, high=1), torch.max),
            # In the Clarke subdifferential, although the median stays the same whichever single element moves.
            "median of five equal values": at(whole(5, high=1), torch.median),
            "nearly equal eigenvalues": at(normal(3, 3), nearly_equal_eigenvalues),
        },
        undecided={"median of five equal values"},
    ),
]


def scattered_amax(g: Generator) -> Problem:
    index = torch.randint(0, 4, (20,), generator=g)
    fn = lambda x: x.new_full((4,), -1.0).scatter_reduce(0, index, x, "amax")  # noqa: E731
    return Problem(fn, (whole(20)(g),))


def with_zeros(count: int) -> Callable[[Generator], Tensor]:
    """Eight normal numbers, the first of which are zeros."""
    return lambda g: torch.cat([torch.zeros(count, dtype=D), torch.randn(8 - count, generator=g, dtype=D)])


def signed_cube_root(x: Tensor) -> Tensor:
    return x.sign() * x.abs() ** (1 / 3)


def zero_rows(g: Generator) -> Tensor:
    return torch.randn(4, 5, generator=g, dtype=D) * torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=D)


SINGULAR = group(
    "singular points",
    {
        "sqrt at 1e-12": at(close(0, 1e-12), torch.sqrt),
        "sqrt at 0": at(lambda g: with_zeros(2)(g).abs(), torch.sqrt),  # gradient inf
        "x log x at 1e-10": at(close(0, 1e-10), lambda x: x * x.log()),
        "log at 1e-15": at(close(0, 1e-15), torch.log),
        "norm at 0": at(whole(4, 3, high=1), lambda x: x.norm(dim=-1)),
        "norm of some rows of zeros": at(zero_rows, lambda x: torch.linalg.vector_norm(x, dim=-1)),
        "acos near 1": at(lambda g: 1 - close(0, 1e-10)(g), torch.acos),
        "atanh near -1": at(close(-1, 1e-9), torch.atanh),
        "x ** 0.1 at 1e-8": at(close(0, 1e-8), lambda x: x**0.1),
        "|x| ** 1.5 at 0": at(with_zeros(3), lambda x: x.abs() ** 1.5),
        "cube root at ±1e-9": at(close(0, 1e-9, sides=2), signed_cube_root),
        "1 / x at ±1e-6": at(close(0, 1e-6, sides=2), torch.reciprocal),
        "atan2 near the origin": at(of(close(0, 1e-8, sides=2), close(0, 1e-8)), torch.atan2),
        "distance of equal points": at(of(whole(4, 2), whole(4, 2)), torch.cdist),
        "standard deviation of equal values": at(whole(3, 4, high=1), lambda x: x.std(-1)),
        "product with one zero": at(with_zeros(1), torch.prod),
        "product with two zeros": at(with_zeros(2), torch.prod),
        "cumprod with a zero": at(with_zeros(1), lambda x: x.cumprod(0)),
        # Linear, but only within 1e-12 of the point.
        "normalize rows of zeros": at(zero_rows, F.normalize),
    },
    undecided={"normalize rows of zeros"},
)


def gate(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x + 1, -x)


def row_of_the_largest(x: Tensor, w: Tensor) -> Tensor:
    """The largest element of each row picks a row of w: the derivative by x is that of the factor only."""
    return w[x.argmax(-1)] * x.sum(-1, keepdim=True)


def stairs(x: Tensor) -> Tensor:
    heights = torch.tensor([3.0, -1.0, 2.0, 0.5], dtype=x.dtype)
    return heights[torch.bucketize(x.detach(), x.new_tensor([-1.0, 0.0, 1.0]))] * x


DISCONTINUOUS = group(
    "discontinuous",
    {
        "round at the jump": at(beside(0.5, -1.5, 2.5), torch.round),
        "round off the jump": at(beside(0.5, -1.5, distance=1e-6), torch.round),
        "floor at and off the jump": at(beside(0, 1, -2), lambda x: x.floor() + x.sin()),
        # Zero on both sides, but not the limit of any difference quotient.
        "sign at 0": at(beside(0), torch.sign),
        "sign near 0": at(beside(0, distance=1e-7), torch.sign),
        "step times x at the jump": at(beside(0), gate),
        "step times x near the jump": at(beside(0, distance=1e-8), gate),
        "selection by argmax": at(of(normal(5, 6), normal(6, 2)), row_of_the_largest),
        "selection by argmax, nearly equal": at(of(pairs(1e-7), normal(6, 2)), row_of_the_largest),
        "integer cast": at(beside(1, 2, -1), lambda x: (x - x.long()) * x),
        "remainder": at(beside(1, -1), lambda x: torch.remainder(x, 1.0)),
        "factor from a table": at(beside(0, 1, distance=1e-6), stairs),
        # The gradient is zero between the steps, and one for every difference that spans many of them.
        "rounded to six digits": at(normal(10), lambda x: torch.round(x * 1e6) / 1e6),
    },
    undecided={"sign at 0", "rounded to six digits"},
)

CANCELLATION = group(
    "cancellation",
    {
        "variance as a difference of moments, offset 1e6": at(
            lambda g: 1e6 + normal(50)(g), lambda x: (x * x).mean() - x.mean() ** 2
        ),
        "variance, offset 1e6": at(lambda g: 1e6 + normal(4, 20)(g), lambda x: x.var(-1)),
        "log-sum-exp less its maximum": at(normal(4, 6), lambda x: (x + 1e5).logsumexp(-1) - 1e5),
        "log of a naive sum of exp": at(normal(4, 6), lambda x: (x + 100).exp().sum(-1).log() - 100),
        "(1 + x) - 1 at 1e-8": at(close(0, 1e-8), lambda x: (1 + x) - 1),
        "exp(x) - 1 at 1e-8": at(close(0, 1e-8), lambda x: x.exp() - 1),
        "(exp(x) - 1) / x at 1e-3": at(close(0, 1e-3), lambda x: (x.exp() - 1) / x),
        "1 - cos(x) at 1e-5": at(close(0, 1e-5), lambda x: 1 - x.cos()),
        "sin² + cos²": at(normal(12), lambda x: x.sin() ** 2 + x.cos() ** 2),  # constant
        "sum of a softmax": at(normal(4, 9), lambda x: x.softmax(-1).sum(-1)),  # constant
    },
)

BIG = group(
    "big offsets",
    {
        "sin(x) + 1e8": at(normal(12), lambda x: x.sin() + 1e8),
        "mean of squares + 1e8": at(normal(100), lambda x: (x * x).mean() + 1e8),
        "log at 1e8": at(lambda g: 1e8 + normal(12)(g), torch.log),
        "square around 1e8": at(lambda g: 1e8 + normal(12)(g), lambda x: (x - 1e8) ** 2),
        "sin at 1e5": at(lambda g: 1e5 + normal(12)(g), torch.sin),
        "layer norm, offset 1e4": at(lambda g: 1e4 + normal(3, 8)(g), lambda x: F.layer_norm(x, (8,))),
    },
)

SCALES = group(
    "mixed scales",
    {
        "square from 1e-12 to 1e12": at(magnitudes, torch.square),
        "asinh from 1e-12 to 1e12": at(magnitudes, torch.asinh),
        "log from 1e-12 to 1e12": at(lambda g: magnitudes(g).abs(), torch.log),
        "product from 1e-12 to 1e12": at(magnitudes, torch.prod),
        "weighted sum from 1e-12 to 1e12": at(of(magnitudes, normal(25)), torch.dot),
        "large matrix times small matrix": at(
            of(lambda g: 1e6 * normal(5, 6)(g), lambda g: 1e-6 * normal(6, 4)(g)), lambda a, b: (a @ b).tanh()
        ),
    },
)

SMALL = group(
    "small gradients",
    {
        "1e-15 sin(x)": at(normal(12), lambda x: 1e-15 * x.sin()),
        "exp(x - 60)": at(normal(12), lambda x: (x - 60).exp()),
        "sigmoid(x - 40)": at(normal(12), lambda x: (x - 40).sigmoid()),
        "x⁴ at 1e-5": at(close(0, 1e-5, sides=2), lambda x: x**4),
        "gaussian at 8": at(close(8, 0.1), lambda x: (-x * x).exp()),
        "zero everywhere": at(lambda g: -1 - normal(12)(g).abs(), F.relu),
    },
)

STEEP = group(
    "curvature and overflow",
    {
        "sin(1000 x)": at(normal(12), lambda x: (1000 * x).sin()),
        "exp(50 x)": at(uniform(-1, 1, 12), lambda x: (50 * x).exp()),
        "exp just below overflow": at(uniform(700, 709.7, 8), torch.exp),
        "x ** 20": at(uniform(0.5, 3, 12), lambda x: x**20),
        "tan near the pole": at(close(math.pi / 2, 1e-4, sides=2), torch.tan),
        "narrow peak": at(close(0, 1e-3, sides=2), lambda x: 1 / (1e-6 + x * x)),
    },
    undecided={"exp just below overflow"},  # a derivative times its cotangent may overflow
)


def swish_of_product(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a @ b)


def soft(x: Tensor) -> Tensor:
    return x.softmax(-1)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), eps=1e-5)


LOW = group(
    "low dtypes",
    {
        "float32 matmul": at(in_dtype(torch.float32, of(normal(8, 16), normal(16, 4))), torch.matmul),
        "float32 mean of 3000": at(in_dtype(torch.float32, normal(3000)), lambda x: x.exp().mean()),
        "float32 input and float64 weight": at(of(in_dtype(torch.float32, normal(9)), normal(9)), torch.mul),
        "bfloat16 softmax": at(in_dtype(torch.bfloat16, normal(4, 16)), soft),
        "bfloat16 silu of a product": at(in_dtype(torch.bfloat16, of(normal(8, 16), normal(16, 4))), swish_of_product),
        "float16 gelu": at(in_dtype(torch.float16, normal(64)), F.gelu),
        "float32 only: silu": at(in_dtype(torch.float32, normal(64)), only(torch.float32, F.silu)),
        "float32 only: product": at(
            in_dtype(torch.float32, of(normal(8, 16), normal(16, 4))), only(torch.float32, swish_of_product)
        ),
        "bfloat16 only, with a reference: softmax": at(
            in_dtype(torch.bfloat16, normal(4, 16)), only(torch.bfloat16, soft), reference=soft
        ),
        "float16 only, with a reference: rms norm": at(
            in_dtype(torch.float16, normal(4, 16)), only(torch.float16, rms_norm), reference=rms_norm
        ),
        "bfloat16 only, no reference: silu": at(in_dtype(torch.bfloat16, normal(64)), only(torch.bfloat16, F.silu)),
    },
    undecided={"bfloat16 only, no reference: silu"},
)

COMPLEX = group(
    "complex",
    {
        "complex abs": at(complex_normal(9), torch.abs),
        "complex abs at 0": at(lambda g: complex_normal(9)(g) * torch.arange(9).gt(2), torch.abs),
        "complex angle": at(lambda g: complex_normal(9)(g) + 3, torch.angle),
        "z times its conjugate": at(complex_normal(9), lambda z: z * z.conj()),
        "fft": at(complex_normal(3, 8), torch.fft.fft),
        "rfft of real numbers": at(normal(3, 9), torch.fft.rfft),
        "irfft": at(complex_normal(3, 5), torch.fft.irfft),  # ignores two imaginary parts
        "real and imaginary part": at(complex_normal(9), lambda z: (z.real * z.imag, z.imag.exp())),
        "complex matmul": at(of(complex_normal(3, 4), complex_normal(4, 2)), torch.matmul),
        "complex64 exp": at(in_dtype(torch.complex64, complex_normal(9)), torch.exp),
        "lazily conjugated input": at(lambda g: complex_normal(9)(g).conj(), lambda z: z * z),
        "polar": at(of(uniform(0.5, 2, 9), normal(9)), torch.polar),
    },
)

CORRECT: list[Case] = [
    *(KINKS + TIES + SINGULAR + DISCONTINUOUS + CANCELLATION + BIG + SCALES + SMALL + STEEP + LOW + COMPLEX),
    *CORRECT_MODULES,
]
