"""`error_clip`: the block within which gradients are clipped on their way."""

import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from gradguard.error_clip.base import BaseErrorClip
from gradguard.error_clip.calibration import Calibration
from gradguard.error_clip.freed import raise_if_freed
from gradguard.error_clip.graph import Graph, Slot, root_of
from gradguard.error_clip.hooks import Claim, Clipping
from gradguard.error_clip.modules import next_number, number_of
from gradguard.error_clip.rules import ErrorClipNonfinite
from gradguard.error_clip.statistics import ErrorClipStats
from gradguard.errors import InvalidTypeError, InvalidValueError

Part = Tensor | nn.Module
LossScale = GradScaler | Tensor | float

_OWNERS = "gradguard.error_clip"
_serial = itertools.count()
_active: dict[int, "_Scope"] = {}


@contextmanager
def error_clip(
    target: Part | Iterable[Part],
    rule: BaseErrorClip | None,
    *,
    leaves: bool = False,
    scale: LossScale | None = None,
    stats: ErrorClipStats | None = None,
    prune: bool = True,
) -> Iterator[None]:
    r"""Clip the gradient of every intermediate value while a backward runs inside the block.

    .. math:: g_v \leftarrow \text{rule}\Bigl(\sum_{w \text{ uses } v} (\partial w / \partial v)^\top g_w\Bigr)
              \quad\text{before the backward of the operation that made } v

    It helps where gradients overflow or explode *on their way*, which clipping parameter gradients afterwards cannot
    undo; it bounds no parameter gradient, so use it with `clip_grad_norm_`.

    **What is clipped** is the gradient of each intermediate value, accumulated over all operations that use the value,
    once, before the operation that made it takes it. Not the root: the loss's own 1, the loss scale, a ``gradient=``
    of yours, a constant factor on the loss. Not parameters in other clothes: chains of views and casts of a leaf, such
    as ``weight.t()``, a shard's split, autocast's copy. Not the leaves themselves, unless ``leaves``. A value is what
    one autograd node made: a fused attention, an RNN of cuDNN, a custom function, a compiled block are one each.

    **Order.** Your tensor hooks see gradients before the clip, and what they return is clipped; ``retain_grad`` and
    ``backward(inputs=[h])`` give the value before the clip at h; full backward hooks of modules see clipped ones; so do
    DDP, FSDP and the optimizer.

    **Scopes.** ``target`` may be a module, for the values that its forward makes inside the block, its outputs included
    (a 0-dim output is taken for the loss); or a list of tensors, for these values and no others. Each value has one
    rule: that of the block for chosen tensors before that for a module before that for a whole graph, and among
    blocks of one kind the innermost. A rule of ``None`` leaves a scope alone.

    **Guarantees.** Nothing stays attached after the block, also after an error. Elementwise clamps that provably change
    nothing are left out; the result is the same bit for bit. That proof counts on the backward that starts at
    ``loss``, and on no tensor hook of yours that enlarges a gradient: otherwise use ``prune=False``.

    **Edge cases.**

    ===============================  ===========================================================================
    input                            result
    ===============================  ===========================================================================
    ``retain_graph``, two backwards  both are clipped
    ``create_graph=True``            the clip is differentiated, as `torch.clamp` is
    activation checkpointing         as without it; both kinds
    float16, or ``scale=``           what is not finite becomes NaN, so that a GradScaler backs off
    sparse gradient of a value       refused, naming the operation
    compiled block in the graph      its outputs' gradients are clipped; for its inside see `attach_error_clip`
    ===============================  ===========================================================================

    Args:
        target: The loss, for the whole graph behind it; a module; or a list of tensors and modules.
        rule: What to do to each gradient: `ErrorClipByValue`, another rule, or a subclass of `BaseErrorClip`.
        leaves: Also clip the gradients of parameters and inputs, before they are accumulated (whole graph only).
        scale: The loss scale, as a GradScaler, a number or a tensor: thresholds are in units of the unscaled loss.
        stats: Counts what happens; see `ErrorClipStats`.
        prune: Whether to leave out clamps that provably change nothing (whole graph only).

    Yields:
        Nothing.

    Raises:
        InvalidValueError: If the loss has no graph, or nothing differentiable passed through the scope.
        InvalidTypeError: If ``target``, ``rule`` or ``stats`` is of another type, or the rule returns something that
            the backward cannot go on with.
        FreedGraphError: If the backward goes through a graph that an earlier one has freed.
        RuntimeError: What PyTorch raises in the block.

    Example:
        >>> import gradguard as gg, torch
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> loss = (10 * x).square().sum()
        >>> with gg.error_clip(loss, gg.ErrorClipByValue(max=5.0)):
        ...     loss.backward()  # the gradient of 10 * x is [20, 40] before the clip
        >>> x.grad
        tensor([50., 50.])

    Reference:
        PaddlePaddle, Error Clip (2018).
    """
    clipping = Clipping(checked_rule(rule), leaves=leaves, observer=_observer(rule, stats), prune=prune)
    scope = _scope(target, clipping, scale)
    try:
        _active[scope.serial] = scope
        scope.enter()
        yield
        scope.check()
    except RuntimeError as error:
        raise_if_freed(error, scope.nodes())
        raise
    finally:
        del _active[scope.serial]
        scope.exit()


