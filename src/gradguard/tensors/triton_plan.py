"""The one way to the Triton kernels: lists of CUDA tensors that these can take, and what they do with them.

`DeviceList.of` and `UnitList.of` return None for everything else, and callers then take torch's own kernels, which are
right for all: that is the whole dispatch. Taken are dense float32, bfloat16, float16 and float64 tensors (float64 not
for norms and units) on one NVIDIA GPU of compute capability 8.0 or newer, where Triton can be imported, outside of
`torch.compile` and of the recording of a CUDA graph. Its replays would copy the addresses from pinned memory that has
been used for something else by then; that memory pinned for as long as the graph lives would do is not to be proven
without a GPU.

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
from typing import Any, NamedTuple, Protocol

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
    def of(tensors: Sequence[Tensor], writes: bool = False, wide: bool | None = None) -> "DeviceList | None":
        """Return ``tensors`` for the kernels, or None if these cannot take all of them.

        Args:
            tensors: Any tensors.
            writes: Whether they will be written: then none may stand in the list twice.
            wide: Whether float64 is taken, as all is but norms; by default where they are written.
        """
        return DeviceList(tensors) if are_taken(tensors, writes, writes if wide is None else wide) else None

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
        self._launch(kernels.partial_squares, partial, advances="chunks")
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

    def nonfinite(self) -> Tensor:
        """Return how many elements of each tensor are NaN, and how many are infinite: int64 ``[tensors, 2]``."""
        from gradguard.tensors.triton_kernels import nonfinite

        counts = torch.zeros(len(self._tensors), 2, dtype=torch.int64, device=self._device)
        order = tuple(i for group in self._groups.values() for i in group)
        places = _sent_once(order, self._device, _stream(self._device))
        self._launch(nonfinite, places, counts, advances="tensors")
        return counts

    def _launch(self, kernel: Any, *arguments: Tensor, advances: str = "") -> None:
        """Start ``kernel`` for each group; its first argument ``advances`` by the "chunks" or "tensors" of each."""
        from gradguard.tensors.triton_kernels import BLOCK, CHUNK

        first = 0
        for (dtype, align), group in self._groups.items():
            sizes = tuple(self._tensors[i].numel() for i in group)
            chunks = _chunks(sizes, CHUNK, self._device, _stream(self._device))
            assert self._where is not None
            where, count = self._where[first : first + len(group)], len(chunks.tensor)
            settings = {"DTYPE": _triton_type(dtype), "ALIGN": align, "CHUNK": CHUNK, "BLOCK": BLOCK}
            _start(kernel, count, self._device, where, *chunks, *arguments, **settings, num_warps=_WARPS)
            first += len(group)
            if advances:
                arguments = (arguments[0][count if advances == "chunks" else len(group) :], *arguments[1:])


class InMemory(Protocol):
    """What tells which elements of a tensor are a unit."""

    def in_memory(self, tensor: Tensor) -> tuple[int, int, int, int] | None:
        """Return the tensor's ``[groups, before, units, after]`` in memory; None if it does not lie like that."""
        ...


