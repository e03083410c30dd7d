"""What all kinds of blocks have in common, and which of those that run now owns a value."""

import itertools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from gradguard.error_clip.graph import Graph, Slot
from gradguard.error_clip.hooks import Claim, Clipping
from gradguard.errors import InvalidTypeError

LossScale = GradScaler | Tensor | float

_OWNERS = "gradguard.error_clip"
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
        """Take everything out again."""
        self.clipping.remove()
        if self.clipping.observer is not None:
            self.clipping.observer.end()

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
    """Note on ``node`` itself that ``scope`` has these slots of it; the note lives as long as the node."""
    owners = _metadata(node).setdefault(_OWNERS, {})
    for number in claim.numbers:
        owners[number] = (scope.serial, claim)


def owner_of(node: Node, number: int) -> Claim | None:
    """Return the claim of the innermost running scope for parts that has this slot."""
    serial, claim = _metadata(node).get(_OWNERS, {}).get(number, (-1, None))
    return claim if serial in active else None


def owned_slots(graph: Graph) -> set[Slot]:
    """Return the slots that running scopes for parts have."""
    if not any(scope.marks_nodes for scope in list(active.values())):
        return set()
    marked = [(i, node, _metadata(node)[_OWNERS]) for i, node in enumerate(graph.nodes) if _OWNERS in _metadata(node)]
    return {(i, number) for i, node, owners in marked for number in owners if owner_of(node, number) is not None}


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


def _metadata(node: Node) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]
