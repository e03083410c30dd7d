"""The scopes of blocks, which decide which of the running blocks clips a value.

A block clips everything behind a loss, or chosen tensors, or the values that modules compute within the block.
"""

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from gradguard.backward_clip.backward_graph import COMPILED, Graph, Slot, operation, root_of
from gradguard.backward_clip.hooks import Claim, Clipping
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.module_hooks import ForwardHook
from gradguard.torch_private import (
    current_graph_task,
    input_metadata_of,
    is_compiled,
    next_sequence_number,
    sequence_number_of,
    traced_scale_of,
    tree_leaves,
)

LossScale = GradScaler | Tensor | float

_OWNERS = "gradguard.backward_clip"
_serial = itertools.count()
active: dict[int, "Scope"] = {}
"""The running blocks, from the outermost."""


class Scope:
    """The values that a block clips: the scope installs hooks when the block begins and removes them at its end."""

    marks_nodes = False
    """Whether this scope records the slots that it owns on their nodes."""

    def __init__(self, clipping: Clipping, scale: LossScale | None) -> None:
        self.clipping, self.scale = clipping, scale
        self.serial, self.thread = next(_serial), threading.get_ident()
        self.taken: list[tuple[weakref.ref[Claim], int]] = []
        """The slots that this scope has taken over from the claims of other scopes until it ends."""

    def enter(self) -> None:
        """Install the hooks that can be installed now, and update the hooks of this thread's other blocks."""
        self._refresh_others()

    def check(self) -> None:
        """Raise if the block had nothing to clip."""

    def refresh(self) -> None:
        """Update the hooks after another scope has taken or returned slots."""

    def nodes(self) -> list[Node]:
        """Return the nodes to search for a freed one, for an error message."""
        return []

    def exit(self) -> None:
        """Remove all hooks, and return the taken slots to their previous scopes."""
        self.clipping.remove()
        for ref, number in self.taken:
            if (claim := ref()) is not None:
                claim.numbers = (*claim.numbers, number)
        self.taken = []
        if self.clipping.observer is not None:
            self.clipping.observer.end()
        self._refresh_others()

    def forget_dead(self) -> None:
        """Drop the hooks of freed graphs, whose memory would add up in a long block."""
        self.clipping.forget_dead()
        self.taken = [(claim, number) for claim, number in self.taken if claim() is not None]

    def _refresh_others(self) -> None:
        for scope in list(active.values()):
            if scope.thread == self.thread and scope is not self:
                scope.refresh()

    def _begin(self, loss: Tensor | None, device: torch.device) -> None:
        if self.clipping.observer is not None:
            self.clipping.observer.begin(loss)
        self._rescale(device)

    def _rescale(self, device: torch.device) -> None:
        if self.scale is not None:
            self.clipping.set_scale(loss_scale(self.scale, device))


def claim_slots(scope: "Scope", node: Node, claim: Claim) -> None:
    """Record in the metadata of ``node`` that ``scope`` owns these slots; the record lives as long as the node.

    A running scope that owned one of the slots does not clip it until ``scope`` ends.
    """
    owners = _metadata(node).setdefault(_OWNERS, {})
    for number in claim.numbers:
        serial, before = owners.get(number, (-1, claim))
        if serial in active and number in before.numbers:
            before.numbers = tuple(n for n in before.numbers if n != number)
            scope.taken.append((weakref.ref(before), number))
        owners[number] = (scope.serial, claim)


def owned_slots(graph: Graph, since: int = -1) -> set[Slot]:
    """Return the slots owned by running target scopes whose serial number is at least ``since``."""
    if not any(scope.marks_nodes for scope in list(active.values())):
        return set()
    marked = [(i, _metadata(node)[_OWNERS]) for i, node in enumerate(graph.nodes) if _OWNERS in _metadata(node)]
    return {
        (i, number)
        for i, owners in marked
        for number, (serial, _) in owners.items()
        if serial in active and serial >= since
    }