class UnitList:
    """Tensors that are cut into units, each a stretch of memory (a row) or a column of one; on one GPU."""

    def __init__(self, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, int, int, int]]) -> None:
        self._tensors, self.shapes, self._device = tensors, shapes, tensors[0].device
        addresses = [t.data_ptr() for t in tensors]
        self._where = _sent(addresses, self._device)
        keys = zip(tensors, addresses, shapes, strict=True)
        self._kinds = tuple([(t.dtype, _are_aligned(t, address, shape), shape) for t, address, shape in keys])

    @staticmethod
    def of(tensors: Sequence[Tensor], layouts: Sequence[InMemory], writes: bool = False) -> "UnitList | None":
        """Return ``tensors`` for the kernels, or None if these cannot take all of them.

        Args:
            tensors: Any tensors.
            layouts: The units of each.
            writes: As for `DeviceList.of`.
        """
        if not are_taken(tensors, writes, wide=False):
            return None
        shapes = [shape for x, layout in zip(tensors, layouts, strict=True) if (shape := layout.in_memory(x))]
        return UnitList(tensors, shapes) if len(shapes) == len(tensors) else None

    def norms(self) -> Tensor:
        """Return the 2-norm of every unit of every tensor, float64: a launch for each dtype, and one."""
        plan = self._plan(len(self._tensors))
        norms = torch.empty(plan.units, dtype=torch.float64, device=self._device)
        self._sum_up(plan, self._squares(plan), norms, None, 0, 0, None, None, factors=False)
        return norms

    def scale_(self, factors: Tensor) -> None:
        """Multiply every unit by its factor, float64, rounded to float32: a launch for each dtype."""
        self._scale_(self._plan(len(self._tensors)), factors)

    def clip_(self, weights: "UnitList", threshold: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Hold the norm of each unit to ``threshold * max(eps, norm of the unit of the weights)``.

        Two launches for each dtype, and two.

        Returns:
            The norm of all before (0-dim float64), that of each unit before, and what each was multiplied by.
        """
        from gradguard.tensors.triton_kernels import finish

        both = UnitList([*self._tensors, *weights._tensors], [*self.shapes, *weights.shapes])
        plan = both._plan(len(self._tensors))
        norms, factors = (torch.empty(plan.units, dtype=torch.float64, device=self._device) for _ in range(2))
        programs = len(plan.summed)
        squares = torch.empty(max(programs, 1), dtype=torch.float64, device=self._device)
        of_weights, limits = plan.cuts[len(self._tensors) :], (_bits(threshold), _bits(eps))
        partial = both._squares(plan)
        both._sum_up(plan, partial, norms, of_weights, *limits, factors, squares, factors=True)
        begin, end, _ = _one_stretch(programs, self._device, _stream(self._device))
        norm = torch.empty(1, dtype=torch.float64, device=self._device)
        _start(finish, 1, self._device, squares, begin, end, norm, BLOCK=1024)
        both._scale_(plan, factors)
        return norm.view(()), norms, factors

    def _plan(self, first: int) -> "UnitPlan":
        return _unit_plan(self._kinds, first, self._device, _stream(self._device))

    def _squares(self, plan: "UnitPlan") -> Tensor:
        """The partial sums of all tensors."""
        from gradguard.tensors import triton_kernels as kernels

        partial = torch.empty(max(plan.partials, 1), dtype=torch.float64, device=self._device)
        settings = {"BLOCK": kernels.UNIT_BLOCK, "STEPS": kernels.UNIT_STEPS, "SPAN": kernels.SPAN}
        for dtype, tensor, _ in plan.programs:
            given = self._where, plan.cuts, tensor, partial
            settings["DTYPE"] = _triton_type(dtype)
            _start(kernels.unit_squares, len(tensor), self._device, *given, **settings, num_warps=_WARPS)
        return partial

    def _sum_up(self, plan: "UnitPlan", partial: Tensor, *arguments: Any, factors: bool) -> None:
        """Put the partial sums of the first tensors together."""
        from gradguard.tensors.triton_kernels import TERMS, UNITS_AT_ONCE, unit_norms

        if len(plan.summed):
            settings = {"TOGETHER": UNITS_AT_ONCE, "TERMS": TERMS, "FACTORS": factors}
            given = plan.cuts, plan.summed, partial
            _start(unit_norms, len(plan.summed), self._device, *given, *arguments, **settings, num_warps=_WARPS)

    def _scale_(self, plan: "UnitPlan", factors: Tensor) -> None:
        """Scale the first tensors of the plan."""
        from gradguard.tensors import triton_kernels as kernels

        settings = {"BLOCK": kernels.UNIT_BLOCK, "STEPS": kernels.UNIT_STEPS}
        for dtype, tensor, count in plan.programs:
            if count:
                given, settings["DTYPE"] = (self._where, plan.cuts, tensor, factors), _triton_type(dtype)
                _start(kernels.unit_scale, count, self._device, *given, **settings, num_warps=_WARPS)
        increment_version(list(self._tensors[: plan.first]))


class UnitPlan(NamedTuple):
    """How a list of tensors with units is cut into programs; what depends on no address.

    Attributes:
        cuts: ``[tensors, fields]``, as ``triton_kernels`` tells.
        programs: Of each dtype, the tensor that each program works on, and how many of these belong to the first.
        summed: Of which of the first tensors each program of ``unit_norms`` puts sums together.
        partials: How many partial sums there are.
        units: How many units the first tensors have.
        first: How many tensors are the first ones, which may be scaled.
    """

    cuts: Tensor
    programs: tuple[tuple[torch.dtype, Tensor, int], ...]
    summed: Tensor
    partials: int
    units: int
    first: int


@functools.lru_cache(maxsize=_REMEMBERED)
def _unit_plan(
    kinds: tuple[tuple[torch.dtype, bool, tuple[int, int, int, int]], ...],
    first: int,
    device: torch.device,
    stream: int,
) -> UnitPlan:
    """The plan of tensors of these dtypes, alignments and shapes; for each stream its own, as `_chunks`."""
    del stream
    from gradguard.tensors.triton_kernels import UNITS_AT_ONCE

    cuts, programs, sums = [], [], []
    started, partials, unit, summed = dict.fromkeys([dtype for dtype, _, _ in kinds], 0), 0, 0, 0
    for dtype, aligned, shape in kinds:
        cut, count, stored = _cut(shape)
        units = shape[0] * shape[2]
        cuts.append([*cut[:6], int(aligned), cut[6], cut[7], started[dtype], unit, partials, *cut[8:], summed, units])
        programs.append(count)
        sums.append(-(-units // UNITS_AT_ONCE))
        started[dtype] += count
        partials, unit, summed = partials + count * stored, unit + units, summed + sums[-1]
    of_dtype = {d: torch.tensor([i for i, k in enumerate(kinds) if k[0] is d], device="cpu") for d in started}
    counts = torch.tensor(programs, dtype=torch.int64, device="cpu")
    listed = tuple(
        (d, _repeated(i, counts[i], device), int(counts[i[i < first]].sum())) for d, i in of_dtype.items() if started[d]
    )
    of_first = torch.tensor(sums[:first], dtype=torch.int64, device="cpu")
    units = sum(shape[0] * shape[2] for _, _, shape in kinds[:first])
    summed_by = _repeated(torch.arange(first, device="cpu"), of_first, device)
    table = torch.tensor(cuts, dtype=torch.int64, device="cpu")
    return UnitPlan(_sent(table, device), listed, summed_by, partials, units, first)


def _cut(shape: tuple[int, int, int, int]) -> tuple[list[int], int, int]:
    """The fields of a tensor that come from its shape, its number of programs, and how many sums each stores."""
    from gradguard.tensors.triton_kernels import SPAN, UNIT_BLOCK, UNIT_STEPS

    groups, before, units, after = shape
    if 0 in shape:  # units of no elements have the norm 0, from no sums
        return [0, 0, 0, 1, 1, 0, max(units, 1), after, 0, 0, 0], 0, 0
    columns = before > 1
    lines, length = (before, units * after) if columns else (groups * units, after)
    reach = length if columns else -(-length // UNIT_STEPS)
    w = min(max((reach - 1).bit_length(), SPAN.bit_length() - 1), UNIT_BLOCK.bit_length() - 1)
    high, width = UNIT_BLOCK >> w, 1 << w
    if columns:
        chunks, across = -(-lines // (UNIT_STEPS * high)), -(-length // width)
        found = [length, lines, w, chunks, across, 1, units, after, after, w, chunks * high]
        return found, groups * across * chunks, UNIT_BLOCK
    chunks, across, slots = -(-length // (UNIT_STEPS * width)), -(-lines // high), UNIT_BLOCK // SPAN
    found = [length, lines, w, chunks, across, 0, lines, after, width // SPAN, slots.bit_length() - 1, chunks]
    return found, across * chunks, slots


def _are_aligned(tensor: Tensor, address: int, shape: tuple[int, int, int, int]) -> bool:
    """Tell whether each line of ``tensor`` is a number of whole 16 bytes."""
    _, before, units, after = shape
    line = units * after if before > 1 else after
    return address % 16 == 0 and line * tensor.element_size() % 16 == 0


def _repeated(numbers: Tensor, times: Tensor, device: torch.device) -> Tensor:
    return _sent(torch.repeat_interleave(numbers, times).to(torch.int32), device)


def _bits(number: float) -> int:
    """A float64 by its bits: a Python float would come to a kernel as float32."""
    return struct.unpack("q", struct.pack("d", number))[0]


def coefficients_on_device(norms: Tensor, limit: float) -> Tensor | None:
    """Return min(1, limit / (norms + 1e-6)) in one launch, the bits that torch gives in four; None: ask torch."""
    if not norms.is_cuda or norms.dtype is not torch.float64 or not norms.is_contiguous() or not _may_start(norms):
        return None
    return _coefficients(norms, limit)


def _coefficients(norms: Tensor, limit: float) -> Tensor:
    from gradguard.tensors.triton_kernels import coefficient

    found = torch.empty_like(norms)
    if count := norms.numel():
        _start(coefficient, -(-count // 256), norms.device, norms, _bits(limit), found, count, BLOCK=256)
    return found


def _start(kernel: Any, programs: int, device: torch.device, *arguments: Any, **settings: Any) -> None:
    """The one place where a kernel starts; Triton starts it on the current device."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*arguments, **settings)


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, DTYPES[dtype])


