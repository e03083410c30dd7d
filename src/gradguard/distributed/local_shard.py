"""`LocalShard`: which elements of a whole tensor this process holds, read from its layout.

Who holds a tensor, and how often, is a value of its own, `Placement`: it is one for all tensors of a mesh and
placements, so that a plan for 23,460 tensors makes a handful, and exists where no elements can be told, as of FSDP1's
flat parameters. Neither follows from the other: two replicas have equal shards, and one placement has as many shards
as there are shapes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.megatron import cut_of
from gradguard.distributed.placements import is_sharded, local_part
from gradguard.tensors.sketch import flat_chunks, hashed
from gradguard.torch_private import FlatShard, flat_shards_of, has_usual_shard_order, wrapper_slots


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A part of a whole tensor.

    Attributes:
        shape: The shape of the whole.
        own: The shape of the part; its elements are in the whole's order.
        along: For each dimension, which entries of the whole the part has, in one block or several; None where it has
            all. Empty where it has all of each.
        start: For a flat shard, its first element in the whole.
    """

    shape: tuple[int, ...]
    own: tuple[int, ...]
    along: tuple[Tensor | None, ...] = ()
    start: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """A value that two processes have in common if and only if they hold the same elements of one whole."""
        digests = [None if i is None else (len(i), int(hashed(i.clone()).sum())) for i in self.along]
        return self.own, self.start, tuple(digests)

    def entries(self, dim: int) -> Tensor:
        """Return the numbers of the entries of one dimension that the part has."""
        held = self.along[dim] if self.along else None
        return torch.arange(self.own[dim], device="cpu") if held is None else held

    def places(self, begin: int, count: int, device: torch.device) -> Tensor:
        """Return the places in the whole of ``count`` of the part's elements, from ``begin`` on."""
        left = torch.arange(begin, begin + count, device=device)
        if not self.along:
            return left + self.start
        places, stride = torch.zeros_like(left), 1
        for size, own, index in reversed(list(zip(self.shape, self.own, self.along, strict=True))):
            here = left % own
            places += stride * (here if index is None else index.to(device)[here])
            left, stride = left // own, stride * size
        return places

    def pieces(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut ``values`` of the part into chunks with their places."""
        for at, chunk in flat_chunks(values):
            yield chunk, self.places(at, len(chunk), values.device)


def cut_along(shape: Sequence[int], along: Sequence[Tensor | None]) -> LocalShard:
    """Return the part of a whole of ``shape`` that has these entries of each dimension; None stands for all."""
    own = tuple(size if index is None else len(index) for size, index in zip(shape, along, strict=True))
    is_whole = all(index is None for index in along)
    return LocalShard(tuple(shape), own, () if is_whole else tuple(along))


def shard_of(tensor: Tensor) -> LocalShard:
    """Return which part of ``tensor`` this process holds, by DTensor placements or Megatron's attributes; else all."""
    if is_sharded(tensor):
        return cut_along(tensor.shape, [_entries(tensor, d) for d in range(tensor.dim())])
    along: list[Tensor | None] = [None] * tensor.dim()
    shape = list(tensor.shape)
    if (cut := cut_of(tensor)) is not None:
        shape[cut.dim], along[cut.dim] = cut.size, cut.entries
    return cut_along(shape, along)


def flat_shards(model: nn.Module) -> Iterator[tuple[str, FlatShard, LocalShard]]:
    """Yield what FSDP1 has flattened in ``model``: name without wrappers, place in the flat tensor, and part."""
    for path, module in model.named_modules():
        front = [word for word in path.split(".") if word and word not in wrapper_slots()]
        for flat in flat_shards_of(module):
            yield ".".join([*front, flat.name]), flat, LocalShard(flat.shape, (flat.numel,), start=flat.start)


def is_told(shard: LocalShard, tensor: Tensor) -> bool:
    """Tell whether ``shard`` is the part held: its shape is the tensor's, and DTensor cut in the usual order."""
    return shard.own == tuple(local_part(tensor).shape) and (not is_sharded(tensor) or has_usual_shard_order(tensor))


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
