"""Hooks on the nodes of a graph that put a rule between one backward operation and the next."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradguard.backward_clip.graph import NO_INPUTS, Graph, Inputs, Slot, holds_a_leaf, is_leaf, root_of, walk
from gradguard.backward_clip.plan import Choice, Plan, RootsToo, Step, plan_for
from gradguard.backward_clip.rules import BaseErrorClip, ErrorClipNonfinite, apply_rule, clamp_bounds, is_trusted
from gradguard.backward_clip.source_lines import makers_with_lines
from gradguard.errors import InvalidTypeError, NonFiniteGradientError, UnsupportedGradientError
from gradguard.torch_private import have_hooks, register_prehooks, tree_leaves

Gradients = tuple[Tensor | None, ...]
_FLOAT32 = torch.float32
_LARGE = 2**16
Roots = Sequence[tuple[Node, int]]


class NodeObserver(Protocol):
    """The line of an observer's notes about one operation in one module."""

    @property
    def module(self) -> str:
        """The name of the module, empty if not known."""
        ...

    def clip(self, grad: Tensor, apply: Callable[[Tensor], Tensor], bounds: tuple[float, float] | None) -> Tensor:
        """Return ``apply(grad)``, or ``grad`` where the clamp to ``bounds`` would not change it."""
        ...


class Tally(Protocol):
    """Gradients that are not clipped because that would change nothing: they pass whenever a backward begins."""

    def add(self, node: Node, name: str, numbers: tuple[int, ...]) -> None:
        """Take note of these slots of ``node``."""

    def passes(self, grads: Gradients) -> None:
        """A backward begins."""

    def forget(self) -> None:
        """They are clipped from now on."""