def _chunk_length() -> int:
    from gradguard.tensors.triton_kernels import CHUNK

    return CHUNK


def _may_start(tensor: Tensor) -> bool:
    """Tell whether a kernel may run on the device of ``tensor`` now."""
    if torch.compiler.is_compiling() or are_operations_watched():
        return False
    return not is_captured(tensor.device) and _serves(tensor.device)


def are_taken(tensors: Sequence[Tensor], writes: bool, wide: bool) -> bool:
    """Tell whether the kernels may run now on all ``tensors``; arguments as for `are_blocks`."""
    if not tensors or torch.compiler.is_compiling() or not tensors[0].is_cuda or not _may_start(tensors[0]):
        return False
    return are_blocks(tensors, tensors[0].device, writes, wide)


def are_blocks(tensors: Sequence[Tensor], device: torch.device, writes: bool, wide: bool) -> bool:
    """Tell whether every tensor is a block of memory on ``device``, of a dtype that the kernels take.

    Args:
        tensors: Any tensors.
        device: Where they must be.
        writes: Whether they will be written: then none may stand in the list twice.
        wide: Whether float64 is taken, which has no wider type for squares that leave its range.

    Returns:
        Whether all of them are.
    """
    ordinary = {Tensor, torch.nn.Parameter}.issuperset(map(type, tensors))
    if not ordinary or not all([t.device == device and t.dtype in DTYPES for t in tensors]):
        return False
    if not all([t.layout is torch.strided and not t.is_neg() and is_dense(t) for t in tensors]):
        return False
    if not wide and torch.float64 in {t.dtype for t in tensors}:
        return False
    if not writes:
        return True
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


