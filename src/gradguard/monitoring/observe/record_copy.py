"""Copy the numbers of steps from a device to the host without a host sync.

The small tensors of many steps are concatenated and copied into pinned memory with one asynchronous copy. They are read
only after the event behind the copy has completed: before that, the memory holds old numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradguard.tensors.host_copy import copy_to_host
from gradguard.tensors.layout import are_readable, wide_dtype


class AsyncHostCopy:
    """An asynchronous copy of the tensors in some steps to the host.

    Args:
        entries: The steps: tuples, lists and dictionaries of tensors and other values. `with_numbers` reads tensors on
            the CPU without a copy.
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
        """Whether a copy from a device was needed, which only the training thread may read."""
        return any(event is not None for _, _, event in self._copies)

    def arrived(self) -> bool:
        """Return whether `with_numbers` can read all numbers without waiting."""
        return all(event is None or event.query() for _, _, event in self._copies)

    def with_numbers(self) -> list[Any]:
        """Return the steps with a number or a list of numbers instead of each tensor; wait for unfinished copies."""
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
    """Return ``value`` with each tensor in it, in their order, replaced by the result of ``instead``."""
    if isinstance(value, Tensor):
        return instead(value)
    if isinstance(value, dict):
        return {key: _replaced(one, instead) for key, one in value.items()}
    if not isinstance(value, tuple | list) or _NUMBERS.issuperset(map(type, value)):
        return value
    found = [_replaced(one, instead) for one in value]
    return type(value)(*found) if hasattr(value, "_fields") else found
