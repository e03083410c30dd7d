"""Which clamps provably change nothing: those of values whose gradient is bounded because the gradient above it is.

A slot needs no clamp to [low, high] ∋ 0 if exactly one operation uses the value, the gradient that arrives at that
operation is itself within the bounds, and the operation's backward multiplies no element by more than 1 and adds none
up. A sign may flip only if the bounds are symmetric. Shapes and dtypes come in because the backward of a broadcast
operand adds up and a cast rounds: they are conditions of the plan, looked at each time that it is used again.

Operations whose backward returns a view of a larger tensor (sum, mean, cat, stack) are not among them: a clamp there
lays the gradient out anew, and sums further down would round in another order. Complex values are never pruned, because
clipping a modulus twice rounds twice.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from torch.autograd.graph import Node

from gradguard.backward_clip.graph import REARRANGES, Graph, Metadata, Slot, dimensions, operation
from gradguard.torch_private import saved_constant

_SHRINKS = frozenset({"Hardtanh", "Relu", "Sigmoid", "Tanh", "Threshold"})
_ADDS = frozenset({"Add", "Sub"})
_EDGES = dict.fromkeys(REARRANGES | _SHRINKS | {"LeakyRelu"}, 1) | dict.fromkeys(_ADDS | {"Mul"}, 2)
"""How many inputs an operation has. Overloads have one name and other edges: a product with a number has one."""
_BELOW_ONE = frozenset({"Sigmoid", "Softmax", "Tanh"})


def same_layout(first: Metadata, second: Metadata) -> bool:
    """Compare the shapes and dtypes of two slots; nested ones are never taken for equal."""
    nested = (
        first.is_nested_tensor or first.is_cpp_nested_tensor or second.is_nested_tensor or second.is_cpp_nested_tensor
    )
    return not nested and first.dtype == second.dtype and first.shape == second.shape


@dataclass
class Conditions:
    """The conditions on shapes, dtypes and constants of a graph under which a plan made for another is right."""

    alike: list[tuple[Slot, Slot]] = field(default_factory=list)
    """Pairs of slots that must have one shape and one dtype."""
    factors: list[tuple[int, str, bool]] = field(default_factory=list)
    """Nodes with a saved constant of modulus at most 1, and whether it may be negative."""
    dimensions: list[tuple[Slot, int, bool]] = field(default_factory=list)
    """Slots, and whether they have so many dimensions."""
    real: set[Slot] = field(default_factory=set)
    """Slots that must not be complex."""

    def hold(self, graph: Graph) -> bool:
        """Tell whether all of it holds of ``graph``, which has the structure of the one that was pruned."""
        nodes, metadata = graph.nodes, graph.metadata
        return (
            all((dimensions(metadata(slot)) == expected) is held for slot, expected, held in self.dimensions)
            and all(
                saved_constant(nodes[at], name) == 1 or small_factor(nodes[at], name, signed)
                for at, name, signed in self.factors
            )
            and all(same_layout(metadata(first), metadata(second)) for first, second in self.alike)
            and not any(metadata(slot).dtype.is_complex for slot in self.real)
        )


def small_factor(node: Node, name: str, signed: bool) -> bool:
    """Tell whether a constant that the node saved is at most 1 in modulus, and not negative unless ``signed``."""
    value = saved_constant(node, name)
    return not isinstance(value, complex) and abs(value) <= 1 and (signed or value >= 0)


class Pruning:
    """Decides slot by slot, in the order of the backward, and collects the conditions of its decisions."""

    def __init__(self, graph: Graph, consumers: dict[Slot, list[tuple[int, int]]], symmetric: bool) -> None:
        self.graph, self.consumers, self.symmetric = graph, consumers, symmetric
        self.bounded: set[Slot] = set()
        self._roots = frozenset(graph.roots)
        self.slots_of: dict[int, list[int]] = defaultdict(list)
        for position, number in consumers:
            self.slots_of[position].append(number)
        self.conditions = Conditions()
        self._left_out: set[Slot] = set()

    def needs_no_clamp(self, slot: Slot) -> bool:
        """Tell whether the gradient of ``slot`` is bounded without a clamp of its own; remember why."""
        uses = self.consumers[slot]
        if len(uses) != 1 or slot in self._roots:
            return False
        position, edge = uses[0]
        above = {(position, number) for number in self.slots_of.get(position, ())}
        if not above or not above <= self.bounded:
            return False
        found = self._never_grows(position, edge, slot)
        if found:
            self._left_out.add(slot)
            # One dtype goes through all of them, down from the last clamp: there it is looked at.
            self.conditions.real |= above - self._left_out
        return found

    def _never_grows(self, position: int, edge: int, slot: Slot) -> bool:
        op = operation(self.graph.nodes[position])
        if len(self.graph.edges(position)) != _EDGES.get(op):
            return False
        if op in REARRANGES or op in _SHRINKS:
            return True
        if op == "LeakyRelu":
            return self._if_small(position, "negative_slope")
        if op in _ADDS:
            if edge == 1 and ((op == "Sub" and not self.symmetric) or not self._if_small(position, "alpha")):
                return False
            return self._if_same_layout(position, slot)
        return op == "Mul" and self._through_gate(position, edge, slot)

    def _through_gate(self, position: int, edge: int, slot: Slot) -> bool:
        other = self.graph.edges(position)[1 - edge]
        if other is None:
            return False
        gate = operation(self.graph.nodes[other[0]])
        return gate in _BELOW_ONE and (gate != "Tanh" or self.symmetric) and self._if_same_layout(position, slot)

    def _if_same_layout(self, position: int, slot: Slot) -> bool:
        """Require that no operand is broadcast or cast: both, or the only one and the result, have one layout."""
        operands = [edge for edge in self.graph.edges(position) if edge is not None]
        first, second = operands if len(operands) == 2 else ((position, 0), slot)
        if not same_layout(self.graph.metadata(first), self.graph.metadata(second)):
            return False
        self.conditions.alike.append((first, second))
        return True

    def _if_small(self, position: int, name: str) -> bool:
        if not small_factor(self.graph.nodes[position], name, self.symmetric):
            return False
        self.conditions.factors.append((position, name, self.symmetric))
        return True
