"""Functions whose backward is right although they make gradient checkers cry wolf: modules, state and structure."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gradient_check.problem import Case, Problem

D = torch.float64
Point = Callable[[Generator], Any]
Make = Callable[[Generator], Problem]


def at(point: Point, fn: Callable[..., Any], **options: Any) -> Make:
    """Check a function at a point; a point that is a tuple is several inputs."""

    def make(g: Generator) -> Problem:
        x = point(g)
        return Problem(fn, x if isinstance(x, tuple) else (x,), dict(options))

    return make


def group(category: str, makes: dict[str, Make], undecided: Collection[str] = ()) -> list[Case]:
    """Cases of one category; for the undecided ones "INCONCLUSIVE" is right too."""
    assert set(undecided) <= set(makes)
    return [Case(name, category, make, name in undecided) for name, make in makes.items()]


def of(*points: Point) -> Point:
    """A point of several inputs."""
    return lambda g: tuple(point(g) for point in points)


def normal(*shape: int) -> Callable[[Generator], Tensor]:
    return lambda g: torch.randn(shape, generator=g, dtype=D)


def uniform(low: float, high: float, *shape: int) -> Callable[[Generator], Tensor]:
    return lambda g: low + (high - low) * torch.rand(*shape, generator=g, dtype=D)


def indices(high: int, *shape: int) -> Callable[[Generator], Tensor]:
    return lambda g: torch.randint(0, high, shape, generator=g)


def away_from_zero(*shape: int) -> Callable[[Generator], Tensor]:
    """Numbers of both signs, none smaller than 0.2."""

    def point(g: Generator) -> Tensor:
        x = torch.randn(*shape, generator=g, dtype=D)
        return x + 0.2 * torch.where(x < 0, -1, 1)

    return point


def only(dtype: torch.dtype, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a kernel that is written for one dtype."""

    def kernel(*inputs: Tensor) -> Any:
        for x in inputs:
            if x.dtype != dtype:
                raise TypeError(f"expected {dtype}, got {x.dtype}")
        return fn(*inputs)

    return kernel


def module(build: Callable[[], nn.Module], point: Point, scale: float = 0.4, **options: Any) -> Make:
    """Check a module in float64, with normal parameters."""

    def make(g: Generator) -> Problem:
        net = build().double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(scale * torch.randn(parameter.shape, generator=g, dtype=D))
        return at(point, net, **options)(g)

    return make


class OneUlpScale(Function):
    """sin(x), whose gradient is one unit in the last place larger at every second call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: list[int]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.calls = calls
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        ctx.calls[0] += 1
        grad = grad_output * ctx.saved_tensors[0].cos()
        return (torch.nextafter(grad, 2 * grad) if ctx.calls[0] % 2 else grad), None


class AlternatingSum(Function):
    """A bias added to rows; its gradient adds the rows up from the top and from the bottom in turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, calls: list[int]) -> Tensor:
        ctx.calls = calls
        return x + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.calls[0] += 1
        rows = grad_output.unbind() if ctx.calls[0] % 2 else grad_output.unbind()[::-1]
        return grad_output, torch.stack(rows).cumsum(0)[-1], None


def counted(fn: Callable[..., Any], point: Point) -> Make:
    """A function with a count of calls that is its own."""

    def make(g: Generator) -> Problem:
        calls = [0]
        return at(point, lambda *inputs: fn(*inputs, calls))(g)

    return make


def alternating_mean(x: Tensor, calls: list[int]) -> Tensor:
    """The order of the sum alternates in forward already."""
    calls[0] += 1
    return ((x if calls[0] % 2 else x.flip(0)).cumsum(0)[-1] / len(x)).tanh()


ULP = group(
    "non-determinism at 1 ulp",
    {
        "gradient changes by one ulp": counted(OneUlpScale.apply, normal(12)),
        "order of a sum alternates": counted(AlternatingSum.apply, of(normal(6, 5), normal(5))),
        "order of a sum alternates in forward": counted(alternating_mean, normal(7, 3)),
    },
)


def expanded(g: Generator) -> Tensor:
    return normal(3, 1)(g).expand(3, 4)


def channels_last(g: Generator) -> Tensor:
    return normal(2, 3, 4, 4)(g).contiguous(memory_format=torch.channels_last)


