"""The only interface to the Triton kernels: which lists of CUDA tensors they accept, and how to call them.

`CudaBlocks.of` returns None for every other list, and callers then use torch's own kernels, which handle all tensors.
Accepted are dense float32, float64, bfloat16 and float16 tensors of one dtype on one NVIDIA GPU of compute capability
8.0 or newer, if Triton can be imported, outside of `torch.compile` and of CUDA graph capture. (A replayed graph would
read addresses from memory that has been reused.)

Before a device's first clip in a dtype, the kernels run on a small list there, and the results are compared with
torch's; this is one host sync. If they differ or do not compile, a warning says so, and torch's kernels are used from
then on. ``GRADGUARD_TRITON=0`` in the environment turns the kernels off.
"""

import ctypes
import importlib.util
import math
import os
import warnings
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradguard import native
from gradguard.tensors.host_copy import is_captured
from gradguard.tensors.kernels import DTYPES
from gradguard.tensors.layout import is_dense
from gradguard.torch_private import are_operations_watched

OLDEST = (8, 0)
"""The first compute capability with bfloat16 arithmetic."""

MOST = 1 << 22
"""The largest number of programs in a launch, and so of entries in its table."""

_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by kernel, device and constants."""

_serving: set[torch.device] = set()
"""Devices on which the kernels agreed with torch."""

_ORDINARY = Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]


class CudaBlocks:
    """A list of tensors of one dtype on one GPU, each one block of memory that is cut into units; keeps them alive.

    Args:
        tensors: At least one.
        rows: For each tensor, the number of units of equal length in its memory.
        memory: The tensors' addresses and lengths, if known.
    """

    def __init__(
        self, tensors: Sequence[Tensor], rows: Sequence[int], memory: tuple[bytes, bytes] | None = None
    ) -> None:
        first, stream = tensors[0], 0
        self._tensors, self._device, self._units = list(tensors), first.device, sum(rows)
        if first.is_cuda:  # cached tables are ready only in the order of the stream that copied them
            stream = torch.cuda.current_stream(first.device).cuda_stream
        memory = memory or _memory(self._tensors)
        assert memory is not None
        addresses, lengths = memory
        where, self.overlaps = _addresses(addresses, lengths, first.element_size(), first.device, stream)
        cuts, tensor, self._begin = _cut(lengths, array("q", rows).tobytes(), first.device, stream)
        self._tables, self.programs = (where, cuts, tensor), len(tensor)

    @staticmethod
    def of(
        tensors: Sequence[Tensor], rows: Sequence[int] | None = None, *, p: float = 2.0, writes: bool = False
    ) -> "CudaBlocks | None":
        """Return ``tensors`` for the kernels, or None if the kernels do not accept all of them.

        Args:
            tensors: Any tensors.
            rows: As for the class; by default each tensor is one unit.
            p: The order of the norm that will be computed; there must be a kernel for it.
            writes: Whether the tensors will be written; no two may then share memory.
        """
        if p not in (2.0, math.inf) or not tensors or not tensors[0].is_cuda or not _may_start(tensors[0].device):
            return None
        if any(kind.__torch_dispatch__ is not _ORDINARY for kind in set(map(type, tensors))):
            return None
        memory = _memory(tensors if isinstance(tensors, list) else list(tensors))
        if memory is None or any(map(Tensor.is_neg, tensors)) or not _serves(tensors[0].device, tensors[0].dtype):
            return None
        blocks = CudaBlocks(tensors, [1] * len(tensors) if rows is None else rows, memory)
        return None if blocks.programs > MOST or (writes and blocks.overlaps) else blocks

    def norms(self, p: float) -> Tensor:
        """Return the norm of every unit: float64, in two launches."""
        from gradguard.tensors.cuda_kernels import UNITS

        return self._norms(p, self._begin[2:], self._units, UNITS)

    def norm(self, p: float) -> Tensor:
        """Return the norm of all elements: 0-dim float64, in two launches."""
        return self._norms(p, self._begin, 1, 1).view(())

    def _norms(self, p: float, begin: Tensor, units: int, at_once: int) -> Tensor:
        from gradguard.tensors.cuda_kernels import TERMS, finish, measure

        partial = torch.empty(self.programs, dtype=torch.float64, device=self._device)
        norms = torch.empty(units, dtype=torch.float64, device=self._device)
        self._over_chunks(measure, partial, LARGEST=p != 2)
        settings = {"LARGEST": p != 2, "UNITS": at_once, "TERMS": TERMS // at_once}
        _launch(self._device, finish, -(-units // at_once), partial, begin, norms, units, **settings)
        return norms

    def scale_(self, factors: Tensor) -> None:
        """Multiply every element by one 0-dim factor, or each unit by its own: float64, on any device.

        The product is computed in float32 (float64 for float64) and rounded once. A factor of 1 writes nothing.
        """
        from gradguard.tensors.cuda_kernels import scale

        factors = factors.to(self._device, torch.float64, non_blocking=True).contiguous()
        self._over_chunks(scale, factors, EACH=factors.dim() > 0)
        increment_version(self._tensors)

    def clamp_(self, low: float, high: float) -> None:
        """Clamp every element to bounds that the dtype can hold; NaN stays."""
        from gradguard.tensors.cuda_kernels import clamp

        self._over_chunks(clamp, float(low), float(high))
        increment_version(self._tensors)

    def _over_chunks(self, kernel: Any, *arguments: Any, **settings: Any) -> None:
        import triton.language as tl

        from gradguard.tensors.cuda_kernels import BLOCK, CHUNK

        dtype = getattr(tl, str(self._tensors[0].dtype).removeprefix("torch."))
        settings = {"DTYPE": dtype} | settings | {"CHUNK": CHUNK, "BLOCK": BLOCK}
        _launch(self._device, kernel, self.programs, *self._tables, *arguments, **settings)


def coefficients_on_device(norm: Tensor, limit: float) -> Tensor | None:
    """Return min(1, limit / (norm + 1e-6)) for each norm, in one launch instead of torch's four; None if impossible."""
    if not norm.is_cuda or norm.dtype is not torch.float64 or norm.device not in _serving:
        return None
    return _coefficient(norm, limit) if _may_start(norm.device) and type(norm) is Tensor else None


