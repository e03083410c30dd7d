"""Short tensors of a list that comes again and again, put next to one another without a look at each."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from gradguard import native
from gradguard.tensors.layout import are_readable

SHORT = 1 << 14
"""Tensors up to this length are copied: reading a longer one costs more than looking at it."""

BLOCK = 1 << 18
"""Elements of one copy: it stays in the cache."""


class SideBySide:
    """Joins the short tensors of a list on the CPU; what it remembers of the last list saves a look at each.

    It remembers which tensors can be joined. Where they cannot any more, joining them fails, and all are looked at
    again; where they can, it keeps every element, because dtypes are widened. So what is returned is right, whatever
    shape, dtype, layout or device a tensor has come to have.
    """

    def __init__(self) -> None:
        self._count, self._taken, self._rest = -1, list[Callable](), list[int]()

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors that hold exactly the elements of ``tensors``: few, where these are many and short.

        Where there are compiled kernels, ``tensors`` themselves: to those, many are as good as few.
        """
        if not torch.compiler.is_compiling() and native.library() is not None:
            return list(tensors)
        joined = self._joined(tensors) if self._count == len(tensors) else None
        if joined is None:
            self._look(tensors)
            joined = self._joined(tensors)
        return list(tensors) if joined is None else joined

    def _joined(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        try:
            joined = [torch.cat(taken(tensors)) for taken in self._taken]
        except RuntimeError:  # of several widths or devices, or some are sparse
            return None
        return [*joined, *[tensors[i] for i in self._rest]] if are_readable(*joined) else None

    def _look(self, tensors: Sequence[Tensor]) -> None:
        alike: dict[tuple, list[list[int]]] = {}
        self._count, self._taken, self._rest, room = len(tensors), [], [], {}
        for i, t in enumerate(tensors):
            if not _may_be_joined(t):
                self._rest.append(i)
                continue
            kind, size = (t.dtype, t.shape[1:]), t.numel()
            if room.get(kind, -1) < size:
                room[kind] = BLOCK
                alike.setdefault(kind, []).append([])
            alike[kind][-1].append(i)
            room[kind] -= size
        for members in chain.from_iterable(alike.values()):
            if len(members) > 1:
                self._taken.append(itemgetter(*members))
            else:
                self._rest += members


def _may_be_joined(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and are_readable(tensor)
        and tensor.dtype.is_floating_point
        and tensor.dim() > 0
        and tensor.numel() <= SHORT
    )
