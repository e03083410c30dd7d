"""Facts of a run read from the graph of its loss, once before the backward: nothing is computed, no hook is called."""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.monitoring.record.record_lines import known_fields, without_none
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import input_metadata_of, saved_tensors_of, sequence_number_of

MOST_NODES = 50_000
"""Of one graph: a larger one is read in part."""


@dataclass(slots=True)
class GraphFacts:
    """Facts read from the graphs of the first losses.

    Attributes:
        leaves: Every tensor that a backward gives a gradient, not kept alive, with the number of the first operation
            that uses it (operations are numbered in the order of the forward), and how many use it.
        dtypes: The floating-point types that operations computed in.
        factor: The number that the last operation multiplied the loss by, as in ``loss / 4``; None if that is no
            number.
        doubled: The operation that a loss applies to probabilities as if they were scores, and the one that made these,
            as in ``("LogSoftmax", "Softmax")``; None without such a pair.
    """

    leaves: dict[int, tuple[weakref.ref, int, int]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    factor: float | None = None
    doubled: tuple[str, str] | None = None

    def read(self, loss: Tensor, scaled: bool) -> None:
        """Add what the graph of a loss tells.

        Args:
            loss: The tensor that backward is called on.
            scaled: Whether a GradScaler has multiplied it.
        """
        last = loss.grad_fn
        if last is not None and scaled:
            last = last.next_functions[0][0]
        if last is None:
            return
        self.factor = _factor(last)
        for node, users in _nodes(last):
            if (variable := _variable(node)) is not None:
                first, uses = min(users, default=0), len(users)
                known = self.leaves.get(id(variable))
                if known is not None and known[0]() is variable:
                    first, uses = min(first, known[1]), max(uses, known[2])
                self.leaves[id(variable)] = weakref.ref(variable), first, uses
            else:
                self.dtypes.update(_dtypes(node))
                with suppress(TypeError):  # a function of the user's may have a name of its own
                    self.doubled = self.doubled or _doubled(node)

    def living(self) -> list[Tensor]:
        """Return the leaves that are still there."""
        return without_none(variable() for variable, _, _ in self.leaves.values())

    def of(self, parameters: Sequence[Tensor]) -> list[dict[str, int]]:
        """Return of each parameter that was reached ``order``, its place in the forward from 0, and ``uses``.

        ``uses``, the number of operations that take it, is left out where it is 1: a recurrent weight has many.

        Args:
            parameters: The parameters.
        """
        reached = {}
        for p in parameters:
            variable, first, uses = self.leaves.get(id(p), (None, 0, 0))
            if variable is not None and variable() is p:
                reached[id(p)] = first, uses
        order = {number: place for place, number in enumerate(sorted({first for first, _ in reached.values()}))}
        facts = [reached.get(id(p), (-1, 1)) for p in parameters]
        return [known_fields({"order": order.get(first), "uses": uses if uses > 1 else None}) for first, uses in facts]


DATA, WEIGHTS = "data", "weights"


def origin_of(loss: Tensor) -> tuple[str, str] | None:
    """Return where the forward of a loss first had a number that is not finite, and the dtype of that number.

    Only what autograd has saved anyway is looked at, and nothing that a hook has packed away.

    Args:
        loss: A loss that is not finite, before its backward.

    Returns:
        An operation, ``"data"`` for what no operation made, or ``"weights"``, as in ``("Mul", "float16")``; None where
        nothing that was saved shows it.
    """
    if loss.grad_fn is None:
        return None
    operations = [node for node, _ in _nodes(loss.grad_fn) if _variable(node) is None]
    for node in sorted(operations, key=sequence_number_of):
        bad = {name: saved for name, saved in saved_tensors_of(node).items() if _is_bad(saved)}
        if bad:
            return _name(node, *next(iter(bad.items())))
    return None


def _name(node: Node, saved_as: str, saved: Tensor) -> tuple[str, str]:
    """Return the operation that made a tensor which ``node`` saved: itself, one before it, or None."""
    before = [_beyond_views(one) for one, _ in node.next_functions if one is not None]
    leaves = [variable for one in before if (variable := _variable(one)) is not None]
    made = [one for one in before if _variable(one) is None]
    dtype = saved.dtype
    if saved_as == "result" and not (made and _dtype(made[0]) != dtype):  # else what it was given was so already
        made = [node]
    elif any(_is_bad(leaf) for leaf in leaves):
        return WEIGHTS, _plain(dtype)
    elif made:
        dtype = _dtype(made[0]) or dtype
    return (_operation(made[0]) if made else DATA), _plain(dtype)


def _operation(node: Node) -> str:
    return node.name().rstrip("0").removesuffix("Backward")


def _doubled(node: Node) -> tuple[str, str] | None:
    """Return what a loss does to scores, and what made probabilities of what it was given; None for another node."""
    given = node.next_functions[0][0] if node.next_functions else None
    if given is not None and _operation(node) in ("NllLoss", "NllLoss2D"):
        node = _beyond_views(given)
        given = node.next_functions[0][0] if _operation(node) == "LogSoftmax" else None
    elif _operation(node) != "BinaryCrossEntropyWithLogits":
        return None
    if given is None:
        return None
    made = _operation(_beyond_views(given))
    return (_operation(node), made) if made in ("Softmax", "Sigmoid") else None


def _dtype(node: Node) -> torch.dtype | None:
    return next((one.dtype for one in input_metadata_of(node)), None)


def _beyond_views(node: Node) -> Node:
    while node.name().startswith(_VIEWS) and node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


_VIEWS = (
    "TBackward", "ToCopyBackward", "TransposeBackward", "ViewBackward", "ExpandBackward", "UnsafeViewBackward",
    "SqueezeBackward", "SelectBackward", "SliceBackward", "PermuteBackward",
)  # fmt: skip


def _variable(node: Node) -> Tensor | None:
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None


def _is_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and are_readable(tensor) and not bool(torch.isfinite(tensor).all())


def _nodes(last: Node) -> Iterator[tuple[Node, list[int]]]:
    """Yield the nodes of a graph, each with the numbers of those that use what it made."""
    users: dict[Node, list[int]] = {last: []}
    waiting = [last]
    while waiting and len(users) < MOST_NODES:
        node = waiting.pop()
        number = sequence_number_of(node)
        for before, _ in node.next_functions:
            if before is None:
                continue
            if before not in users:
                users[before] = []
                waiting.append(before)
            users[before].append(number)
    yield from users.items()


def _dtypes(node: Node) -> Iterator[str]:
    for made in input_metadata_of(node):
        dtype = getattr(made, "dtype", None)
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            yield _plain(dtype)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _factor(last: Node) -> float | None:
    name = last.name()
    divides, multiplies = name.startswith("DivBackward"), name.startswith("MulBackward")
    if not (divides or multiplies):
        return None
    numbers = [saved for saved in saved_tensors_of(last).values() if saved.dim() == 0 and are_readable(saved)]
    if len(numbers) != 1:
        return None
    number = float(numbers[0])
    if not number or not math.isfinite(number):
        return None
    return 1 / number if divides else number