def twice_the_same(g: Generator) -> tuple[Tensor, Tensor]:
    x = normal(6)(g)
    return x, x


LAYOUT = group(
    "layout",
    {
        "expanded input": at(expanded, lambda x: x.sin() * x),
        "expanded inputs, matmul": at(of(expanded, lambda g: expanded(g).mT), torch.matmul),
        "transposed input": at(lambda g: normal(4, 3)(g).t(), lambda x: x.softmax(-1)),
        "sliced input": at(lambda g: normal(9, 8)(g)[1::2, ::3], torch.exp),
        "overlapping windows as input": at(lambda g: normal(8)(g).unfold(0, 3, 1), torch.tanh),
        "channels-last input": at(channels_last, lambda x: F.avg_pool2d(x.exp(), 2)),
        "view as output": at(normal(3, 4), lambda x: x.t()[1:]),
        "expanded output": at(normal(3, 1), lambda x: (x * x).expand(3, 5)),
        "input as output": at(normal(3, 4), lambda x: x),
        "module that does nothing": at(normal(3, 4), nn.Identity()),
        "same tensor passed twice": at(twice_the_same, lambda a, b: a.exp() * b),
        "number as input": at(normal(), lambda x: x.sin()),
        "empty input beside another": at(of(normal(3), normal(0)), lambda a, b: torch.cat([a.exp(), b])),
    },
)


class NumpySinh(Function):
    """sinh, with both directions outside torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sinh(x.detach().numpy()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return torch.from_numpy(grad_output.numpy() * np.cosh(ctx.saved_tensors[0].numpy()))


def branch(x: Tensor) -> Tensor:
    return x.sin() if x[0] > 0 else x.cos() * 2


def force(x: Tensor) -> Tensor:
    """Minus the gradient of an energy, which needs autograd inside."""
    energy = (x**4).sum() + (x[1:] * x[:-1]).sin().sum()
    return -torch.autograd.grad(energy, x, create_graph=True)[0]


def halve_until_small(x: Tensor) -> Tensor:
    """As many steps as the value asks for: 16 ends between 0.5 and 1."""
    while x.norm() > 1:
        x = x.sin() / 2
    return x * x


def choose_rows(x: Tensor) -> Tensor:
    """The rows with a positive first element: the shape depends on the data."""
    return x[(x[:, 0] > 0).nonzero().squeeze(1)].exp()


CONTROL = group(
    "control flow",
    {
        "branch on a value": at(away_from_zero(8), branch),
        "boolean mask": at(away_from_zero(12), lambda x: x[x > 0].log()),
        "rows chosen by data": at(away_from_zero(6, 3), choose_rows),
        "loop of data-dependent length": at(lambda g: 3 + normal(6)(g).abs(), halve_until_small),
        "numpy forward and backward": at(normal(9), NumpySinh.apply),
        "gradient taken inside": at(normal(7), force),
        "functional gradient inside": at(normal(7), torch.func.grad(lambda x: (x**3).sin().sum())),
    },
)


class CountingLayer(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.weight * x.tanh()


class RunningCentre(nn.Module):
    """Subtracts a stored mean, then moves it, so that two calls differ unless the buffer is restored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = (x - self.mean.clone()).sin()
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return y


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:].mul_(2).add_(1)
    y[0] = 3 * y[1]
    return y.exp_()


def seeded_noise(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * torch.rand_like(x) + torch.randn_like(x)


def recomputed(x: Tensor) -> Tensor:
    return checkpoint(lambda t: F.dropout(t.sin(), 0.5) * t, x, use_reentrant=False)


STATE = group(
    "in-place, state, random",
    {
        "in-place on a clone": at(normal(6), in_place),
        "batch norm in training": module(lambda: nn.BatchNorm1d(4), normal(6, 4)),
        "batch norm 2d": module(lambda: nn.BatchNorm2d(3), normal(2, 3, 4, 4)),
        "batch norm in evaluation": module(lambda: nn.BatchNorm1d(4).eval(), normal(6, 4)),
        "counter as buffer": module(CountingLayer, normal(3, 4)),
        "stored mean moves at each call": module(RunningCentre, normal(3, 4)),
        "dropout": at(normal(30), lambda x: F.dropout(x * x, 0.4)),
        "network with dropout": module(
            lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)), normal(3, 5)
        ),
        "random noise": at(normal(9), lambda x: (x + torch.randn_like(x)).sin()),
        "seeds the generator itself": at(normal(9), seeded_noise),
        "checkpoint with dropout": at(normal(20), recomputed),
    },
)


