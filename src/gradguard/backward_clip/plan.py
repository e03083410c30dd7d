"""Where in a graph the hooks go, and the cache of such plans by the structure of the graph."""

from collections import OrderedDict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from threading import Lock
from typing import Literal, NamedTuple

from torch.autograd.graph import Node

from gradguard.backward_clip.graph import REARRANGES, Graph, Slot, dimensions, holds_a_leaf, is_leaf, operation
from gradguard.backward_clip.pruning import Conditions, Pruning
from gradguard.torch_private import input_metadata_of

RootsToo = Literal["never", "with dimensions", "always"]


@dataclass(frozen=True)
class Plan:
    """The actions at the nodes of graphs of one structure."""

    steps: tuple["Step", ...]
    """The nodes with something to clip, in the order of the backward."""
    pruned: tuple["Step", ...]
    """Those of `steps` with a slot that needs none."""
    leaves: tuple[int, ...]
    """Nodes that accumulate the gradient of a parameter or input."""
    checkpoints: tuple[int, ...]
    """Nodes that hide a graph of their own: reentrant checkpoints."""
    conditions: Conditions


class Step(NamedTuple):
    """The action at one node."""

    position: int
    numbers: tuple[int, ...]
    """Its slots to clip."""
    pruned: tuple[int, ...]
    """Its slots that need no clip, because it would change nothing."""
    name: str
    """Such as ``"MulBackward0"``."""
    sources: str
    """The names of the nodes whose backward makes the gradients of its slots."""
    around: tuple[int, ...]
    """The positions of this node and of those from which its pruned slots get their gradients."""


@dataclass(frozen=True)
class Choice:
    """The inputs of a plan besides the graph."""

    roots_too: RootsToo = "never"
    """Which roots are intermediate values, clipped like the others: those that have dimensions, or all."""
    bounds: str = ""
    """``"symmetric"`` or ``"asymmetric"`` for a clamp to bounds around 0 that may be pruned, else empty."""
    excluded: frozenset[Slot] = frozenset()
    """Slots that another scope owns."""


Consumers = dict[Slot, list[tuple[int, int]]]
"""For each slot the (node, input number) pairs whose backward makes its gradient; an empty list for a mere root."""

_MULTIPLIES = frozenset(["Alias", "Clone", "Div", "Mean", "Mul", "Neg", "Sum", "ToCopy"])
_ADDS = frozenset(["Add", "Rsub", "Stack", "Sub"])
"""Operations that make of a 0-dim value itself times a constant, and those that put another to it."""
_MAY_DROP_DIMENSIONS = REARRANGES - {"Alias", "Clone"}

_CACHED_STRUCTURES = 64
_CACHED_CONDITIONS = 8
_plans: OrderedDict[tuple[object, ...], list[Plan]] = OrderedDict()
_lock = Lock()


def plan_for(graph: Graph, choice: Choice) -> Plan:
    """Return the plan for ``graph``: a kept one if its conditions hold, else a new one, which is kept."""
    key = (choice, graph.structure)
    with _lock:
        kept = list(_plans.get(key, ()))
        if kept:
            _plans.move_to_end(key)
    for plan in kept:
        if plan.conditions.hold(graph):
            return plan
    plan = make_plan(graph, choice)
    with _lock:
        _plans[key] = [*kept, plan][-_CACHED_CONDITIONS:]
        if len(_plans) > _CACHED_STRUCTURES:
            _plans.popitem(last=False)
    return plan


def forget_plans() -> None:
    """Empty the cache."""
    with _lock:
        _plans.clear()


