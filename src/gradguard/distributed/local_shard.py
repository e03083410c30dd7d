"""`LocalShard`: the part of a whole tensor on this rank. `gradguard.distributed.engines` reads it from the layout.

Its `Placement`, the ranks that hold the part, is also used alone. All tensors of one mesh and placements share one
`Placement`, so a plan for 23,460 tensors makes a handful, and a norm needs no lookup of elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.placements import WHOLE, Placement
from gradguard.tensors.sketch import flat_chunks, hashed


@dataclass(frozen=True, eq=False)
class LocalShard:
    """The part of a whole tensor on this rank.

    Attributes:
        shape: Shape of the whole.
        own: Shape of the part, whose elements are in the whole's order.
        along: For each dimension, the indices of the whole that the part holds, in one block or several; None for all.
            Empty if the part holds all of every dimension.
        start: Index in the flattened whole of a flat part's first element.
        padding: Number of elements at the end that are not in the whole.
        placement: The ranks that hold the whole, and how many of them hold this part.
        is_known: Whether the layout determines which elements the part holds.
        reduced: For each mesh dimension along which the whole is a reduction over ranks: the operation (sum, avg, max,
            ...), and this rank's coordinate.
    """

    shape: tuple[int, ...]
    own: tuple[int, ...]
    along: tuple[Tensor | None, ...] = ()
    start: int = 0
    padding: int = 0
    placement: Placement = WHOLE
    is_known: bool = True
    reduced: tuple[tuple[str, int], ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """A value that two ranks share if and only if they hold the same elements of one whole."""
        digests = [None if i is None else (len(i), int(hashed(i.clone()).sum())) for i in self.along]
        return self.own, self.start, tuple(digests)

    def entries(self, dim: int) -> Tensor:
        """Return the indices of one dimension of the whole that the part holds."""
        held = self.along[dim] if self.along else None
        return torch.arange(self.own[dim], device="cpu") if held is None else held

    def places(self, begin: int, count: int, device: torch.device) -> Tensor:
        """Return the indices in the flattened whole of ``count`` elements of the part, from ``begin`` on."""
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
        """Cut ``values`` of the part into chunks, each with its indices in the whole."""
        for at, chunk in flat_chunks(values):
            yield chunk, self.places(at, len(chunk), values.device)


def cut_along(
    shape: Sequence[int],
    along: Sequence[Tensor | None],
    placement: Placement = WHOLE,
    held: Sequence[int] | None = None,
) -> LocalShard:
    """Return the part of a whole of ``shape`` that holds these indices of each dimension; None stands for all.

    Args:
        shape: Shape of the whole.
        along: Indices of each dimension.
        placement: The ranks that hold it.
        held: Shape of the tensor that should be this part; None if there is none to compare.
    """
    own = tuple(size if index is None else len(index) for size, index in zip(shape, along, strict=True))
    is_whole = all(index is None for index in along)
    is_known = held is None or own == tuple(held)
    return LocalShard(tuple(shape), own, () if is_whole else tuple(along), placement=placement, is_known=is_known)