def loss_scale(scale: LossScale, device: torch.device) -> float | Tensor:
    """Return the factor by which losses are multiplied now: a number on the CPU, else a tensor, without a wait.

    Raises:
        InvalidTypeError: If ``scale`` is no GradScaler, number or tensor.
    """
    if hasattr(scale, "scale") and hasattr(scale, "get_scale"):
        scale = scale.scale(torch.ones((), device=device))  # type: ignore[union-attr]
    if not isinstance(scale, Tensor | int | float):
        raise InvalidTypeError(f"scale is {type(scale).__name__}: expected a GradScaler, a number or a tensor.")
    if isinstance(scale, Tensor) and not torch.compiler.is_compiling() and scale.is_cpu:
        return scale.item()
    return scale


class _Scope:
    """What the block does at its beginning and at its end."""

    def __init__(self, clipping: Clipping, scale: LossScale | None) -> None:
        self.clipping, self.scale = clipping, scale
        self.serial, self.thread = next(_serial), threading.get_ident()

    def enter(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Refuse to have done nothing."""

    def nodes(self) -> list[Node]:
        """Return the nodes among which a freed one may be."""
        return []

    def exit(self) -> None:
        self.clipping.remove()
        if self.clipping.observer is not None:
            self.clipping.observer.end()

    def _rescale(self, device: torch.device) -> None:
        if self.scale is not None:
            self.clipping.set_scale(loss_scale(self.scale, device))

    def _begin(self, loss: Tensor | None) -> None:
        if self.clipping.observer is not None:
            self.clipping.observer.begin(loss)


class _WholeGraph(_Scope):
    """Everything behind a loss."""

    def __init__(self, clipping: Clipping, scale: LossScale | None, loss: Tensor) -> None:
        super().__init__(clipping, scale)
        if loss.grad_fn is None:
            raise InvalidValueError(
                f"the loss (shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}) has no graph behind it: "
                f"expected the result of differentiable operations, computed outside torch.no_grad()."
            )
        self.loss, self.graph = loss, Graph([], (), (), {})

    def enter(self) -> None:
        self._begin(self.loss)
        self._rescale(self.loss.device)
        for scope in self._others():
            scope.refresh()
        self.refresh()

    def exit(self) -> None:
        super().exit()
        self.graph = Graph([], (), (), {})
        for scope in self._others():
            scope.refresh()

    def refresh(self) -> None:
        """Install anew, without what other scopes own now."""
        self.clipping.remove()
        self.graph = self.clipping.install([root_of(self.loss)], exclude=self._owned_by_others)

    def nodes(self) -> list[Node]:
        return self.graph.nodes

    def _others(self) -> list["_WholeGraph"]:
        mine = (s for s in _active.values() if isinstance(s, _WholeGraph) and s.thread == self.thread)
        return [scope for scope in mine if scope is not self and scope.graph.nodes]

    def _owned_by_others(self, graph: Graph) -> frozenset[Slot]:
        inner = [scope.graph.index for scope in self._others() if scope.serial > self.serial]
        owned = owned_slots(graph)
        for index in inner:
            owned |= {(i, n) for i, node in enumerate(graph.nodes) if node in index for n in _numbers(node)}
        return frozenset(owned)


class _Parts(_Scope):
    """Chosen tensors, and the values that modules make in the block."""

    def __init__(self, clipping: Clipping, scale: LossScale | None, parts: list[Part]) -> None:
        super().__init__(clipping, scale)
        for number, part in enumerate(parts):
            _check_part(number, part)
        self.parts = parts
        self.kept: list[Node] = []
        self.taken: list[tuple[Claim, int]] = []
        self.starts: dict[int, list[int]] = {}
        self.forwards = self.backwards = 0

    def enter(self) -> None:
        self._begin(None)
        self._rescale(_device_of(self.parts))
        for part in self.parts:
            if isinstance(part, Tensor):
                self._take(part)
            else:
                handles = self.clipping.handles
                handles.append(part.register_forward_pre_hook(self._before_forward, prepend=True))
                handles.append(part.register_forward_hook(self._after_forward, prepend=True, always_call=True))
        _refresh_whole_graphs(self)

    def check(self) -> None:
        if not any(isinstance(part, nn.Module) for part in self.parts):
            return
        if not self.forwards:
            raise InvalidValueError(
                "nothing differentiable passed through the module in the block: run its forward inside the block, with "
                "gradients enabled and something in it or in its input that requires them."
            )
        if not self.backwards:
            raise InvalidValueError("no backward passed through the module in the block: call backward() inside it.")

    def exit(self) -> None:
        super().exit()
        for claim, number in self.taken:
            claim.numbers = (*claim.numbers, number)
        self.parts, self.kept, self.taken = [], [], []
        _refresh_whole_graphs(self)

    def _take(self, value: Tensor) -> None:
        """Clip one chosen value, in place of the scope that had it."""
        node, number = root_of(value)
        owner = owner_of(node, number)
        if owner is not None and number in owner.numbers:
            owner.numbers = tuple(n for n in owner.numbers if n != number)
            self.taken.append((owner, number))
        if value.grad_fn is None:
            self.clipping.hook_leaf(value)
            self.kept.append(node)  # lives only as long as somebody holds it
            self._own(node, Claim((number,)))
        else:
            self._own(node, self.clipping.hook_slot(node, number))

    def _own(self, node: Node, claim: Claim) -> None:
        owners = _metadata(node).setdefault(_OWNERS, {})
        for number in claim.numbers:
            owners[number] = (self.serial, claim)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise InvalidTypeError(_COMPILED)
        self.starts.setdefault(threading.get_ident(), []).append(next_number())

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        start = self.starts[threading.get_ident()].pop()
        values = [v for v in tree_leaves(output) if isinstance(v, Tensor) and v.grad_fn is not None]
        roots = [root for root in map(root_of, values) if number_of(root[0]) >= start]
        if not roots:
            return
        self._rescale(values[0].device)
        self.clipping.forget_dead()
        self.clipping.install(
            roots,
            roots_too=True,
            stop=lambda node: number_of(node) < start,
            exclude=lambda graph: frozenset(owned_slots(graph)),
            claimed=self._own,
        )
        self.clipping.handles += [node.register_prehook(self._passed) for node in {node for node, _ in roots}]
        self.forwards += 1

    def _passed(self, grads: Any) -> None:
        self.backwards += 1


_COMPILED = (
    "error_clip on a compiled module: the hooks of the block are not part of compiled code. Call "
    "gg.attach_error_clip(outputs, rule) inside the module's forward instead."
)


def owner_of(node: Node, number: int) -> Claim | None:
    """Return the claim of the innermost running scope for parts that has this slot."""
    serial, claim = _metadata(node).get(_OWNERS, {}).get(number, (-1, None))
    return claim if serial in _active else None


def owned_slots(graph: Graph) -> set[Slot]:
    """Return the slots that running scopes for parts have."""
    if not any(isinstance(scope, _Parts) for scope in _active.values()):
        return set()
    marked = [(i, node, _metadata(node)[_OWNERS]) for i, node in enumerate(graph.nodes) if _OWNERS in _metadata(node)]
    return {(i, number) for i, node, owners in marked for number in owners if owner_of(node, number) is not None}


def _refresh_whole_graphs(scope: _Scope) -> None:
    for other in list(_active.values()):
        if isinstance(other, _WholeGraph) and other.thread == scope.thread and other.graph.nodes:
            other.refresh()


def _metadata(node: Node) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]


def _numbers(node: Node) -> range:
    return range(len(node._input_metadata))  # type: ignore[attr-defined]


def _scope(target: Any, clipping: Clipping, scale: LossScale | None) -> _Scope:
    if isinstance(target, Tensor):
        return _WholeGraph(clipping, scale, target)
    if isinstance(target, nn.Module):
        return _Parts(clipping, scale, [target])
    if isinstance(target, str | bytes) or not isinstance(target, Iterable):
        raise InvalidTypeError(f"target is {type(target).__name__}: expected a loss, a module, or a list of tensors.")
    parts = list(target)
    if not parts:
        raise InvalidValueError("target is an empty list: expected tensors or modules.")
    return _Parts(clipping, scale, parts)


def _check_part(number: int, part: Any) -> None:
    if isinstance(part, torch._dynamo.eval_frame.OptimizedModule if "torch._dynamo" in sys.modules else ()):
        raise InvalidTypeError(_COMPILED)
    if isinstance(part, Tensor) and not part.requires_grad:
        raise InvalidValueError(
            f"tensor {number} of the list (shape {tuple(part.shape)}) does not require a gradient: nothing to clip."
        )
    if not isinstance(part, Tensor | nn.Module):
        raise InvalidTypeError(f"entry {number} of the list is {type(part).__name__}: expected a tensor or a module.")


def _device_of(parts: list[Part]) -> torch.device:
    for part in parts:
        for tensor in (part,) if isinstance(part, Tensor) else part.parameters():
            return tensor.device
    return torch.device("cpu")


def checked_rule(rule: Any) -> BaseErrorClip:
    """Return ``rule``, or the rule that does nothing for None.

    Raises:
        InvalidTypeError: If it is no rule.
    """
    if rule is None:
        return ErrorClipNonfinite("keep")
    if isinstance(rule, BaseErrorClip):
        return rule
    hint = f": did you mean gg.ErrorClipByValue({rule})?" if isinstance(rule, int | float) else "."
    raise InvalidTypeError(f"rule is {type(rule).__name__}, expected one such as gg.ErrorClipByValue(max=5.0){hint}")


def _observer(rule: Any, stats: Any) -> Any:
    if isinstance(rule, Calibration):
        if stats is not None:
            raise InvalidTypeError("a calibration is its own statistics: leave stats= out.")
        return rule
    if stats is not None and not isinstance(stats, ErrorClipStats):
        raise InvalidTypeError(f"stats is {type(stats).__name__}: expected gg.ErrorClipStats().")
    return stats
