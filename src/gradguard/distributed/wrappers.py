"""What modules that wrap a model know of its gradients and the parameters alone do not tell: FSDP1 and DDP."""

import gc
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradguard.distributed.placements import Placement
from gradguard.errors import UnsupportedGradientError

FLAT = "FSDP1 flat parameter"

_found: dict[tuple[int, int], list[weakref.ref[DistributedDataParallel]]] = {}
_flat: "weakref.WeakKeyDictionary[nn.Module, dict[int, Placement]]" = weakref.WeakKeyDictionary()


def flat_placements(tensors: Sequence[Tensor], module: nn.Module | None) -> dict[int, Placement]:
    """Return, by identity, how FSDP1 has spread ``tensors``, parameters of ``module``; empty if it has not.

    Args:
        tensors: The parameters.
        module: The module that they come from, if it is known.

    Raises:
        UnsupportedGradientError: If it has, and the module does not tell how: this process' part alone would be wrong.

    Returns:
        The placement of each that FSDP1 has spread.
    """
    flat = [id(t) for t in tensors if getattr(t, "_fsdp_flattened", False)]
    if not flat:
        return {}
    if module is not None and not (_flat.get(module, {}).keys() >= set(flat)):
        _flat[module] = _flat_placements(module)
    known = {} if module is None else _flat[module]
    if not known.keys() >= set(flat):
        raise UnsupportedGradientError(
            "a parameter belongs to FullyShardedDataParallel (FSDP1), and which processes hold its other parts cannot "
            "be told from the parameter. Pass the root module itself: clip_grad_norm_(model, ...), or "
            "Guard(optimizer, clipper, model=model)."
        )
    return known


def _flat_placements(module: nn.Module) -> dict[int, Placement]:
    fsdp = sys.modules["torch.distributed.fsdp"]
    placements: dict[int, Placement] = {}
    for part in module.modules():
        handle = getattr(part, "_handle", None) if isinstance(part, fsdp.FullyShardedDataParallel) else None
        if handle is not None:
            ranks = frozenset(dist.get_process_group_ranks(part.process_group))  # type: ignore[attr-defined]
            placement = Placement(None, ranks, 1 if handle.uses_sharded_strategy else len(ranks), FLAT)
            flat: Any = handle.flat_param
            placements |= {id(p): placement for p in (flat, *(flat._params or ()))}
    return placements


def refuse_unsynchronized(tensors: Sequence[Tensor]) -> None:
    """Raise if the gradients are inside DistributedDataParallel's ``no_sync()``: they are this process' own.

    Raises:
        UnsupportedGradientError: If so.
    """
    for wrapper in _wrappers_of(tensors):
        if not wrapper.require_backward_grad_sync:
            raise UnsupportedGradientError(
                "inside DistributedDataParallel.no_sync() the gradients are this process' own, not yet averaged: their "
                "norm differs from rank to rank. Clip after the backward pass that synchronizes, outside no_sync()."
            )


def _wrappers_of(tensors: Sequence[Tensor]) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules over ``tensors``: looked for once in everything that lives."""
    if not tensors:
        return []
    key = id(tensors[0]), len(tensors)
    if key not in _found:
        living = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
        wanted = {id(t) for t in tensors}
        _found[key] = [weakref.ref(w) for w in living if any(id(p) in wanted for p in w.parameters())]
        weakref.finalize(tensors[0], _found.pop, key, None)
    return [wrapper for reference in _found[key] if (wrapper := reference()) is not None]