def make_plan(graph: Graph, choice: Choice) -> Plan:
    """Decide for each slot of ``graph`` whether its gradient is clipped."""
    consumers = _consumers(graph)
    prunes = bool(choice.bounds) and not any(graph.metadata(s).dtype.is_complex for s in consumers)
    order = _backward_order(graph)
    pruning = Pruning(graph, consumers, choice.bounds == "symmetric")
    steps, terms = [], _Terms(graph, consumers, pruning.conditions)
    for position in order:
        clipped, pruned = [], []
        for number in sorted(pruning.slots_of.get(position, ())):
            slot = (position, number)
            if _is_clipped(graph, consumers, slot, choice) and not terms.include(slot):
                (pruned if prunes and pruning.needs_no_clamp(slot) else clipped).append(number)
                pruning.bounded.add(slot)
        if clipped or pruned:
            sources = _sources(graph, consumers, position)
            around = {position, *(user for number in pruned for user, _ in consumers[position, number])}
            name = graph.nodes[position].name()
            steps.append(Step(position, tuple(clipped), tuple(pruned), name, sources, tuple(around) if pruned else ()))
    return Plan(
        steps=tuple(steps),
        pruned=tuple(step for step in steps if step.pruned),
        leaves=tuple(i for i, node in enumerate(graph.nodes) if is_leaf(node)),
        checkpoints=tuple(i for i, node in enumerate(graph.nodes) if hides_a_graph(node)),
        conditions=pruning.conditions,
    )


def hides_a_graph(node: Node) -> bool:
    """Tell whether ``node`` is a reentrant checkpoint, which runs its forward again within the backward."""
    return hasattr(node, "run_function") and callable(node.run_function)  # type: ignore[attr-defined]


def _is_clipped(graph: Graph, consumers: Consumers, slot: Slot, choice: Choice) -> bool:
    node = graph.nodes[slot[0]]
    if is_leaf(node) or slot in choice.excluded or hides_a_graph(node):  # its values are the roots of the hidden graph
        return False
    if not consumers[slot]:  # a root and nothing else: its gradient is the loss's own 1, not an error signal
        wanted = choice.roots_too == "always" or (choice.roots_too == "with dimensions" and not graph.is_scalar(slot))
        return wanted and not holds_a_leaf(node, graph.inputs)
    return not holds_a_leaf(node, graph.inputs)


class _Terms:
    """The 0-dim values of which the root is a sum, with constant weights; asked in the order of the backward.

    The gradient of such a term is its weight in the loss, and clipping that would be another loss. A value that came to
    have no dimensions by ``squeeze`` or ``view`` is none: with a larger batch it would have some.
    """

    def __init__(self, graph: Graph, consumers: Consumers, conditions: Conditions) -> None:
        self.graph, self.consumers, self.conditions = graph, consumers, conditions
        self.found = {root for root in graph.roots if not consumers[root] and graph.is_scalar(root)}

    def include(self, slot: Slot) -> bool:
        """Tell whether the value is a term, or the stack of some."""
        uses = self.consumers[slot]
        op = operation(self.graph.nodes[slot[0]])
        if (
            len(uses) != 1
            or (uses[0][0], 0) not in self.found
            or op in _MAY_DROP_DIMENSIONS
            or not self._is_linear(*uses[0])
        ):
            return False
        expected = 1 if op == "Stack" else 0
        held = dimensions(self.graph.metadata(slot)) == expected
        self.conditions.dimensions.append((slot, expected, held))
        if held:
            self.found.add(slot)
        return held

    def _is_linear(self, position: int, edge: int) -> bool:
        """Tell whether the operation adds up or multiplies by a constant what it gets at this edge."""
        op, operands = operation(self.graph.nodes[position]), self.graph.nodes[position].next_functions
        if op in _ADDS:
            return True
        alone = all(child is None for i, (child, _) in enumerate(operands) if i != edge)
        return op in _MULTIPLIES and alone and (op != "Div" or edge == 0)


def _consumers(graph: Graph) -> Consumers:
    consumers: Consumers = {root: [] for root in graph.roots}
    for position in range(len(graph.nodes)):
        for number, slot in enumerate(graph.edges(position)):
            if slot is not None:
                consumers.setdefault(slot, []).append((position, number))
    return consumers


def _backward_order(graph: Graph) -> list[int]:
    """Return the nodes so that each comes after all whose backward makes its gradient."""
    order: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(graph.nodes)), ()))
    for position in range(len(graph.nodes)):
        for slot in graph.edges(position):
            if slot is not None:
                order.add(slot[0], position)
    return list(order.static_order())


def _sources(graph: Graph, consumers: Consumers, position: int) -> str:
    numbers = range(len(input_metadata_of(graph.nodes[position])))  # type: ignore[attr-defined]
    users = [user for number in numbers for user, _ in consumers.get((position, number), ())]
    return ", ".join({graph.nodes[user].name(): None for user in users})
