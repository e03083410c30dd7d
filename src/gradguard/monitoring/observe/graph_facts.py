"""Read facts about a run from the autograd graph of its loss before the backward: compute nothing, call no hook."""

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
"""The largest number of nodes read from one graph; the rest of a larger graph is ignored."""


@dataclass(slots=True)
class GraphFacts:
    """Facts read from the graphs of the first losses.

    Attributes:
        leaves: By id, every leaf tensor that a backward writes a gradient to: a weak reference to it, the number of
            the first operation that uses it, and the count of operations that use it. Operations are numbered in the
            order of the forward.
        dtypes: The floating-point dtypes of the operations' results.
        factor: The number that the last operation multiplied the loss by, 0.25 for ``loss / 4``; None if the last
            operation multiplied by no plain number.
        doubled: The operation that a loss wrongly applies to probabilities instead of scores, and the operation that
            made the probabilities, as in ``("LogSoftmax", "Softmax")``; None without such a pair.
    """

    leaves: dict[int, tuple[weakref.ref, int, int]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    factor: float | None = None
    doubled: tuple[str, str] | None = None

    def read(self, loss: Tensor, scaled: bool) -> None:
        """Add the facts from the graph of a loss.

        Args:
            loss: The tensor that backward is called on.
            scaled: Whether a GradScaler has multiplied the loss.
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
                with suppress(TypeError):  # a user's autograd.Function may override the `name` of its node
                    self.doubled = self.doubled or _doubled(node)

    def living(self) -> list[Tensor]:
        """Return the leaves that are still alive."""
        return without_none(variable() for variable, _, _ in self.leaves.values())

    def of(self, parameters: Sequence[Tensor]) -> list[dict[str, int]]:
        """Return ``order`` and ``uses`` of each parameter; an empty dictionary for one that no graph reached.

        ``order`` is the parameter's position in the forward, counted from 0. ``uses`` is the number of operations that
        take the parameter, many for a recurrent weight; it is left out if it is 1.

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
    """Return where the forward first produced a non-finite number, and the dtype of that number.

    The function reads only tensors that autograd has saved, and none that a saved-tensor hook has packed.

    Args:
        loss: A non-finite loss, before its backward.

    Returns:
        A pair such as ``("Mul", "float16")``. Its first element is an operation, ``"data"`` for a tensor that no
        operation made, or ``"weights"``. None if no saved tensor contains a non-finite number.
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
    """Return the source of a non-finite tensor that ``node`` saved, and its dtype.

    The source is the operation ``node``, an operation before it, ``"weights"`` or ``"data"``.
    """
    before = [_beyond_views(earlier) for earlier, _ in node.next_functions if earlier is not None]
    leaves = [variable for earlier in before if (variable := _variable(earlier)) is not None]
    made = [earlier for earlier in before if _variable(earlier) is None]
    dtype = saved.dtype
    if saved_as == "result" and not (made and _dtype(made[0]) != dtype):  # with another dtype, its input was bad before
        made = [node]
    elif any(_is_bad(leaf) for leaf in leaves):
        return WEIGHTS, _plain(dtype)
    elif made:
        dtype = _dtype(made[0]) or dtype
    return (_operation(made[0]) if made else DATA), _plain(dtype)


def _operation(node: Node) -> str:
    return node.name().rstrip("0").removesuffix("Backward")


def _doubled(node: Node) -> tuple[str, str] | None:
    """Return the loss's own operation on scores and the operation that already made probabilities of them.

    Return None if ``node`` is no such loss, or if its input comes from neither Softmax nor Sigmoid.
    """
    before = node.next_functions[0][0] if node.next_functions else None
    if before is not None and _operation(node) in ("NllLoss", "NllLoss2D"):
        node = _beyond_views(before)
        before = node.next_functions[0][0] if _operation(node) == "LogSoftmax" else None
    elif _operation(node) != "BinaryCrossEntropyWithLogits":
        return None
    if before is None:
        return None
    made = _operation(_beyond_views(before))
    return (_operation(node), made) if made in ("Softmax", "Sigmoid") else None


def _dtype(node: Node) -> torch.dtype | None:
    return next((metadata.dtype for metadata in input_metadata_of(node)), None)


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
    """Yield each node of a graph, with the sequence numbers of the nodes that use its result."""
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
