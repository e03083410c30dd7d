"""Triton kernels over lists of tensors that are given as a table of addresses: one launch each, no host reads.

Tables, all on the device:

* ``where[t]``: address of tensor t, int64; new whenever a gradient was allocated again
* ``length[t]``: number of its elements, int64
* ``tensor[c]``, ``start[c]``: chunk c is up to ``CHUNK`` elements of one tensor, int32 and int64

A chunk is one program. Its sum of squares lies in ``partial[c]``, float64, and one program adds those up in a fixed
order: the bits depend neither on the order in which the hardware runs programs nor on how many it runs at a time.

Loads are 16 bytes wide only if the compiler can prove alignment: hints come after the cast of the pointer, and masks
end at whole 16 bytes; what is left over is a second, short load.
"""

# What follows is Triton's language, of which a type checker for Python understands little.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false

import triton
import triton.language as tl

CHUNK = 65536
"""Elements of a program."""

BLOCK = 4096
"""Elements at a time: a float32 lane sees at most 16 additions before float64 takes over."""


@triton.jit
def _chunk(where, length, tensor, start, c, DTYPE: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """Pointer to chunk c, and its number of elements."""
    t = tl.load(tensor + c)
    first = tl.multiple_of(tl.load(start + c), CHUNK)
    n = tl.minimum(tl.load(length + t) - first, CHUNK).to(tl.int32)
    pointer = tl.multiple_of(tl.load(where + t).to(tl.pointer_type(DTYPE)), ALIGN)
    return pointer + first, n


@triton.jit
def _even(n, DTYPE: tl.constexpr):
    """N rounded down to whole 16 bytes."""
    V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    return tl.multiple_of(n // V * V, V)


@triton.jit
def _squares(pointer, n, scale, DTYPE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of squares of n elements times ``scale``: lanes in COMPUTE, added up in float64."""
    V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    lanes = tl.zeros([BLOCK], COMPUTE)
    offsets = tl.arange(0, BLOCK)
    main = _even(n, DTYPE)
    for at in range(0, main, BLOCK):
        x = tl.load(pointer + at + offsets, mask=at + offsets < main, other=0.0).to(COMPUTE) * scale
        lanes += x * x
    rest = main + tl.arange(0, V)
    x = tl.load(pointer + rest, mask=rest < n, other=0.0).to(COMPUTE) * scale
    return tl.sum(lanes.to(tl.float64), 0) + tl.sum((x * x).to(tl.float64), 0)


@triton.jit
def partial_squares(
    where,
    length,
    tensor,
    start,
    partial,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """partial[c] = sum of squares of chunk c. float32 squares that left their range are taken again in float64.

    CHUNK squares of less than 1.2e-38 each cannot matter above 1e-26.
    """
    c = tl.program_id(0)
    pointer, n = _chunk(where, length, tensor, start, c, DTYPE, ALIGN, CHUNK)
    squares = _squares(pointer, n, 1.0, DTYPE, tl.float32, BLOCK)
    if (squares > 1e-26) & (squares < 3e38):
        tl.store(partial + c, squares)
    else:
        tl.store(partial + c, _squares(pointer, n, 1.0, DTYPE, tl.float64, BLOCK))


@triton.jit
def finish(partial, first, last, norms, BLOCK: tl.constexpr):
    """norms[t] = square root of the sum of partial[first[t]] up to, without, partial[last[t]], in that order."""
    t = tl.program_id(0)
    begin = tl.load(first + t)
    end = tl.load(last + t)
    offsets = tl.arange(0, BLOCK)
    lanes = tl.zeros([BLOCK], tl.float64)
    for at in range(begin, end, BLOCK):
        lanes += tl.load(partial + at + offsets, mask=at + offsets < end, other=0.0)
    tl.store(norms + t, tl.sqrt(tl.sum(lanes, 0)))


@triton.jit(do_not_specialize=["limit", "count"])
def coefficient(norms, limit, coefficients, count, BLOCK: tl.constexpr):
    """coefficients[i] = min(1, limit / (norms[i] + 1e-6)), rounded as torch does: a reciprocal, then a product.

    ``limit`` is a float64 by its bits: a Python float would come as float32.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = limit.to(tl.int64).to(tl.float64, bitcast=True)
    c = 1.0 / (tl.load(norms + at, mask=at < count, other=1.0) + 1e-6) * m
    tl.store(coefficients + at, tl.where(c > 1.0, 1.0, c), mask=at < count)  # NaN stays


@triton.jit
def scale(
    where,
    length,
    tensor,
    start,
    coefficient,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply every element; where the coefficient is 1, a program reads 8 bytes and leaves.

    Chunks in reverse: the last that the norm read are still in L2.
    """
    COMPUTE: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    factor = tl.load(coefficient).to(COMPUTE)
    if factor != 1.0:
        c = tl.num_programs(0) - 1 - tl.program_id(0)
        pointer, n = _chunk(where, length, tensor, start, c, DTYPE, ALIGN, CHUNK)
        V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        offsets = tl.arange(0, BLOCK)
        main = _even(n, DTYPE)
        for at in range(0, main, BLOCK):
            mask = at + offsets < main
            x = tl.load(pointer + at + offsets, mask=mask, other=0.0).to(COMPUTE)
            tl.store(pointer + at + offsets, (x * factor).to(DTYPE), mask=mask)
        rest = main + tl.arange(0, V)
        x = tl.load(pointer + rest, mask=rest < n, other=0.0).to(COMPUTE)
        tl.store(pointer + rest, (x * factor).to(DTYPE), mask=rest < n)


@triton.jit
def _clamp_block(pointer, mask, lo, hi, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    x = tl.load(pointer, mask=mask, other=0.0).to(COMPUTE)
    outside = mask & ((x < lo) | (x > hi))
    if tl.sum(outside.to(tl.int32), 0) > 0:
        y = tl.where(x < lo, lo, x)
        tl.store(pointer, tl.where(y > hi, hi, y).to(DTYPE), mask=mask)


@triton.jit
def clamp(
    where,
    length,
    tensor,
    start,
    low,
    high,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Clamp to bounds that DTYPE holds; blocks with nothing outside are not written. NaN compares false and stays."""
    pointer, n = _chunk(where, length, tensor, start, tl.program_id(0), DTYPE, ALIGN, CHUNK)
    COMPUTE: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    lo = tl.load(low).to(COMPUTE)
    hi = tl.load(high).to(COMPUTE)
    offsets = tl.arange(0, BLOCK)
    main = _even(n, DTYPE)
    for at in range(0, main, BLOCK):
        _clamp_block(pointer + at + offsets, at + offsets < main, lo, hi, DTYPE, COMPUTE)
    rest = main + tl.arange(0, V)
    _clamp_block(pointer + rest, rest < n, lo, hi, DTYPE, COMPUTE)


@triton.jit
def zero(
    where,
    length,
    tensor,
    start,
    flag,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set every element to 0 where the flag is not 0, reading none; else leave."""
    if tl.load(flag) != 0.0:
        pointer, n = _chunk(where, length, tensor, start, tl.program_id(0), DTYPE, ALIGN, CHUNK)
        V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        offsets = tl.arange(0, BLOCK)
        nothing = tl.zeros([BLOCK], DTYPE)
        main = _even(n, DTYPE)
        for at in range(0, main, BLOCK):
            tl.store(pointer + at + offsets, nothing, mask=at + offsets < main)
        rest = main + tl.arange(0, V)
        tl.store(pointer + rest, tl.zeros([V], DTYPE), mask=rest < n)
