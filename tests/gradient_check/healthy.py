"""Sound functions: PyTorch's operators and compositions of them, many at points that are special to them.

Each with floating inputs runs in float64 and in float32; a smooth one also as a kernel that takes nothing but float32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, linalg, nn

from gradient_check.planted import D, only_float32
from gradient_check.problem import Case, Problem

Point = Callable[[Generator], Any]


def normal(*shape: int) -> Point:
    return lambda g: torch.randn(shape, generator=g, dtype=D)


def positive(*shape: int) -> Point:
    return lambda g: torch.rand(shape, generator=g, dtype=D) + 0.5


def unit(*shape: int) -> Point:
    return lambda g: 0.1 + 0.8 * torch.rand(shape, generator=g, dtype=D)


def complex_(*shape: int) -> Point:
    return lambda g: torch.randn(shape, generator=g, dtype=torch.complex128)


def definite(*shape: int) -> Point:
    def point(g: Generator) -> Tensor:
        x = torch.randn(shape, generator=g, dtype=D)
        return x @ x.mT + torch.eye(shape[-1], dtype=D)

    return point


def well(*shape: int) -> Point:
    """Matrices far from singular ones."""
    return lambda g: torch.randn(shape, generator=g, dtype=D) + 4 * torch.eye(shape[-2], shape[-1], dtype=D)


def constant(value: Tensor) -> Point:
    return lambda g: value.clone()


def several(*points: Point) -> Point:
    return lambda g: tuple(point(g) for point in points)


V, M = normal(12), normal(3, 4)
ELEMENTWISE: dict[str, tuple[Callable[..., Any], Point]] = {
    **{name: (getattr(torch, name), V) for name in (
        "sin", "cos", "exp", "expm1", "tanh", "sigmoid", "atan", "asinh", "erf", "erfc", "sinh", "cosh", "neg",
        "square", "sinc", "exp2", "deg2rad",
    )},
    **{name: (getattr(torch, name), positive(12)) for name in (
        "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma",
    )},
    **{name: (getattr(torch, name), unit(12)) for name in ("asin", "acos", "atanh", "logit", "erfinv")},
    **{name: (getattr(F, name), V) for name in (
        "silu", "gelu", "softplus", "mish", "elu", "selu", "celu", "logsigmoid", "softsign", "tanhshrink", "hardtanh",
        "leaky_relu", "relu", "relu6", "hardswish", "softshrink", "hardshrink",
    )},
    **{name: (getattr(torch.special, name), V) for name in ("i0", "i0e", "i1", "i1e", "ndtr", "log_ndtr", "erfcx")},
    "acosh": (torch.acosh, lambda g: 1.5 + torch.rand(12, generator=g, dtype=D)),
    "xlogy": (torch.xlogy, several(normal(6), positive(6))),
    "pow": (torch.pow, several(positive(6), normal(6))),
    "atan2": (torch.atan2, several(normal(6), normal(6))),
    "hypot": (torch.hypot, several(normal(6), normal(6))),
    "logaddexp": (torch.logaddexp, several(normal(6), normal(6))),
    "lerp": (torch.lerp, several(normal(6), normal(6), normal(6))),
    "addcmul": (torch.addcmul, several(normal(6), normal(6), normal(6))),
    "addcdiv": (torch.addcdiv, several(normal(6), normal(6), positive(6))),
    "where": (lambda a, b: torch.where(a > 0, a * b, a - b), several(normal(6), normal(6))),
    "maximum": (torch.maximum, several(normal(6), normal(6))),
    "fmin": (torch.fmin, several(normal(6), normal(6))),
    "mul, broadcast": (torch.mul, several(normal(3, 1), normal(4))),
    "div, broadcast": (torch.div, several(normal(3, 4), positive(4))),
}  # fmt: skip
REDUCTIONS: dict[str, tuple[Callable[..., Any], Point]] = {
    **{name: (partial(getattr(torch, name), dim=-1), M) for name in (
        "sum", "mean", "prod", "logsumexp", "cumsum", "cumprod", "softmax", "log_softmax", "amax", "amin", "var", "std",
        "logcumsumexp",
    )},
    "diff": (torch.diff, M),
    "flip": (lambda x: x.flip(0), M),
    "norm": (lambda x: x.norm(), M),
    "norm, p = 1": (lambda x: linalg.vector_norm(x, 1), M),
    "norm, p = 3": (lambda x: linalg.vector_norm(x, 3, dim=0), M),
    "norm, p = inf": (lambda x: linalg.vector_norm(x, torch.inf), M),
    "normalize": (F.normalize, M),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), M),
    "cdist": (torch.cdist, several(normal(3, 2), normal(4, 2))),
    "pdist": (F.pdist, normal(4, 3)),
    "cosine similarity": (F.cosine_similarity, several(normal(3, 4), normal(3, 4))),
    "pairwise distance": (F.pairwise_distance, several(normal(3, 4), normal(3, 4))),
    "trapezoid": (torch.trapezoid, M),
    "nanmean": (torch.nanmean, M),
    "quantile": (lambda x: x.quantile(0.3, dim=-1), M),
    "kthvalue": (lambda x: x.kthvalue(2, -1)[0], M),
    "median": (lambda x: x.median(-1)[0], M),
    "cummax": (lambda x: x.cummax(-1)[0], M),
}  # fmt: skip
SEVERAL_OUTPUTS: dict[str, tuple[Callable[..., Any], Point]] = {
    "var_mean": (lambda x: torch.var_mean(x, -1), M),
    "std_mean": (lambda x: torch.std_mean(x, 0), M),
    "max, with indices": (lambda x: x.max(-1), M),
    "topk": (lambda x: x.topk(2), M),
    "sort": (lambda x: x.sort(), M),
    "unbind": (torch.unbind, M),
    "split": (lambda x: x.split(2, -1), M),
    "slogdet": (linalg.slogdet, well(3, 3)),
    "slogdet of a batch": (linalg.slogdet, well(2, 3, 3)),
    "eigh": (lambda x: linalg.eigh(x + x.mT)[0], normal(4, 4)),
    "qr": (linalg.qr, well(4, 3)),
    "lu": (lambda x: linalg.lu(x)[1:], well(3, 3)),
    "aminmax": (torch.aminmax, V),
    "three of them, one without a graph": (lambda x: (x.sin(), x.detach(), x * x), V),
    "four": (lambda x, y: (x * y, x + y, x.sin(), y.exp()), several(normal(4), normal(4))),
    "frexp's mantissa": (lambda x: (x.sin(), x.frexp().mantissa.detach()), V),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), several(normal(3), normal(2))),
}
IDENTITY, HALF = torch.eye(3, dtype=D), torch.diag(torch.tensor([1.0, 1.0, 2.0], dtype=D))
LINEAR_ALGEBRA: dict[str, tuple[Callable[..., Any], Point]] = {
    "matmul": (torch.matmul, several(normal(3, 4), normal(4, 2))),
    "bmm": (torch.bmm, several(normal(2, 3, 4), normal(2, 4, 2))),
    "matrix times vector": (torch.mv, several(normal(3, 4), normal(4))),
    "outer": (torch.outer, several(normal(3), normal(4))),
    "kron": (torch.kron, several(normal(2, 2), normal(2, 2))),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bk", a, b), several(normal(2, 3, 4), normal(2, 4, 3))),
    "trace": (torch.trace, normal(3, 3)),
    "det": (linalg.det, well(3, 3)),
    "det of a batch": (linalg.det, well(2, 3, 3)),
    "det, singular": (linalg.det, constant(torch.ones(3, 3, dtype=D))),
    "logdet": (torch.logdet, definite(3, 3)),
    "logdet of a batch": (torch.logdet, definite(2, 3, 3)),
    "logdet, larger": (torch.logdet, definite(6, 6)),
    "slogdet, larger": (linalg.slogdet, normal(6, 6)),
    "slogdet's logarithm": (lambda x: torch.slogdet(x)[1], normal(4, 4)),
    "inv": (linalg.inv, well(3, 3)),
    "pinv": (linalg.pinv, well(4, 3)),
    "solve": (linalg.solve, several(well(3, 3), normal(3, 2))),
    "triangular solve": (
        lambda a, b: linalg.solve_triangular(a.triu(), b, upper=True), several(well(3, 3), normal(3, 2)),
    ),
    "cholesky": (lambda x: linalg.cholesky(x @ x.mT + IDENTITY.to(x.dtype)), normal(3, 3)),
    "cholesky solve": (
        lambda b, a: torch.cholesky_solve(b, linalg.cholesky(a @ a.mT + IDENTITY.to(a.dtype))),
        several(normal(3, 2), normal(3, 3)),
    ),
    "matrix exponential": (torch.matrix_exp, normal(3, 3)),
    "matrix power": (lambda x: linalg.matrix_power(x, 3), normal(3, 3)),
    "nuclear norm": (lambda x: linalg.matrix_norm(x, "nuc"), well(3, 3)),
    "spectral norm": (lambda x: linalg.matrix_norm(x, 2), normal(3, 3)),
    "singular values": (linalg.svdvals, normal(4, 3)),
    "eigenvalues": (lambda x: linalg.eigvalsh(x + x.mT), normal(4, 4)),
    "eigenvalues, complex": (linalg.eigvals, normal(3, 3)),
    "least squares": (lambda a, b: linalg.lstsq(a, b, driver="gelsd").solution, several(well(4, 3), normal(4, 2))),
    "householder product": (linalg.householder_product, several(normal(4, 2), normal(2))),
    "cross": (torch.cross, several(normal(2, 3), normal(2, 3))),
    "singular values of the identity": (linalg.svdvals, constant(IDENTITY)),
    "singular values of the identity, larger": (linalg.svdvals, constant(torch.eye(5, dtype=D))),
    "eigenvalues of the identity": (lambda x: linalg.eigvalsh(x + x.mT), constant(IDENTITY)),
    "eigenvalues by eigh, of the identity": (lambda x: linalg.eigh(x + x.mT)[0], constant(IDENTITY)),
    "eigenvalues by eigh, of a larger identity": (lambda x: linalg.eigh(x + x.mT)[0], constant(torch.eye(5, dtype=D))),
    "eigenvalues by eigh, two alike": (lambda x: linalg.eigh(x + x.mT)[0], constant(HALF)),
    "eigenvalues, unsymmetric, of the identity": (linalg.eigvals, constant(IDENTITY)),
    "spectral norm of the identity": (lambda x: linalg.matrix_norm(x, 2), constant(IDENTITY)),
    "nuclear norm of the identity": (lambda x: linalg.matrix_norm(x, "nuc"), constant(IDENTITY)),
    "logdet of the identity": (torch.logdet, constant(IDENTITY)),
    "inverse of the identity": (linalg.inv, constant(IDENTITY)),
    "singular values of equal columns": (linalg.svdvals, constant(torch.ones(4, 3, dtype=D))),
}  # fmt: skip
TARGETS = torch.tensor([0, 2, 1])
NETWORKS: dict[str, tuple[Callable[..., Any], Point]] = {
    "linear": (F.linear, several(normal(3, 4), normal(2, 4), normal(2))),
    "bilinear": (F.bilinear, several(normal(3, 2), normal(3, 4), normal(2, 2, 4))),
    "conv1d": (F.conv1d, several(normal(2, 3, 6), normal(2, 3, 3), normal(2))),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), several(normal(1, 2, 4, 5), normal(2, 2, 3, 3))),
    "conv3d": (F.conv3d, several(normal(1, 1, 3, 3, 3), normal(2, 1, 2, 2, 2))),
    "transposed convolution": (F.conv_transpose2d, several(normal(1, 2, 3, 3), normal(2, 1, 2, 2))),
    "average pool": (lambda x: F.avg_pool2d(x, 2), normal(2, 2, 4, 4)),
    "max pool": (lambda x: F.max_pool2d(x, 2), normal(2, 2, 4, 4)),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 2), normal(1, 2, 3, 5)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), several(normal(3, 4), normal(4), normal(4))),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), several(normal(2, 4, 3), normal(4), normal(4))),
    "instance norm": (F.instance_norm, normal(2, 3, 5)),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True), several(normal(6, 3), normal(3), normal(3)),
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), several(normal(3, 4), normal(4))),
    "attention": (
        F.scaled_dot_product_attention, several(normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)),
    ),
    "attention, one tensor three times": (lambda x: F.scaled_dot_product_attention(x, x, x), normal(1, 2, 3, 4)),
    "embedding": (lambda w: F.embedding(TARGETS, w), normal(4, 3)),
    "cross entropy": (lambda x: F.cross_entropy(x, TARGETS), normal(3, 4)),
    "negative log likelihood": (lambda x: F.nll_loss(x.log_softmax(-1), TARGETS), normal(3, 4)),
    "binary cross entropy": (F.binary_cross_entropy, several(unit(6), unit(6))),
    "with logits": (F.binary_cross_entropy_with_logits, several(normal(6), unit(6))),
    "squared error": (F.mse_loss, several(normal(6), normal(6))),
    "l1 loss": (F.l1_loss, several(normal(6), normal(6))),
    "smooth l1 loss": (F.smooth_l1_loss, several(normal(6), normal(6))),
    "kl divergence": (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1)), several(normal(3, 4), normal(3, 4))),
    "triplet loss": (F.triplet_margin_loss, several(normal(3, 4), normal(3, 4), normal(3, 4))),
    "ctc loss": (
        lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])),
        normal(5, 1, 4),
    ),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), normal(1, 2, 3, 3)),
    "grid sample": (
        lambda x, i: F.grid_sample(x, i, align_corners=False), several(normal(1, 2, 4, 4), unit(1, 3, 3, 2)),
    ),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), normal(1, 4, 2, 2)),
    "fold": (lambda x: F.fold(x, (4, 4), 2, stride=2), normal(1, 4, 4)),
    "unfold": (lambda x: F.unfold(x, 2), normal(1, 2, 3, 3)),
    "pad": (lambda x: F.pad(x, (1, 2), mode="reflect"), normal(1, 2, 4)),
    "glu": (F.glu, normal(3, 4)),
    "prelu": (F.prelu, several(normal(3, 2), positive(2))),
    "local response norm": (lambda x: F.local_response_norm(x, 2), normal(1, 3, 4)),
    "softmin": (lambda x: F.softmin(x, -1), M),
    "gumbel-free softmax of rows alike": (lambda x: x.softmax(-1), constant(torch.ones(3, 4, dtype=D))),
    "channels_last convolution": (
        F.conv2d,
        several(lambda g: normal(1, 2, 4, 4)(g).to(memory_format=torch.channels_last), normal(2, 2, 3, 3)),
    ),
}  # fmt: skip
MODULES: dict[str, tuple[Callable[[], nn.Module], Point]] = {
    "Linear": (lambda: nn.Linear(4, 3), normal(2, 4)),
    "MLP": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), normal(3, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(5), normal(3, 5)),
    "BatchNorm": (lambda: nn.BatchNorm1d(3), normal(6, 3)),
    "LSTM": (lambda: nn.LSTM(3, 4), normal(5, 2, 3)),
    "GRU": (lambda: nn.GRU(3, 4), normal(4, 2, 3)),
    "RNN": (lambda: nn.RNN(3, 4), normal(4, 2, 3)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), several(*[normal(3, 2, 4)] * 3)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), normal(3, 2, 4)),
    "encoder layer, no dropout": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), normal(3, 2, 4)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2), normal(1, 2, 4, 4)),
    "PReLU": (lambda: nn.PReLU(3), normal(4, 3)),
    "Bilinear": (lambda: nn.Bilinear(2, 3, 2), several(normal(3, 2), normal(3, 3))),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), normal(4, 3)),
}
COMPLEX: dict[str, tuple[Callable[..., Any], Point]] = {
    "complex product": (torch.mul, several(complex_(5), complex_(5))),
    "conjugate": (torch.conj, complex_(5)),
    "absolute value": (torch.abs, complex_(5)),
    "angle": (torch.angle, complex_(5)),
    "real part": (lambda z: z.real * z.imag, complex_(5)),
    "complex exp": (torch.exp, complex_(5)),
    "complex sine": (torch.sin, complex_(5)),
    "fft": (torch.fft.fft, complex_(6)),
    "real fft": (torch.fft.rfft, normal(6)),
    "inverse real fft": (torch.fft.irfft, complex_(4)),
    "short-time transform": (
        lambda x: torch.stft(x, 4, window=torch.ones(4, dtype=x.dtype), return_complex=True), normal(12),
    ),
    "hermitian product": (lambda z: z @ z.mH, complex_(3, 2)),
    "complex inverse": (linalg.inv, lambda g: complex_(3, 3)(g) + 4 * torch.eye(3)),
    "polar": (torch.polar, several(positive(4), normal(4))),
}  # fmt: skip
EQUAL, WHOLE = torch.ones(4, 5, dtype=D), torch.tensor([[1.0, 3, 3, 2, 3], [0, 0, 0, 0, 0]], dtype=D)
SPECIAL: dict[str, tuple[Callable[..., Any], Point]] = {
    "relu at 0": (F.relu, constant(torch.zeros(4, dtype=D))),
    "abs at 0": (torch.abs, constant(torch.zeros(4, dtype=D))),
    "max of equal values": (lambda x: x.max(-1)[0], constant(EQUAL)),
    "amax of equal values": (lambda x: x.amax(-1), constant(EQUAL)),
    "median of equal values": (lambda x: x.median(), constant(torch.ones(5, dtype=D))),
    "median of ties": (lambda x: x.median(-1)[0], constant(WHOLE)),
    "sort of ties": (lambda x: x.sort(-1)[0], constant(WHOLE)),
    "topk of ties": (lambda x: x.topk(2, -1)[0], constant(WHOLE)),
    "cummax of ties": (lambda x: x.cummax(-1)[0], constant(WHOLE)),
    "quantile of ties": (lambda x: x.quantile(0.5, -1), constant(WHOLE)),
    "maximum of a tensor with itself": (torch.maximum, several(constant(EQUAL), constant(EQUAL))),
    "max pool of equal values": (lambda x: F.max_pool2d(x, 2), constant(torch.ones(1, 1, 4, 4, dtype=D))),
    "norm at 0": (lambda x: x.norm(), constant(torch.zeros(4, dtype=D))),
    "distance to itself": (F.l1_loss, several(constant(EQUAL), constant(EQUAL))),
    "clamp at its bound": (lambda x: x.clamp(-1, 1), constant(torch.tensor([-1.0, 1, 0.3], dtype=D))),
    "sine at subnormal numbers": (torch.sin, constant(torch.tensor([1e-310, -3e-310, 5e-324, 0.2], dtype=D))),
    "product with a subnormal number": (
        lambda x: x * x.flip(0), constant(torch.tensor([1e-310, 2.0, 0.5, 1.0], dtype=D)),
    ),
    "sine at huge numbers": (torch.sin, constant(torch.tensor([1e6, -3e5, 2.0], dtype=D))),
    "floor and a slope": (lambda x: x.floor() + x * x, normal(6)),
    "rounded to tenths, plus a slope": (lambda x: (x * 10).round() / 10 + x.sin(), normal(6)),
    "wide range": (lambda x: x * x, constant(10.0 ** torch.arange(-8, 9, 2, dtype=D))),
    "softmax of large numbers": (lambda x: (100 * x).softmax(-1), M),
    "log of a softmax, one-hot": (lambda x: (300 * x).log_softmax(-1), M),
    "steep": (lambda x: (50 * x).tanh(), normal(6)),
    "fast oscillation": (lambda x: (200 * x).sin(), normal(6)),
    "in place": (lambda x: (x * 2).sin_().mul_(3), V),
    "view as output": (lambda x: x.t()[1:], M),
    "expanded inside": (lambda x: x.expand(3, 12).contiguous() * torch.arange(36.0, dtype=D).view(3, 12), V),
    "index with repeats": (lambda x: x[TARGETS[[0, 0, 1, 2]]] * 2, normal(4, 2)),
    "scatter_add": (lambda x: torch.zeros(3, dtype=x.dtype).scatter_add(0, torch.tensor([0, 1, 1, 2]), x), normal(4)),
    "index_put, accumulated": (
        lambda x: torch.zeros(3, dtype=x.dtype).index_put((torch.tensor([0, 0, 2]),), x, accumulate=True), normal(3),
    ),
    "masked_fill": (lambda x: x.masked_fill(x > 0.5, 0.0) * x, V),
    "roll": (lambda x: x.roll(2) * x, V),
    "cat of itself": (lambda x: torch.cat([x, x.sin()]), V),
    "as a dictionary": (lambda x: {"a": x.sin(), "b": [x.exp()]}, V),
    "a scalar input": (torch.sin, lambda g: torch.randn((), generator=g, dtype=D)),
    "one element": (torch.exp, normal(1)),
    "no elements": (torch.sin, lambda g: torch.zeros(0, 3, dtype=D)),
    "one unused input": (lambda x, y: x.sin(), several(normal(4), normal(4))),
    "five inputs": (lambda a, b, c, d, e: a * b + c.sin() * d - e, several(*[normal(4)] * 5)),
}  # fmt: skip
ALL_BUT_CONSTANT = "softmax of large numbers"
"""Its gradient is 0 but for rounding: there is nothing to compare with."""
NOT_FLOAT32 = ("subnormal", "huge numbers", "floor", "rounded to tenths", "wide range", "expanded inside")


def _low(value: Any) -> tuple[Tensor, ...]:
    tensors = value if isinstance(value, tuple) else (value,)
    return tuple(one.to(torch.complex64 if one.is_complex() else torch.float32) for one in tensors)


def _wide(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _of_functions(category: str, table: dict[str, tuple[Callable[..., Any], Point]]) -> Iterator[Case]:
    for name, (fn, point) in table.items():
        unclear = name == ALL_BUT_CONSTANT
        yield Case(name, category, lambda g, f=fn, p=point: Problem(f, _wide(p(g))), unclear)
        if not any(part in name for part in NOT_FLOAT32):
            yield Case(f"{name}, float32", category, lambda g, f=fn, p=point: Problem(f, _low(p(g))), unclear)
        if category in ("elementwise", "reductions", "several outputs"):
            kernel = f"{name}, float32 alone"
            yield Case(kernel, category, lambda g, f=fn, p=point: Problem(only_float32(f), _low(p(g))), True)


def _of_modules() -> Iterator[Case]:
    def make(build: Callable[[], nn.Module], g: Generator) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(g.initial_seed())
            return build()

    for name, (build, point) in MODULES.items():
        yield Case(name, "modules", lambda g, b=build, p=point: Problem(make(b, g).double(), _wide(p(g))))
        yield Case(f"{name}, float32", "modules", lambda g, b=build, p=point: Problem(make(b, g), _low(p(g))))


def _all() -> Iterator[Case]:
    tables = {
        "elementwise": ELEMENTWISE,
        "reductions": REDUCTIONS,
        "several outputs": SEVERAL_OUTPUTS,
        "linear algebra": LINEAR_ALGEBRA,
        "networks": NETWORKS,
        "complex": COMPLEX,
        "special points": SPECIAL,
    }
    for category, table in tables.items():
        yield from _of_functions(category, table)
    yield from _of_modules()


HEALTHY = list(_all())
"""All functions, by class and name."""
