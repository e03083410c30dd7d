"""Which gradients of a list add up alike, so that the norm of all needs few numbers; and which lie in one buffer."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter

import torch
from torch import Tensor

from gradguard.distributed.placements import Placement
from gradguard.tensors.layout import meeting_device, move
from gradguard.tensors.norms import tensor_norms, total_norm
from gradguard.tensors.side_by_side import SideBySide
from gradguard.torch_private import base_of

_LOOKED_AT = 16
"""Gradients that are looked at before all of them are."""

_WORTH = 1024
"""Elements of the longest of these from which on reading a buffer saves more time than finding out what lies in it."""


class Classes:
    """The gradients of one list in classes, each of which one number stands for in the all-reduce.

    Those of one group and one replication factor are together. A whole gradient may be missing on some processes, so
    that it needs a place of its own; and so has every gradient of a group whose rule asks for the norm of each.

    Args:
        weights: One over the number of processes that hold the same part of each.
        whole: Whether every process holds all of it.
        padded: What `padded_numel` returned for each.
        device: Where norms are added up.
        groups: The group of each gradient, the same on all processes; None if all are in one.
        each: For each group whether its gradients stay by themselves.

    Attributes:
        weights: Those of the classes.
        of_group: Which classes each group has.
        each: For each group whether its gradients are by themselves.
    """

    def __init__(
        self,
        weights: Sequence[float],
        whole: Sequence[bool],
        padded: Sequence[int],
        device: torch.device,
        groups: Sequence[int] | None = None,
        each: Sequence[bool] = (False,),
    ) -> None:
        self.each = each
        self._holders, self._is_whole, self._padded, self._device = weights, whole, padded, device
        by_key: dict[tuple[int, bool, float], list[int]] = {}
        for i, group in enumerate(groups or [0] * len(weights)):
            is_alone = each[group] or whole[i]
            by_key.setdefault((group, is_alone, i if is_alone else weights[i]), []).append(i)
        # Every process has the same classes, also a pipeline stage that has no parameter of some of them.
        keys = sorted(by_key)
        self._members = [by_key[key] for key in keys]
        counts = Counter(group for group, _, _ in keys)
        starts = [0, *accumulate(counts[group] for group in range(len(each)))]
        self.of_group = [slice(*ends) for ends in pairwise(starts)]
        class_of = [0] * len(weights)
        for k, members in enumerate(self._members):
            for i in members:
                class_of[i] = k
        self._class_of = torch.tensor(class_of, dtype=torch.int64, device=device)
        self.weights = torch.tensor([weights[m[0]] for m in self._members], dtype=torch.float64, device=device)
        self._several = {
            k: _Several(members, len(weights), padded) for k, members in enumerate(self._members) if len(members) > 1
        }
        self._one = [k for k, members in enumerate(self._members) if len(members) == 1]
        self._last_shares: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Return how many classes there are."""
        return len(self._members)

    def grouped(self, groups: Sequence[int], each: Sequence[bool]) -> "Classes":
        """Return those of the same gradients in several groups.

        Args:
            groups: The group of each.
            each: For each group whether its gradients stay by themselves.
        """
        return Classes(self._holders, self._is_whole, self._padded, self._device, groups, each)

    def norms(self, parts: Sequence[Tensor], order: float) -> Tensor:
        """Return the norm of what this process holds of each class: ``[len(self)]``, float64."""
        alone = tensor_norms([parts[self._members[k][0]] for k in self._one], order)
        if not self._several:
            return alone.double()
        several = [total_norm(members.of(parts), order) for members in self._several.values()]
        where = meeting_device([alone, *several])
        norms = torch.zeros(len(self), dtype=torch.float64, device=where)
        for k, norm in zip([*self._several, *self._one], [*several, *alone.unbind()], strict=True):
            norms[k] = move(norm, where, torch.float64)
        return norms

    def joined(self, norms: Tensor, order: float) -> Tensor:
        """Return the norm of each class from that of each gradient's part, of a finite order, without overflow."""
        at, none = move(self._class_of, norms.device), norms.new_zeros(len(self))
        largest = none.scatter_reduce(0, at, norms, "amax")
        divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
        return divisor * none.index_add(0, at, (norms / divisor[at]) ** order) ** (1 / order)

    def of(self, positions: Tensor) -> Tensor:
        """Return the class of each of these gradients; a whole one is a class by itself."""
        return self._class_of[move(positions, self._class_of.device)]

    def shares(self, shares: Tensor) -> Tensor:
        """Return the shares of the classes from those of the gradients: not 0 where this process has any."""
        if self._last_shares is None or self._last_shares[0] is not shares:
            added = shares.new_zeros(len(self)).index_add(0, move(self._class_of, shares.device), shares)
            self._last_shares = shares, added
        return self._last_shares[1]


class _Several:
    """The gradients of one class, which come again and again."""

    def __init__(self, members: Sequence[int], count: int, padded: Sequence[int]) -> None:
        self._taken = tuple if len(members) == count else itemgetter(*members)
        self._padded = self._taken(padded)
        self._side_by_side = SideBySide()

    def of(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors that hold exactly the elements of those of ``parts`` that are in the class, and zeros."""
        return self._side_by_side(merged(self._taken(parts), self._padded))


def padded_numel(tensor: Tensor, part: Tensor, placement: Placement) -> int:
    """Return how many elements FSDP2 keeps for this process' part of ``tensor`` in a buffer, padding included."""
    shards = equal_shards_of_rows(placement)
    return part.numel() if shards is None else math.ceil(tensor.shape[0] / shards) * math.prod(tensor.shape[1:])


@cache
def equal_shards_of_rows(placement: Placement) -> int | None:
    """Into how many equal shards dimension 0 is cut, if a tensor is cut in no other way."""
    split = [i for i, p in enumerate(placement.kinds) if not (p.is_replicate() or p.is_partial())]
    alone = len(split) == 1 and placement.kinds[split[0]].is_shard(dim=0)
    return placement.mesh.size(split[0]) if alone else None


def merged(parts: Sequence[Tensor], padded: Sequence[int]) -> list[Tensor]:
    """Return tensors that hold exactly the elements of ``parts``, and zeros: whole buffers instead of their pieces.

    FSDP2's gradients of one module are views of one buffer, padded with zeros. It stands for them only if they are all
    of it, each once: not if one is exempt, None or was replaced.
    """
    if not _are_worth_it(parts[:_LOOKED_AT]):  # looking at thousands would cost more than it can save
        return list(parts)
    buffers = [base_of(part) for part in parts]
    by_buffer: dict[int, list[int]] = {}
    for i, buffer in enumerate(buffers):
        by_buffer.setdefault(id(buffer), []).append(i)
    kept: list[Tensor] = []
    for members in by_buffer.values():
        buffer = buffers[members[0]]
        dense = all(parts[i].is_contiguous() for i in members)
        if (
            buffer is not None
            and dense
            and _are_all_of(buffer, [(int(parts[i].storage_offset()), padded[i]) for i in members])
        ):
            kept.append(buffer)
        else:
            kept += [parts[i] for i in members]
    return kept


def _are_worth_it(parts: Sequence[Tensor]) -> bool:
    if max([part.numel() for part in parts], default=0) < _WORTH:
        return False
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
