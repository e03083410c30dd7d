"""Select the values of a graph to clip: every intermediate one, except the root, the root's terms and parameters."""

from collections import defaultdict
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from torch.autograd.graph import Node

from gradguard.backward_clip.backward_graph import REARRANGES, Graph, Slot, holds_a_leaf, is_leaf, operation

_MULTIPLIES = frozenset(["Alias", "Clone", "Div", "Mean", "Mul", "Neg", "Sum", "ToCopy"])
_ADDS = frozenset(["Add", "Rsub", "Stack", "Sub"])
"""Operations that multiply a 0-dim value by a constant (``_MULTIPLIES``), or add another value to it (``_ADDS``)."""
_MAY_DROP_DIMENSIONS = REARRANGES - {"Alias", "Clone"}


class NodeAction(NamedTuple):
    """A node, and the slots of the node to clip."""

    node: Node
    numbers: tuple[int, ...]
    """The output numbers of the slots to clip."""
    sources: str
    """The names of the nodes whose backward computes the gradients of the node's outputs."""


def steps_through(graph: Graph, roots_too: bool, excluded: AbstractSet[Slot]) -> list[NodeAction]:
    """Return the nodes of ``graph`` with something to clip, in the order of the backward.

    Args:
        graph: The graph.
        roots_too: Whether roots with dimensions are clipped like intermediate values.
        excluded: The slots that another scope owns.
    """
    slots: dict[int, list[int]] = defaultdict(list)
    for position, number in graph.consumers:
        slots[position].append(number)
    terms = {root for root in graph.roots if not graph.consumers[root] and graph.dimensions(root) == 0}
    steps = []
    for position in graph.backward_order():
        node, numbers = graph.nodes[position], []
        if is_leaf(node) or holds_a_leaf(node):
            continue
        for number in sorted(slots[position]):
            slot = (position, number)
            if slot in excluded:
                continue
            if not graph.consumers[slot]:
                # The root is not an input of another root. The gradient of a 0-dim root is the loss's own 1.
                is_clipped = roots_too and graph.dimensions(slot) != 0
            elif _is_term(graph, slot, terms):
                terms.add(slot)
                is_clipped = False
            else:
                is_clipped = True
            numbers += [number] if is_clipped else []
        if numbers:
            users = [user for number in slots[position] for user, _ in graph.consumers[position, number]]
            sources = ", ".join(dict.fromkeys(graph.nodes[user].name() for user in users))
            steps.append(NodeAction(node, tuple(numbers), sources))
    return steps


def _is_term(graph: Graph, slot: Slot, terms: set[Slot]) -> bool:
    """Return whether a value is a 0-dim term of a root that is a sum, or a stack of such terms."""
    # The gradient of a term is its weight in the loss, and clipping it would change the loss. A value that became 0-dim
    # by `squeeze` or `view` is not a term, because with a larger batch it would have dimensions.
    (user, edge), *others = graph.consumers[slot]
    if others or (user, 0) not in terms:
        return False
    made_by, used_by = operation(graph.nodes[slot[0]]), operation(graph.nodes[user])
    operands = graph.nodes[user].next_functions
    alone = all(child is None for i, (child, _) in enumerate(operands) if i != edge)
    linear = used_by in _ADDS or (used_by in _MULTIPLIES and alone and (used_by != "Div" or edge == 0))
    scalar = graph.dimensions(slot) == (1 if made_by == "Stack" else 0)
    return linear and scalar and made_by not in _MAY_DROP_DIMENSIONS
