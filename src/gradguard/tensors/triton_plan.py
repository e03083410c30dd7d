"""The one way to the Triton kernels: lists of CUDA tensors that these can take, and what they do with them.

`DeviceList.of` returns None for everything else, and callers then take torch's own kernels, which are right for all:
that is the whole dispatch. Taken are dense float32, bfloat16, float16 and float64 tensors (float64 not for norms) on
one NVIDIA GPU of compute capability 8.0 or newer, where Triton can be imported, outside of `torch.compile` and of the
recording of a CUDA graph, whose replays would read addresses from memory that is used for something else by then.

**They have never run on a GPU**, so they are off unless ``GRADGUARD_TRITON=1`` is set when they are first asked for.
Before a device is used for the first time, the kernels do a small list there and are compared with torch, for which the
host waits once. If they differ or do not compile, a warning says so, and torch's kernels are taken from then on.
"""

import functools
import importlib.util
import math
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradguard.tensors.host_copy import is_captured
from gradguard.tensors.layout import is_dense
from gradguard.torch_private import are_operations_watched

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
"""What the kernels take, by Triton's names."""

OLDEST = (8, 0)
"""The first compute capability with bfloat16 arithmetic."""

_WARPS = 8
_REMEMBERED = 32


class Chunks(NamedTuple):
    """How tensors of one dtype and alignment are cut.

    Attributes:
        length: Number of elements of each tensor.
        tensor: Which tensor each chunk is a part of.
        start: Where in it the chunk begins.
    """

    length: Tensor
    tensor: Tensor
    start: Tensor


class DeviceList:
    """A list of tensors on one GPU, each a block of memory. It holds them while the kernels are started."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._device = tensors, tensors[0].device
        addresses = [t.data_ptr() for t in tensors]
        self._groups: dict[tuple[torch.dtype, int], list[int]] = {}
        for i, (tensor, address) in enumerate(zip(tensors, addresses, strict=True)):
            if tensor.numel():
                align = 16 if address % 16 == 0 else tensor.element_size()
                self._groups.setdefault((tensor.dtype, align), []).append(i)
        # All addresses in one copy, from memory that torch keeps until the copy is done.
        order = [i for group in self._groups.values() for i in group]
        self._where = _sent([addresses[i] for i in order], self._device) if order else None

    @staticmethod
    def of(tensors: Sequence[Tensor], writes: bool = False) -> "DeviceList | None":
        """Return ``tensors`` for the kernels, or None if these cannot take all of them.

        Args:
            tensors: Any tensors.
            writes: Whether they will be written: then none may stand in the list twice.
        """
        if not tensors or torch.compiler.is_compiling() or not tensors[0].is_cuda or not _may_start(tensors[0]):
            return None
        return DeviceList(tensors) if are_blocks(tensors, tensors[0].device, writes) else None

    def norms(self) -> Tensor:
        """Return the 2-norm of each tensor, float64: one launch for each dtype and alignment, and one."""
        sizes, groups = tuple(t.numel() for t in self._tensors), tuple(map(tuple, self._groups.values()))
        return self._finished(_stretches(sizes, groups, _chunk_length(), self._device, _stream(self._device)))

    def norm(self) -> Tensor:
        """Return the 2-norm of all of them, 0-dim float64, in as many launches."""
        count = sum(-(-t.numel() // _chunk_length()) for t in self._tensors)
        return self._finished(_one_stretch(count, self._device, _stream(self._device))).view(())

    def _finished(self, stretches: tuple[Tensor, Tensor, int]) -> Tensor:
        """The norm of each stretch of partial sums."""
        from gradguard.tensors import triton_kernels as kernels

        begin, end, count = stretches
        partial = torch.empty(max(count, 1), dtype=torch.float64, device=self._device)
        norms = torch.empty(len(begin), dtype=torch.float64, device=self._device)
        self._launch(kernels.partial_squares, partial, advances=True)
        _start(kernels.finish, len(begin), self._device, partial, begin, end, norms, BLOCK=1024)
        return norms

    def scale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim ``factor``, in float32 or float64; where it is 1, touch nothing."""
        from gradguard.tensors.triton_kernels import scale

        self._launch(scale, factor)
        increment_version(list(self._tensors))

    def clamp_(self, low: float, high: float) -> None:
        """Clamp every element to bounds that its dtype holds; a stretch with nothing outside is not written."""
        from gradguard.tensors.triton_kernels import clamp

        bounds = [torch.full((), x, dtype=torch.float64, device=self._device) for x in (low, high)]
        self._launch(clamp, *bounds)
        increment_version(list(self._tensors))

    def zero_(self, flag: Tensor) -> None:
        """Set every element to 0 where a 0-dim ``flag`` is true; else touch nothing."""
        from gradguard.tensors.triton_kernels import zero

        self._launch(zero, flag.to(torch.float32))
        increment_version(list(self._tensors))

    def _launch(self, kernel: Any, *arguments: Tensor, advances: bool = False) -> None:
        """Start ``kernel`` for each group; if it ``advances``, each writes behind what the one before has written."""
        import triton.language as tl

        from gradguard.tensors.triton_kernels import BLOCK, CHUNK

        first = 0
        for (dtype, align), group in self._groups.items():
            sizes = tuple(self._tensors[i].numel() for i in group)
            chunks = _chunks(sizes, CHUNK, self._device, _stream(self._device))
            assert self._where is not None
            where, count = self._where[first : first + len(group)], len(chunks.tensor)
            settings = {"DTYPE": getattr(tl, DTYPES[dtype]), "ALIGN": align, "CHUNK": CHUNK, "BLOCK": BLOCK}
            _start(kernel, count, self._device, where, *chunks, *arguments, **settings, num_warps=_WARPS)
            first += len(group)
            arguments = (arguments[0][count:],) if advances else arguments


