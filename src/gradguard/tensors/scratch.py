"""Memory that is kept between calls: fresh pages cost more than the arithmetic that is done in them.

Each thread that clips on the CPU keeps at most two buffers of 8 MB, which stay in the last-level cache.
"""

import math
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gradguard.torch_private import are_operations_watched

BLOCK = 1 << 20
"""Elements that a buffer holds."""

_kept = threading.local()


def gathered(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Iterable[tuple[Sequence[Tensor], Tensor]]:
    """Yield lists of short tensors of one dtype, each with a copy of their elements side by side.

    The copy is valid until the next is asked for. ``sizes`` are the numbers of elements, at most ``BLOCK`` each.
    """
    ends = list(accumulate(sizes))
    start, done = 0, 0
    while start < len(tensors):
        stop = bisect_right(ends, done + BLOCK)
        some = tensors[start:stop]
        room = _buffer("gathered", tensors[0].dtype)[: ends[stop - 1] - done]
        _copy_side_by_side(some, room)
        yield some, room
        start, done = stop, ends[stop - 1]


def _copy_side_by_side(tensors: Sequence[Tensor], room: Tensor) -> None:
    """Copy the elements of ``tensors`` to ``room``, which has as many, in any order."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for tensor in tensors:
        by_shape.setdefault(tensor.shape, []).append(tensor)
    by_row: dict[torch.Size, list[Tensor]] = {}  # what may be concatenated without a view of each
    lengths: dict[torch.Size, int] = {}
    for shape, alike in by_shape.items():
        row = shape[1:]
        by_row.setdefault(row, []).extend(alike if shape else [tensor.view(1) for tensor in alike])
        lengths[row] = lengths.get(row, 0) + len(alike) * math.prod(shape)
    start = 0
    for row, alike in by_row.items():
        stop = start + lengths[row]
        if stop > start:
            torch.cat(alike, out=room[start:stop].view(-1, *row))
        start = stop


def in_float32(pieces: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield one-dimensional half-precision ``pieces`` as float32 blocks; each is valid until the next is asked for."""
    room, used = _buffer("converted", torch.float32), 0
    for piece in (part for x in pieces for part in x.split(BLOCK)):
        if used + piece.numel() > BLOCK:
            yield room[:used]
            used = 0
        room[used : used + piece.numel()].copy_(piece)
        used += piece.numel()
    if used:
        yield room[:used]


def _buffer(name: str, dtype: torch.dtype) -> Tensor:
    """This thread's buffer, of ``BLOCK`` elements of ``dtype``."""
    if are_operations_watched():  # by a mode that may give stand-ins, which are of no use when it has ended
        return torch.empty(BLOCK, dtype=torch.float64, device="cpu").view(dtype)[:BLOCK]
    if not hasattr(_kept, name):
        with torch.inference_mode(False):  # a buffer made inside it could not be written outside
            setattr(_kept, name, torch.empty(BLOCK, dtype=torch.float64, device="cpu"))
    return getattr(_kept, name).view(dtype)[:BLOCK]
