r"""Contributions: the per-sample gradients from one use of a parameter, in the form that costs least.

A layer's rule (``layers/``) returns one of these forms for each of its parameters. Only `Materialized` stores the
``[B, *shape]`` per-sample gradients:

==============  ===============================================  =============================
form            per-sample gradient :math:`g_i`                  used for
==============  ===============================================  =============================
`Outer`         :math:`\sum_t l_{it} \otimes r_{it}`             weights of linear maps
`TableRows`     row ``ids[i, t]`` gets :math:`\sum_t v_{it}`     embeddings
`Recomputed`    computed anew for some samples at a time         convolutions
`Materialized`  stored                                           biases, scales, anything else
==============  ===============================================  =============================

Each form returns squared norms (float64, ``[B]``), the weighted sum :math:`\sum_i c_i g_i` (at least float32), and the
gradients of a range of samples.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, zip_longest
from operator import not_
from typing import NamedTuple

import torch
from torch import Tensor

from gradguard.tensors.layout import HALVES, wide_dtype
from gradguard.tensors.units import ROWS, unit_norms

# Wide arithmetic: at least float32 for every dtype, float64 where rows are long.


def wide(values: Tensor) -> Tensor:
    """Return ``values`` in the dtype of the computation: float32 for half precision, otherwise unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def real_parts(values: Tensor) -> Tensor:
    """Return complex ``values`` as pairs of real ones, ``[..., 2]``, which have the same norm; others unchanged."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def with_parts_of(values: Tensor, parameter: Tensor) -> Tensor:
    """Return pairs of real values as complex values if ``parameter`` is complex; otherwise return them unchanged."""
    return torch.view_as_complex(values.contiguous()) if parameter.is_complex() else values


def row_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each row of each tensor ``[B, ...]``, as float64 ``[B]``, in one pass over all tensors."""
    # One tensor that is not contiguous, such as the first token of each sample, keeps all from the compiled kernels.
    rows = [t.reshape(len(t), -1).contiguous() if t.numel() else t.new_zeros(len(t), 1) for t in tensors]
    return unit_norms(rows, [ROWS] * len(rows))


def row_squares(values: Tensor) -> Tensor:
    """Return the squared 2-norm of each row of ``values``, shape ``[B, ...]``, as float64 of shape ``[B]``."""
    return row_norms([values])[0].square()


