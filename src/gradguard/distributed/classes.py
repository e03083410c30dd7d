"""Which gradients of a list add up alike, so that the norm of all needs few numbers; and which lie in one buffer."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.placements import is_sharded
from gradguard.torch_private import base_of, spec_of

_LOOKED_AT = 16
"""Gradients that are looked at before all of them are."""


class Classes:
    """The gradients of one list in classes: those of one replication factor together, whole ones each by itself.

    A whole gradient may be missing on some processes, so that it needs a place of its own.

    Args:
        weights: One over the number of processes that hold the same part of each.
        whole: Whether every process holds all of it.
        padded: What `padded_numel` returned for each.
        device: Where norms are added up.

    Attributes:
        weights: Those of the classes, whole ones last.
        whole: Where the whole gradients stand in the list.
    """

    def __init__(
        self, weights: Sequence[float], whole: Sequence[bool], padded: Sequence[int], device: torch.device
    ) -> None:
        spread = [i for i, alone in enumerate(whole) if not alone]
        # Every process has the same classes, also a pipeline stage that has no parameter of some of them.
        values = sorted({weights[i] for i in spread})
        self._members = [[i for i in spread if weights[i] == value] for value in values]
        self._whole = [i for i, alone in enumerate(whole) if alone]
        self._padded = padded
        self._everything = len(self._members) == 1 and not self._whole
        every = [*values, *(weights[i] for i in self._whole)] or [1.0]  # no tensors at all have norm 0
        self.weights = torch.tensor(every, dtype=torch.float64, device=device)
        self.whole = torch.tensor(self._whole, dtype=torch.int64, device=device)

    def lists(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the parts of each class, in as few tensors as hold exactly them."""
        if self._everything:
            return [merged(parts, self._padded)]
        spread = [merged([parts[i] for i in members], [self._padded[i] for i in members]) for members in self._members]
        return [*spread, *([parts[i]] for i in self._whole)]


def padded_numel(tensor: Tensor, part: Tensor) -> int:
    """Return how many elements FSDP2 keeps for this process' part of ``tensor`` in a buffer, padding included."""
    if is_sharded(tensor):
        spec = spec_of(tensor)
        along = _only_split_of_rows(spec.placements)
        if along is not None:
            return math.ceil(tensor.shape[0] / spec.mesh.size(along)) * math.prod(tensor.shape[1:])
    return part.numel()


@cache
def _only_split_of_rows(placements: tuple[Any, ...]) -> int | None:
    """The only mesh dimension along which a tensor is split, if that cuts dimension 0 into equal shards."""
    split = [i for i, p in enumerate(placements) if not (p.is_replicate() or p.is_partial())]
    return split[0] if len(split) == 1 and placements[split[0]].is_shard(dim=0) else None


def merged(parts: Sequence[Tensor], padded: Sequence[int]) -> list[Tensor]:
    """Return tensors that hold exactly the elements of ``parts``, and zeros: whole buffers instead of their pieces.

    FSDP2's gradients of one module are views of one buffer, padded with zeros. It stands for them only if they are all
    of it, each once: not if one is exempt, None or was replaced.
    """
    if not _share_buffers(parts[:_LOOKED_AT]):  # looking at thousands would cost more than it can save
        return list(parts)
    buffers = [base_of(part) for part in parts]
    by_buffer: dict[int, list[int]] = {}
    for i, buffer in enumerate(buffers):
        by_buffer.setdefault(id(buffer), []).append(i)
    kept: list[Tensor] = []
    for members in by_buffer.values():
        buffer = buffers[members[0]]
        if buffer is not None and _are_all_of(buffer, [(int(parts[i].storage_offset()), padded[i]) for i in members]):
            kept.append(buffer)
        else:
            kept += [parts[i] for i in members]
    return kept


def _share_buffers(parts: Sequence[Tensor]) -> bool:
    buffers = [id(buffer) for part in parts if (buffer := base_of(part)) is not None]
    return len(set(buffers)) < len(buffers)


def _are_all_of(buffer: Tensor, pieces: Sequence[tuple[int, int]]) -> bool:
    """Tell whether pieces of these offsets and lengths, padding included, follow one another through all of it."""
    end = 0
    for offset, length in sorted(pieces):
        if offset != end:
            return False
        end += length
    return len(pieces) > 1 and end == buffer.numel() and buffer.dim() == 1 and buffer.is_contiguous()
