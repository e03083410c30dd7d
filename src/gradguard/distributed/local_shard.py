"""`LocalShard`: the part of one whole tensor on this process. `gradguard.distributed.engines` reads it from the layout.

Its `Placement`, of those who hold the part, is also used alone: it is one for all tensors of a mesh and placements, so
that a plan for 23,460 tensors makes a handful, and no element need be looked up for a norm.
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
    """The part of a whole tensor on this process.

    Attributes:
        shape: Shape of the whole.
        own: Shape of the part, whose elements are in the whole's order.
        along: For each dimension, which entries of the whole the part has, in one block or several; None for all of
            them. Empty where it has all of each.
        start: Position in the whole of a flat part's first element.
        padding: Number of elements at the end that are not of the whole.
        placement: The processes that hold the whole, and how many of them hold this part.
        is_known: Whether the layout tells which elements the part has.
        reduced: Operation by which processes make the whole (sum, avg, max, ...), for each mesh dimension along which
            they do, and which of these processes this one is.
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


def cut_along(
    shape: Sequence[int],
    along: Sequence[Tensor | None],
    placement: Placement = WHOLE,
    held: Sequence[int] | None = None,
) -> LocalShard:
    """Return the part of a whole of ``shape`` that has these entries of each dimension; None stands for all.

    Args:
        shape: Shape of the whole.
        along: Entries of each dimension.
        placement: The processes that hold it.
        held: Shape of the tensor that should be this part; None if it is not there to be compared.
    """
    own = tuple(size if index is None else len(index) for size, index in zip(shape, along, strict=True))
    is_whole = all(index is None for index in along)
    is_known = held is None or own == tuple(held)
    return LocalShard(tuple(shape), own, () if is_whole else tuple(along), placement=placement, is_known=is_known)