def loss_scale(scale: LossScale, device: torch.device) -> float | Tensor:
    """Return the current loss scale: a number, or a tensor if the scale is on another device than the CPU.

    The host does not wait for the device. In compiled code, the factor of a tensor or GradScaler is a tensor.

    Raises:
        InvalidTypeError: If ``scale`` is not a GradScaler, a number or a tensor.
        InvalidValueError: If ``scale`` is not one finite number above 0. The value is not checked on other devices, and
            nothing in compiled code.
    """
    if isinstance(scale, Tensor):
        factor = scale
    elif isinstance(scale, int | float):
        factor = float(scale)
    elif isinstance(scale, GradScaler):
        is_traced = torch.compiler.is_compiling()
        factor = traced_scale_of(scale) if is_traced else scale.scale(torch.ones((), device=device))
    else:
        raise InvalidTypeError(f"scale is {type(scale).__name__}: expected a GradScaler, a number or a tensor.")
    if torch.compiler.is_compiling():
        return factor
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            raise InvalidValueError(f"scale is a tensor of shape {tuple(factor.shape)}: expected one number.")
        if not factor.is_cpu:
            return factor.reshape(())
        factor = factor.item()
    if not 0 < factor < math.inf:
        raise InvalidValueError(f"scale={factor}: expected a finite number above 0.")
    return factor


def _metadata(node: Node) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]


class LossScope(Scope):
    """The scope of everything behind a loss."""

    def __init__(self, clipping: Clipping, scale: LossScale | None, loss: Tensor) -> None:
        super().__init__(clipping, scale)
        if loss.grad_fn is None:
            raise InvalidValueError(
                f"the loss (shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}) has no graph behind it: "
                f"expected the result of differentiable operations, computed outside torch.no_grad()."
            )
        self.loss, self.graph = loss, Graph()

    def enter(self) -> None:
        """Install the hooks, and remove the hooks of outer blocks from the shared nodes."""
        self._begin(self.loss, self.loss.device)
        self._install()
        super().enter()

    def exit(self) -> None:
        """Remove the hooks, and reinstall the hooks of outer blocks."""
        self.graph = Graph()
        super().exit()

    def refresh(self) -> None:
        """Reinstall the hooks without the slots that other scopes own."""
        if self.graph.nodes:
            self._install()

    def _install(self) -> None:
        self.clipping.remove()
        self.graph = self.clipping.install([root_of(self.loss)], exclude=self._owned_by_others)
        if not self.clipping.reached and any(operation(node) == COMPILED for node in self.graph.nodes):
            raise InvalidValueError(
                "the loss comes straight out of compiled code, whose inside no block can reach: instead of the block, "
                "call gg.attach_error_clip(loss, rule) in the compiled function, before it returns the loss."
            )

    def nodes(self) -> list[Node]:
        """Return the nodes to search for a freed one, for an error message."""
        return self.graph.nodes

    def _owned_by_others(self, graph: Graph) -> frozenset[Slot]:
        owned = owned_slots(graph)
        for scope in list(active.values()):
            if isinstance(scope, LossScope) and scope.thread == self.thread and scope.serial > self.serial:
                shared = [(i, node) for i, node in enumerate(graph.nodes) if node in scope.graph.index]
                owned |= {(i, n) for i, node in shared for n in range(len(input_metadata_of(node)))}
        return frozenset(owned)


Target = Tensor | nn.Module

_COMPILED = (
    "error_clip on a compiled module: the hooks of the block are not part of compiled code. Call "
    "gg.attach_error_clip(outputs, rule) inside the module's forward instead."
)


