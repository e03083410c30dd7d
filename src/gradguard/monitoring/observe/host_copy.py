"""Numbers on their way from a device to the host: nothing here ever makes the host wait.

Small tensors of many steps are put side by side, copied into pinned memory with one asynchronous copy, and looked at
when the event behind the copy has completed, not earlier: a number that is read too early is some old number.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradguard.tensors.host_copy import copy_to_host
from gradguard.tensors.layout import are_readable, wide_dtype


class AsyncHostCopy:
    """A copy of some tensors of any devices to the host, under way.

    Args:
        tensors: What is copied. Those that Python may read at no cost are read where they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: list[Tensor | None] = [t if are_readable(t) else None for t in tensors]
        self._shapes = [t.shape for t in tensors]
        by_device: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if self._tensors[i] is None:
                by_device.setdefault(tensor.device, []).append(i)
        self._copies = []
        for device, places in by_device.items():
            wide = wide_dtype(device)
            flat = torch.cat([tensors[i].detach().reshape(-1).to(wide) for i in places])
            self._copies.append((places, *copy_to_host(flat)))

    @property
    def waits(self) -> bool:
        """Whether anything had to be sent for, so that only the thread that trains may look at it."""
        return any(event is not None for _, _, event in self._copies)

    def arrived(self) -> bool:
        """Return whether `values` would not wait."""
        return all(event is None or event.query() for _, _, event in self._copies)

    def values(self) -> list[Any]:
        """Return each tensor as a number, or a list of numbers; waits if it must."""
        found: list[Any] = [None if t is None else t.tolist() for t in self._tensors]
        for places, host, event in self._copies:
            if event is not None:
                event.synchronize()
            pieces = host.split([self._shapes[i].numel() for i in places])
            for i, piece in zip(places, pieces, strict=True):
                found[i] = piece.view(self._shapes[i]).tolist()
        return found


class NumberPlaces:
    """Where the numbers of some steps are still tensors, and how they take the numbers' place.

    Args:
        holders: What holds them: objects with slots, whose fields are tensors, or lists or dictionaries with tensors.
    """

    def __init__(self, holders: Sequence[Any]) -> None:
        self._places = [place for holder in holders for place in _places_in(holder)]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in their order."""
        return [holder[key] if is_item else getattr(holder, key) for holder, key, is_item in self._places]

    def fill(self, values: Sequence[Any]) -> None:
        """Put ``values`` in the tensors' place."""
        for (holder, key, is_item), value in zip(self._places, values, strict=True):
            if is_item:
                holder[key] = value
            else:
                setattr(holder, key, value)


_SEARCHED = {"losses", "scalars", "rates", "logits"}
"""The fields whose entries are looked at; others may be long (one for each parameter) or not to be read (weights)."""


def _places_in(holder: Any) -> Iterator[tuple[Any, Any, bool]]:
    for name in type(holder).__slots__:
        value = getattr(holder, name)
        if isinstance(value, Tensor):
            yield holder, name, False
        elif name in _SEARCHED:
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((value, key, True) for key, entry in entries if isinstance(entry, Tensor))
