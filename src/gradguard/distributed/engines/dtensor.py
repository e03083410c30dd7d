"""DTensor (FSDP2, HSDP, tensor and expert parallelism): each tensor has its device mesh and placements with it."""

import math
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.engines.engine import Engine
from gradguard.distributed.local_shard import LocalShard, cut_along
from gradguard.distributed.placements import is_sharded, local_part, placement_of
from gradguard.torch_private import has_usual_shard_order


class DTensors(Engine):
    """DTensors, of which `placement_of` tells who holds them."""

    def shard_of(self, tensor: Tensor) -> LocalShard | None:
        """Return the part, by placements; those of an unusual order do not tell its elements."""
        if not is_sharded(tensor):
            return None
        along = [_entries(tensor, d) for d in range(tensor.dim())]
        shard = cut_along(tensor.shape, along, placement_of(tensor), local_part(tensor).shape)
        return shard if has_usual_shard_order(tensor) else replace(shard, is_known=False)


def _entries(tensor: Any, d: int) -> Tensor | None:
    """Return which entries of dimension ``d`` of a DTensor this process holds; None if no mesh dimension cuts it.

    Mesh dimensions cut one after another. Where later ones have cut before, as tensor parallelism has before
    `fully_shard`, the placement is a `_StridedShard` whose split factor is the number of their parts.
    """
    sizes, coordinate = tensor.device_mesh.shape, tensor.device_mesh.get_coordinate()
    cuts = [
        (sizes[i], coordinate[i], getattr(p, "split_factor", 1))
        for i, p in enumerate(tensor.placements)
        if hasattr(p, "dim") and p.dim % tensor.dim() == d and sizes[i] > 1
    ]
    if not cuts:
        return None
    behind = [math.prod(ranks for ranks, _, _ in cuts[k:]) for k in range(1, len(cuts) + 1)]
    if all(factor in (1, parts) for (_, _, factor), parts in zip(cuts, behind, strict=True)):
        last = [(ranks, rank, 1) for ranks, rank, factor in cuts if factor > 1]
        cuts = [*(cut for cut in cuts if cut[2] == 1), *reversed(last)]
    entries = torch.arange(tensor.shape[d], device="cpu")
    for ranks, rank, factor in cuts:
        pieces = [piece.chunk(ranks)[rank : rank + 1] for piece in entries.chunk(int(factor))]
        entries = torch.cat([entries[:0], *chain(*pieces)])
    return entries
