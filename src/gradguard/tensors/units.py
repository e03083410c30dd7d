r"""Unit-wise norms: one norm for each row of a linear weight, each filter of a convolution, each whole bias."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradguard.tensors.layout import HALVES, are_readable, is_plain, readable_values, wide_dtype
from gradguard.tensors.norms import ROW

_WIDE = (torch.float64, torch.complex128)

_SAFE = 1e-11
"""Above this norm, float32 squares that underflow cannot matter."""


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Which elements of a tensor form one unit.

    Attributes:
        dim: The dimension whose entries are the units; ``None`` makes the whole tensor one unit.
        groups: Dimension 0 is first cut into this many groups, each with units of its own (grouped transposed
            convolutions).
    """

    dim: int | None = 0
    groups: int = 1

    def rows(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` as ``[units, elements of a unit]``: a view wherever its strides allow one."""
        if self.dim is None or tensor.dim() == 0:
            return tensor.reshape(1, -1)
        if self == UnitLayout() and tensor.is_contiguous():
            return tensor.flatten(1)
        by_group = self._by_group(tensor).movedim(self.dim + 1, 1)  # [groups, units, ...]
        rest = sorted(range(2, by_group.dim()), key=by_group.stride, reverse=True)
        return by_group.permute(0, 1, *rest).flatten(2).flatten(0, 1)

    def scale_(self, tensor: Tensor, factors: Tensor) -> None:
        """Multiply each unit of ``tensor`` by its own entry of ``factors``, in place."""
        factors = factors.to(torch.float64 if tensor.dtype in _WIDE else torch.float32)
        tensor = tensor if tensor.dim() else tensor[None]
        if self.dim is None:
            tensor.mul_(factors)  # of shape [1], so that half precision is promoted and rounded once
            return
        by_group = self._by_group(tensor)
        shape = [1] * by_group.dim()
        shape[0], shape[self.dim + 1] = self.groups, by_group.shape[self.dim + 1]
        by_group.mul_(factors.view(shape))

    def _by_group(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.groups, tensor.shape[0] // self.groups))


WHOLE = UnitLayout(dim=None)
"""The whole tensor is one unit: biases, gains, scalars."""


@torch.no_grad()
def unit_norms(tensors: Sequence[Tensor], layouts: Sequence[UnitLayout], floor: float = 0.0) -> list[Tensor]:
    """Return the 2-norm of every unit of every tensor, one vector of float64 for each tensor.

    Args:
        tensors: Dense tensors of any real or complex dtype, on any device.
        layouts: The units of each tensor.
        floor: Norms below this need not be told from 0, which spares tiny ones a second look.

    Returns:
        Vectors on the devices of their tensors (float32 on MPS).
    """
    reals = [t if is_plain(t) else readable_values(t, modulus=False) for t in tensors]
    return [_row_norms(layout.rows(x), floor) for x, layout in zip(reals, layouts, strict=True)]


def _row_norms(rows: Tensor, floor: float) -> Tensor:
    if not are_readable(rows):
        return torch.linalg.vector_norm(rows, dim=1, dtype=wide_dtype(rows.device))
    if rows.numel() == 0:
        return torch.zeros(rows.shape[0], dtype=torch.float64)
    norms = _sum_in_float32(rows.float() if rows.dtype in HALVES else rows)
    smallest, largest = map(float, torch.aminmax(norms))
    if math.isfinite(largest) and (smallest > _SAFE or floor > _SAFE):
        return norms
    return _scaled_row_norms(rows)


def _sum_in_float32(rows: Tensor) -> Tensor:
    """Norms of rows; long ones are cut, so that no float32 accumulator sees more than a few dozen additions."""
    length = rows.shape[1]
    if length <= 2 * ROW:
        return torch.linalg.vector_norm(rows, dim=1).double()
    whole = length - length % ROW
    parts = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, ROW)), dim=2).double()
    tail = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True).double()
    return torch.linalg.vector_norm(torch.cat([parts, tail], dim=1), dim=1)


def _scaled_row_norms(rows: Tensor) -> Tensor:
    """The same in float64 with each row divided by its largest element: slower, and safe for every magnitude."""
    largest = torch.linalg.vector_norm(rows.double(), torch.inf, dim=1, keepdim=True)
    divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    return (divisor * torch.linalg.vector_norm(rows.double() / divisor, dim=1, keepdim=True)).squeeze(1)
