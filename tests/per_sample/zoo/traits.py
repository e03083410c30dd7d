"""Small models with traits of timm, diffusers, peft and torch_geometric, for those who have none of these packages.

`packages.py` tries out the packages themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from per_sample.case import Model
from per_sample.zoo.case import B, ZooCase
from per_sample.zoo.plain import NO_BFLOAT16, D, Packed, T, linear, one, rows, weight, whole, words


class Forbidding(dict[str, Any]):
    """Forbids what would change it, as the configurations of diffusers do."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("You cannot change a FrozenDict.")

    __setitem__ = __delitem__ = update = clear = pop = popitem = setdefault = copy = _refuse  # type: ignore[assignment]


class Configured(nn.Module):
    """Has a configuration that forbids changes, and notes in it, past that, how often it was called."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.config, self.counts = Forbidding(width=D, sizes=[1, 2]), counts
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            dict.__setitem__(self.config, "calls", self.config.get("calls", 0) + 1)
        return self.inner(x).tanh()


class NormThenAct(nn.BatchNorm2d):
    """A batch normalization that calls an activation in place, as `timm.layers.BatchNormAct2d` does."""

    def __init__(self, channels: int, between: bool) -> None:
        super().__init__(channels)
        self.drop = nn.Identity() if between else None
        self.act = nn.ReLU(inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        x = F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        return self.act(x if self.drop is None else self.drop(x))


def convolved(between: bool) -> ZooCase:
    return whole(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), NormThenAct(3, between), nn.Flatten(), nn.Linear(48, 2)),
        rows(2, 6, 6),
        modes=("eval", "float32", "bfloat16"),
    )


class OneOfTwo(nn.Module):
    """The loss leaves one result out."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.a, self.scale, self.c, self.known = nn.Linear(D, 2), weight(2)(), weight(4, D)(), known

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.known:
            return self.a(x) * self.scale, x @ self.c.T
        return (self.a(x) * self.scale).exp(), torch.einsum("bi,oi->bo", x, self.c).sin()


def left_out(known: bool, which: int) -> ZooCase:
    return whole(lambda: OneOfTwo(known), rows(D), loss=lambda m, i: m(*i)[which].square().sum(1).mean())


class OwnCodeInCheckpoint(nn.Module):
    """A reentrant checkpoint of code that uses a bare weight: forward runs again in backward, past all hooks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.scale, self.reentrant = nn.Linear(D, D), weight(D)(), reentrant

    def inner(self, h: Tensor) -> Tensor:
        return (h * self.scale.exp()).sin()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


class Potential(nn.Module):
    """Gives an energy, and forces by differentiating it inside forward."""

    def __init__(self, where: str, graph: bool | None = None) -> None:
        super().__init__()
        self.net, self.where, self.graph = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)), where, graph

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_() if self.where == "input" else x.detach().requires_grad_()
        energy = self.net(x)
        graph = self.training if self.graph is None else self.graph
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=graph, retain_graph=True)
        return energy, -slope


class SortedPacked(Packed):
    """Packs sequences that must come sorted by their lengths, which is the default."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths.tolist(), batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=T)[0])


def all_pairs(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all pairs beside what each sample gives."""
    x, y = m.a(x), m.b(y)
    return x @ y.mT * m.scale, x, y


PAIRS = {"a": linear(), "b": linear(), "scale": weight()}


def patches(m: Any, x: Tensor) -> Tensor:
    """A frozen batch norm whose gradient comes transposed, as in XCiT: of one sample PyTorch 2.13 computes it wrong."""
    return m.head(m.norm(m.embed(x)).flatten(2).transpose(1, 2).contiguous() ** 2)


def two_rows() -> tuple[Tensor, Tensor]:
    return torch.randn(B, D), torch.randn(B, D)


def pairs(which: int) -> ZooCase:
    return one(all_pairs, two_rows, loss=lambda m, i: m(*i)[which].square().sum(1).mean(), **PAIRS)


def by_functional_call(change: Any) -> ZooCase:
    def call(model: nn.Module, inputs: Any) -> Any:
        return torch.func.functional_call(model, {k: change(v) for k, v in model.named_parameters()}, inputs)

    return ZooCase(lambda: Model(lambda m, x: m.a(x).tanh(), a=nn.Linear(D, D)), rows(D), call)


CASES: dict[str, ZooCase] = {
    "a configuration that forbids changes": whole(Configured, rows(D)),
    "a configuration that changes": whole(lambda: Configured(True), rows(D)),
    "an activation in place inside a batch norm": convolved(False),
    "an activation in place behind a layer inside a batch norm": convolved(True),
    "a result is left out": left_out(True, 0),
    "the other result is left out": left_out(True, 1),
    "a result of other code is left out": left_out(False, 0),
    "the other result of other code is left out": left_out(False, 1),
    "reentrant checkpoint of own code": whole(lambda: OwnCodeInCheckpoint(True), rows(T, D)),
    "checkpoint of own code": whole(lambda: OwnCodeInCheckpoint(False), rows(T, D)),
    "forces of the input": whole(lambda: Potential("input"), rows(D), modes=NO_BFLOAT16),
    "forces of a copy": whole(lambda: Potential("copy"), rows(D), modes=NO_BFLOAT16),
    "energy, forces without a graph": whole(
        lambda: Potential("input", False), rows(D), modes=NO_BFLOAT16, loss=lambda m, i: m(*i)[0].square().mean()
    ),
    "energy of a potential": whole(
        lambda: Potential("copy", True), rows(D), modes=NO_BFLOAT16, loss=lambda m, i: m(*i)[0].square().mean()
    ),
    "packed sequences, sorted": whole(
        lambda: SortedPacked(nn.LSTM), lambda: (*words()(), torch.tensor([5, 4, 4, 2])), modes=NO_BFLOAT16
    ),
    "scores of all pairs, not in the loss": pairs(1),
    "scores of all pairs": pairs(0),
    "patches behind a batch norm": one(
        patches,
        rows(2, 6, 6),
        embed=lambda: nn.Conv2d(2, 3, 3),
        norm=lambda: nn.BatchNorm2d(3),
        head=linear(3, 2),
        modes=("eval", "float32"),
    ),
    "functional_call": by_functional_call(lambda value: value),
    "functional_call with values of weights": by_functional_call(lambda value: 2 * value),
}
