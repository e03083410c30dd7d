"""Models, rules and comparisons for the tests of `attach_error_clip`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gradguard as gg

CLIP = gg.ErrorClipByValue(0.05)


class Damp(gg.BaseErrorClip):
    """Multiplies what exceeds ``bound`` by ``k``, which is a constant of the compiled code."""

    thresholds = ("bound",)

    def __init__(self, bound, k=0.5):
        self.bound, self.k = bound, k

    def clip(self, grad):
        return torch.where(grad.abs() > self.bound, grad * self.k, grad)


class Softsign(gg.BaseErrorClip):
    """Knows of no threshold."""

    def clip(self, grad):
        return grad / (1 + 100 * grad.abs())


RULES = {
    "value": gg.ErrorClipByValue(0.05),
    "value, asymmetric": gg.ErrorClipByValue(0.05, min=-0.01),
    "norm": gg.ErrorClipByNorm(0.05),
    "sample norm": gg.rules.ErrorClipBySampleNorm(0.02),
    "zero above": gg.rules.ErrorClipZeroAbove(0.15),
    "non-finite": gg.rules.ErrorClipNonfinite("zero"),
    "custom, threshold": Damp(0.05),
    "custom, none": Softsign(),
}


class Attention(nn.Module):
    def __init__(self, fused: bool = True):
        super().__init__()
        self.fused, self.norm = fused, nn.LayerNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


class Unrolled(nn.Module):
    def __init__(self, steps: int = 5):
        super().__init__()
        self.cell, self.steps = nn.LSTMCell(3, 4), steps

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 4), x.new_zeros(x.shape[1], 4)
        for t in range(self.steps):
            state = self.cell(x[t], state)
        return state[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens).tanh(), self.embedding.weight)


def conv_net() -> nn.Module:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 5))


def mean_square(y: Tensor) -> Tensor:
    return (4 * y.float()).square().mean()


def cross_entropy(y: Tensor) -> Tensor:
    y = y.flatten(0, -2).float()
    return F.cross_entropy(y, torch.arange(len(y)) % y.shape[1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda: torch.randn(6, 4),
        mean_square,
    ),
    "conv": (conv_net, lambda: torch.randn(3, 2, 4, 4), mean_square),
    "lstm": (Unrolled, lambda: torch.randn(5, 3, 3), mean_square),
    "attention": (Attention, lambda: torch.randn(2, 6, 8), cross_entropy),
    "softmax": (lambda: Attention(fused=False), lambda: torch.randn(2, 6, 8), cross_entropy),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(True), nn.Linear(8, 3)).eval(),
        lambda: torch.randn(6, 4),
        mean_square,
    ),
    "tied": (Tied, lambda: torch.tensor([[1, 2, 2], [0, 6, 1]]), cross_entropy),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.GELU(), nn.Linear(4, 3)),
        lambda: torch.tensor([1, 2, 2, 6]),
        cross_entropy,
    ),
}


def made(name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return a model of the table and a function of a rule that returns its loss."""
    model, x, loss = (part() if number < 2 else part for number, part in enumerate(MODELS[name]))
    return model, lambda rule=None: loss(model(x)) if rule is None else gg.attach_error_clip(loss(model(x)), rule)


def compiled(function: Callable, **options) -> Callable:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def gradients(model: nn.Module, loss: Callable[..., Tensor], *args, **options) -> list[Tensor]:
    model.zero_grad()
    loss(*args, **options).backward()
    return [p.grad for p in model.parameters()]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def differ(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return not all(map(torch.equal, ours, theirs))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