def _coefficient(norm: Tensor, limit: float) -> Tensor:
    from gradguard.tensors.cuda_kernels import coefficient

    norm = norm.contiguous()
    found = torch.empty_like(norm)
    _launch(norm.device, coefficient, norm.numel(), norm, found, float(limit))
    return found


def _launch(device: torch.device, kernel: Any, programs: int, *arguments: Any, **settings: Any) -> None:
    """Start a kernel, on the current device as Triton does; ``settings`` are its constants, in its order.

    The first start compiles the kernel for all others, because only the constants are specialized. Later starts call
    the compiled kernel directly and skip Triton's inspection of each argument.
    """
    if not programs:
        return
    is_current = device.type != "cuda" or torch.cuda.current_device() == device.index
    with nullcontext() if is_current else torch.cuda.device(device):
        key = kernel, device, *settings.values()
        if (compiled := _compiled.get(key)) is None:
            _compiled[key] = kernel[(programs,)](*arguments, **settings)
        else:
            compiled[programs, 1, 1](*arguments, *settings.values())


def _may_start(device: torch.device) -> bool:
    """Tell whether the kernels may start now: nothing traces, intercepts or captures operations."""
    return not torch.compiler.is_compiling() and not are_operations_watched() and not is_captured(device)


def _memory(tensors: list[Tensor]) -> tuple[bytes, bytes] | None:
    """Return addresses and lengths, int64 each, if all are blocks of memory of one dtype on one device, else None."""
    place, count = tensors[0].get_device(), len(tensors)
    if (library := native.library()) is not None:  # fifty times as fast as the loop below
        room = bytearray(17 * count)
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        is_taken = library.collect(tensors, place, start, start + 8 * count, start + 16 * count)
        is_taken = is_taken and room.count(room[-1], 16 * count) == count
        return (bytes(room[: 8 * count]), bytes(room[8 * count : 16 * count])) if is_taken else None
    kind = tensors[0].dtype, place, tensors[0].is_cuda, torch.strided
    for t in tensors:
        if (t.dtype, t.get_device(), t.is_cuda, t.layout) != kind or t.is_nested or not is_dense(t):
            return None
    if kind[0] not in DTYPES:
        return None
    try:
        addresses = [t.data_ptr() for t in tensors]
    except RuntimeError:  # tensors of a torch.func transform have no memory
        return None
    return array("q", addresses).tobytes(), array("q", [t.numel() for t in tensors]).tobytes()


@lru_cache(maxsize=64)
def _addresses(addresses: bytes, lengths: bytes, size: int, device: torch.device, stream: int) -> tuple[Tensor, bool]:
    """Return the addresses of tensors on the device, and whether any two tensors share memory."""
    del stream
    where, length = _numbers(addresses), _numbers(lengths)
    start, order = where[length > 0].sort()
    end = start + size * length[length > 0][order]
    return _sent(where, device), bool((end[:-1] > start[1:]).any())


