"""The autograd graph behind some values: its nodes, its edges, and which of them stand for what.

A *slot* is one output of one forward operation, written (node, number): the gradient of an intermediate value arrives
at the value's slot, accumulated over all that used the value, before the node's backward operation runs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradguard.errors import FreedGraphError
from gradguard.torch_private import input_metadata_of, is_freed

Slot = tuple[int, int]
"""The position of a node in `Graph.nodes`, and which of its outputs."""

Inputs = Mapping[Node, bool]
"""Leaves that stand for something of a graph further out, and whether that is an intermediate value."""

NO_INPUTS: Inputs = {}

COMPILED = "CompiledFunctionBackward"
"""The name of the one node that compiled code is."""


class Metadata(Protocol):
    """The metadata that PyTorch has of the value of a slot."""

    shape: list[int]
    dtype: torch.dtype
    device: torch.device
    is_nested_tensor: bool
    is_cpp_nested_tensor: bool


_OPERATION = re.compile(r"(\w+?)Backward\d+")  # the number tells PyTorch's own operations from custom functions

REARRANGES = frozenset(
    [
        "Alias", "Clone", "Diagonal", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes",
        "Squeeze", "T", "Transpose", "Unbind", "UnsafeSplit", "UnsafeSplitWithSizes", "UnsafeView", "Unsqueeze", "View",
    ]
)  # fmt: skip
"""Operations of one input whose backward gives each element its own place, or none."""

VIEWS_AND_CASTS = REARRANGES | frozenset(
    ["AsStrided", "Conj", "ConjPhysical", "Expand", "NegView", "ToCopy", "Unfold", "ViewAsComplex", "ViewAsReal"]
)
"""Operations of one input whose chains from a parameter, such as ``weight.t()``, still hold that parameter."""


def operation(node: Node) -> str:
    """Return the operation of a node, ``"Mul"`` for ``MulBackward0``, and the whole name of what is not PyTorch's."""
    match = _OPERATION.fullmatch(node.name())
    return match[1] if match else node.name()


def is_leaf(node: Node) -> bool:
    """Tell whether nothing lies behind ``node``: a parameter, an input, or either of them while a graph is traced."""
    return not node.next_functions


def holds_a_leaf(node: Node, inputs: Inputs = NO_INPUTS) -> bool:
    """Return whether ``node`` is a chain of views and casts that ends at a leaf: a parameter in other clothes.

    Leaves that stand for intermediate values of a graph further out do not count.
    """
    while operation(node) in VIEWS_AND_CASTS:
        edges = [child for child, _ in node.next_functions if child is not None]
        if len(edges) != 1:
            return False
        node = edges[0]
        if is_leaf(node):
            return not inputs.get(node, False)
    return False


def root_of(value: Tensor) -> tuple[Node, int]:
    """Return the slot of ``value`` as (node, number)."""
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


@dataclass
class Graph:
    """The nodes behind some roots, each once, with the roots first.

    Graphs of the same operations, wired the same way, agree in ``structure``, whatever their shapes and values.
    """

    nodes: list[Node]
    roots: tuple[Slot, ...]
    structure: tuple[object, ...]
    index: dict[Node, int] = field(repr=False)
    inputs: Inputs = field(default_factory=dict)

    def edges(self, position: int) -> list[Slot | None]:
        """Return where the gradients go that the backward of this node makes, one entry for each of its inputs."""
        return [
            (self.index[child], number) if child in self.index else None
            for child, number in self.nodes[position].next_functions
        ]

    def is_scalar(self, slot: Slot) -> bool:
        """Tell whether the value of ``slot`` has no dimensions."""
        return dimensions(self.metadata(slot)) == 0

    def metadata(self, slot: Slot) -> "Metadata":
        """Return the shape, dtype and device of a slot's value."""
        return input_metadata_of(self.nodes[slot[0]])[slot[1]]


def dimensions(value: Metadata) -> int:
    """Return the number of dimensions of a slot's value; -1 for nested ones, which have no single shape."""
    return -1 if value.is_nested_tensor or value.is_cpp_nested_tensor else len(value.shape)


def walk(
    roots: Iterable[tuple[Node, int]],
    stop: Callable[[Node], bool] | None = None,
    inputs: Inputs = NO_INPUTS,
) -> Graph:
    """Return the graph behind ``roots``, without the nodes for which ``stop`` is true and what lies behind them."""
    index: dict[Node, int] = {}
    nodes: list[Node] = []
    slots = []
    for node, number in roots:
        if node not in index:
            index[node] = len(nodes)
            nodes.append(node)
        slots.append((index[node], number))
    structure: list[object] = [*slots]
    add, found, keep = structure.append, index.setdefault, nodes.append
    count = len(nodes)
    for node in nodes:  # grows while it is read
        add(type(node))
        if inputs and is_leaf(node):
            add(inputs.get(node))
        for child, number in node.next_functions:
            if child is None:
                add(None)
                continue
            if stop is not None and child not in index and stop(child):
                add("leaf" if holds_a_leaf(child, inputs) else "outside")
                continue
            position = found(child, count)
            if position == count:  # a new one: that it is new says which
                keep(child)
                count += 1
                add(...)
            else:
                add(position)
            if number:
                add(-number)  # negative, so that it is not taken for the position of a node
    graph = Graph(nodes, tuple(slots), (), index, inputs)
    structure += map(graph.is_scalar, slots)
    graph.structure = tuple(structure)
    return graph


_PYTORCH_SAYS = "backward through the graph a second time"


def raise_if_freed(error: RuntimeError, nodes: list[Node]) -> None:
    """Raise our error in place of PyTorch's if that is about a freed graph.

    Raises:
        FreedGraphError: If it is.
    """
    if _PYTORCH_SAYS not in str(error):
        return
    name = next((node.name() for node in nodes if is_freed(node)), None)
    where = f" at {name}" if name else ""
    raise FreedGraphError(
        f"the graph was freed by an earlier backward{where}: expected a graph that has not been gone through; compute "
        f"the loss again, or call the earlier backward with retain_graph=True."
    ) from error
