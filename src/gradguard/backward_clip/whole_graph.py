"""The block for everything behind a loss."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradguard.backward_clip.graph import COMPILED, Graph, Slot, is_leaf, operation, root_of
from gradguard.backward_clip.hooks import Clipping
from gradguard.backward_clip.scopes import LossScale, Scope, active, owned_slots, refresh_all
from gradguard.errors import InvalidValueError
from gradguard.torch_private import call_before_backwards, input_metadata_of


class WholeGraph(Scope):
    """Everything behind a loss."""

    def __init__(self, clipping: Clipping, scale: LossScale | None, loss: Tensor) -> None:
        super().__init__(clipping, scale)
        if loss.grad_fn is None:
            raise InvalidValueError(
                f"the loss (shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}) has no graph behind it: "
                f"expected the result of differentiable operations, computed outside torch.no_grad()."
            )
        self.loss, self.graph = loss, Graph([], (), (), {})
        self._unsubscribe: Callable[[], None] | None = None

    def enter(self) -> None:
        """Install, and have outer blocks give way."""
        if self.clipping.prune:
            self._unsubscribe = call_before_backwards(self._backward_begins)
            self.clipping.prune = self._unsubscribe is not None
        self._begin(self.loss)
        self._rescale(self.loss.device)
        self._install()
        refresh_all(self.thread, but=self)

    def exit(self) -> None:
        """Take everything out, and have outer blocks come back."""
        super().exit()
        if self._unsubscribe is not None:
            self._unsubscribe()
        self.graph = Graph([], (), (), {})
        refresh_all(self.thread, but=self)

    def refresh(self) -> None:
        """Install anew, without what other scopes own now."""
        if self.graph.nodes:
            self._install()

    def _install(self) -> None:
        self.clipping.remove()
        self.graph = self.clipping.install([root_of(self.loss)], exclude=self._owned_by_others)
        if not self.clipping.reached and any(operation(node) == COMPILED for node in self.graph.nodes):
            raise InvalidValueError(
                "the loss comes straight out of compiled code, whose inside no block can reach: call "
                "gg.attach_error_clip(loss, rule) there, before the loss is returned, instead of a block."
            )

    def nodes(self) -> list[Node]:
        """Return the nodes among which a freed one may be."""
        return self.graph.nodes

    def _backward_begins(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """Leave no clamp out where values of this graph get gradients from elsewhere than its loss."""
        graph = self.graph  # another thread may end its block meanwhile
        if graph.nodes and self.clipping.left_out and _enters_beside_loss(graph, roots):
            self.clipping.leave_nothing_out()

    def _others(self) -> list["WholeGraph"]:
        mine = (s for s in list(active.values()) if isinstance(s, WholeGraph) and s.thread == self.thread)
        return [scope for scope in mine if scope is not self and scope.graph.nodes]

    def _owned_by_others(self, graph: Graph) -> frozenset[Slot]:
        inner = [scope.graph.index for scope in self._others() if scope.serial > self.serial]
        owned = owned_slots(graph)
        for index in inner:
            owned |= {(i, n) for i, node in enumerate(graph.nodes) if node in index for n in _numbers(node)}
        return frozenset(owned)


def _enters_beside_loss(graph: Graph, roots: Sequence[Tensor | GradientEdge]) -> bool:
    """Tell whether a backward from ``roots`` comes to a value of ``graph`` on another way than through its loss."""
    loss = graph.nodes[0]
    nodes = [r.node if isinstance(r, GradientEdge) else root_of(r)[0] for r in roots if _has_graph(r)]
    seen = set(nodes)
    for node in nodes:  # grows while it is read
        if node is loss or is_leaf(node):
            continue
        if node in graph.index:
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                nodes.append(child)
    return False


def _has_graph(root: Tensor | GradientEdge) -> bool:
    return isinstance(root, GradientEdge) or root.grad_fn is not None


def _numbers(node: Node) -> range:
    return range(len(input_metadata_of(node)))  # type: ignore[attr-defined]
