"""Numbers on their way from a device to the host: nothing here ever makes the host wait.

Small tensors of many steps are put side by side, copied into pinned memory with one asynchronous copy, and looked at
when the event behind the copy has completed, not earlier: a number that is read too early is some old number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradguard.tensors.host_copy import copy_to_host
from gradguard.tensors.layout import are_readable, wide_dtype


class AsyncHostCopy:
    """A copy of the tensors in some steps to the host, under way.

    Args:
        entries: The steps: tuples, lists and dictionaries of tensors and of anything else. Tensors that Python may read
            at no cost are read where they are, by `with_numbers`.
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        self._entries, self._tensors = entries, list[Tensor]()
        _replaced(entries, self._tensors.append)
        by_device: dict[torch.device, list[int]] = {}
        for k, tensor in enumerate(self._tensors):
            if not are_readable(tensor):
                by_device.setdefault(tensor.device, []).append(k)
        self._copies = []
        for device, places in by_device.items():
            wide = wide_dtype(device)
            flat = torch.cat([self._tensors[k].detach().reshape(-1).to(wide) for k in places])
            self._copies.append((places, *copy_to_host(flat)))

    @property
    def waits(self) -> bool:
        """Whether anything had to be sent for, so that only the thread that trains may look at it."""
        return any(event is not None for _, _, event in self._copies)

    def arrived(self) -> bool:
        """Return whether `with_numbers` would not wait."""
        return all(event is None or event.query() for _, _, event in self._copies)

    def with_numbers(self) -> list[Any]:
        """Return the steps with a number, or a list of numbers, in the place of each tensor; waits if it must."""
        found: list[Any] = list(self._tensors)
        for places, host, event in self._copies:
            if event is not None:
                event.synchronize()
            pieces = host.split([found[k].numel() for k in places])
            for k, piece in zip(places, pieces, strict=True):
                found[k] = piece.view(found[k].shape)
        numbers = (tensor.tolist() for tensor in found)
        return _replaced(self._entries, lambda _: next(numbers))


_NUMBERS = {float, int}


def _replaced(value: Any, instead: Callable[[Tensor], Any]) -> Any:
    """Return ``value`` with what ``instead`` gives for each tensor in it, in their order."""
    if isinstance(value, Tensor):
        return instead(value)
    if isinstance(value, dict):
        return {key: _replaced(one, instead) for key, one in value.items()}
    if not isinstance(value, tuple | list) or _NUMBERS.issuperset(map(type, value)):
        return value
    found = [_replaced(one, instead) for one in value]
    return type(value)(*found) if hasattr(value, "_fields") else found
