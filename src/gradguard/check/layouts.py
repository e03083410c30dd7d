"""Places in memory where the numbers of a tensor may lie. PyTorch has no negative strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputLayout:
    """One way to lay a tensor out.

    Attributes:
        words: The name of the layout, ``{}`` for what is laid out.
        place: From a tensor to a copy with that layout, the same numbers in it.
        parts: Layouts which this one has at once: each is tried alone where this one goes wrong, or is refused.
    """

    words: str
    place: Callable[[Tensor], Tensor]
    parts: tuple[InputLayout, ...] = ()


def orders_of(tensors: Sequence[Tensor]) -> list[InputLayout]:
    """Return the orders of dimensions in which at least one of ``tensors`` lies elsewhere; if none, strided ones."""
    with_order = [one for one in tensors if one.dim() > 1]
    orders: list[InputLayout] = [order for order in _ORDERS if any(map(order.moves, with_order))]
    return orders or ([STRIDED] if any(one.numel() > 1 for one in tensors) else [])


def layouts_of(tensors: Sequence[Tensor]) -> list[InputLayout]:
    """Return the layouts in which at least one of ``tensors`` lies elsewhere."""
    strided = [STRIDED] if any(one.numel() > 1 for one in tensors) else []
    flagged = [FLAGGED] if any(map(_has_flag, tensors)) else []
    rows = [ROWS_APART] if any(one.dim() > 1 and one.shape[:-1].numel() > 1 for one in tensors) else []
    blocks = [BLOCKS_APART] if any(one.dim() > 2 and one.shape[0] > 1 for one in tensors) else []
    orders = [order for order in orders_of(tensors) if order is not STRIDED]
    return [*strided, WITHIN, *rows, *blocks, *orders, *flagged]


def _strided(tensor: Tensor) -> Tensor:
    buffer = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = buffer[..., 0]
    view.copy_(tensor)
    return view


def _room(tensor: Tensor) -> int:
    # An address that a kernel of a GPU cannot read ends all work there: attention of torch 2.11 does on an odd one.
    return 1 if tensor.is_cpu else 64


def _within(tensor: Tensor) -> Tensor:
    before = _room(tensor)  # it stays dense: what is not is copied by many a kernel
    buffer = torch.full((before + tensor.numel(),), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return buffer[before:].copy_(tensor.reshape(-1)).view(tensor.shape)


def _cut_out(tensor: Tensor, dim: int) -> Tensor:
    """Return a copy that is cut out of a buffer which is longer along one dimension."""
    shape = list(tensor.shape)
    shape[dim] += _room(tensor)
    buffer = torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
    return buffer.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)


def _rows_apart(tensor: Tensor) -> Tensor:
    return _cut_out(tensor, -1) if tensor.dim() > 1 else tensor


def _blocks_apart(tensor: Tensor) -> Tensor:
    return _cut_out(tensor, 1) if tensor.dim() > 2 else tensor


def _has_flag(tensor: Tensor) -> bool:
    """Tell whether a bit can say it; not of one element: whatever its stride, ``contiguous()`` leaves it the bit."""
    return tensor.numel() > 1 and (tensor.is_complex() or tensor.dtype in (torch.float32, torch.float64))


def _flagged(tensor: Tensor) -> Tensor:
    """Return a copy whose memory holds the conjugate, or the negative, which a bit on the tensor says."""
    if not _has_flag(tensor):
        return _strided(tensor)
    if tensor.is_complex():
        return _strided(tensor.conj().resolve_conj()).conj()
    return torch.complex(torch.full_like(tensor, torch.nan), -tensor).conj().imag


@dataclass(frozen=True)
class _Order(InputLayout):
    """A layout that has the dimensions in another order, the outermost first."""

    order: Callable[[int], list[int] | None] = lambda _: None
    """From the number of dimensions to that order, None if there is none for so many."""

    def moves(self, tensor: Tensor) -> bool:
        """Tell whether an element lies elsewhere: dimensions of one length have no place in the order."""
        order = [dim for dim in self.order(tensor.dim()) or () if tensor.shape[dim] > 1]
        return order != sorted(order)


def _ordered(words: str, order: Callable[[int], list[int] | None]) -> _Order:
    def place(tensor: Tensor) -> Tensor:
        found = order(tensor.dim())
        if found is None:
            return tensor
        return tensor.permute(found).contiguous().permute([found.index(dim) for dim in range(tensor.dim())])

    return _Order(words, place, order=order)


def _swapped(first: int, second: int, least: int) -> Callable[[int], list[int] | None]:
    def order(count: int) -> list[int] | None:
        found = list(range(count))
        if count < least:
            return None
        found[first], found[second] = found[second], found[first]
        return found

    return order


STRIDED = InputLayout("{} at every second element of a larger buffer", _strided)
WITHIN = InputLayout("{} that begins within a buffer", _within)
ROWS_APART = InputLayout("{} cut out of a longer last dimension", _rows_apart)
BLOCKS_APART = InputLayout("{} cut out of a longer dimension 1", _blocks_apart)
FLAGGED = InputLayout("{} with the negative or the conjugate bit", _flagged, (STRIDED, WITHIN))
_ORDERS = (
    _ordered("transposed {}", _swapped(0, -1, 2)),
    _ordered("{} with the last two dimensions swapped in memory", _swapped(-2, -1, 3)),
    _ordered("{} with the first two dimensions swapped in memory", _swapped(0, 1, 3)),
    _ordered("channels_last {}", lambda count: [0, *range(2, count), 1] if count in (4, 5) else None),
)