class Observer:
    """Something that is shown each gradient on its way through a rule: statistics, a calibration."""

    def row(self, node: Node, name: str, sources: str) -> NodeObserver:
        """Return where the gradients of the output of ``node`` are written down."""
        raise NotImplementedError

    def tally(self) -> Tally | None:
        """Return where to add the gradients that one install leaves alone; None if there are none."""
        return None

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
    bounds: tuple[float, float] | None = None
    pruned_steps: list[tuple[Graph, tuple[Step, ...], int]] = field(default_factory=list)
    """Clamps that change nothing, for reasons that hold of real numbers, and of a backward from the roots.

    With them the id of a handle: hooks with larger ones came later than a clamp would have."""
    tallies: list[Tally] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    reached: int = 0
    """How many nodes with something to clip were found, whoever clips it."""
    _replaced: list["_Replaced"] = field(default_factory=list)
    _removals: list[Callable[[], None]] = field(default_factory=list)
    _leaves_done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rule = self.unscaled_rule

    def set_scale(self, scale: float | Tensor) -> None:
        """Take gradients for those of a loss that was multiplied by ``scale``."""
        self.scale, self.rule, self.overflow_stays = scale, self.unscaled_rule.scaled(scale), True

    def install(
        self,
        roots: Roots,
        inputs: Inputs = NO_INPUTS,
        *,
        roots_too: RootsToo = "never",
        stop: Callable[[Node], bool] | None = None,
        exclude: Callable[[Graph], frozenset[Slot]] | None = None,
        claimed: Callable[[Node, Claim], None] | None = None,
    ) -> Graph:
        """Put the rule into the graph behind ``roots``, and return that graph."""
        bounds = clamp_bounds(self.rule) if is_trusted(self.rule) else None
        simple = self.observer is None and not self.overflow_stays
        self.bounds = bounds if simple and bounds is not None and _fits_float32(bounds) else None
        graph = walk(roots, stop, inputs)
        excluded = exclude(graph) if exclude is not None else frozenset()
        plan = self._plan(graph, roots_too, excluded)
        self.reached += len(plan.steps) + len(excluded)
        tally = self.observer.tally() if self.observer is not None else None
        if plan.pruned:
            self.handles.append(roots[0][0].register_prehook(self._backward_begins))
            self.pruned_steps.append((graph, plan.pruned, self.handles[-1].id))
        hooks, kept = [], {}
        makers = makers_with_lines(graph) if isinstance(self.unscaled_rule, ErrorClipNonfinite) else {}
        for position, numbers, pruned, name, made_by, _ in plan.steps:
            node, sources = graph.nodes[position], makers.get(position, made_by)
            if tally is not None and pruned:
                tally.add(node, name, pruned)
            if numbers and claimed is None and self.bounds is not None:  # nothing in it is of this node alone
                key = numbers, name, sources
                if key not in kept:
                    kept[key] = self._prehook(node, Claim(numbers), name, sources)
                hooks.append((node, kept[key]))
                continue
            claim = Claim(numbers)
            if numbers:
                self.handles.append(node.register_prehook(self._prehook(node, claim, name, sources)))
            if claimed is not None:
                claimed(node, claim)
        if hooks:
            self._removals.append(register_prehooks(hooks))
        if tally is not None:
            self.tallies.append(tally)
            self.handles.append(roots[0][0].register_prehook(tally.passes))
        again = partial(self.install, roots_too="always", exclude=exclude, claimed=claimed)
        for position in plan.checkpoints:
            self._replaced.append(enter_checkpoint(graph.nodes[position], again))
        if self.leaves:
            chosen = [graph.nodes[i] for i in plan.leaves if (i, 0) not in excluded]
            for node in chosen:
                if node not in inputs and (variable := getattr(node, "variable", None)) is not None:
                    self.hook_leaf(variable)
        return graph

    def leave_nothing_out(self) -> None:
        """Clamp where it was left out too, from now on: a backward begins for which it may change something."""
        for graph, steps, began in self.pruned_steps:
            for position, _, pruned, name, sources, _ in steps:
                node = graph.nodes[position]
                handle = node.register_prehook(self._prehook(node, Claim(pruned), name, sources))
                self.handles.append(handle)
                table = handle.hooks_dict_ref() or {}
                for later in [key for key in table if began < key < handle.id]:
                    table[later] = table.pop(later)  # the engine reads the dict below an OrderedDict's own order
        for tally in self.tallies:
            tally.forget()
        self.pruned_steps, self.tallies, self.prune = [], [], False

    def _backward_begins(self, grads: Gradients) -> None:
        """Leave nothing out where the backward is differentiated, or somebody's hook may enlarge what was bounded.

        The backward of a backward would add up in another order.
        """
        if self.pruned_steps and (torch.is_grad_enabled() or self._are_hooked()):
            self.leave_nothing_out()

    def _are_hooked(self) -> bool:
        """Tell whether a node by which a clamp was left out, or whose value it is, has a hook of somebody else's."""
        own = {handle.id for handle in self.handles}
        nodes = [graph.nodes[i] for graph, steps, _ in self.pruned_steps for step in steps for i in step.around]
        return have_hooks(dict.fromkeys(nodes), own)

    def hook_slot(self, node: Node, number: int) -> Claim:
        """Put the rule on one slot, whatever it is."""
        claim = Claim((number,))
        self.handles.append(node.register_prehook(self._prehook(node, claim, node.name(), "")))
        return claim

    def hook_leaf(self, leaf: Tensor) -> None:
        """Put the rule on the gradient of a parameter or input before it is accumulated, or captured."""
        if id(leaf) in self._leaves_done:
            return
        self._leaves_done.add(id(leaf))
        node, name = get_gradient_edge(leaf).node, "AccumulateGrad"
        row = self.observer.row(node, name, "") if self.observer is not None else None
        claim = Claim((0,))
        self.handles.append(leaf.register_hook(lambda grad: self._clip_all(claim, row, name, "", (grad,))[0]))

    def remove(self) -> None:
        """Take out everything that was put in."""
        for handle in self.handles:
            if handle.extra_dict_ref:
                handle.remove()
            elif (hooks := handle.hooks_dict_ref()) is not None:
                hooks.pop(handle.id, None)  # what handle.remove() does, at a third of its price
        for replaced in reversed(self._replaced):
            replaced.remove()
        for removal in self._removals:
            removal()
        self.handles.clear()
        self._removals.clear()
        self.pruned_steps.clear()
        self.tallies.clear()
        self._replaced.clear()
        self._leaves_done.clear()

    def forget_dead(self) -> None:
        """Drop what belongs to nodes that are gone, so that a long block does not grow."""
        self._replaced = [replaced for replaced in self._replaced if not replaced.is_dead()]
        self.handles = [handle for handle in self.handles if handle.hooks_dict_ref() is not None]

    def _plan(self, graph: Graph, roots_too: RootsToo, excluded: frozenset[Slot]) -> Plan:
        if bounds := self._prunable_bounds():
            try:
                return plan_for(graph, Choice(roots_too, bounds, excluded))
            except Exception as error:
                self.prune = False
                warnings.warn(
                    f"gradguard could not tell which clamps change nothing, and does all of them, more slowly. Please "
                    f"report this: {type(error).__name__}: {error}",
                    stacklevel=8,
                )
        return plan_for(graph, Choice(roots_too, "", excluded))

    def _prunable_bounds(self) -> str:
        bounds = clamp_bounds(self.unscaled_rule) if self.prune else None
        if bounds is None or not bounds[0] <= 0 <= bounds[1]:
            return ""
        return "symmetric" if bounds[0] == -bounds[1] else "asymmetric"

    def _prehook(self, node: Node, claim: Claim, name: str, sources: str) -> Callable[[Gradients], Gradients | None]:
        row = self.observer.row(node, name, sources) if self.observer is not None else None
        general = partial(self._clip_all, claim, row, name, sources)
        if self.bounds is None:
            return general
        low, high = self.bounds

        def prehook(grads: Gradients) -> Gradients | None:
            grad = grads[0]  # by far the most frequent: one float32 gradient, clamped without a call in between
            if len(grads) > 1 or grad is None or grad.dtype is not _FLOAT32 or not claim.numbers or grad.is_sparse:
                return general(grads)
            if grad.numel() >= _LARGE and _is_within(grad, low, high):
                return None
            return (grad.clamp(low, high),)

        return prehook

    def _clip_all(self, claim: Claim, row: NodeObserver | None, name: str, sources: str, grads: Gradients) -> Gradients:
        """Return the gradients of one node, those of the claimed slots clipped."""
        try:
            result = list(grads)
            for number in claim.numbers:
                grad = grads[number]
                if grad is not None:
                    result[number] = self._clip_one(grad, row)
            return tuple(result)
        except Exception as error:
            place = row.module if row is not None else ""
            raise explained(error, self.rule, name, place, grads, sources) from error.__cause__

    def _clip_one(self, grad: Tensor, row: NodeObserver | None) -> Tensor:
        if row is None:
            return self._apply(grad)
        return row.clip(grad, self._apply, None if isinstance(self.scale, Tensor) else clamp_bounds(self.rule))

    def _apply(self, grad: Tensor) -> Tensor:
        if self.pruned_steps and grad.is_complex():
            raise UnsupportedGradientError("a complex gradient in a graph planned for real ones: use prune=False.")
        return apply_rule(self.rule, grad, self.overflow_stays)


