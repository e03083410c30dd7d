"""Numbers on their way from a device to the host: nothing here ever makes the host wait.

Small tensors of many steps are put side by side, copied into pinned memory with one asynchronous copy, and looked at
when the event behind the copy has completed, not earlier: a number that is read too early is some old number.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradguard.tensors.host_copy import copy_to_host
from gradguard.tensors.layout import are_readable, wide_dtype


class AsyncHostCopy:
    """A copy of the tensors in some steps to the host, under way; the numbers then take the tensors' place.

    Args:
        holders: The holders of the tensors: objects with slots, whose fields are tensors, or lists or dictionaries with
            tensors. Those that Python may read at no cost are read where they are.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        by_device: dict[torch.device | None, list[_Place]] = {}
        for place in (place for holder in holders for place in _places_in(holder)):
            device = None if are_readable(place[0]) else place[0].device
            by_device.setdefault(device, []).append(place)
        self._here = by_device.pop(None, [])
        self._copies = []
        for device, places in by_device.items():
            wide = wide_dtype(device)  # type: ignore[arg-type]
            flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor, _ in places])
            self._copies.append((places, *copy_to_host(flat)))

    @property
    def waits(self) -> bool:
        """Whether anything had to be sent for, so that only the thread that trains may look at it."""
        return any(event is not None for _, _, event in self._copies)

    def arrived(self) -> bool:
        """Return whether `fill` would not wait."""
        return all(event is None or event.query() for _, _, event in self._copies)

    def fill(self) -> None:
        """Put a number, or a list of numbers, in the place of each tensor; waits if it must."""
        for tensor, put in self._here:
            put(tensor.tolist())
        for places, host, event in self._copies:
            if event is not None:
                event.synchronize()
            pieces = host.split([tensor.numel() for tensor, _ in places])
            for (tensor, put), piece in zip(places, pieces, strict=True):
                put(piece.view(tensor.shape).tolist())


_Place = tuple[Tensor, Callable[[Any], None]]
"""A tensor, and what puts another value in its place."""

_SEARCHED = {"losses", "scalars", "rates", "logits", "numbers"}
"""The fields whose entries are looked at; others may be long (one for each parameter) or not to be read (weights)."""


def _places_in(holder: Any) -> Iterator[_Place]:
    for name in type(holder).__slots__:
        value = getattr(holder, name)
        if isinstance(value, Tensor):
            yield value, partial(setattr, holder, name)
        elif name in _SEARCHED:
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((entry, partial(value.__setitem__, key)) for key, entry in entries if isinstance(entry, Tensor))