def coefficients_on_device(norms: Tensor, limit: float) -> Tensor | None:
    """Return min(1, limit / (norms + 1e-6)) in one launch, the bits that torch gives in four; None: ask torch."""
    if not norms.is_cuda or norms.dtype is not torch.float64 or not norms.is_contiguous() or not _may_start(norms):
        return None
    return _coefficients(norms, limit)


def _coefficients(norms: Tensor, limit: float) -> Tensor:
    from gradguard.tensors.triton_kernels import coefficient

    found = torch.empty_like(norms)
    (bits,) = struct.unpack("q", struct.pack("d", limit))
    if count := norms.numel():
        _start(coefficient, -(-count // 256), norms.device, norms, bits, found, count, BLOCK=256)
    return found


def _start(kernel: Any, programs: int, device: torch.device, *arguments: Any, **settings: Any) -> None:
    """The one place where a kernel starts; Triton starts it on the current device."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*arguments, **settings)


def _chunk_length() -> int:
    from gradguard.tensors.triton_kernels import CHUNK

    return CHUNK


def _may_start(tensor: Tensor) -> bool:
    """Tell whether a kernel may run on the device of ``tensor`` now."""
    if torch.compiler.is_compiling() or are_operations_watched():
        return False
    return not is_captured(tensor.device) and _serves(tensor.device)


def are_blocks(tensors: Sequence[Tensor], device: torch.device, writes: bool) -> bool:
    """Tell whether every tensor is a block of memory on ``device``, of a dtype that the kernels take for this."""
    ordinary = {Tensor, torch.nn.Parameter}.issuperset(map(type, tensors))
    if not ordinary or not all([t.device == device and t.dtype in DTYPES for t in tensors]):
        return False
    if not all([t.layout is torch.strided and not t.is_neg() and is_dense(t) for t in tensors]):
        return False
    if not writes:  # float64 has no wider type for squares that leave its range
        return all([t.dtype is not torch.float64 for t in tensors])
    addresses = [t.data_ptr() for t in tensors if t.numel()]
    return len(set(addresses)) == len(addresses)


@functools.lru_cache(maxsize=_REMEMBERED)
def _chunks(sizes: tuple[int, ...], length: int, device: torch.device, stream: int) -> Chunks:
    """The tables of tensors of these sizes; for each stream its own, since another may run ahead of the copy."""
    del stream
    sizes_ = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (sizes_ + length - 1) // length
    tensor = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    start = (torch.arange(len(tensor), device="cpu") - (counts.cumsum(0) - counts)[tensor]) * length
    return Chunks(_sent(sizes_, device), _sent(tensor.to(torch.int32), device), _sent(start, device))


@functools.lru_cache(maxsize=_REMEMBERED)
def _stretches(
    sizes: tuple[int, ...], groups: tuple[tuple[int, ...], ...], length: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor, int]:
    """Where the partial sums of each tensor begin and end, and how many there are."""
    del stream
    begin, end, at = [0] * len(sizes), [0] * len(sizes), 0
    for i in (i for group in groups for i in group):
        begin[i], at = at, at + -(-sizes[i] // length)
        end[i] = at
    return _sent(begin, device), _sent(end, device), at


@functools.lru_cache(maxsize=_REMEMBERED)
def _one_stretch(count: int, device: torch.device, stream: int) -> tuple[Tensor, Tensor, int]:
    """The same where all of them are one."""
    del stream
    return _sent([0], device), _sent([count], device), count


def _sent(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Copy numbers to ``device`` without a wait."""
    table = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.cache
def _serves(device: torch.device) -> bool:
    """Tell whether the kernels run on ``device``, and do there what torch does."""
    if (
        os.environ.get("GRADGUARD_TRITON") != "1"
        or torch.version.cuda is None
        or importlib.util.find_spec("triton") is None
    ):
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        wrong = differs_from_torch(device)
    except Exception as error:  # whatever a compiler may say
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        warnings.warn(
            f"gradguard's Triton kernels are not used on {device}, where torch's do the same more slowly: {wrong}. "
            "Please report this.",
            stacklevel=2,
        )
    return not wrong


@torch.no_grad()
def differs_from_torch(device: torch.device) -> str:
    """Say what the kernels do on ``device`` that torch does not; empty if nothing."""
    values = _values(device)
    small = [x for x in values if x.dtype is not torch.float64]
    norms = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in small])
    if not torch.allclose(DeviceList(small).norms(), norms, rtol=1e-6, atol=0, equal_nan=True):
        return "norms differ"
    for some in (small[::5], small[3::5]):  # of each dtype the long ones, and those out of range
        want = torch.linalg.vector_norm(norms[[next(i for i, x in enumerate(small) if x is one) for one in some]])
        if not torch.allclose(DeviceList(some).norm(), want, rtol=1e-6, atol=0):
            return "the norm of all differs"
    if not torch.equal(_coefficients(norms, 0.3).nan_to_num(7.0), (0.3 / (norms + 1e-6)).clamp(max=1).nan_to_num(7.0)):
        return "coefficients differ"
    half = torch.full((), 0.3, dtype=torch.float64, device=device)
    yes, no = (torch.full((), x, device=device) for x in (True, False))
    writes: dict[str, tuple[Callable[[DeviceList], None], Callable[[Tensor], Tensor]]] = {
        "scale": (lambda x: x.scale_(half), lambda x: (_wide(x) * half.to(_wide(x).dtype)).to(x.dtype)),
        "clamp": (lambda x: x.clamp_(-0.5, 1.5), lambda x: x.clamp(-0.5, 1.5)),
        "zero": (lambda x: x.zero_(yes), torch.zeros_like),
        "zero that is not asked for": (lambda x: x.zero_(no), lambda x: x),
    }
    for name, (ours, torchs) in writes.items():
        came = _values(device)
        ours(DeviceList(came))
        if not all(
            torch.equal(a.nan_to_num(7.0), torchs(b).nan_to_num(7.0)) for a, b in zip(came, values, strict=True)
        ):
            return f"{name} differs"
    return ""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _values(device: torch.device) -> list[Tensor]:
    """Several chunks, short tails, an address that is not a whole 16 bytes, NaN, infinities, numbers out of range."""
    found = []
    for dtype in DTYPES:
        long = (torch.arange(140_001, device=device) % 997 - 498).to(dtype) / 100
        odd = torch.tensor([1.0, math.nan, math.inf, -math.inf, 6e4, 1e-30, -2.0], device=device).to(dtype)
        far = torch.full((5,), {torch.float16: 6e4}.get(dtype, 1e30), device=device, dtype=dtype)
        found += [long, long[1:1000].clone(), torch.cat([odd, odd])[1:8], far, far[:0]]
    return found