def joint_norm(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of several parts as one vector, from the norms of the parts."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)), dim=0)


def scale_rows(values: Tensor, factors: Tensor, bad: Tensor | None) -> Tensor:
    """Return ``values * factors`` row by row, at least float32; rows marked in ``bad`` become 0, even if NaN."""
    shape = (-1, *[1] * (values.dim() - 1))
    scaled = values * factors.to(torch.float32 if values.dtype in HALVES else values.dtype).view(shape)
    return scaled if bad is None else scaled.masked_fill_(bad.view(shape), 0)


def blank_rows(values: Tensor, bad: Tensor | None) -> Tensor:
    """Return ``values``, at least float32, with the rows marked in ``bad`` set to 0, because 0 times NaN is NaN."""
    values = wide(values)
    return values if bad is None else values.masked_fill(bad.view(-1, *[1] * (values.dim() - 1)), 0)


# Products of 16-bit matrices with float32 sums, on tensor cores. Float32 represents the product of two 16-bit numbers
# exactly, so the results are the products of the converted matrices, at ten times the speed. Tensor cores lose
# precision only in the sums: they truncate bits below the float32 accumulator instead of rounding, once in 16 products.

_UNDERFLOW = 1e-36
"""Squared norms up to this may have lost terms below the range of float32."""

_CUT_OFF = 2.0**-26
"""Relative amount by which a sum of 16-bit products may be too small, per product: 2**-22 for each 16 products."""

_WORTH_SPLITTING = 1 << 32
"""Multiply-adds from which three 16-bit products take less time than one float32 product with fewer launches."""


def multiplies_halves(values: Tensor) -> bool:
    """Return whether ``values`` have 16 bits and tensor cores multiply them with sums in float32."""
    if values.dtype not in HALVES or not _has_tensor_cores(values.device):
        return False
    return values.dtype is torch.bfloat16 or not torch.backends.cuda.matmul.allow_fp16_accumulation


@functools.cache
def _has_tensor_cores(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _multiply_halves(left: Tensor, right: Tensor) -> Tensor:
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    return multiply(left, right, out_dtype=torch.float32)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices, or of two batches of matrices, in at least float32."""
    return _multiply_halves(left, right) if left.dtype in HALVES else left @ right


def operands(grad: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands for `product`: in 16 bits where tensor cores multiply these, otherwise at least float32."""
    if grad.dtype is values.dtype and multiplies_halves(grad):
        return grad, values
    return wide(grad), wide(values)


def as_computed(values: Tensor, grad: Tensor) -> Tensor:
    """Return a layer's input in the dtype of its output's gradient ``grad``, as autocast has multiplied it.

    Where no tensor cores multiply 16 bits, the input is returned unchanged.
    """
    return values.to(grad.dtype) if values.dtype is torch.float32 and multiplies_halves(grad) else values


def sum_positions(values: Tensor) -> Tensor:
    """Return the sums of ``[B, T, d]`` over positions, ``[B, d]``, at least float32."""
    return values.sum(1, dtype=torch.float32 if values.dtype in HALVES else None)


# The forms.

_PIECE = 1 << 18
"""Number of elements of a sample's gradient in one piece of `Contribution.pieces`."""


class Contribution(ABC):
    """The per-sample gradients from one or several uses of one parameter.

    Attributes:
        shape: Shape of the parameter.
        batch_size: Number of samples B.
        uncancelled: After `squared_norms`: an upper bound of the squares without cancellation in their sums, ``[B]``;
            None if nothing can cancel. Squares far below this bound are computed again (`sample_norms`,
            `are_certain`).
        room: Memory that nothing else refers to, in which the next weighted sum may be written; None for new memory.
    """

    shape: torch.Size
    batch_size: int
    uncancelled: Tensor | None = None
    room: Tensor | None = None

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """Return the gradients of samples ``start`` to ``stop``: ``[stop - start, *shape]``, at least float32."""

    def pieces(self, sample: int) -> Iterable[Tensor]:
        """Return the flattened gradient of one sample in consecutive pieces."""
        return self.rows(sample, sample + 1).flatten().split(_PIECE)

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Return the squared 2-norm of each sample's gradient, float64 of shape ``[B]``."""

    @property
    def measured(self) -> list[Tensor]:
        """The tensors whose row norms multiply to the samples' norms; empty if norms are computed in another way."""
        return []

    @abstractmethod
    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        """Return the sum of ``factors[i]`` times the gradient of sample i, of the parameter's shape.

        Args:
            factors: One number for each sample.
            bad: A mask of samples that count as zero even if their gradients are NaN; None for no such sample.
        """

    def materialize(self) -> "Materialized":
        """Return this contribution as stored per-sample gradients."""
        return Materialized(self.rows(0, self.batch_size))

    def _room_for(self, values: Tensor) -> Tensor | None:
        """Return `room` if a sum of ``values`` can be written in it, and forget it."""
        room, self.room = self.room, None
        if room is None or room.shape != self.shape or room.dtype != values.dtype or room.device != values.device:
            return None
        return room

    def with_recomputed(self, squares: Tensor) -> Tensor:
        """Return ``squares`` after computing uncertain ones again from the gradients themselves."""
        if self.uncancelled is not None:
            for i in (~are_certain(squares, self.uncancelled)).nonzero().flatten().tolist():
                squares[i] = row_squares(self.rows(i, i + 1))[0]
        return squares


Contributions = dict[str, Contribution]
"""The contribution to each parameter, by name."""


class Materialized(Contribution):
    """Per-sample gradients that are stored, ``[B, *shape]``."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = wide(gradients)
        self.shape, self.batch_size = gradients.shape[1:], len(gradients)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return a view of the gradients of samples ``start`` to ``stop``."""
        return self.gradients[start:stop]

    @property
    def measured(self) -> list[Tensor]:
        """The gradients."""
        return [self.gradients]

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each row."""
        return row_squares(self.gradients)

    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        """Return the weighted sum, by one matrix-vector product."""
        rows = blank_rows(self.gradients, bad)
        return (factors.to(rows.dtype) @ rows.reshape(self.batch_size, self.shape.numel())).view(self.shape)

    def materialize(self) -> "Materialized":
        """Return itself."""
        return self


class Recomputed(Contribution):
    """Per-sample gradients that are computed again for each purpose, some samples at a time.

    Attributes:
        chunk: Number of samples at a time.
    """

    chunk: int

    def squared_norms(self) -> Tensor:
        """Return the squared norms, from the gradients of ``chunk`` samples at a time, which are then dropped."""
        return squared_norms_in_chunks(self, self.chunk)


class TableRows(Contribution):
    """Vectors added to rows of a table: ``values[i, t]`` is added to row ``ids[i, t]`` of sample i's gradient.

    Args:
        ids: int64, ``[B, T]``.
        values: ``[B, T, d]``.
        shape: ``(V, d)``.
    """

    def __init__(self, ids: Tensor, values: Tensor, shape: torch.Size) -> None:
        self.ids, self.values, self.shape, self.batch_size = ids, values, shape, len(ids)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the dense tables of samples ``start`` to ``stop``."""
        values = wide(self.values[start:stop])
        samples, width = len(values), self.shape[1]
        keys = self._keys(self.ids[start:stop])
        table = values.new_zeros(samples * self.shape[0], width)
        return table.index_add_(0, keys, values.reshape(-1, width)).view(samples, *self.shape)

    def squared_norms(self) -> Tensor:
        """Sum the vectors of each row of each sample, then their squares, without ``[B, V, d]`` or ``[B, T, T]``."""
        keys, order = self._keys(self.ids).sort()
        first = torch.ones_like(keys, dtype=torch.bool)
        torch.ne(keys[1:], keys[:-1], out=first[1:])
        slots = first.cumsum(0) - 1
        values = wide(self.values).reshape(-1, self.shape[1])[order]
        squares = row_squares(torch.zeros_like(values).index_add_(0, slots, values))
        samples = torch.zeros_like(slots).index_copy_(0, slots, keys // self.shape[0])
        return squares.new_zeros(self.batch_size).index_add_(0, samples, squares)

    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        """Return the table with all scaled vectors added."""
        scaled = scale_rows(self.values, factors, bad).reshape(-1, self.shape[1])
        table = scaled.new_zeros(self.shape) if (room := self._room_for(scaled)) is None else room.zero_()
        return table.index_add_(0, self.ids.reshape(-1), scaled)

    def _keys(self, ids: Tensor) -> Tensor:
        """Return one index for each pair of a sample and a row of the table, flattened ``[B * T]``."""
        offsets = torch.arange(len(ids), device=ids.device).view(-1, 1) * self.shape[0]
        return (ids + offsets).reshape(-1)


class Outer(Contribution):
    """Sums of outer products of two vectors at each position.

    Args:
        left: ``[B, T, l]``.
        right: ``[B, T, r]``; the parameter has shape ``(l, r)``. For a linear weight, left is the gradient of the
            output and right the input.

    Attributes:
        ghost: Whether norms are computed from Gram matrices; otherwise from the gradients of ``chunk`` samples at a
            time, which are then dropped. Both are exact; `choose_method` sets the faster one.
        chunk: Number of samples at a time.
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = operands(left, right)
        self.shape, self.batch_size = torch.Size((left.shape[2], right.shape[2])), len(left)
        self.ghost, self.chunk = False, max(1, self.batch_size)

    @property
    def positions(self) -> int:
        """Number of positions T."""
        return self.left.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the gradients of samples ``start`` to ``stop``, by one matrix product for each sample."""
        return product(self.left[start:stop].mT, self.right[start:stop])

    def pieces(self, sample: int) -> Iterable[Tensor]:
        """Return a sample's flattened gradient in pieces, by products with some entries of the left side at a time."""
        left, right = self.left[sample].mT, self.right[sample]
        for part in left.split(max(1, _PIECE // max(1, self.shape[1]))):
            yield product(part, right).flatten()

    @property
    def measured(self) -> list[Tensor]:
        """Both sides if there is one position, where norms need no products; otherwise nothing."""
        return [self.left, self.right] if self.positions == 1 else []

    def squared_norms(self) -> Tensor:
        """Return the squared norms; for one position from the norms of both sides."""
        if self.positions == 1:
            return row_squares(self.left) * row_squares(self.right)
        return self._ghost_norms() if self.ghost else squared_norms_in_chunks(self, self.chunk)

    def _ghost_norms(self) -> Tensor:
        r"""Return squared norms as sums over pairs of positions; samples where these cancel must be recomputed.

        With :math:`U = (\sum_t \lVert l_t\rVert\lVert r_t\rVert)^2` the relative error is a few times 1e-7 U / n².
        Squares of 16-bit products are raised by the largest possible truncation, so norms are never too small.
        """
        half = self.positions // 2 if self.left.is_cpu else 0
        # A Gram matrix is symmetric: its upper right quarter is not computed.
        grams = self._grams(half, self.positions)
        squares, diagonal = grams.sum((1, 2), dtype=torch.float64), grams.diagonal(half, dim1=1, dim2=2)
        if half:
            squares += grams[:, :, :half].sum((1, 2), dtype=torch.float64)
            grams = self._grams(0, half)
            squares += grams.sum((1, 2), dtype=torch.float64)
            diagonal = torch.cat([diagonal, grams.diagonal(dim1=1, dim2=2)], 1)
        if self.left.dtype in HALVES:
            squares *= 1 + _CUT_OFF * sum(self.shape)
        self.uncancelled = torch.linalg.vector_norm(diagonal, 0.5, dim=1, dtype=torch.float64)
        return squares

    def _grams(self, start: int, stop: int) -> Tensor:
        """Return the product of both sides' inner products of positions ``start`` to ``stop`` with all before."""
        left, right = (product(side[:, start:stop], side[:, :stop].mT) for side in (self.left, self.right))
        return left.mul_(right)

    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        """Return the weighted sum, by one matrix product with the smaller side scaled."""
        left, right = self.left, self.right
        work = self.batch_size * self.positions * self.shape.numel()
        if left.dtype is torch.bfloat16 and work >= _WORTH_SPLITTING:
            return self._sum_of_pieces(factors, bad)
        if left.shape[2] <= right.shape[2]:
            left, right = scale_rows(left, factors, bad), blank_rows(right, bad)
        else:
            left, right = blank_rows(left, bad), scale_rows(right, factors, bad)
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        return torch.mm(left.mT, right, out=self._room_for(left))

    def _sum_of_pieces(self, factors: Tensor, bad: Tensor | None) -> Tensor:
        """Return the weighted sum, with the smaller side scaled in float32 and split into three bfloat16 pieces."""
        swapped = self.shape[0] < self.shape[1]
        small, large = (self.left, self.right) if swapped else (self.right, self.left)
        rest = scale_rows(small, factors, bad).flatten(0, 1)
        pieces = torch.empty(len(rest), 3, rest.shape[1], dtype=torch.bfloat16, device=rest.device)
        first, second, third = pieces.unbind(1)  # the three pieces add up to the float32 values exactly
        first.copy_(rest)
        second.copy_(rest.sub_(first))
        third.copy_(rest.sub_(second))
        pieces = pieces.flatten(1)
        if bad is not None:
            large = large.masked_fill(bad.view(-1, 1, 1), 0)
        large = large.flatten(0, 1)
        if swapped:
            return product(pieces.mT, large).unflatten(0, (3, -1)).sum(0)
        return product(large.mT, pieces).unflatten(1, (3, -1)).sum(1)


class Tied(Contribution):
    r"""A table that serves lookups and products, like GPT-2's tied embedding and head: `TableRows` plus `Outer`.

    Its squared norm has a cross term, twice :math:`\sum_{t,s} l_s[id_t] \langle v_t, r_s \rangle`.
    """

    def __init__(self, rows: TableRows, outer: Outer) -> None:
        self.looked_up, self.multiplied = rows, outer
        self.shape, self.batch_size = rows.shape, rows.batch_size

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the sum of both parts' gradients."""
        return self.looked_up.rows(start, stop) + self.multiplied.rows(start, stop)

    def squared_norms(self) -> Tensor:
        """Return the sum of both squared norms and the cross term; samples where these cancel must be recomputed."""
        looked_up, multiplied = self.looked_up.squared_norms(), self.multiplied.squared_norms()
        left, dtype = self.multiplied.left, wide_dtype(self.multiplied.left.device)
        ids = self.looked_up.ids.unsqueeze(1).expand(-1, left.shape[1], -1)
        products = self.multiplied.right.to(dtype) @ self.looked_up.values.to(dtype).mT
        cross = products.mul_(left.gather(2, ids)).sum((1, 2))
        uncancelled = self.multiplied.uncancelled
        self.uncancelled = looked_up + (multiplied if uncancelled is None else torch.maximum(multiplied, uncancelled))
        return looked_up + multiplied + 2 * cross

    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        """Return the sum of both parts' weighted sums."""
        self.multiplied.room, self.room = self.room, None
        total = self.multiplied.weighted_sum(factors, bad)
        return total.add_(self.looked_up.weighted_sum(factors, bad))


def together(contributions: list[Contribution]) -> Contribution:
    """Merge the contributions of all uses of one parameter into one, including every cross term between uses."""
    if len(contributions) == 1:
        return contributions[0]
    outers = [c for c in contributions if isinstance(c, Outer)]
    tables = [c for c in contributions if isinstance(c, TableRows)]
    merged = [c for c in contributions if not isinstance(c, Outer | TableRows)]
    if outers:
        merged.append(Outer(torch.cat([c.left for c in outers], 1), torch.cat([c.right for c in outers], 1)))
    if tables:
        ids, values = torch.cat([c.ids for c in tables], 1), torch.cat([wide(c.values) for c in tables], 1)
        merged.append(TableRows(ids, values, tables[0].shape))
    match merged:
        case [only]:
            return only
        case [Outer() as outer, TableRows() as table]:
            return Tied(table, outer)
    return Materialized(functools.reduce(torch.add, [c.materialize().gradients for c in merged]))


def squared_norms_in_chunks(contribution: Contribution, chunk: int) -> Tensor:
    """Return the squared norms, from the gradients of ``chunk`` samples at a time, dropped before the next chunk."""
    size, chunk = contribution.batch_size, max(1, chunk)
    parts = [row_squares(contribution.rows(i, min(i + chunk, size))) for i in range(0, size, chunk)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")


def are_certain(squares: Tensor, uncancelled: Tensor) -> Tensor:
    """Return a mask of squared norms that are finite, and large enough beside their summands to be free of rounding."""
    return (squares > uncancelled * 1e-3 + _UNDERFLOW) & (squares < torch.inf)


def sample_norms(
    contributions: Mapping[str, Contribution], scale: Tensor | float = 1.0, valid: Tensor | bool = True
) -> tuple[dict[str, Tensor], bool]:
    """Return the norm of each sample's gradient of each parameter, with at most one host sync.

    Args:
        contributions: The contribution to each parameter.
        scale: Factor of the norms; ``[B]`` or one number.
        valid: A bool on the device, read in the same host sync; False makes the second result False.

    Returns:
        The norms, float64 ``[B]``, by parameter; and whether the host sync, if there was one, showed that all norms are
        finite.
    """
    if not contributions:
        return {}, False
    # In blocks: products of two norms, then norms, then squares. Each block takes one call, not one per parameter.
    measured = dict(sorted(((name, c.measured) for name, c in contributions.items()), key=lambda one: -len(one[1])))
    sides = [*zip_longest(*[each for each in measured.values() if each])]
    squares = {name: contributions[name].squared_norms() for name, each in measured.items() if not each}
    blocks = [torch.stack([*squares.values()]).sqrt_()] if squares else []
    if sides:
        present = [[one for one in side if one is not None] for side in sides]
        norms, *others = torch.stack(row_norms([*chain(*present)])).split([*map(len, present)])
        for other in others:
            norms[: len(other)].mul_(other)
        blocks.insert(0, norms)
    together, seen_finite = torch.cat(blocks), False
    bounds = {name: bound for name in squares if (bound := contributions[name].uncancelled) is not None}
    if bounds:
        certain = are_certain(torch.stack([squares[name] for name in bounds]), torch.stack([*bounds.values()]))
        finite = (together < torch.inf).all() & valid
        *each, seen_finite = torch.cat([certain.all(1), finite.view(1)]).tolist()
        for name in compress(bounds, map(not_, each)):
            together[[*measured].index(name)] = contributions[name].with_recomputed(squares[name]).sqrt()
    return dict(zip(measured, (together * scale).unbind(), strict=True)), seen_finite


# The method for each norm: the fastest within a budget of bytes. Times are estimates from four numbers of a device;
# only their ratios matter. For T positions and a weight of l x r, in addition to a plain step:
#
# keep: compute and store each sample's gradient. The clipped sum is then one pass over the gradients instead of a
#   product, so this takes little more time than the plain step's own weight gradient, but memory.
# ghost: compute two [T, T] Gram matrices for each sample's norm, then one product for the clipped sum.
# drop: compute and drop each sample's gradient, then one product for the clipped sum.

_CACHE, _BLOCK = 4 << 20, 256 << 20
"""Bytes of gradients that ``drop`` computes at a time: as many as fit a CPU's cache, or keep an accelerator busy."""

_FRESH = 32 << 20
"""Bytes from which the C library maps new pages for each allocation."""


class Speed(NamedTuple):
    """The speed of a device per second: multiply-adds in products and in clipped sums, bytes, bytes of new pages."""

    products: float
    sums: float
    traffic: float
    pages: float


CPU = Speed(products=4e10, sums=4e10, traffic=2e10, pages=3e9)
ACCELERATOR = Speed(products=2e13, sums=2e13, traffic=2e12, pages=float("inf"))  # its allocator keeps what was freed
TENSOR_CORES = {
    torch.bfloat16: ACCELERATOR._replace(products=2e14, sums=7e13),
    torch.float16: ACCELERATOR._replace(products=2e14),
}
"""The speed of products of 16-bit operands in an `Outer`, by dtype."""


def choose_method(contribution: Contribution, budget: int, device: torch.device) -> Contribution:
    """Materialize ``contribution`` if that is fastest and fits ``budget`` bytes; otherwise set its fastest method.

    Returns:
        The materialized contribution, or ``contribution`` itself.
    """
    is_outer = isinstance(contribution, Outer)
    if isinstance(contribution, Materialized) or (is_outer and contribution.positions == 1):
        return contribution
    on_cpu = device.type == "cpu"
    size = materialized_bytes(contribution)
    chunk = max(1, (_CACHE if on_cpu else _BLOCK) // max(1, size // max(1, contribution.batch_size)))
    if isinstance(contribution, Recomputed):
        contribution.chunk = chunk
        return contribution.materialize() if size <= budget else contribution
    if isinstance(contribution, Tied):
        choose_method(contribution.multiplied, 0, device)
    if not is_outer:
        return contribution
    speed = CPU if on_cpu else TENSOR_CORES.get(contribution.left.dtype, ACCELERATOR)
    samples, positions, (left, right) = contribution.batch_size, contribution.positions, contribution.shape
    work, grams = samples * positions * left * right, samples * positions * positions
    # Estimated seconds, the clipped sum included.
    keep = work / speed.products + 3 * size / speed.traffic + (size / speed.pages if size > _FRESH else 0)
    ghost = work / speed.sums + grams * (left + right) / speed.products + 16 * grams / speed.traffic
    drop = work / speed.sums + work / speed.products + size / speed.traffic
    if kept_bytes(contribution) <= budget and keep <= min(ghost, drop):
        return contribution.materialize()
    contribution.ghost = ghost < drop
    contribution.chunk = chunk
    return contribution


def materialized_bytes(contribution: Contribution) -> int:
    """Return the bytes of all samples' gradients in float32."""
    return 4 * contribution.batch_size * contribution.shape.numel()


def kept_bytes(contribution: Contribution) -> int:
    """Return the bytes of the budget that a contribution takes if it is materialized.

    Gradients that are no larger than their two factors take none, because the factors would be stored until the sum
    otherwise.
    """
    size = materialized_bytes(contribution)
    if isinstance(contribution, Outer) and size <= contribution.left.nbytes + contribution.right.nbytes:
        return 0
    return size
