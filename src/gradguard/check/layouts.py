"""Places in memory where the numbers of a tensor may lie. PyTorch has no negative strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """One way to lay a tensor out.

    Attributes:
        words: What to call it, ``{}`` for what is laid out.
        place: From a tensor to a copy with that layout, the same numbers in it.
        parts: Layouts which this one has at once: each is tried alone where this one goes wrong, or is refused.
    """

    words: str
    place: Callable[[Tensor], Tensor]
    parts: tuple[Layout, ...] = ()


def layouts_of(tensors: Sequence[Tensor]) -> list[Layout]:
    """Return the layouts in which at least one of ``tensors`` lies elsewhere."""
    most = max((one.dim() for one in tensors), default=0)
    swaps = [pair for least, pair in ((2, (0, -1)), (3, (-2, -1)), (3, (0, 1))) if most >= least]
    found = [FLAGGED if any(map(_has_flag, tensors)) else STRIDED, WITHIN]
    found += [_swapped(*pair) for pair in swaps]
    return found + ([CHANNELS_LAST] if any(one.dim() in (4, 5) for one in tensors) else [])


def _strided(tensor: Tensor) -> Tensor:
    buffer = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = buffer[..., 0]
    view.copy_(tensor)
    return view


def _within(tensor: Tensor) -> Tensor:
    # An address that a kernel of a GPU cannot read ends all work there: attention of torch 2.11 does on an odd one.
    before = 1 if tensor.is_cpu else 64
    buffer = torch.full((before + tensor.numel(),), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return buffer[before:].copy_(tensor.reshape(-1)).view(tensor.shape)


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


def _swapped(first: int, second: int) -> Layout:
    def place(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        pair = (first, second) if tensor.dim() > 2 else (0, 1)
        return tensor.transpose(*pair).contiguous().transpose(*pair)

    if (first, second) == (0, -1):
        return Layout("transposed {}", place)
    return Layout(f"{{}} with the {'last' if first else 'first'} two dimensions swapped in memory", place)


def _channels_last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats.get(tensor.dim(), torch.contiguous_format))


STRIDED = Layout("{} at every second element of a larger buffer", _strided)
WITHIN = Layout("{} that begins within a buffer", _within)
CHANNELS_LAST = Layout("channels_last {}", _channels_last)
FLAGGED = Layout("{} with the negative or the conjugate bit", _flagged, (STRIDED, WITHIN))
