"""The autograd graph behind some values: its nodes, its edges, and the kinds of its operations.

A *slot* is one output of one forward operation, written (node, number). The gradient of an intermediate value arrives
at the value's slot, accumulated over all operations that use the value, before the node's backward operation runs.
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
"""The position of a node in `Graph.nodes`, and the number of one of its outputs."""

COMPILED = "CompiledFunctionBackward"
"""The name of the single node that represents compiled code."""


_OPERATION = re.compile(r"(\w+?)Backward\d+")  # only PyTorch's own operations have a number, custom functions do not

_REARRANGING = """
    Alias Clone Diagonal Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T Transpose Unbind UnsafeSplit
    UnsafeSplitWithSizes UnsafeView Unsqueeze View
"""
_CASTING = "AsStrided Conj ConjPhysical Expand NegView ToCopy Unfold ViewAsComplex ViewAsReal"

REARRANGES = frozenset(_REARRANGING.split())
"""Operations of one input whose outputs are elements of the input, each at most once."""

VIEWS_AND_CASTS = REARRANGES.union(_CASTING.split())
"""Operations of one input: a chain of them from a parameter, such as ``weight.t()``, counts as the parameter."""


def operation(node: Node) -> str:
    """Return the name of a node's operation: ``"Mul"`` for ``MulBackward0``, the whole name for a custom function."""
    match = _OPERATION.fullmatch(node.name())
    return match[1] if match else node.name()


def is_leaf(node: Node) -> bool:
    """Return whether ``node`` is a leaf of the graph: a parameter or an input, also while a graph is traced."""
    return not node.next_functions


def holds_a_leaf(node: Node) -> bool:
    """Return whether ``node`` ends a chain of views and casts that begins at a leaf, and so counts as the leaf."""
    while operation(node) in VIEWS_AND_CASTS:
        edges = [child for child, _ in node.next_functions if child is not None]
        if len(edges) != 1:
            return False
        node = edges[0]
        if is_leaf(node):
            return True
    return False


def root_of(value: Tensor) -> tuple[Node, int]:
    """Return the node of ``value`` and the number of its output."""
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


@dataclass
class Graph:
    """The nodes behind some roots, each once, starting with the roots."""

    nodes: list[Node] = field(default_factory=list)
    roots: tuple[Slot, ...] = ()
    index: dict[Node, int] = field(default_factory=dict, repr=False)
    consumers: dict[Slot, list[tuple[int, int]]] = field(default_factory=dict)
    """For each slot, the (node, input number) pairs whose backward contributes to its gradient; empty for a root that
    no other root uses."""

    def backward_order(self) -> list[int]:
        """Return the positions of the nodes in backward order: each node after all that contribute to its gradient."""
        missing = Counter(position for (position, _), users in self.consumers.items() for _ in users)
        order = [position for position in range(len(self.nodes)) if not missing[position]]
        for position in order:  # the loop appends to the list
            for child, _ in self.nodes[position].next_functions:
                if child is not None and child in self.index:
                    missing[self.index[child]] -= 1
                    if not missing[self.index[child]]:
                        order.append(self.index[child])
        return order

    def dimensions(self, slot: Slot) -> int:
        """Return the number of dimensions of a slot's value; -1 for a nested tensor, which has no single shape."""
        value = input_metadata_of(self.nodes[slot[0]])[slot[1]]
        return -1 if value.is_nested_tensor or value.is_cpp_nested_tensor else len(value.shape)


def walk(roots: Iterable[tuple[Node, int]], stop: Callable[[Node], bool] | None = None) -> Graph:
    """Return the graph behind ``roots``.

    It lacks nodes for which ``stop`` is true, except roots, and everything behind them.
    """
    index: dict[Node, int] = {}
    slots = tuple((index.setdefault(node, len(index)), number) for node, number in roots)
    nodes = [*index]
    graph = Graph(nodes, slots, index, {slot: [] for slot in slots})
    for position, node in enumerate(nodes):  # the loop appends to the list
        for edge, (child, number) in enumerate(node.next_functions):
            if child is None or (stop is not None and child not in index and stop(child)):
                continue
            at = index.setdefault(child, len(nodes))
            if at == len(nodes):
                nodes.append(child)
            graph.consumers.setdefault((at, number), []).append((position, edge))
    return graph


def refuse_reentrant(graph: Graph) -> None:
    """Refuse a reentrant checkpoint in ``graph``: it builds another graph when it recomputes within the backward.

    Raises:
        InvalidValueError: If the graph contains a reentrant checkpoint; the message names it.
    """
    for node in graph.nodes:
        if hasattr(node, "run_function"):
            raise InvalidValueError(
                f"a reentrant checkpoint ({node.name()}) hides the operations in it: expected "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )


_PYTORCH_SAYS = "backward through the graph a second time"


def raise_if_freed(error: RuntimeError, nodes: list[Node]) -> None:
    """Raise `FreedGraphError` if ``error`` is PyTorch's error about a freed graph; otherwise return.

    Raises:
        FreedGraphError: If ``error`` is about a freed graph. The message names a freed node of ``nodes``.
    """
    if _PYTORCH_SAYS not in str(error):
        return
    name = next((node.name() for node in nodes if is_freed(node)), None)
    where = f" at {name}" if name else ""
    raise FreedGraphError(
        f"the graph was freed by an earlier backward{where}: expected a graph without an earlier backward. Compute the "
        f"loss again, or call the earlier backward with retain_graph=True."
    ) from error
