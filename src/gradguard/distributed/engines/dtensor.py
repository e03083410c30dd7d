"""DTensor (FSDP2, HSDP, tensor and expert parallelism): each tensor carries its device mesh and placements."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.engines.engine import Engine
from gradguard.distributed.local_shard import LocalShard, cut_along
from gradguard.distributed.placements import is_sharded, local_part, placement_of
from gradguard.torch_private import has_usual_shard_order


class DTensors(Engine):
    """DTensors, whose holders `placement_of` reads."""

    def shard_of(self, tensor: Tensor) -> LocalShard | None:
        """Return the part from the placements; ``is_known`` is False for placements in an unusual order."""
        if not is_sharded(tensor):
            return None
        along = [_entries(tensor, d) for d in range(tensor.dim())]
        shard = cut_along(tensor.shape, along, placement_of(tensor), local_part(tensor).shape)
        return replace(shard, is_known=shard.is_known and has_usual_shard_order(tensor), reduced=_reduced(tensor))


def _reduced(tensor: Any) -> tuple[tuple[str, int], ...]:
    """Return the operations that combine the ranks' tensors into the whole, as `LocalShard.reduced`."""
    mesh = tensor.device_mesh
    return tuple(
        (getattr(kind, "reduce_op", repr(kind)), at)
        for kind, size, at in zip(tensor.placements, mesh.shape, mesh.get_coordinate(), strict=True)
        if size > 1 and not kind.is_replicate() and not hasattr(kind, "dim")
    )


def _entries(tensor: Any, d: int) -> Tensor | None:
    """Return the indices of dimension ``d`` that this rank holds; None if no mesh dimension shards it."""
    mesh, cuts = tensor.device_mesh, list[tuple[type, float] | None]()
    for size, kind in zip(mesh.shape, tensor.placements, strict=True):
        is_cut = size > 1 and hasattr(kind, "dim") and kind.dim % tensor.dim() == d
        cuts.append((type(kind), getattr(kind, "split_factor", 0)) if is_cut else None)
    return _cut(mesh, tuple(mesh.get_coordinate()), tensor.shape[d], tuple(cuts)) if any(cuts) else None


@lru_cache(4096)
def _cut(mesh: Any, at: tuple[int, ...], size: int, cuts: Sequence[tuple[Any, int] | None]) -> Tensor:
    """Return the indices, of ``size``, that the rank ``at`` these coordinates holds, sharded by DTensor itself.

    A strided shard, as `fully_shard` makes of a tensor that tensor parallelism has sharded, has a split factor.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    kinds = [Replicate() if c is None else c[0](0, split_factor=c[1]) if c[1] else c[0](0) for c in cuts]
    return distribute_tensor(torch.arange(size, device="cpu"), mesh, kinds, src_data_rank=None).to_local().cpu()