def nested(x: Tensor) -> dict[str, Any]:
    return {"a": x.sin(), "b": [x.exp(), (x.sum(), None)], "count": x.numel()}


def from_batch(batch: dict[str, Any]) -> Tensor:
    first, second = batch["pair"]
    return (first @ second)[batch["rows"]] * batch["scale"]


def batch(g: Generator) -> tuple[dict[str, Any]]:
    pair = [normal(4, 3)(g), normal(3, 2)(g)]
    return ({"pair": pair, "rows": indices(4, 5)(g), "scale": normal(2)(g), "name": "a"},)


OUTPUTS = group(
    "several outputs",
    {
        "sort with indices": at(normal(4, 5), torch.sort),
        "integer output beside a float one": at(normal(4, 5), lambda x: (x.argmax(-1), x.exp())),
        "unused input": at(of(normal(5), normal(3)), lambda a, b: a.sin()),
        "constant output": at(normal(5), lambda x: (x.sin(), torch.ones(3, dtype=D))),
        "detached output": at(normal(5), lambda x: (x.sin(), x.detach().cos())),
        "same output twice": at(normal(5), lambda x: (y := x.sin(), y)),
        "outputs in a nested dict": at(normal(5), nested),
        "inputs in a nested dict": at(batch, from_batch),
        "each output from one input": at(of(normal(5), normal(3)), lambda a, b: (a.sin(), b.exp())),
    },
)


def fixed_point(x: Tensor, w: Tensor, tolerance: float) -> Tensor:
    """z = tanh(z w + x), by iteration from zero."""
    z = torch.zeros_like(x)
    for _ in range(500):
        last, z = z, torch.tanh(z @ w + x)
        if (z - last).abs().max() <= tolerance:
            break
    return z


class ImplicitFixedPoint(Function):
    """The same with the gradient of the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, tolerance: float) -> Tensor:
        z = fixed_point(x, w, tolerance)
        ctx.save_for_backward(z, w)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        z, w = ctx.saved_tensors
        slope = 1 - z * z
        # u solves u = slope * (grad_output + u wᵀ)
        system = torch.eye(len(z), dtype=z.dtype) - slope[:, None] * w
        u = torch.linalg.solve(system, slope * grad_output)
        return u, torch.outer(z, u), None


def contraction(g: Generator) -> tuple[Tensor, Tensor]:
    w = normal(5, 5)(g)
    return normal(5)(g), 0.5 * w / torch.linalg.matrix_norm(w, 2)


def newton_root(a: Tensor) -> Tensor:
    y = torch.ones_like(a)
    for _ in range(8):
        y = (y + a / y) / 2
    return y


def newton_to_tolerance(a: Tensor) -> Tensor:
    """Solves y + y³ = a; the last step squares an error that is below the tolerance."""
    y = torch.zeros_like(a)
    step = torch.ones_like(a)
    while step.abs().max() > 1e-10:
        step = (y + y**3 - a) / (1 + 3 * y * y)
        y = y - step
    return y


def sinkhorn(cost: Tensor) -> Tensor:
    p = (-cost).exp()
    for _ in range(12):
        p = p / p.sum(0, keepdim=True)
        p = p / p.sum(1, keepdim=True)
    return p


ITERATIVE = group(
    "iterative",
    {
        "newton, eight steps": at(uniform(0.3, 4, 8), newton_root),
        "newton to a tolerance": at(normal(8), newton_to_tolerance),
        "sinkhorn, twelve rounds": at(normal(4, 4), sinkhorn),
        "fixed point, unrolled, tolerance 1e-10": at(contraction, lambda x, w: fixed_point(x, w, 1e-10)),
        "fixed point, implicit": at(contraction, lambda x, w: ImplicitFixedPoint.apply(x, w, 1e-16)),
        "fixed point, implicit, tolerance 1e-10": at(contraction, lambda x, w: ImplicitFixedPoint.apply(x, w, 1e-10)),
    },
    undecided={"fixed point, implicit, tolerance 1e-10"},
)


class TiedAutoencoder(nn.Module):
    """Uses one weight twice, and has a parameter that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 6))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).tanh() @ self.weight


