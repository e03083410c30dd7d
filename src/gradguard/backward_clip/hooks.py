"""Hooks on the nodes of a graph that put a rule between one backward operation and the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradguard.backward_clip.backward_graph import Graph, Slot, is_leaf, refuse_reentrant, walk
from gradguard.backward_clip.clipped_slots import steps_through
from gradguard.backward_clip.error_clip_rules import BaseErrorClip, ErrorClipNonfinite, apply_rule, clamp_bounds
from gradguard.backward_clip.source_lines import makers_with_lines
from gradguard.backward_clip.statistics import BlockCounts, NodeCounts
from gradguard.errors import InvalidTypeError, NonFiniteGradientError, UnsupportedGradientError

Gradients = tuple[Tensor | None, ...]
_LARGE = 2**16
Roots = Sequence[tuple[Node, int]]


@dataclass
class Claim:
    """The slots of one node that a scope clips; an inner scope may take some of them over until it ends."""

    numbers: tuple[int, ...]


@dataclass
class Clipping:
    """Installs a rule in graphs, and stores the handles of its hooks."""

    unscaled_rule: BaseErrorClip
    leaves: bool = False
    observer: BlockCounts | None = None
    rule: BaseErrorClip = field(init=False)
    scale: float | Tensor | None = None
    overflow_stays: bool = False
    """Whether non-finite elements become NaN in every dtype, not only in float16; True with a loss scale."""
    handles: list[RemovableHandle] = field(default_factory=list)
    reached: int = 0
    """The number of nodes to clip, plus the slots that other scopes own: 0 if there is nothing to clip."""
    _leaves_done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rule = self.unscaled_rule

    def set_scale(self, scale: float | Tensor) -> None:
        """Scale the rule for gradients of a loss that is multiplied by ``scale``."""
        self.scale, self.rule, self.overflow_stays = scale, self.unscaled_rule.scaled(scale), True

    def install(
        self,
        roots: Roots,
        *,
        roots_too: bool = False,
        stop: Callable[[Node], bool] | None = None,
        exclude: Callable[[Graph], frozenset[Slot]] | None = None,
        claimed: Callable[[Node, Claim], None] | None = None,
    ) -> Graph:
        """Hook the rule on the graph behind ``roots``.

        Args:
            roots: The values behind which the graph is clipped.
            roots_too: Whether roots with dimensions are clipped too.
            stop: A predicate for nodes that the graph leaves out, with everything behind them.
            exclude: A function that returns the slots that other scopes clip.
            claimed: A function that is called with each hooked node and its claim.

        Returns:
            The graph.
        """
        graph = walk(roots, stop)
        refuse_reentrant(graph)
        excluded = exclude(graph) if exclude is not None else frozenset()
        steps = steps_through(graph, roots_too, excluded)
        self.reached += len(steps) + len(excluded)
        makers = makers_with_lines(graph) if isinstance(self.unscaled_rule, ErrorClipNonfinite) else {}
        for node, numbers, made_by in steps:
            claim = self.hook_slots(node, numbers, makers.get(node, made_by))
            if claimed is not None:
                claimed(node, claim)
        if self.leaves:
            for position, node in enumerate(graph.nodes):
                variable = getattr(node, "variable", None) if is_leaf(node) else None
                if variable is not None and (position, 0) not in excluded:
                    self.hook_leaf(variable)
        return graph

    def hook_slots(self, node: Node, numbers: tuple[int, ...], sources: str = "") -> Claim:
        """Hook the rule on some slots of one node; ``sources`` names the operations that compute their gradients."""
        claim, name = Claim(numbers), node.name()
        row = self.observer.row(node, name, sources) if self.observer is not None else None
        self.handles.append(node.register_prehook(partial(self._clip_all, claim, row, name, sources)))
        return claim

    def hook_leaf(self, leaf: Tensor) -> None:
        """Hook the rule on the gradient of a parameter or input, before the gradient is accumulated or captured."""
        if id(leaf) in self._leaves_done:
            return
        self._leaves_done.add(id(leaf))
        node, name = get_gradient_edge(leaf).node, "AccumulateGrad"
        row = self.observer.row(node, name, "") if self.observer is not None else None
        claim = Claim((0,))
        self.handles.append(leaf.register_hook(lambda grad: self._clip_all(claim, row, name, "", (grad,))[0]))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._leaves_done.clear()

    def forget_dead(self) -> None:
        """Drop the hooks of freed nodes, whose memory would add up in a long block."""
        self.handles = [handle for handle in self.handles if handle.hooks_dict_ref() is not None]

    def _clip_all(self, claim: Claim, row: NodeCounts | None, name: str, sources: str, grads: Gradients) -> Gradients:
        """Return the gradients of one node, with the claimed slots clipped."""
        try:
            result = list(grads)
            for number in claim.numbers:
                if (grad := grads[number]) is not None:
                    result[number] = self._apply(grad) if row is None else row.clip(grad, self._apply, self._bounds())
            return tuple(result)
        except Exception as error:
            place = row.row.module if row is not None else ""
            raise explained(error, self.rule, name, place, grads, sources) from error.__cause__

    def _bounds(self) -> tuple[float, float] | None:
        return None if isinstance(self.scale, Tensor) else clamp_bounds(self.rule)

    def _apply(self, grad: Tensor) -> Tensor:
        # On the CPU, reading a large tensor costs less than writing a second one into newly allocated memory.
        is_large = type(grad) is Tensor and grad.is_cpu and grad.numel() >= _LARGE and not grad.is_complex()
        if is_large and (bounds := self._bounds()) is not None and grad.is_contiguous():
            smallest, largest = grad.detach().aminmax()
            if bounds[0] <= smallest.item() and largest.item() <= bounds[1]:
                return grad
        return apply_rule(self.rule, grad, self.overflow_stays)


def explained(
    error: Exception, rule: BaseErrorClip, name: str, place: str, grads: Gradients, sources: str = ""
) -> Exception:
    """Return ``error`` with the operation and the module at which it was raised.

    ``sources`` are the operations whose backward computed the gradient; only an error about its values names them.
    """
    where = f"the gradient of the output of {name}" + (f" in {place}" if place else "")
    if any(grad is not None and grad.is_sparse for grad in grads):
        return UnsupportedGradientError(f"{where} is sparse, and {rule} is for dense gradients: leave that value out.")
    if isinstance(error, NonFiniteGradientError | InvalidTypeError):
        text = str(error)
        if sources and isinstance(error, NonFiniteGradientError):
            text = f"{text.removesuffix('.')}; made by the backward of {sources}"
        return type(error)(f"{where}: {text}")
    error.add_note(f"{where}, under {rule}")
    return error