@lru_cache(maxsize=16)
def _cut(lengths: bytes, rows: bytes, device: torch.device, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables ``cuts``, ``tensor`` and ``begin`` of `gradguard.tensors.cuda_kernels`."""
    from gradguard.tensors.cuda_kernels import CHUNK

    del stream
    count = _numbers(rows)
    length = _numbers(lengths) // count
    chunks = (length + CHUNK - 1) // CHUNK
    programs = count * chunks
    cuts = torch.stack([length, chunks, programs.cumsum(0) - programs, count.cumsum(0) - count], dim=1)
    tensor = torch.arange(len(count), dtype=torch.int32, device="cpu").repeat_interleave(programs)
    ends = chunks.repeat_interleave(count).cumsum(0)
    begin = torch.cat([torch.tensor([0, len(tensor), 0], device="cpu"), ends])  # of the whole list, then of each unit
    return _sent(cuts, device), _sent(tensor, device), _sent(begin, device)


def _numbers(table: bytes) -> Tensor:
    return torch.frombuffer(bytearray(table), dtype=torch.int64)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table without a host sync; torch keeps the pinned memory until the copy is done."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@cache
def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the kernels run on ``device`` and agree with torch there."""
    if (
        os.environ.get("GRADGUARD_TRITON") == "0"
        or torch.version.cuda is None
        or importlib.util.find_spec("triton") is None
        or torch.cuda.get_device_capability(device) < OLDEST
    ):
        return False
    try:
        with _waits_unseen():
            wrong = differs_from_torch(device, dtype)
    except Exception as error:  # a compiler may raise anything
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        warnings.warn(
            f"gradguard's kernels for {dtype} are not used on {device}; torch's give the same results more slowly. "
            f"Reason: {wrong}. Please report this.",
            stacklevel=2,
        )
    else:
        _serving.add(device)
    return not wrong


@contextmanager
def _waits_unseen() -> Iterator[None]:
    """Allow host syncs in this block, even if `torch.cuda.set_sync_debug_mode` forbids them."""
    said = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0
    if not said:  # setting the mode warns, whatever the value
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(said)


@torch.no_grad()
def differs_from_torch(device: torch.device, dtype: torch.dtype) -> str:
    """Describe how the kernels differ from torch on ``device``; empty if they agree."""
    rows = [1, 1, 1, 1, 7]
    given, wide = _given(device, dtype), torch.float64 if dtype is torch.float64 else torch.float32
    units = [unit for x, count in zip(given, rows, strict=True) for unit in (x.chunk(count) if count > 1 else [x])]
    for p in (2.0, math.inf):
        padded = [torch.nn.functional.pad(unit.double(), (0, 1)) for unit in units]
        expected = torch.stack([torch.linalg.vector_norm(unit, p) for unit in padded])
        if not torch.allclose(CudaBlocks(given, rows).norms(p), expected, rtol=1e-12, atol=0, equal_nan=True):
            return f"norms of order {p} differ"
    total = torch.tensor(3.0, dtype=torch.float64, device=device)
    if not torch.allclose(_coefficient(total, 0.7), 0.7 / (total + 1e-6), rtol=1e-14, atol=0):
        return "coefficients differ"
    line = given[0].double().norm()
    if not torch.allclose(CudaBlocks(given[:1], rows[:1]).norm(2.0), line, rtol=1e-12, atol=0):
        return "the norm of all differs"
    each = torch.linspace(0.25, 1.0, len(units), dtype=torch.float64, device=device)
    for name, factors in {"scale": each[1], "scale by units": each, "scale by 1": each[-1]}.items():
        written = [x.clone() for x in given[:1]] + _given(device, dtype)[1:]
        CudaBlocks(written, rows).scale_(factors)
        by_unit = zip(units, factors.expand(len(units)).to(wide), strict=True)
        if not _alike(written, [(unit.to(wide) * factor).to(dtype) for unit, factor in by_unit]):
            return f"{name} differs"
    written = _given(device, dtype)
    CudaBlocks(written, rows).clamp_(-0.5, 1.5)
    return "" if _alike(written, [unit.clamp(-0.5, 1.5) for unit in units]) else "clamp differs"


def _alike(written: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Tell whether both hold the same numbers, with NaN in the same places."""
    one, other = torch.cat(list(written)), torch.cat(list(expected))
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def _given(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return test tensors: several chunks, an odd start, NaN and infinities, an empty one, rows of an odd length."""
    line = ((torch.arange(20_001, device=device) % 997 - 498) / 100).to(dtype)
    odd = torch.tensor([0.0, 1.0, math.nan, math.inf, -math.inf, 6e4, 1e-6, -2.0], device=device).to(dtype)
    return [line, line.clone()[1:1000], odd, line.clone()[:0], line.clone()[: 7 * 1031]]