class TargetScope(Scope):
    """The scope of chosen tensors, and of the values that chosen modules compute in the block."""

    marks_nodes = True

    def __init__(self, clipping: Clipping, scale: LossScale | None, targets: list[Target]) -> None:
        super().__init__(clipping, scale)
        for number, target in enumerate(targets):
            _check_target(number, target)
        if clipping.leaves and not any(isinstance(target, nn.Module) for target in targets):
            raise InvalidValueError("leaves=True with chosen tensors: put parameters into the list to clip them too.")
        self.targets = targets
        self.kept: list[Node] = []
        self.starts: dict[int, list[int]] = {}
        self.forwards: set[nn.Module] = set()
        self.backwards: set[nn.Module] = set()

    def enter(self) -> None:
        """Hook the chosen tensors, and register forward hooks on the chosen modules."""
        parts = (
            one for target in self.targets for one in ([target] if isinstance(target, Tensor) else target.parameters())
        )
        self._begin(None, next((tensor.device for tensor in parts), torch.device("cpu")))
        for target in self.targets:
            if isinstance(target, Tensor):
                self._take(target)
            else:
                handles = self.clipping.handles
                before, after = ForwardHook(self._before_forward), ForwardHook(self._after_forward)
                handles.append(target.register_forward_pre_hook(before, prepend=True))
                handles.append(target.register_forward_hook(after, prepend=True, always_call=True))
        super().enter()

    def check(self) -> None:
        """Raise if a chosen module had no differentiable forward, or no backward, in the block."""
        for number, target in enumerate(self.targets):
            which = type(target).__name__ if len(self.targets) == 1 else f"{type(target).__name__}, entry {number},"
            if isinstance(target, nn.Module) and target not in self.forwards:
                raise InvalidValueError(
                    f"nothing differentiable passed through {which} in the block: run its forward inside the block, "
                    f"with gradients enabled and a parameter or an input that requires a gradient, and let it return "
                    f"tensors, nested lists, tuples or dicts of tensors, or objects with tensors as attributes."
                )
            if isinstance(target, nn.Module) and target not in self.backwards:
                raise InvalidValueError(f"no backward passed through {which} in the block: call backward() inside it.")

    def exit(self) -> None:
        """Remove the hooks, and reinstall the hooks of blocks around whole graphs."""
        self.targets, self.kept = [], []
        super().exit()

    def _take(self, value: Tensor) -> None:
        """Clip one chosen value, and take it over from the scope that clipped it."""
        node, number = root_of(value)
        if value.grad_fn is None:
            self.clipping.hook_leaf(value)
            self.kept.append(node)  # without a reference the leaf's node, and the claim on it, would be freed
            claim_slots(self, node, Claim((number,)))
        else:
            claim_slots(self, node, self.clipping.hook_slots(node, (number,)))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise InvalidTypeError(_COMPILED)
        self.starts.setdefault(threading.get_ident(), []).append(next_sequence_number())
        if current_graph_task() != -1 and module not in self.forwards:
            raise InvalidValueError(
                f"{type(module).__name__} runs within a backward, where a checkpoint computes it again: expected its "
                "forward inside the block, and torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        start = self.starts.get(threading.get_ident(), [0]).pop()
        values = [value for value in _tensors_in(output) if value.grad_fn is not None]
        roots = [root for root in map(root_of, values) if sequence_number_of(root[0]) >= start]
        if not roots:
            return
        self._rescale(values[0].device)
        self.forget_dead()
        self.clipping.install(
            roots,
            roots_too=True,
            stop=lambda node: sequence_number_of(node) < start,
            exclude=lambda graph: frozenset(owned_slots(graph, since=self.serial)),
            claimed=lambda node, claim: claim_slots(self, node, claim),
        )
        for node in {node for node, _ in roots}:
            self.clipping.handles.append(node.register_prehook(lambda grads: self.backwards.add(module)))
        self.forwards.add(module)


def _check_target(number: int, target: Any) -> None:
    if is_compiled(target):
        raise InvalidTypeError(_COMPILED)
    if isinstance(target, Tensor) and not target.requires_grad:
        raise InvalidValueError(
            f"tensor {number} of the list (shape {tuple(target.shape)}) does not require a gradient: nothing to clip."
        )
    if not isinstance(target, Tensor | nn.Module):
        raise InvalidTypeError(f"entry {number} of the list is {type(target).__name__}: expected a tensor or a module.")


def _tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors in a forward's output: in nested lists, tuples and dicts, and in attributes of objects."""
    found, visited, waiting = [], set(), [output]
    for value in waiting:  # the loop appends to the list
        if isinstance(value, Tensor):
            found.append(value)
        elif not isinstance(value, _PLAIN) and id(value) not in visited:
            visited.add(id(value))
            waiting += _contents_of(value)
    return found


_PLAIN = (
    str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType, nn.Module, torch.device, torch.dtype,
)  # fmt: skip
"""Types that contain no tensor computed by a forward."""


def _contents_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    leaves = tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return leaves
    state: Any = object.__getstate__(value)  # None, a dict of attributes, or a tuple of this dict and a dict of slots
    return [one for part in (state if isinstance(state, tuple) else (state,)) for one in (part or {}).values()]
