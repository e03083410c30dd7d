"""Norms of earlier steps in a tensor of fixed length, read and written without the host: unfilled places hold inf."""

import torch
from torch import Tensor


def empty(length: int) -> Tensor:
    """Return a history with room for ``length`` numbers."""
    return torch.full((length,), torch.inf, dtype=torch.float64, device="cpu")


def push(history: Tensor, count: Tensor, value: Tensor, enters: Tensor) -> None:
    """Put ``value`` in the place of the oldest, in place, if ``enters``; ``count`` is how many have been put."""
    places = torch.arange(len(history), device=history.device)
    history.copy_(torch.where((places == count % len(history)) & enters, value, history))
    count.add_(enters)


def insert(ordered: Tensor, count: Tensor, value: Tensor, enters: Tensor) -> None:
    """Put ``value`` where it belongs in an ascending history with room for it, in place, if ``enters``."""
    places = torch.arange(len(ordered), device=ordered.device)
    place = (ordered <= value).sum()
    shifted = torch.where(places == place, value, ordered.roll(1))
    ordered.copy_(torch.where((places < place) | ~enters, ordered, shifted))
    count.add_(enters)


def median(ordered: Tensor, count: Tensor) -> Tensor:
    """Return the median of the first ``count`` of an ascending history; the mean of both middle ones if it is even."""
    last = count.clamp(min=1, max=len(ordered)) - 1
    middle = torch.stack([last // 2, last - last // 2])
    return ordered.index_select(0, middle).mean()


def percentile(ordered: Tensor, count: Tensor, percent: float) -> Tensor:
    """Return a percentile of the first ``count`` of an ascending history, interpolated as NumPy does; inf of none."""
    last = count.clamp(min=1, max=len(ordered)) - 1
    place = last.to(ordered.dtype) * (percent / 100)
    below = place.floor()
    fraction = place - below
    low, high = ordered.index_select(0, torch.stack([below.long(), (below.long() + 1).minimum(last)])).unbind()
    # NumPy measures from the nearer end, and so do these two, to the last digit.
    between = torch.where(fraction < 0.5, low + (high - low) * fraction, high - (high - low) * (1 - fraction))
    return torch.where(count > 0, between, torch.inf)
