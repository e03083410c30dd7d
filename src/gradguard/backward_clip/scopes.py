"""What all kinds of blocks have in common, and which of those that run now owns a value."""

import itertools
import math
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from gradguard.backward_clip.graph import Graph, Slot
from gradguard.backward_clip.hooks import Claim, Clipping
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.torch_private import traced_scale_of

LossScale = GradScaler | Tensor | float

_OWNERS = "gradguard.backward_clip"
_serial = itertools.count()
active: dict[int, "Scope"] = {}
"""The blocks that run now, the outer ones first."""


class Scope:
    """What a block does at its beginning and at its end."""

    marks_nodes = False
    """Whether nodes carry notes of what this scope owns."""

    def __init__(self, clipping: Clipping, scale: LossScale | None) -> None:
        self.clipping, self.scale = clipping, scale
        self.serial, self.thread = next(_serial), threading.get_ident()
        self.taken: list[tuple[weakref.ref[Claim], int]] = []
        """What was taken from other scopes for the time of this one."""

    def enter(self) -> None:
        """Install what can be installed now."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse to have done nothing."""

    def refresh(self) -> None:
        """Look again at what other scopes own."""

    def nodes(self) -> list[Node]:
        """Return the nodes among which a freed one may be."""
        return []

    def exit(self) -> None:
        """Take everything out again, and give back what was taken."""
        self.clipping.remove()
        for ref, number in self.taken:
            if (claim := ref()) is not None:
                claim.numbers = (*claim.numbers, number)
        self.taken = []
        if self.clipping.observer is not None:
            self.clipping.observer.end()

    def forget_dead(self) -> None:
        """Drop what belongs to graphs that are gone, so that a long block does not grow."""
        self.clipping.forget_dead()
        self.taken = [(claim, number) for claim, number in self.taken if claim() is not None]

    def _rescale(self, device: torch.device) -> None:
        if self.scale is not None:
            self.clipping.set_scale(loss_scale(self.scale, device))

    def _begin(self, loss: Tensor | None) -> None:
        if self.clipping.observer is not None:
            self.clipping.observer.begin(loss)


def refresh_all(thread: int, but: "Scope") -> None:
    """Have the other blocks of this thread look again at what they own."""
    for scope in list(active.values()):
        if scope.thread == thread and scope is not but:
            scope.refresh()


def own(scope: "Scope", node: Node, claim: Claim) -> None:
    """Note on ``node`` itself that ``scope`` has these slots of it; the note lives as long as the node.

    A running scope that had one of them gives it up until ``scope`` ends.
    """
    owners = _metadata(node).setdefault(_OWNERS, {})
    for number in claim.numbers:
        before = owner_of(node, number)
        if before is not None and number in before.numbers:
            before.numbers = tuple(n for n in before.numbers if n != number)
            scope.taken.append((weakref.ref(before), number))
        owners[number] = (scope.serial, claim)


def owner_of(node: Node, number: int) -> Claim | None:
    """Return the claim of the running scope for parts that has this slot."""
    serial, claim = _metadata(node).get(_OWNERS, {}).get(number, (-1, None))
    return claim if serial in active else None


def owned_slots(graph: Graph, since: int = -1) -> set[Slot]:
    """Return the slots that running scopes for parts have, of those that began at ``since`` or later."""
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
    """Return the factor by which losses are multiplied now: a number on the CPU, else a tensor, without a wait.

    Raises:
        InvalidTypeError: If ``scale`` is no GradScaler, number or tensor.
        InvalidValueError: If it is not one finite number above 0.
    """
    if isinstance(scale, Tensor):
        factor = scale
    elif isinstance(scale, int | float):
        factor = float(scale)
    elif isinstance(scale, GradScaler):
        factor = _factor_of(scale, device)
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


def _factor_of(scaler: GradScaler, device: torch.device) -> float | Tensor:
    if not torch.compiler.is_compiling():
        return scaler.scale(torch.ones((), device=device))
    return traced_scale_of(scaler)


def _metadata(node: Node) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]