def frozen_bias() -> nn.Module:
    layer = nn.Linear(5, 3)
    layer.bias.requires_grad_(False)
    return layer


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True)


MODULES = group(
    "modules",
    {
        "linear": module(lambda: nn.Linear(6, 4), normal(3, 6)),
        "linear with a frozen bias": module(frozen_bias, normal(3, 5)),
        "lstm": module(lambda: nn.LSTM(3, 4), normal(5, 2, 3)),
        "gru": module(lambda: nn.GRU(3, 4), normal(5, 2, 3)),
        "multi-head attention": module(
            lambda: nn.MultiheadAttention(8, 2), of(normal(4, 2, 8), normal(5, 2, 8), normal(5, 2, 8))
        ),
        "layer norm": module(lambda: nn.LayerNorm(7), normal(4, 7)),
        "group norm": module(lambda: nn.GroupNorm(2, 4), normal(2, 4, 5)),
        "conv2d": module(lambda: nn.Conv2d(2, 3, 3, padding=1), normal(2, 2, 5, 5)),
        "transformer layer": module(transformer_layer, normal(2, 3, 8)),
        "tied weight and unused parameter": module(TiedAutoencoder, normal(3, 6)),
        "weight norm": module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), normal(2, 4)),
    },
)


def keyword_scale(x: Tensor, *, scale: float, power: int = 1) -> Tensor:
    return scale * x.sin() ** power


KEYWORDS = group(
    "keyword arguments",
    {
        "softmax along a dimension": at(normal(4, 5), F.softmax, kwargs={"dim": 0}),
        "own keyword arguments": at(normal(6), keyword_scale, kwargs={"scale": 2.5, "power": 3}),
        "causal attention": at(
            of(normal(1, 4, 6), normal(1, 4, 6), normal(1, 4, 6)),
            F.scaled_dot_product_attention,
            kwargs={"is_causal": True},
        ),
        "attention without weights as output": module(
            lambda: nn.MultiheadAttention(4, 2),
            of(normal(3, 2, 4), normal(3, 2, 4), normal(3, 2, 4)),
            kwargs={"need_weights": False},
        ),
    },
)


def masked(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of a square with everything above the diagonal set to -inf."""
    return lambda x: fn(x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -torch.inf))


def targets(g: Generator) -> tuple[Tensor, Tensor]:
    """Scores and classes, some of which are to be ignored."""
    return normal(6, 4)(g), torch.where(torch.arange(6) % 3 == 1, -100, indices(4, 6)(g))


def scatter(x: Tensor, index: Tensor) -> Tensor:
    return x.new_zeros(4, 3).scatter_add(0, index, x) ** 2


INDICES = group(
    "masks and indices",
    {
        "masked softmax": at(normal(5, 5), masked(lambda x: x.softmax(-1))),
        "masked log-softmax": at(normal(5, 5), masked(lambda x: x.log_softmax(-1)[:, 0])),
        # What comes out as -inf has a limit of derivatives, but no differences.
        "masked log-softmax, -inf as output": at(normal(5, 5), masked(lambda x: x.log_softmax(-1))),
        "masked log-sum-exp": at(normal(5, 5), masked(lambda x: x.logsumexp(-1))),
        "cross-entropy with ignored rows": at(targets, F.cross_entropy),
        "smoothed cross-entropy with ignored rows": at(
            targets, F.cross_entropy, kwargs={"label_smoothing": 0.1, "reduction": "none"}
        ),
        "embedding with repeated indices": at(of(indices(5, 8), normal(5, 3)), F.embedding),
        "embedding module": module(lambda: nn.Embedding(6, 3), indices(6, 2, 5)),
        "gather with repeated indices": at(of(normal(5, 3), indices(5, 7, 3)), lambda x, i: x.gather(0, i)),
        "scatter_add with repeated indices": at(of(normal(6, 3), indices(4, 6, 3)), scatter),
        "index_add with repeated indices": at(
            of(normal(4, 3), indices(4, 6), normal(6, 3)), lambda x, i, y: x.index_add(0, i, y).sin()
        ),
    },
    undecided={"masked log-softmax, -inf as output"},
)

CORRECT_MODULES: list[Case] = [
    *(ULP + LAYOUT + CONTROL + STATE + OUTPUTS + ITERATIVE + MODULES + KEYWORDS + INDICES),
]
