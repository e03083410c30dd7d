"""Memory layouts in which a tensor may store its elements. PyTorch has no negative strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputLayout:
    """One memory layout of a tensor.

    Attributes:
        words: The description of the layout, with ``{}`` for the name of the tensor.
        place: A function that returns an equal copy with this layout, or the tensor itself if the layout cannot apply.
    """

    words: str
    place: Callable[[Tensor], Tensor]


def layouts_of(tensors: Sequence[Tensor], layouts: Sequence[InputLayout]) -> list[InputLayout]:
    """Return the ``layouts`` that change the memory layout of at least one of ``tensors``."""
    return [one for one in layouts if any(_place_of(one.place(t)) != _place_of(t) for t in tensors)]


def orders_of(tensors: Sequence[Tensor]) -> list[InputLayout]:
    """Return the dimension orders that change the layout of at least one tensor; without any, the strided layout."""
    return layouts_of(tensors, _ORDERS) or layouts_of(tensors, [STRIDED])


def _place_of(tensor: Tensor) -> object:
    """Return a comparable description of a tensor's layout, which ignores strides along dimensions of one entry."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return strides, tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()


def _strided(tensor: Tensor) -> Tensor:
    return _buffer_for(tensor, *tensor.shape, 2)[..., 0].copy_(tensor)


def _room(tensor: Tensor) -> int:
    # A misaligned address makes some GPU kernels fail and ends the CUDA context: attention of torch 2.11 does so.
    return 1 if tensor.is_cpu else 64


def _buffer_for(tensor: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)


def _within(tensor: Tensor) -> Tensor:
    before = _room(tensor)  # the copy stays dense, because many kernels first copy a tensor that is not
    return _buffer_for(tensor, before + tensor.numel())[before:].copy_(tensor.reshape(-1)).view(tensor.shape)


def _cut_out(dim: int, least: int) -> Callable[[Tensor], Tensor]:
    """Return a function that stores tensors of ``least`` or more dimensions as a slice of a longer buffer."""

    def place(tensor: Tensor) -> Tensor:
        if tensor.dim() < least:
            return tensor
        shape = list(tensor.shape)
        shape[dim] += _room(tensor)
        return _buffer_for(tensor, *shape).narrow(dim, 0, tensor.shape[dim]).copy_(tensor)

    return place


def _flagged(tensor: Tensor) -> Tensor:
    """Return a copy that stores the conjugate or the negative, with the tensor's conjugate or negative bit set.

    Half-precision tensors and tensors of one element are returned unchanged; for the latter, ``contiguous()`` would not
    clear the bit, whatever the stride.
    """
    if tensor.numel() < 2 or not (tensor.is_complex() or tensor.dtype in (torch.float32, torch.float64)):
        return tensor
    if tensor.is_complex():
        return _strided(tensor.conj().resolve_conj()).conj()
    return torch.complex(torch.full_like(tensor, torch.nan), -tensor).conj().imag


def _ordered(counts: range, order: Callable[[list[int]], list[int]]) -> Callable[[Tensor], Tensor]:
    """Return a function that stores the dimensions of a tensor in another order, listed from the outermost."""

    def place(tensor: Tensor) -> Tensor:
        if tensor.dim() not in counts:
            return tensor
        found = order(list(range(tensor.dim())))
        return tensor.permute(found).contiguous().permute([found.index(dim) for dim in range(tensor.dim())])

    return place


_MOST = 64
"""The exclusive upper bound of the number of dimensions that are reordered."""

STRIDED = InputLayout("{} at every second element of a larger buffer", _strided)
FLAGGED = InputLayout("{} with the negative or the conjugate bit", _flagged)
_ORDERS = [
    InputLayout(words, _ordered(counts, order))
    for words, counts, order in (
        ("transposed {}", range(2, _MOST), lambda d: [d[-1], *d[1:-1], d[0]]),
        ("{} with the last two dimensions swapped in memory", range(3, _MOST), lambda d: [*d[:-2], d[-1], d[-2]]),
        ("{} with the first two dimensions swapped in memory", range(3, _MOST), lambda d: [d[1], d[0], *d[2:]]),
        ("channels_last {}", range(4, 6), lambda d: [d[0], *d[2:], d[1]]),
    )
]
LAYOUTS = [
    STRIDED,
    InputLayout("{} within a buffer", _within),
    InputLayout("{} cut out of a longer last dimension", _cut_out(-1, 2)),
    InputLayout("{} cut out of a longer dimension 1", _cut_out(1, 3)),
    *_ORDERS,
    FLAGGED,
]