@functools.lru_cache(maxsize=_REMEMBERED)
def _sent_once(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The same as `_sent`, remembered."""
    del stream
    return _sent(numbers, device)


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
    counts = [[int(x.isnan().sum()), int(x.isinf().sum())] for x in values]
    if DeviceList(values).nonfinite().tolist() != counts:
        return "counts differ"
    if wrong := _differs_in_units(device):
        return wrong
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


def _differs_in_units(device: torch.device) -> str:
    """Say what adaptive clipping by the kernels does that torch does not."""
    grads = _unit_values(device)
    before, weights = [x.clone() for x in grads], [x.flip(3).contiguous() / 8 for x in grads]
    shapes = [(x.shape[0], x.shape[1], x.shape[2], x.shape[3]) for x in grads]
    norm, norms, factors = UnitList(grads, shapes).clip_(UnitList(weights, shapes), 0.5, 1e-3)
    of_grads, of_weights = (
        torch.cat([torch.linalg.vector_norm(x, dim=(1, 3), dtype=torch.float64).flatten() for x in some])
        for some in (before, weights)
    )
    close = functools.partial(torch.allclose, rtol=1e-6, atol=0)
    if not close(norms, of_grads) or not close(norm, torch.linalg.vector_norm(of_grads)):
        return "norms of units differ"
    bound = of_weights.clamp(min=1e-3) * 0.5
    if not close(factors, torch.where(norms > bound, bound / norms, 1.0)):
        return "factors of units differ"
    each = zip(grads, before, factors.split([x.shape[0] * x.shape[2] for x in grads]), strict=True)
    for came, was, factor in each:
        if not torch.equal(came, (was * factor.float().view(was.shape[0], 1, was.shape[2], 1)).to(was.dtype)):
            return "scale of units differs"
    return ""


def _unit_values(device: torch.device) -> list[Tensor]:
    """``[groups, before, units, after]``: rows and columns, short and long, in whole 16 bytes and not, out of range."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1, 1, 130, 400), (1, 1, 3, 70_001), (1, 3000, 40, 1), (2, 70, 9, 7), (1, 1, 5, 0)):
            x = (torch.arange(math.prod(shape), device=device) % 997 - 498).to(dtype).view(shape) / 100
            x[..., 2:3, 1:2] *= 600 if dtype is torch.float16 else 1e25
            found.append(x)
    return found


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
