"""Hooks on the nodes of a graph that put a rule between one backward operation and the next."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradguard.error_clip.base import BaseErrorClip
from gradguard.error_clip.graph import Graph, Slot, root_of, walk
from gradguard.error_clip.plan import Choice, plan_for
from gradguard.errors import InvalidTypeError, NonFiniteGradientError, UnsupportedGradientError

Gradients = tuple[Tensor | None, ...]
Roots = Sequence[tuple[Node, int]]


class Row(Protocol):
    """What an observer writes down about one operation."""

    def clip(self, grad: Tensor, apply: Callable[[Tensor], Tensor], bounds: tuple[float, float] | None) -> Tensor:
        """Return ``apply(grad)``, or ``grad`` where the clamp to ``bounds`` would not change it."""
        ...


class Observer(Protocol):
    """Something that is shown each gradient on its way through a rule: statistics, a calibration."""

    def row(self, node: Node, name: str, sources: str) -> Row:
        """Return where the gradients of the output of ``node`` are written down."""
        ...

    def skipped(self, node: Node, name: str, numbers: tuple[int, ...]) -> None:
        """Take note of slots that are not clipped because that would change nothing."""

    def place(self, node: Node) -> str:
        """Return the name of the module that recorded ``node``, empty if not known."""
        ...

    def begin(self, loss: Tensor | None) -> None:
        """A block begins."""

    def end(self) -> None:
        """A block ends."""


@dataclass
class Claim:
    """The slots of one node that one scope clips; an inner scope takes some of them away for a while."""

    numbers: tuple[int, ...]


@dataclass
class Clipping:
    """A rule on its way into graphs: what to install, and everything that is installed."""

    unscaled_rule: BaseErrorClip
    leaves: bool = False
    observer: Observer | None = None
    prune: bool = False
    rule: BaseErrorClip = field(init=False)
    scale: float | Tensor | None = None
    overflow_stays: bool = False
    """Whether non-finite elements become NaN in every dtype, not in float16 alone: there is a loss scale to lower."""
    handles: list[Any] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _leaves_done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rule = self.unscaled_rule

    def set_scale(self, scale: float | Tensor) -> None:
        """Take gradients for those of a loss that was multiplied by ``scale``."""
        self.scale, self.rule, self.overflow_stays = scale, self.unscaled_rule.scaled(scale), True

    def install(
        self,
        roots: Roots,
        *,
        roots_too: bool = False,
        stop: Callable[[Node], bool] | None = None,
        inputs: Set[Node] = frozenset(),
        exclude: Callable[[Graph], frozenset[Slot]] | None = None,
        claimed: Callable[[Node, Claim], None] | None = None,
    ) -> Graph:
        """Put the rule into the graph behind ``roots``, and return that graph."""
        graph = walk(roots, stop, inputs)
        excluded = exclude(graph) if exclude is not None else frozenset()
        plan = plan_for(graph, Choice(roots_too, self._prunable_bounds(), excluded))
        for position, numbers, pruned, name, sources in plan.steps if self.observer is not None else plan.hooks:
            node, claim = graph.nodes[position], Claim(numbers)
            if pruned and self.observer is not None:
                self.observer.skipped(node, name, pruned)
            if not numbers:
                continue
            self.handles.append(node.register_prehook(self._prehook(node, claim, name, sources)))
            if claimed is not None:
                claimed(node, claim)
        for position in plan.checkpoints:
            self._enter_checkpoint(graph.nodes[position])
        if self.leaves:
            chosen = [graph.nodes[i] for i in plan.leaves if (i, 0) not in excluded]
            self._hook_leaves([node for node in chosen if node not in inputs])
        return graph

    def hook_slot(self, node: Node, number: int) -> Claim:
        """Put the rule on one slot, whatever it is."""
        claim = Claim((number,))
        self.handles.append(node.register_prehook(self._prehook(node, claim, node.name(), "")))
        return claim

    def hook_leaf(self, leaf: Tensor, name: str = "AccumulateGrad") -> None:
        """Put the rule on the gradient of a parameter or input before it is accumulated, or captured."""
        node = get_gradient_edge(leaf).node
        if id(leaf) in self._leaves_done:
            return
        self._leaves_done.add(id(leaf))
        row = self.observer.row(node, name, "") if self.observer is not None else None
        self.handles.append(leaf.register_hook(lambda grad: self._clip_one(grad, row, name, "")))

    def remove(self) -> None:
        """Take out everything that was put in."""
        for handle in self.handles:
            handle.remove()
        for undo in reversed(self._undo):
            undo()
        self.handles.clear()
        self._undo.clear()
        self._leaves_done.clear()

    def forget_dead(self) -> None:
        """Drop the handles of nodes that are gone, so that a long block does not grow."""
        self.handles = [handle for handle in self.handles if handle.hooks_dict_ref() is not None]

    def _prunable_bounds(self) -> str:
        bounds = self.unscaled_rule.bounds() if self.prune else None
        if bounds is None or not bounds[0] <= 0 <= bounds[1]:
            return ""
        return "symmetric" if bounds[0] == -bounds[1] else "asymmetric"

    def _prehook(self, node: Node, claim: Claim, name: str, sources: str) -> Callable[[Gradients], Gradients | None]:
        if self.observer is not None or self.overflow_stays or not is_trusted(self.rule):
            return self._careful_prehook(node, claim, name, sources)
        clip = self.rule.clip

        def prehook(grads: Gradients) -> Gradients | None:
            try:
                if len(grads) == 1:
                    grad = grads[0]
                    if grad is None or not claim.numbers:
                        return None
                    clipped = clip(grad)
                    return (clipped if grad.dtype is not torch.float16 else keep_overflow(grad, clipped),)
                return _replaced(grads, claim.numbers, lambda grad: self._clip_one(grad, None, name, ""))
            except Exception as error:
                raise explained(error, self.rule, name, "", grads) from error.__cause__

        return prehook

    def _careful_prehook(
        self, node: Node, claim: Claim, name: str, sources: str
    ) -> Callable[[Gradients], Gradients | None]:
        row = self.observer.row(node, name, sources) if self.observer is not None else None
        place = self.observer.place(node) if self.observer is not None else ""

        def prehook(grads: Gradients) -> Gradients | None:
            try:
                return _replaced(grads, claim.numbers, lambda grad: self._clip_one(grad, row, name, place))
            except Exception as error:
                raise explained(error, self.rule, name, place, grads) from error.__cause__

        return prehook

    def _clip_one(self, grad: Tensor, row: Row | None, name: str, place: str) -> Tensor:
        if row is None:
            return self._apply(grad)
        return row.clip(grad, self._apply, None if isinstance(self.scale, Tensor) else self.rule.bounds())

    def _apply(self, grad: Tensor) -> Tensor:
        return apply_rule(self.rule, grad, self.overflow_stays)

    def _hook_leaves(self, nodes: list[Node]) -> None:
        for node in nodes:
            variable = getattr(node, "variable", None)
            if variable is not None:
                self.hook_leaf(variable)

    def _enter_checkpoint(self, node: Node) -> None:
        enter_checkpoint(node, lambda roots, inputs: self.install(roots, inputs=inputs), self._undo)


def enter_checkpoint(node: Any, install: Callable[[Roots, Set[Node]], Any], undo: list[Callable[[], None]]) -> None:
    """Have ``install`` called on the graph that a reentrant checkpoint builds when it runs its forward again."""
    original = node.run_function

    def run_function(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        found = outputs if isinstance(outputs, tuple | list) else (outputs,)
        roots = [root_of(value) for value in found if isinstance(value, Tensor) and value.grad_fn is not None]
        inputs = {get_gradient_edge(a).node for a in args if isinstance(a, Tensor) and a.is_leaf and a.requires_grad}
        install(roots, inputs)
        return outputs

    node.run_function = run_function
    undo.append(lambda: setattr(node, "run_function", original))


def apply_rule(rule: BaseErrorClip, grad: Tensor, overflow_stays: bool = False) -> Tensor:
    """Return what ``rule`` makes of ``grad``, checked, with overflow left visible where a loss scale depends on it."""
    clipped = checked(rule, grad, rule.clip(grad))
    return keep_overflow(grad, clipped) if overflow_stays or grad.dtype is torch.float16 else clipped


def is_trusted(rule: BaseErrorClip) -> bool:
    """Tell whether the rule is one of ours, whose results need no check."""
    return type(rule).__module__.startswith("gradguard.error_clip.")


def keep_overflow(grad: Tensor, clipped: Tensor) -> Tensor:
    """Return ``clipped`` with NaN wherever ``grad`` is not finite, so that a GradScaler sees the overflow."""
    return clipped + (grad - grad)


def checked(rule: BaseErrorClip, grad: Tensor, clipped: Any) -> Tensor:
    """Return ``clipped`` if the backward can go on with it.

    Raises:
        InvalidTypeError: If it is no tensor of the same shape, dtype and device.
    """
    if is_trusted(rule):
        return clipped
    expected = f"tensor of shape {tuple(grad.shape)}, {grad.dtype}, on {grad.device}"
    if not isinstance(clipped, Tensor):
        raise InvalidTypeError(f"{type(rule).__name__}.clip returned {type(clipped).__name__}: expected a {expected}.")
    if (clipped.shape, clipped.dtype, clipped.device) != (grad.shape, grad.dtype, grad.device):
        got = f"one of shape {tuple(clipped.shape)}, {clipped.dtype}, on {clipped.device}"
        raise InvalidTypeError(f"{type(rule).__name__}.clip returned {got}: expected a {expected}.")
    return clipped


def explained(error: Exception, rule: BaseErrorClip, name: str, place: str, grads: Gradients) -> Exception:
    """Return ``error`` with the operation and the module at which it happened."""
    where = f"the gradient of the output of {name}" + (f" in {place}" if place else "")
    if any(grad is not None and grad.is_sparse for grad in grads):
        return UnsupportedGradientError(f"{where} is sparse, and {rule} is for dense gradients: leave that value out.")
    if isinstance(error, NonFiniteGradientError | InvalidTypeError):
        return type(error)(f"{where}: {error}")
    error.add_note(f"{where}, under {rule}")
    return error


def _replaced(grads: Gradients, numbers: tuple[int, ...], clip: Callable[[Tensor], Tensor]) -> Gradients:
    result = list(grads)
    for number in numbers:
        grad = grads[number]
        if grad is not None:
            result[number] = clip(grad)
    return tuple(result)
