"""The autograd graph behind some values: its nodes, its edges, and which of them stand for what.

A *slot* is one output of one forward operation, written (node, number): the gradient of an intermediate value arrives
at the value's slot, accumulated over all that used the value, before the node's backward operation runs.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradguard.errors import FreedGraphError, InvalidValueError
from gradguard.torch_private import input_metadata_of, is_freed

Slot = tuple[int, int]
"""The position of a node in `Graph.nodes`, and which of its outputs."""

COMPILED = "CompiledFunctionBackward"
"""The name of the one node that compiled code is."""


_OPERATION = re.compile(r"(\w+?)Backward\d+")  # the number tells PyTorch's own operations from custom functions

_REARRANGING = """
    Alias Clone Diagonal Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T Transpose Unbind UnsafeSplit
    UnsafeSplitWithSizes UnsafeView Unsqueeze View
"""
_CASTING = "AsStrided Conj ConjPhysical Expand NegView ToCopy Unfold ViewAsComplex ViewAsReal"

REARRANGES = frozenset(_REARRANGING.split())
"""Operations of one input whose backward gives each element its own place, or none."""

VIEWS_AND_CASTS = REARRANGES.union(_CASTING.split())
"""Operations of one input whose chains from a parameter, such as ``weight.t()``, still hold that parameter."""


def operation(node: Node) -> str:
    """Return the name of a node's operation: ``"Mul"`` for ``MulBackward0``, the whole name for a custom function."""
    match = _OPERATION.fullmatch(node.name())
    return match[1] if match else node.name()


def is_leaf(node: Node) -> bool:
    """Tell whether nothing lies behind ``node``: a parameter, an input, or either of them while a graph is traced."""
    return not node.next_functions


def holds_a_leaf(node: Node) -> bool:
    """Return whether ``node`` ends a chain of views and casts that begins at a leaf, and so still holds a parameter."""
    while operation(node) in VIEWS_AND_CASTS:
        edges = [child for child, _ in node.next_functions if child is not None]
        if len(edges) != 1:
            return False
        node = edges[0]
        if is_leaf(node):
            return True
    return False


def root_of(value: Tensor) -> tuple[Node, int]:
    """Return the slot of ``value`` as (node, number)."""
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


@dataclass
class Graph:
    """The nodes behind some roots, each once, with the roots first."""

    nodes: list[Node] = field(default_factory=list)
    roots: tuple[Slot, ...] = ()
    index: dict[Node, int] = field(default_factory=dict, repr=False)
    consumers: dict[Slot, list[tuple[int, int]]] = field(default_factory=dict)
    """For each slot the (node, input number) pairs whose backward makes its gradient; empty for an unused root."""

    def backward_order(self) -> list[int]:
        """Return the positions of the nodes in the order of the backward: each after all that add to its gradient."""
        missing = Counter(position for (position, _), users in self.consumers.items() for _ in users)
        order = [position for position in range(len(self.nodes)) if not missing[position]]
        for position in order:  # grows while it is read
            for child, _ in self.nodes[position].next_functions:
                if child is not None and child in self.index:
                    missing[self.index[child]] -= 1
                    if not missing[self.index[child]]:
                        order.append(self.index[child])
        return order

    def dimensions(self, slot: Slot) -> int:
        """Return the number of dimensions of a slot's value; -1 for nested ones, which have no single shape."""
        value = input_metadata_of(self.nodes[slot[0]])[slot[1]]
        return -1 if value.is_nested_tensor or value.is_cpp_nested_tensor else len(value.shape)


def walk(roots: Iterable[tuple[Node, int]], stop: Callable[[Node], bool] | None = None) -> Graph:
    """Return the graph behind ``roots``, without the nodes for which ``stop`` is true and what lies behind them."""
    index: dict[Node, int] = {}
    slots = tuple((index.setdefault(node, len(index)), number) for node, number in roots)
    nodes = [*index]
    graph = Graph(nodes, slots, index, {slot: [] for slot in slots})
    for position, node in enumerate(nodes):  # grows while it is read
        for edge, (child, number) in enumerate(node.next_functions):
            if child is None or (stop is not None and child not in index and stop(child)):
                continue
            at = index.setdefault(child, len(nodes))
            if at == len(nodes):
                nodes.append(child)
            graph.consumers.setdefault((at, number), []).append((position, edge))
    return graph


def refuse_reentrant(graph: Graph) -> None:
    """Raise if ``graph`` holds a reentrant checkpoint, whose recomputation within the backward makes another graph.

    Raises:
        InvalidValueError: If there is one; the message names it.
    """
    for node in graph.nodes:
        if hasattr(node, "run_function"):
            raise InvalidValueError(
                f"a reentrant checkpoint ({node.name()}) hides the operations in it: expected "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )


_PYTORCH_SAYS = "backward through the graph a second time"


def raise_if_freed(error: RuntimeError, nodes: list[Node]) -> None:
    """Raise `FreedGraphError` in place of PyTorch's error about a freed graph.

    Raises:
        FreedGraphError: If ``error`` is about a freed graph.
    """
    if _PYTORCH_SAYS not in str(error):
        return
    name = next((node.name() for node in nodes if is_freed(node)), None)
    where = f" at {name}" if name else ""
    raise FreedGraphError(
        f"the graph was freed by an earlier backward{where}: expected a graph that has not been gone through; compute "
        f"the loss again, or call the earlier backward with retain_graph=True."
    ) from error
