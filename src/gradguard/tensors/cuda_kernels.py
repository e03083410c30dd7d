"""Triton kernels over many tensors of one dtype, given as a table of addresses: one launch for all of them.

A tensor is cut into *units*, rows of equal length one after the other in memory (one row: the whole tensor), and a unit
into chunks of up to ``CHUNK`` elements, each of which is one program. Tables, all on the device:

* ``where[t]``: the address of tensor t
* ``cuts[t]``: the length of its units, the number of chunks in each, its first program and its first unit
* ``tensor[c]``: the tensor of program c
* ``begin[u]``: the first program of unit u

Sums are computed in float64, which holds the square of every float32, and in a fixed order. A program begins at a
multiple of 16 bytes, so full blocks are read and written 16 bytes at a time wherever the tensor begins.
"""

# The rest is in Triton's language, which Python tools do not understand.
# ruff: noqa: N803, N806, SIM108, F821
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportUndefinedVariable=false

import triton
import triton.language as tl

CHUNK = 16384
"""How many elements a program handles."""

BLOCK = 1024
"""How many of them it handles at a time."""

UNITS = 16
"""How many units one program of `finish` completes."""

TERMS = 1024
"""How many partial sums such a program reads at a time, over all its units."""

DOWN = tl.constexpr(2.0**-126)
"""float32 holds smaller numbers with fewer digits: multiply by ``factor * UP`` first, and then by ``DOWN``."""

UP = tl.constexpr(2.0**126)

_MAGNITUDE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""All bits of a float64 except its sign: as integers they have the order of the numbers, with NaN the largest."""


@triton.jit
def _chunk(where, cuts, tensor, c, DTYPE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the aligned begin of chunk c, its first and last element counted from there, and its unit."""
    t = tl.load(tensor + c)
    cut = cuts + t * 4
    length, chunks = tl.load(cut), tl.load(cut + 1)
    k = c - tl.load(cut + 2)
    row, start = k // chunks, k % chunks * CHUNK
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address = tl.load(where + t) + (row * length + start) * SIZE
    begin = address & -16
    head = ((address - begin) // SIZE).to(tl.int32)
    pointer = tl.multiple_of(begin.to(tl.pointer_type(DTYPE)), 16)
    return pointer, head, head + tl.minimum(length - start, CHUNK).to(tl.int32), tl.load(cut + 3) + row


@triton.jit
def _read(pointer, at, head, end, BLOCK: tl.constexpr):
    """Read a block: its elements, their addresses, which of them are in the chunk, and whether all are."""
    lane = at + tl.arange(0, BLOCK)
    inside = (lane >= head) & (lane < end)
    whole = (at >= head) & (at + BLOCK <= end)
    if whole:
        x = tl.load(pointer + lane)
    else:
        x = tl.load(pointer + lane, mask=inside, other=0.0)
    return x if x.dtype == tl.float64 else x.to(tl.float32), pointer + lane, inside, whole


@triton.jit
def _write(pointers, x, inside, whole, DTYPE: tl.constexpr):
    if whole:
        tl.store(pointers, x.to(DTYPE))
    else:
        tl.store(pointers, x.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["where", "cuts", "tensor", "partial"])
def measure(
    where, cuts, tensor, partial,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute partial[c], the sum of squares of chunk c or its largest magnitude; NaN is larger than all."""
    c = tl.program_id(0)
    pointer, head, end, _ = _chunk(where, cuts, tensor, c, DTYPE, CHUNK)
    lanes = tl.zeros([BLOCK], tl.int64 if LARGEST else tl.float64)
    for at in range(0, end, BLOCK):
        x = _read(pointer, at, head, end, BLOCK)[0].to(tl.float64)
        if LARGEST:
            lanes = tl.maximum(lanes, x.to(tl.int64, bitcast=True) & _MAGNITUDE)
        else:
            lanes += x * x
    if LARGEST:
        tl.store(partial + c, tl.max(lanes, 0).to(tl.float64, bitcast=True))
    else:
        tl.store(partial + c, tl.sum(lanes, 0))


@triton.jit(do_not_specialize=["partial", "begin", "norms", "units"])
def finish(
    partial, begin, norms, units,
    LARGEST: tl.constexpr, UNITS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Compute norms[u], the root of the sum, or the largest, of partial[begin[u] : begin[u + 1]]."""
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    first = tl.load(begin + u, mask=u < units, other=0)
    count = tl.load(begin + u + 1, mask=u < units, other=0) - first
    lanes = tl.zeros([UNITS, TERMS], tl.int64 if LARGEST else tl.float64)
    for at in range(0, tl.max(count, 0), TERMS):
        k = (at + tl.arange(0, TERMS))[None, :]
        x = tl.load(partial + first[:, None] + k, mask=k < count[:, None], other=0.0)
        if LARGEST:
            lanes = tl.maximum(lanes, x.to(tl.int64, bitcast=True))
        else:
            lanes += x
    if LARGEST:
        tl.store(norms + u, tl.max(lanes, 1).to(tl.float64, bitcast=True), mask=u < units)
    else:
        tl.store(norms + u, tl.sqrt(tl.sum(lanes, 1)), mask=u < units)


@triton.jit(do_not_specialize=["where", "cuts", "tensor", "factors"])
def scale(
    where, cuts, tensor, factors,
    DTYPE: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply every element by the one factor, or by that of its unit (EACH); a factor of 1 writes nothing.

    Chunks run in reverse order, because the norm has read the last ones most recently and they are still in the cache.
    """
    c = tl.num_programs(0) - 1 - tl.program_id(0)
    pointer, head, end, unit = _chunk(where, cuts, tensor, c, DTYPE, CHUNK)
    factor = tl.load(factors + unit if EACH else factors)
    if factor != 1.0:
        is_tiny = (factor > 0.0) & (factor < DOWN) & (DTYPE.primitive_bitwidth < 64)
        first, again = tl.where(is_tiny, factor * UP, factor), tl.where(is_tiny, DOWN, 1.0)
        for at in range(0, end, BLOCK):
            x, pointers, inside, whole = _read(pointer, at, head, end, BLOCK)
            _write(pointers, x * first.to(x.dtype) * again.to(x.dtype), inside, whole, DTYPE)


@triton.jit(do_not_specialize=["norm", "found"])
def coefficient(norm, found, limit: "fp64"):
    """Compute found[i] = min(1, limit / (norm[i] + 1e-6)), rounded as in torch: a reciprocal, then a product."""
    i = tl.program_id(0)
    ratio = 1.0 / (tl.load(norm + i) + 1e-6) * limit
    tl.store(found + i, tl.where(ratio > 1.0, 1.0, ratio))  # NaN stays


@triton.jit(do_not_specialize=["where", "cuts", "tensor"])
def clamp(
    where, cuts, tensor, low: "fp64", high: "fp64",
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clamp every element to bounds that DTYPE can hold; NaN compares false and stays."""
    pointer, head, end, _ = _chunk(where, cuts, tensor, tl.program_id(0), DTYPE, CHUNK)
    for at in range(0, end, BLOCK):
        x, pointers, inside, whole = _read(pointer, at, head, end, BLOCK)
        least, most = tl.cast(low, x.dtype), tl.cast(high, x.dtype)
        x = tl.where(x < least, least, x)
        _write(pointers, tl.where(x > most, most, x), inside, whole, DTYPE)
