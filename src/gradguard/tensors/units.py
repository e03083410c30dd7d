r"""Unit-wise norms: one norm for each row of a linear weight, each filter of a convolution, each whole bias."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradguard.tensors.cuda_blocks import CudaBlocks
from gradguard.tensors.kernels import DTYPES, UnitBlocks
from gradguard.tensors.layout import (
    are_readable,
    each_plain,
    grouped,
    is_dense,
    readable_values,
    wide_dtype,
)
from gradguard.tensors.norms import CONVERTED
from gradguard.tensors.scaling import LEAST, is_below, scale_

_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Which elements of a tensor form one unit.

    Attributes:
        dim: The dimension whose entries are the units; ``None`` makes the whole tensor one unit.
        groups: The number of groups into which dimension 0 is cut first, each with its own units (grouped transposed
            convolutions).
    """

    dim: int | None = 0
    groups: int = 1

    def units(self, tensor: Tensor) -> int:
        """Return how many units ``tensor`` has."""
        if self.dim is None:
            return 1
        return tensor.shape[0] if self.dim == 0 else self.groups * tensor.shape[self.dim]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` as ``[units, elements of a unit]``: a view if its strides allow one."""
        if self.dim is None:
            return tensor.reshape(1, -1)
        if self == ROWS and tensor.is_contiguous():
            return tensor.flatten(1)
        by_group = self._by_group(tensor).movedim(self.dim + 1, 1)  # [groups, units, ...]
        rest = sorted(range(2, by_group.dim()), key=by_group.stride, reverse=True)
        return by_group.permute(0, 1, *rest).flatten(2).flatten(0, 1)

    def stretches(self, tensor: Tensor) -> int:
        """Return the number of units if each is a contiguous run of memory, one after the other; else 0."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in DTYPES or not is_dense(tensor):
            return 0
        if self.dim is None:
            return 1
        count = tensor.shape[self.dim]
        is_outermost = count == 1 or tensor.stride(self.dim) * count == tensor.numel()
        return count if is_outermost and self.groups == 1 else 0

    def spread(self, tensor: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of ``tensor`` and ``factors``, one factor for each unit, whose product scales each unit."""
        if self.dim is None:
            return (tensor if tensor.dim() else tensor[None]), factors
        if self == ROWS:
            return tensor, factors.view(-1, *[1] * (tensor.dim() - 1))
        by_group = self._by_group(tensor)
        shape = [1] * by_group.dim()
        shape[0], shape[self.dim + 1] = self.groups, by_group.shape[self.dim + 1]
        return by_group, factors.view(shape)

    def _by_group(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.groups, tensor.shape[0] // self.groups))


WHOLE = UnitLayout(dim=None)
"""The whole tensor is one unit: for biases, gains, scalars."""

ROWS = UnitLayout()
"""The entries of dimension 0 are the units."""


def layout_of(tensor: Tensor) -> UnitLayout:
    """Return the usual units of a tensor: a scalar or vector is one unit, else each entry of dimension 0 is one."""
    return WHOLE if tensor.dim() <= 1 else ROWS


@torch.no_grad()
def unit_norms(tensors: Sequence[Tensor], layouts: Sequence[UnitLayout]) -> list[Tensor]:
    """Return the 2-norm of every unit of every tensor, one vector of float64 for each tensor.

    Args:
        tensors: Dense tensors of any real or complex dtype on one device.
        layouts: The units of each tensor.

    Returns:
        Vectors on the device of the tensors (float32 on MPS), views of one vector.
    """
    if (blocks := _blocks_of(tensors, layouts)) is not None:
        counts = [layout.units(x) for x, layout in zip(tensors, layouts, strict=True)]
        return list(blocks.norms(sum(counts)).split(counts))
    norms: dict[int, Tensor] = {}
    for places, counts, blocks in _on_device(tensors, layouts, writes=False):
        norms.update(zip(places, blocks.norms(2.0).split(counts), strict=True))
    others = [i for i in range(len(tensors)) if i not in norms]
    values = each_plain([tensors[i] for i in others], partial(readable_values, modulus=False))
    norms.update((i, _row_norms(layouts[i].rows(x))) for i, x in zip(others, values, strict=True))
    return [norms[i] for i in range(len(tensors))]


def _on_device(
    tensors: Sequence[Tensor], layouts: Sequence[UnitLayout], *, writes: bool
) -> Iterator[tuple[list[int], list[int], CudaBlocks]]:
    """Yield the indices of tensors that one launch on a GPU accepts, their numbers of units, and their blocks."""
    if torch.compiler.is_compiling() or are_readable(*tensors[:1]):
        return
    counts = [layout.stretches(x) for x, layout in zip(tensors, layouts, strict=True)]
    for group in grouped(tensors).values():
        places = [i for i in group if counts[i]]
        units = [counts[i] for i in places]
        blocks = CudaBlocks.of([tensors[i] for i in places], units, writes=writes)
        if blocks is not None:
            yield places, units, blocks


def _blocks_of(tensors: Sequence[Tensor], layouts: Sequence[UnitLayout]) -> UnitBlocks | None:
    return UnitBlocks.of(tensors, [layout.dim for layout in layouts], [layout.groups for layout in layouts])


def _row_norms(rows: Tensor) -> Tensor:
    """Return the norms of rows in float64, without a host sync; in parts, because torch may copy what it converts."""
    if rows.dtype is torch.float64:  # divide by the largest element first: squares may leave the range
        if rows.numel() == 0:
            return rows.new_zeros(len(rows))
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)
        divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
        return (divisor * torch.linalg.vector_norm(rows / divisor, dim=1, keepdim=True)).squeeze(1)
    at_once = max(1, CONVERTED // max(1, rows.shape[1]))
    parts = [torch.linalg.vector_norm(x, dim=1, dtype=wide_dtype(x.device)) for x in rows.split(at_once)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def scale_units_(tensors: Sequence[Tensor], layouts: Sequence[UnitLayout], factors: Sequence[Tensor]) -> None:
    """Multiply each unit of each tensor by its own factor, rounding once, in place.

    Args:
        tensors: As for `unit_norms`; no two elements may share memory.
        layouts: The units of each tensor.
        factors: One float64 vector for each tensor, as from `unit_norms`. On the CPU, a tensor whose factors are all 1
            is not written.
    """
    others = _not_scaled_at_once(tensors, layouts, factors)
    tensors, layouts = [tensors[i] for i in others], [layouts[i] for i in others]
    factors = [factors[i] for i in others]
    if not tensors:
        return
    together = torch.cat(list(factors))
    sizes = [f.shape[0] for f in factors]
    binding = _any_below_one(together, sizes) if are_readable(together) else [True] * len(tensors)
    if are_readable(together) and (blocks := _blocks_of(tensors, layouts)) is not None:
        blocks.scale_(together)
        increment_version(list(compress(tensors, binding)))
        return
    narrow, wide, is_tiny = together.float(), together, False
    if are_readable(together) and is_below(together, LEAST):
        tiny = (together > 0) & (together < LEAST)
        narrow, is_tiny = torch.where(tiny, together, narrow.double()), True
    each = zip(tensors, layouts, binding, narrow.split(sizes), wide.split(sizes), strict=True)
    for tensor, layout, binds, short, long in each:
        if binds:
            view, factor = layout.spread(tensor, long if tensor.dtype in _WIDE else short)
            if is_tiny and tensor.dtype not in _WIDE:
                view.copy_(view.to(torch.promote_types(view.dtype, torch.float64)).mul_(factor))
            else:
                view.mul_(factor)  # the factor has at least one dimension, so half precision is promoted


@torch.no_grad()
def scale_each_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply each tensor by its own factor, rounding once, in place, as `scale_` would for one after the other.

    Args:
        tensors: As for `scale_`.
        factors: One float64 number for each tensor, on their device, or on the meeting device of several.
    """
    each = factors.unbind()
    for i in _not_scaled_at_once(tensors, [WHOLE] * len(tensors), factors.split(1)):
        scale_([tensors[i]], each[i])


def _not_scaled_at_once(
    tensors: Sequence[Tensor], layouts: Sequence[UnitLayout], factors: Sequence[Tensor]
) -> Sequence[int]:
    """Scale the tensors that one launch on a GPU accepts, and return the indices of the others."""
    others = set(range(len(tensors)))
    for places, _, blocks in _on_device(tensors, layouts, writes=True):
        blocks.scale_(torch.cat([factors[i] for i in places]))
        others.difference_update(places)
    return sorted(others)


@torch.no_grad()
def clip_units_(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    layouts: Sequence[UnitLayout],
    counts: Sequence[int],
    threshold: float,
    eps: float,
) -> tuple[Tensor, Tensor] | None:
    r"""Clip each unit's norm to ``threshold * max(norm of its weight, eps)``, in place.

    This takes one pass over memory on the CPU. The result is that of `unit_norms`, the factors
    :math:`\min(1, \text{bound} / \text{norm})`, and `scale_units_`.

    Args:
        grads: As for `scale_units_`.
        weights: One for each gradient, of the same shape.
        layouts: The units of each.
        counts: How many units each has.
        threshold: At least 0.
        eps: At least 0.

    Returns:
        The norms of all units before, and their factors, one vector each. None, with nothing written, if no kernel
        accepts all of these tensors.
    """
    if any([g.shape != w.shape for g, w in zip(grads, weights, strict=True)]):
        return None
    blocks, limits = _blocks_of(grads, layouts), _blocks_of(weights, layouts)
    if blocks is None or limits is None:
        return None
    norms, factors = blocks.clip_(limits, sum(counts), threshold, eps)
    written = compress(grads, _any_below_one(factors, counts))
    increment_version(list(written))
    return norms, factors


def _any_below_one(factors: Tensor, sizes: Sequence[int]) -> list[bool]:
    """Return for each run of ``sizes`` entries whether any entry is below 1."""
    below = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), (factors < 1).cumsum(0)])
    ends = torch.tensor([0, *sizes], device="cpu").cumsum(0)
    return (below[ends].diff() > 0).tolist()
