"""Read the constants in values that a loss computes from parameters alone, such as ``softplus(scale) + 0.001``.

Another optimizer trains the parameters, so the value changes from batch to batch, for all samples alike. The numbers
and settings of the operations in between do not change: one that does may be a statistic of the batch.
"""

import functools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.beside import INVERTIBLE, AffineChains, Bounds, is_affine, known_values, recovered
from gradguard.per_sample.loss.loss_graph import (
    Dependence,
    Unreadable,
    Value,
    is_parameter,
    is_tensor,
    operation,
    parents,
    walk,
)
from gradguard.per_sample.loss.operation_table import SINGLY
from gradguard.torch_private import saved_constant, saved_settings, saved_tensors

_USUAL = {"exponent": 2.0, "alpha": 1.0, "beta": 1.0, "threshold": 20.0, "p": 2.0, "ord": 2.0}
"""The numbers of settings that need no declaration in private training."""

_FACTORS = "alpha", "beta", "value", "self", "other"

_NUMBERS = frozenset([*_USUAL, *_FACTORS, "min", "max", "min_val", "max_val", "negative_slope", "input_scale", "scale"])
"""Settings that are numbers, and no dimensions, positions or sizes."""


class TrainedValue:
    """A value that parameters alone decide.

    Args:
        value: The value.
        user: The operation that takes the value.
    """

    def __init__(self, value: Value, user: Node) -> None:
        self._value, self._depends = value, Dependence(is_end=is_parameter)
        places = [*walk([value], lambda place: parents(place.node))]
        self._nodes = list(dict.fromkeys(place.node for place in places if not is_parameter(place.node)))
        leaves = {place: _content_of(place.node) for place in places if is_parameter(place.node)}
        saved = known_values([*self._nodes, user], self._depends)
        self._chains = AffineChains({one: saved[one] for one in places if one in saved} | leaves, self._depends)

    def numbers(self) -> Iterator[tuple[Hashable, Tensor | float, bool]]:
        """Yield each number, setting and size that the operations take: its place, its value, and whether it is usual.

        Usual are 0.5 as a factor, 2 as an exponent, torch's own defaults, dimensions, positions and sizes.
        """
        for place, node in enumerate(self._nodes):
            is_single = operation(node) in SINGLY
            if len(parents(node)) < len(node.next_functions):
                given = [one for one in saved_tensors(node) if not (one.requires_grad or one.dim())]
                factor = 1.0 if operation(parents(node)[0].node) == "Reciprocal" else 0.5  # torch writes 1 / x so
                for i, one in enumerate(given):
                    is_usual = operation(node) == "Mul" and not is_tensor(one) and float(one) == factor
                    yield (place, i), one if is_tensor(one) else float(one), is_usual
            settings = {name: saved_constant(node, name) for name in _FACTORS}
            settings |= {} if operation(node) in {"Expand", "ToCopy"} else saved_settings(node)
            sizes = {} if is_single else {str(i): tuple(one.shape) for i, one in enumerate(parents(node))}
            for name, setting in (settings | sizes).items():
                for i, one in enumerate(setting if isinstance(setting, Sequence) else [setting]):
                    if isinstance(one, float | int) and one == one:
                        yield (place, name, i), float(one), name not in _NUMBERS or one == _USUAL.get(name)

    @functools.cached_property
    def added(self) -> list[Bounds | None]:
        """Bounds of each constant that operations add and do not save; None where the graph does not show it."""
        edges = [self._value, *[one for n in self._nodes if not is_affine(n, self._depends) for one in parents(n)]]
        return [self._added(edge) for edge in dict.fromkeys(edges) if self._chains.add_unseen(edge)]

    def _added(self, end: Value) -> Bounds | None:
        user = next((n for n in self._nodes if operation(n) in INVERTIBLE and end in parents(n)), None)
        exact = self._chains.known.get(end)
        try:
            whole = Bounds.exactly(exact) if exact is not None else recovered(user) if user is not None else None
            found = None if whole is None else self._chains.added(end, whole)
        except Unreadable:
            return None
        return None if found is None else found.bounds


def _content_of(node: Node) -> Tensor:
    """Return the content of the parameter that a node stands for."""
    variable: Tensor = node.variable  # pyright: ignore[reportAttributeAccessIssue]
    return variable.detach()


def as_number(bounds: Bounds) -> tuple[Tensor | float, Bounds]:
    """Return a constant and its bounds, as a single number where all elements may be equal."""
    low, high = bounds.low.max(), bounds.high.min()
    if low <= high and bool(torch.isfinite(bounds.middle).all()):
        return float((low + high) / 2), Bounds(low, high)
    return bounds.middle, bounds
