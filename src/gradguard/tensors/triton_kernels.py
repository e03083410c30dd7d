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

LEAST = tl.constexpr(2.0**-126)
"""float32 has not all digits of smaller numbers: an element is multiplied by this, and then by ``UP`` times them."""

UP = tl.constexpr(2.0**126)

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
def _scale_chunk(pointer, n, factor, again, DTYPE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    offsets = tl.arange(0, BLOCK)
    main = _even(n, DTYPE)
    for at in range(0, main, BLOCK):
        mask = at + offsets < main
        x = tl.load(pointer + at + offsets, mask=mask, other=0.0).to(COMPUTE)
        tl.store(pointer + at + offsets, (x * factor * again).to(DTYPE), mask=mask)
    rest = main + tl.arange(0, V)
    x = tl.load(pointer + rest, mask=rest < n, other=0.0).to(COMPUTE)
    tl.store(pointer + rest, (x * factor * again).to(DTYPE), mask=rest < n)


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
    wide = tl.load(coefficient).to(tl.float64)
    if wide != 1.0:
        c = tl.num_programs(0) - 1 - tl.program_id(0)
        pointer, n = _chunk(where, length, tensor, start, c, DTYPE, ALIGN, CHUNK)
        if tl.float64 == DTYPE:
            _scale_chunk(pointer, n, wide, 1.0, DTYPE, tl.float64, BLOCK)
        else:  # in two steps where float32 has not all digits
            tiny = (wide > 0.0) & (wide < LEAST)
            first, again = tl.where(tiny, LEAST, wide), tl.where(tiny, wide * UP, 1.0)
            _scale_chunk(pointer, n, first.to(tl.float32), again.to(tl.float32), DTYPE, tl.float32, BLOCK)


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


@triton.jit
def _count_block(pointer, mask, DTYPE: tl.constexpr):
    """How many elements are NaN, and how many infinite."""
    COMPUTE: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    x = tl.load(pointer, mask=mask, other=0.0).to(COMPUTE)
    return tl.sum((x != x).to(tl.int32), 0), tl.sum((tl.abs(x) == float("inf")).to(tl.int32), 0)


@triton.jit
def nonfinite(
    where,
    length,
    tensor,
    start,
    place,
    counts,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the numbers of NaN and of infinite elements to counts[2 * place[t]] and the one behind; integers, int64."""
    c = tl.program_id(0)
    pointer, n = _chunk(where, length, tensor, start, c, DTYPE, ALIGN, CHUNK)
    V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    offsets = tl.arange(0, BLOCK)
    main = _even(n, DTYPE)
    rest = main + tl.arange(0, V)
    nan, inf = _count_block(pointer + rest, rest < n, DTYPE)
    for at in range(0, main, BLOCK):
        more_nan, more_inf = _count_block(pointer + at + offsets, at + offsets < main, DTYPE)
        nan += more_nan
        inf += more_inf
    if nan + inf > 0:
        slot = counts + 2 * tl.load(place + tl.load(tensor + c))
        tl.atomic_add(slot, nan.to(tl.int64))
        tl.atomic_add(slot + 1, inf.to(tl.int64))


# Units: each tensor lies in memory as [groups, lines, length], and a program takes a tile of one group, BLOCK lanes at
# a time: 2^w adjacent elements of each of BLOCK / 2^w lines, then STEPS - 1 such blocks behind it. A row is a line, and
# the blocks follow each other along it. Columns are stretches of every line, and the blocks follow across the lines.
#
# ``cuts``, int64, FIELDS numbers for each tensor, in this order:
LENGTH = tl.constexpr(0)  # elements of a line
LINES = tl.constexpr(1)  # lines of a group
WIDTH = tl.constexpr(2)  # w
CHUNKS = tl.constexpr(3)  # programs one behind the other in the direction of the steps
ACROSS = tl.constexpr(4)  # programs of a group in the other direction
COLUMNS = tl.constexpr(5)  # 1 for columns, 0 for rows
ALIGNED = tl.constexpr(6)  # 1 if the address and every line are whole 16 bytes
UNITS = tl.constexpr(7)  # units of a group
AFTER = tl.constexpr(8)  # adjacent elements of a unit in a line
PROGRAM = tl.constexpr(9)  # the first program
UNIT = tl.constexpr(10)  # the first unit
PARTIAL = tl.constexpr(11)  # the first partial sum
BESIDE = tl.constexpr(12)  # partial sums of a unit that lie side by side
RUN = tl.constexpr(13)  # log2 of how many partial sums lie side by side
RUNS = tl.constexpr(14)  # how many such runs a unit has sums in
SUMMED = tl.constexpr(15)  # the first program of `unit_norms`
COUNT = tl.constexpr(16)  # units of all groups
FIELDS = tl.constexpr(17)

UNIT_BLOCK = 2048
"""Lanes of a program that measures or scales units."""

UNIT_STEPS = 32
"""Elements that a float32 lane of it adds up."""

SPAN = 32
"""Lanes of a row that are added up before the partial sum is stored."""

UNITS_AT_ONCE = 32
"""Units of a program that puts partial sums together."""

TERMS = 16
"""Partial sums of each that it reads at a time."""


@triton.jit
def _tile(cuts, tensor, c, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Where program c works.

    Returns:
        Its tensor's cut, the group, the first element; of each lane the line and the place in it, from the first; the
        first line and place; how many of both are left; by how many of each a step advances; the number of steps.
    """
    cut = cuts + tl.load(tensor + c).to(tl.int64) * FIELDS
    p = c - tl.load(cut + PROGRAM)
    q, chunk = p // tl.load(cut + CHUNKS), p % tl.load(cut + CHUNKS)
    group, block = q // tl.load(cut + ACROSS), q % tl.load(cut + ACROSS)
    columns, w = tl.load(cut + COLUMNS), tl.load(cut + WIDTH).to(tl.int32)
    lines, length = tl.load(cut + LINES), tl.load(cut + LENGTH)
    lane = tl.arange(0, BLOCK)
    high, wide = BLOCK >> w, 1 << w
    first_line = tl.where(columns == 1, chunk * STEPS, block) * high
    first_place = tl.where(columns == 1, block, chunk * STEPS) * wide
    lines_left = tl.minimum(lines - first_line, STEPS * BLOCK).to(tl.int32)
    places_left = tl.minimum(length - first_place, STEPS * BLOCK).to(tl.int32)
    steps = tl.where(columns == 1, (lines_left + high - 1) // high, (places_left + wide - 1) // wide)
    first = (group * lines + first_line) * length + first_place
    down, along = tl.where(columns == 1, high, 0), tl.where(columns == 1, 0, wide)
    line, place = lane >> w, lane & (wide - 1)
    steps = tl.minimum(steps, STEPS)
    return cut, group, first, line, place, first_line, first_place, lines_left, places_left, down, along, steps


@triton.jit
def _lanes(k, offset, length, line, place, lines, places, down, along, V: tl.constexpr):
    """Offsets and mask of step k, with what the compiler cannot see: V lanes lie side by side, all or none of them."""
    at = offset + k * (down * length + along)  # a hint on what comes as an argument would be lost
    mask = tl.max_constancy((line + k * down < lines) & (place + k * along < places), V)
    return tl.max_contiguous(tl.multiple_of(at, V), V), mask


@triton.jit
def _lane_squares(
    pointer, offset, length, line, place, lines, places, down, along, steps,
    V: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each lane the sum of squares, and the largest magnitude (NaN is none)."""
    squares, largest = tl.zeros([BLOCK], COMPUTE), tl.zeros([BLOCK], COMPUTE)
    for k in range(steps):
        at, mask = _lanes(k, offset, length, line, place, lines, places, down, along, V)
        x = tl.load(pointer + at, mask=mask, other=0.0).to(COMPUTE)
        squares += x * x
        largest = tl.maximum(largest, tl.abs(x))
    return squares, largest


@triton.jit
def _lost(squares, largest):
    """Whether one of the sums left the range of float32, or lost squares that were too small for it."""
    return tl.max(((largest > 0) & ((squares <= 1e-28) | (squares >= 3e38) | (squares != squares))).to(tl.int32), 0)


@triton.jit
def unit_squares(
    where, cuts, tensor, partial,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Partial sums of squares, float64: of columns one for each lane, of rows one for SPAN lanes.

    Where a sum left the range of float32, all of the program are taken again in float64. At most 32 * SPAN squares
    below 1.2e-38 each cannot matter above 1e-28.
    """
    c = tl.program_id(0)
    cut, _, first, line, place, _, _, lines, places, down, along, steps = _tile(cuts, tensor, c, BLOCK, STEPS)
    p = c - tl.load(cut + PROGRAM)
    pointer = tl.load(where + tl.load(tensor + c)).to(tl.pointer_type(DTYPE))
    length = tl.load(cut + LENGTH)
    offset = first + line.to(tl.int64) * length + place
    V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    if tl.load(cut + ALIGNED) == 1:
        pointer16 = tl.multiple_of(pointer, 16)
        squares, largest = _lane_squares(
            pointer16, offset, length, line, place, lines, places, down, along, steps, V, tl.float32, BLOCK
        )
    else:
        squares, largest = _lane_squares(
            pointer, offset, length, line, place, lines, places, down, along, steps, 1, tl.float32, BLOCK
        )
    SLOTS: tl.constexpr = BLOCK // SPAN
    columns = tl.load(cut + COLUMNS) == 1
    of_rows = tl.sum(tl.reshape(squares.to(tl.float64), [SLOTS, SPAN]), 1)
    row_lost = _lost(of_rows, tl.max(tl.reshape(largest, [SLOTS, SPAN]), 1))
    sums = squares.to(tl.float64)
    if tl.where(columns, _lost(squares, largest), row_lost) > 0:
        sums, _largest = _lane_squares(
            pointer, offset, length, line, place, lines, places, down, along, steps, 1, tl.float64, BLOCK
        )
        of_rows = tl.sum(tl.reshape(sums, [SLOTS, SPAN]), 1)
    out = partial + tl.load(cut + PARTIAL)
    if columns:
        tl.store(out + p * BLOCK + tl.arange(0, BLOCK), sums)
    else:
        tl.store(out + p * SLOTS + tl.arange(0, SLOTS), of_rows)


@triton.jit
def _unit_sums(cut, partial, unit, TOGETHER: tl.constexpr, TERMS: tl.constexpr):
    """The sums of squares of some units of a tensor, each in a fixed order."""
    beside, run, runs = tl.load(cut + BESIDE), tl.load(cut + RUN), tl.load(cut + RUNS)
    units, across = tl.load(cut + UNITS), tl.load(cut + ACROSS)
    group, begin = (unit // units * across)[:, None], (unit % units * beside)[:, None]
    there = (unit < tl.load(cut + COUNT))[:, None]
    lanes = tl.zeros([TOGETHER, TERMS], tl.float64)
    terms = beside * runs
    for m in range(0, terms, TERMS):
        term = (m + tl.arange(0, TERMS))[None, :]
        j = begin + term % beside
        at = (((group + (j >> run)) * runs + term // beside) << run) + (j & ((1 << run) - 1))
        lanes += tl.load(partial + tl.load(cut + PARTIAL) + at, mask=there & (term < terms), other=0.0)
    return tl.sum(lanes, 1)


@triton.jit(do_not_specialize=["threshold", "eps"])
def unit_norms(
    cuts, tensor, partial, norms, weights, threshold, eps, factors, squares,
    TOGETHER: tl.constexpr, TERMS: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """norms[u] from the partial sums of unit u. With FACTORS also what adaptive clipping multiplies each unit by.

    ``cuts`` are then of gradients, ``weights`` of the weights; squares[c] becomes the sum of squares of program c's
    units. ``threshold`` and ``eps`` are float64 by their bits, as in `coefficient`.
    """
    c = tl.program_id(0)
    t = tl.load(tensor + c).to(tl.int64)
    cut = cuts + t * FIELDS
    unit = (c - tl.load(cut + SUMMED)) * TOGETHER + tl.arange(0, TOGETHER)
    there, at = unit < tl.load(cut + COUNT), tl.load(cut + UNIT) + unit
    sums = _unit_sums(cut, partial, unit, TOGETHER, TERMS)
    norm = tl.sqrt(sums)
    tl.store(norms + at, norm, mask=there)
    if FACTORS:
        weight = tl.sqrt(_unit_sums(weights + t * FIELDS, partial, unit, TOGETHER, TERMS))
        least = eps.to(tl.int64).to(tl.float64, bitcast=True)
        bound = tl.where(weight < least, least, weight) * threshold.to(tl.int64).to(tl.float64, bitcast=True)
        tl.store(factors + at, tl.where(norm > bound, bound / norm, 1.0), mask=there)  # NaN compares false
        tl.store(squares + c, tl.sum(sums, 0))


@triton.jit
def _scale_lanes(
    pointer, offset, length, line, place, lines, places, down, along, steps, factor,
    V: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    for k in range(steps):
        at, mask = _lanes(k, offset, length, line, place, lines, places, down, along, V)
        x = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointer + at, (x * factor).to(DTYPE), mask=mask)


@triton.jit
def unit_scale(
    where, cuts, tensor, factors,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Multiply each unit by its factor, rounded to float32; a program of whose units all have 1 leaves.

    Programs in reverse, as in `scale`.
    """
    c = tl.num_programs(0) - 1 - tl.program_id(0)
    cut, group, first, line, place, first_line, first_place, lines, places, down, along, steps = _tile(
        cuts, tensor, c, BLOCK, STEPS
    )
    columns = tl.load(cut + COLUMNS) == 1
    unit = tl.where(columns, (first_place + place) // tl.load(cut + AFTER), first_line + line)
    at = tl.load(cut + UNIT) + group * tl.load(cut + UNITS) + unit
    factor = tl.load(factors + at, mask=(line < lines) & (place < places), other=1.0).to(tl.float32)
    if tl.max((factor != 1.0).to(tl.int32), 0) > 0:
        pointer = tl.load(where + tl.load(tensor + c)).to(tl.pointer_type(DTYPE))
        length = tl.load(cut + LENGTH)
        offset = first + line.to(tl.int64) * length + place
        V: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        if tl.load(cut + ALIGNED) == 1:
            pointer16 = tl.multiple_of(pointer, 16)
            _scale_lanes(pointer16, offset, length, line, place, lines, places, down, along, steps, factor, V, DTYPE)
        else:
            _scale_lanes(pointer, offset, length, line, place, lines, places, down, along, steps, factor, 1, DTYPE)
