"""One model, its batch, and how a loss for each sample comes out of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

B, T = 6, 4


class Model(nn.Module):
    """A module whose forward is a function of it and its inputs, so that a table can hold it."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)


def squares(outputs: Any, batch_dim: int = 0) -> Tensor:
    """The mean squared distance of all that a sample gives from fixed targets, ``[B]``."""
    total = torch.zeros(())
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            rows = leaf.movedim(min(batch_dim, leaf.dim() - 1), 0)
            rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
            targets = torch.arange(rows.shape[1]).sin().to(rows.dtype)
            total = total + (rows - targets).square().mean(1)
    return total


@dataclass
class Case:
    """What the oracle and the clipper are both run on.

    Attributes:
        model: In float64 and train mode.
        inputs: Any nesting of tensors, all with the samples along dimension 0 (1 where not ``batch_first``).
        call: Runs the model on ``inputs``.
        loss: Called with the outputs and the inputs; the loss of each sample, ``[B]``.
        batch_first: As the clipper is told.
        stochastic: Only the sum of all gradients can be compared, under the same seed.
        refused: Words of the error that must come; "" where exactness is expected.
        either: Exact, or an error with these words.
    """

    model: nn.Module
    inputs: Any
    call: Callable[[nn.Module, Any], Any] = lambda model, inputs: model(*inputs)
    loss: Callable[[Any, Any], Tensor] | None = None
    batch_first: bool = True
    stochastic: bool = False
    refused: str = ""
    either: str = ""

    @property
    def batch_dim(self) -> int:
        return 0 if self.batch_first else 1

    @property
    def batch_size(self) -> int:
        return tree_leaves(self.inputs)[0].shape[self.batch_dim]

    def part(self, start: int, stop: int) -> Any:
        """The inputs of some samples."""
        return tree_map(lambda t: t.narrow(self.batch_dim, start, stop - start), self.inputs)

    def samples(self) -> list[Any]:
        return [self.part(i, i + 1) for i in range(self.batch_size)]

    def losses(self, inputs: Any) -> Tensor:
        outputs = self.call(self.model, inputs)
        return squares(outputs, self.batch_dim) if self.loss is None else self.loss(outputs, inputs)

    def to(self, dtype: torch.dtype) -> "Case":
        self.model.to(dtype)
        self.inputs = tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, self.inputs)
        return self


def case(model: nn.Module, *inputs: Any, **options: Any) -> Case:
    return Case(model.double().train(), inputs, **options)


def numbers(*shape: int, dim: int = 0) -> Tensor:
    """Random float64; later samples are larger, so that norms differ."""
    growth = torch.linspace(0.5, 2.0, shape[dim], dtype=torch.float64)
    return torch.randn(*shape, dtype=torch.float64) * growth.view([-1 if d == dim else 1 for d in range(len(shape))])


def tokens(*shape: int, vocabulary: int = 7) -> Tensor:
    return torch.randint(0, vocabulary, shape)


def next_token(outputs: Any, inputs: Any) -> Tensor:
    """Cross-entropy of each sample: the mean over its own positions."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    targets = inputs[0].roll(-1, 1)
    return nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
