"""The only interface to the compiled kernels: which lists of tensors they accept, and how to call them.

`Blocks.of` and `UnitBlocks.of` return None for every other list, and callers then use torch's own kernels, which handle
all tensors. Accepted are dense float32, float64, bfloat16 and float16 tensors on the CPU, of any shape and order of
dimensions, each one block of memory. The kernels return the same bits for any number of threads and any instruction
set; ``native/kernels.cpp`` documents the order of their sums.
"""

import ctypes
import math
import threading
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradguard import native
from gradguard.torch_private import are_operations_watched

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes, in the order of ``DType`` in native/kernels.h."""

TILE = 256
"""How many normal numbers are drawn at a time: ``TILE`` of native/kernels.h."""

_ORDERS = {1.0: 1, 2.0: 2, math.inf: 3}
_ORDINARY = Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]


def _library_for(tensors: Sequence[Tensor]) -> native.Library | None:
    """Return the library if it may read ``tensors``: they have memory, and no mode intercepts operations."""
    if torch.compiler.is_compiling() or are_operations_watched():  # first, because the compiler cannot trace the rest
        return None
    library = native.library()
    if library is None:
        return None
    return library if all([kind.__torch_dispatch__ is _ORDINARY for kind in set(map(type, tensors))]) else None


def _address(room: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(room))


class _Collected:
    """Tensors with a buffer of their addresses, sizes and dtypes for the kernels; the tensors are kept alive."""

    _before_dtypes: int
    """The number of bytes in the address and the sizes of one tensor."""

    def __init__(self, library: native.Library, tensors: list[Tensor], room: bytearray) -> None:
        self._library, self._tensors, self._room = library, tensors, room
        start, n = _address(room), len(tensors)
        self._list = native.List(start, start + 8 * n, start + self._before_dtypes * n, n)
        self._where = ctypes.addressof(self._list)

    @classmethod
    def _of(cls, tensors: Sequence[Tensor], *cuts: int) -> Self | None:
        library = _library_for(tensors)
        if library is None:
            return None
        tensors, n = tensors if isinstance(tensors, list) else list(tensors), len(tensors)
        room = bytearray((cls._before_dtypes + 1) * n + 8)
        start, collect = _address(room), library.collect_units if cuts else library.collect
        is_taken = collect(tensors, *(cuts or (-1,)), start, start + 8 * n, start + cls._before_dtypes * n)
        return cls(library, tensors, room) if is_taken else None


class Blocks(_Collected):
    """A list of tensors, each one block of memory."""

    _before_dtypes = 16

    @staticmethod
    def of(tensors: Sequence[Tensor], p: float = 2.0) -> "Blocks | None":
        """Return ``tensors`` for the kernels; None if these do not accept all, or have no norm of order ``p``."""
        return Blocks._of(tensors) if p in _ORDERS else None

    def norm(self, p: float) -> float:
        """Return the norm of all elements of all tensors."""
        norm = ctypes.c_double()
        self._library.call("gg_norm", self._where, _ORDERS[p], ctypes.addressof(norm), None)
        return norm.value

    def norms(self, p: float) -> Tensor:
        """Return the norm of each tensor: float64."""
        norm, norms = ctypes.c_double(), torch.empty(len(self._tensors), dtype=torch.float64, device="cpu")
        self._library.call("gg_norm", self._where, _ORDERS[p], ctypes.addressof(norm), norms.data_ptr())
        return norms

    def scale_(self, factor: float) -> None:
        """Multiply every element, in float64 or float32, rounding once to the tensor's dtype."""
        self._library.call("gg_scale", self._where, factor)
        increment_version(self._tensors)

    def clamp_(self, low: float, high: float) -> bool:
        """Clamp every element to the bounds, rounded to its dtype; return False without a write if impossible."""
        if self._is_mirrored(low, high):
            return False
        (lows, highs), written = _bounds(low, high), bytearray(len(self._tensors) + 1)
        addresses = lows.buffer_info()[0], highs.buffer_info()[0], _address(written)
        self._library.call("gg_clamp", self._where, *addresses)
        if any(written):
            increment_version(list(compress(self._tensors, written)))
        return True

    def exceed(self, low: float, high: float) -> bool | None:
        """Tell whether any element exceeds the bounds, rounded to its dtype; None if the kernels cannot."""
        if self._is_mirrored(low, high):
            return None
        (lows, highs), found = _bounds(low, high), ctypes.c_int()
        addresses = lows.buffer_info()[0], highs.buffer_info()[0], ctypes.addressof(found)
        self._library.call("gg_exceeds", self._where, *addresses)
        return bool(found)

    def nonfinite(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return how many elements of each tensor are NaN, and how many are infinite."""
        nan, inf = (array("q", bytes(8 * len(self._tensors))) for _ in range(2))
        self._library.call("gg_nonfinite", self._where, nan.buffer_info()[0], inf.buffer_info()[0])
        return nan, inf

    @staticmethod
    def tiles(tensors: Sequence[Tensor]) -> int:
        """Return how many tiles of normal numbers `add_normal_` consumes: each tensor begins a new tile."""
        return sum([-(-tensor.numel() // TILE) for tensor in tensors])

    def add_normal_(self, key: bytes, tile: int, factor: float, deviation: float) -> None:
        """Multiply every element by ``factor``, and add ``deviation`` times a standard normal number; float32 only.

        Args:
            key: 32 bytes.
            tile: The first of the `tiles` to consume; no tile may be used twice under one key.
            factor: Rounded to float32, as is ``deviation``.
            deviation: Standard deviation of the added noise.
        """
        words = ctypes.create_string_buffer(key, 32)
        self._library.call("gg_add_normal", self._where, ctypes.addressof(words), tile, factor, deviation)
        increment_version(self._tensors)

    def _is_mirrored(self, low: float, high: float) -> bool:
        """Tell whether a tensor's memory holds negated values and the bounds are not symmetric."""
        return low != -high and any([t.is_neg() for t in self._tensors])


@lru_cache(maxsize=16)
def _room(count: int, thread: int) -> tuple[tuple[int, ...], array, native.List, bytearray]:
    """Return buffers of ``thread`` for ``count`` tensors and their norms; reused between calls."""
    memory, norms = bytearray(17 * count + 8), array("d", bytes(8 * count + 8))  # the last norm is that of all
    start = _address(memory)
    at = start, start + 8 * count, start + 16 * count
    return at, norms, native.List(*at, count), memory


def norms_at_once(tensors: Sequence[Tensor]) -> list[float] | None:
    """Return the 2-norm of each tensor from one kernel for all; None if the kernels do not accept them."""
    library = _library_for(tensors)
    if library is None:
        return None
    tensors, count = tensors if isinstance(tensors, list) else list(tensors), len(tensors)
    at, norms, listed, _ = _room(count, threading.get_ident())
    if not library.collect(tensors, -1, *at):
        return None
    start = norms.buffer_info()[0]
    library.call("gg_norm", ctypes.addressof(listed), _ORDERS[2.0], start + 8 * count, start)
    return norms[:count].tolist()


def memory_of(tensors: Sequence[Tensor]) -> bytes | None:
    """Return the address, length and dtype of each tensor's memory; None if the kernels do not accept all of them."""
    library, tensors = _library_for(tensors), tensors if isinstance(tensors, list) else list(tensors)
    at, _, _, memory = _room(len(tensors), threading.get_ident())
    return bytes(memory) if library is not None and library.collect(tensors, -1, *at) else None


class SampledBlocks:
    """Sampled elements of several tensors, compared before and after a write.

    Args:
        library: The kernels.
        views: The sampled elements of each tensor, as a one-dimensional view; kept alive.
        before: A buffer for all sampled elements at `take`, one tensor after the other.
        changes: A buffer for the changes since then.
    """

    def __init__(self, library: native.Library, views: Sequence[Tensor], before: Tensor, changes: Tensor) -> None:
        self._library, self._kept = library, (views, before, changes)
        at, numel = array("Q", [one.data_ptr() for one in views]), array("q", [one.numel() for one in views])
        stride, self._norms = array("q", [one.stride(0) for one in views]), array("d", bytes(16 * len(views) + 8))
        self._rows, self._where_norms = (at, numel, stride), self._norms.buffer_info()[0]
        rows = [row.buffer_info()[0] for row in self._rows]
        rooms = before.data_ptr(), changes.data_ptr()
        self._list = native.SampleList(*rows, *rooms, len(views), DTYPES.index(before.dtype))
        self._where = ctypes.addressof(self._list)

    @staticmethod
    def of(views: Sequence[Tensor], before: Tensor, changes: Tensor) -> "SampledBlocks | None":
        """Return the samples for the kernels, or None unless all have one dtype, float32 or float64."""
        library, kinds = _library_for(views), {(one.dtype, one.is_neg()) for one in views if one.numel()}
        known = before.is_cpu and before.dtype in (torch.float32, torch.float64) and kinds == {(before.dtype, False)}
        return SampledBlocks(library, views, before, changes) if known and library is not None else None

    def take(self) -> None:
        """Store the present elements."""
        self._library.call("gg_take", self._where)

    def moved(self) -> list[float]:
        """Return, for each tensor, the 2-norm of the changes since `take`; then that of the elements at `take`."""
        self._library.call("gg_moved", self._where, self._where_norms)
        return self._norms[:-1].tolist()


class UnitBlocks(_Collected):
    """Blocks of tensors that are cut into units, each a contiguous run of memory or a column of one."""

    _before_dtypes = 40  # four sizes each

    @staticmethod
    def of(tensors: Sequence[Tensor], dims: Sequence[int | None], groups: Sequence[int]) -> "UnitBlocks | None":
        """Return ``tensors`` for the kernels, or None if these do not accept all of them.

        Args:
            tensors: Any tensors.
            dims: The dimension of each tensor along which its units run; None for a tensor that is one unit.
            groups: The number of groups of units into which dimension 0 is cut first.
        """
        wanted, cut = array("i", [-1 if dim is None else dim for dim in dims]), array("i", groups)
        return UnitBlocks._of(tensors, wanted.buffer_info()[0], cut.buffer_info()[0])

    def norms(self, units: int) -> Tensor:
        """Return the 2-norm of every unit of every tensor, ``units`` in total: float64."""
        norms = torch.empty(units, dtype=torch.float64, device="cpu")
        self._library.call("gg_unit_norms", self._where, norms.data_ptr())
        return norms

    def scale_(self, factors: Tensor) -> None:
        """Multiply every unit by its float64 factor; 1 writes nothing. The caller increments the versions."""
        self._library.call("gg_unit_scale", self._where, factors.data_ptr())

    def clip_(self, weights: "UnitBlocks", units: int, threshold: float, eps: float) -> tuple[Tensor, Tensor]:
        """Clip the norm of each unit to ``threshold * max(eps, norm of the weights' unit)`` in one pass over memory.

        The caller increments the tensors' versions.

        Returns:
            The norm of each unit before, and the factor of each.
        """
        norm, norms = ctypes.c_double(), torch.empty(2, units, dtype=torch.float64, device="cpu")
        rows = norms.data_ptr(), norms[1].data_ptr(), ctypes.addressof(norm)
        self._library.call("gg_unit_clip", weights._where, self._where, threshold, eps, *rows)
        return norms[0], norms[1]


@lru_cache(maxsize=64)
def _bounds(low: float, high: float) -> tuple[array, array]:
    """Return both bounds, rounded to each dtype of the kernels."""
    lows, highs = ([representable(bound, dtype) for dtype in DTYPES] for bound in (low, high))
    return array("d", lows), array("d", highs)


def representable(bound: float, dtype: torch.dtype) -> float:
    """Return ``bound`` rounded to ``dtype``; a finite number beyond its range becomes its largest finite number."""
    largest = torch.finfo(dtype).max
    if not math.isinf(bound):
        bound = min(max(bound, -largest), largest)
    return torch.tensor(bound, dtype=dtype, device="cpu").item()