class _FunctionProxy:
    """Called, it is another function; else it is the one that it stands for: some checkpoints read its attributes."""

    def __init__(self, original: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self._original, self._ours = original, ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ours(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Replaced:
    """A function of a checkpoint's node that ours stands in for, until it is removed."""

    def __init__(self, node: Any, ours: Callable[..., Any]) -> None:
        self.node, self.original = weakref.ref(node), node.run_function
        node.run_function = _FunctionProxy(node.run_function, ours)

    def is_dead(self) -> bool:
        return self.node() is None

    def remove(self) -> None:
        node = self.node()
        if node is not None:
            node.run_function = self.original


def enter_checkpoint(node: Any, install: Callable[[Roots, Inputs], Any]) -> _Replaced:
    """Have ``install`` called on the graph that a reentrant checkpoint builds when it runs its forward again."""
    original, outside = node.run_function, weakref.ref(node)
    edges = [child for child, _ in node.next_functions]

    def run_function(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        roots = [
            root_of(value) for value in tree_leaves(outputs) if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        given = [value for value in args if isinstance(value, Tensor)]
        behind = edges if len(edges) == len(given) else [outside()] * len(given)
        inputs = {
            get_gradient_edge(value).node: not (is_leaf(child) or holds_a_leaf(child))
            for value, child in zip(given, behind, strict=True)
            if value.is_leaf and value.requires_grad and child is not None
        }
        if roots:
            install(roots, inputs)
        return outputs

    return _Replaced(node, run_function)


def explained(
    error: Exception, rule: BaseErrorClip, name: str, place: str, grads: Gradients, sources: str = ""
) -> Exception:
    """Return ``error`` with the operation and the module at which it happened.

    ``sources`` are the operations whose backward made the gradient; only an error about its values names them.
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


def _is_within(grad: Tensor, low: float, high: float) -> bool:
    """Return whether a clamp would give a copy of ``grad``, as far as that is cheaper to find out than to clamp.

    On the CPU reading a large tensor costs less than writing another one into fresh memory.
    """
    if type(grad) is not Tensor or not grad.is_cpu or not grad.is_contiguous():
        return False
    smallest, largest = grad.detach().aminmax()
    return low <= smallest.item() and largest.item() <= high


def _fits_float32(bounds: tuple[float, float]) -> bool:
    return isinstance(bounds[1], float) and all(abs(bound) < torch.finfo(torch.float32).max for bound in bounds)
