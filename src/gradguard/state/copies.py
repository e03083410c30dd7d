"""Copies of objects that contain tensors, in memory of their own, which can be written back in place repeatedly.

A copy shares no memory with its source, nor with the objects it is written back to. torch's own ``load_state_dict``
keeps the given tensors, so the steps after a first restore would change the copy for a second one.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.distributed.placements import is_sharded
from gradguard.errors import UnsupportedGradientError
from gradguard.state.plain_file import is_numpy
from gradguard.tensors.host_copy import refuse_capture
from gradguard.torch_private import spec_of

PINNED = ("cuda", "xpu")
"""Devices that copy to pinned memory asynchronously."""

_BY_REFERENCE = (type, ModuleType, nn.Module, Optimizer)
"""Types that a state may refer to but does not own."""

_NEVER_CHANGES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


class Copier:
    """Makes copies, reusing the memory of earlier copies that are no longer needed.

    Attributes:
        known: Objects, by their ids, that are copied already or are not to be copied, such as parameters to which
            another object refers; None if each object is copied by itself.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self._used: list[tuple[tuple[Any, ...], Tensor]] = []
        self._seen: dict[int, tuple[Tensor, TensorCopy]] = {}
        self.known: dict[int, Any] | None = None

    def begin(self) -> None:
        """Release the memory of all earlier copies for reuse; their content is lost."""
        for key, memory in self._used:
            self._free[key].append(memory)
        self._used, self._seen = [], {}

    def end(self) -> None:
        """Free unused memory, and drop references to the copied tensors."""
        self._free.clear()
        self._seen = {}

    @property
    def nbytes(self) -> int:
        """Size of all copies in bytes."""
        return sum(memory.numel() * memory.element_size() for _, memory in self._used)

    def keep(self, memory: Tensor) -> Tensor:
        """Return ``memory``, which the caller has filled; this copier may reuse it later."""
        self._used.append(((tuple(memory.shape), memory.stride(), memory.dtype, memory.is_pinned()), memory))
        return memory

    def copy(self, value: Any) -> Any:
        """Return ``value`` with a `TensorCopy` in place of each tensor and a copy of everything else.

        A tensor that occurs twice is copied once. Functions, modules and optimizers are not copied.
        """
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, dict):
            empty = {} if type(value) is dict else copy.copy(value)
            empty.clear()
            return _Mapping(empty, {key: self.copy(entry) for key, entry in value.items()})
        if isinstance(value, list | tuple | deque):
            return _Sequence(value, [self.copy(entry) for entry in value])
        return self.other(value)

    def other(self, value: Any) -> Any:
        """Return a copy of an object; functions, modules and optimizers are returned themselves."""
        return _owned(value, self.known)

    def tensor(self, tensor: Tensor) -> "TensorCopy":
        """Return a copy of one tensor.

        Raises:
            UnsupportedGradientError: If it has no data to copy, because it is on the meta device.
        """
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor, self._copied(tensor)
        return self._seen[id(tensor)][1]

    def _copied(self, tensor: Tensor) -> "TensorCopy":
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise UnsupportedGradientError(
                f"a snapshot needs the data of every tensor, but one ({type(tensor).__name__}, {tensor.device}) has "
                "none yet: materialize the model, or run it once if it has lazy layers, before the snapshot."
            )
        parts = {name: self.tensor(part) for name, part in inner_tensors(tensor).items()}
        if parts:
            return WrappedCopy(tensor, parts)
        return PlainCopy(self._filled(tensor.detach()), tensor.device, tensor.layout)

    def _filled(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.clone()
        pinned = tensor.device.type in PINNED
        key = tuple(tensor.shape), tensor.stride(), tensor.dtype, pinned
        memory = self._free[key].pop() if self._free[key] else torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        self._used.append((key, memory))
        return memory.copy_(tensor, non_blocking=pinned)


class UndoCopier(Copier):
    """Makes copies for undoing one step: tensors stay on their devices, and immutable objects are not copied.

    Args:
        lists: Whether tensors in lists are copied; if not, such lists are kept by reference: their tensors must only
            be replaced, never written.
    """

    def __init__(self, lists: bool = True) -> None:
        super().__init__()
        self._lists = lists

    def copy(self, value: Any) -> Any:
        """Return ``value`` with a `TensorCopy` in place of each tensor."""
        if type(value) is list and not self._lists and all(one is None or isinstance(one, Tensor) for one in value):
            return _Sequence(value, list(map(Same, value)))
        return super().copy(value)

    def other(self, value: Any) -> Any:
        """Return an object itself, or a copy if a step may change it.

        Raises:
            UnsupportedGradientError: If it cannot be copied, so a step that changes it could not be undone.
        """
        if isinstance(value, _NEVER_CHANGES):
            return Same(value)
        try:
            return super().other(value)
        except Exception as error:  # raised by a __deepcopy__, or for lack of one
            raise UnsupportedGradientError(
                f"an object of type {type(value).__name__} in the optimizer's state cannot be copied ({error}), so "
                "a step that changes it could not be skipped. Keep numbers, tensors and containers of these in the "
                "state, or give its class a __deepcopy__."
            ) from error

    def _filled(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class Same(NamedTuple):
    """An object that is kept by reference."""

    value: Any


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors inside a wrapper tensor, such as a DTensor's local one; empty for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    named = {} if flatten is None else {name: getattr(tensor, name) for name in flatten()[0]}
    return {name: part for name, part in named.items() if isinstance(part, Tensor)}  # without a DTensor's mesh


class PlainCopy:
    """The copy of a plain tensor, which wraps no other.

    Args:
        memory: A tensor with its elements.
        device: The device of the original.
        layout: The layout of the original.
    """

    def __init__(self, memory: Tensor, device: torch.device, layout: torch.layout = torch.strided) -> None:
        self.memory, self.device = memory, device
        self._layout = layout

    def fits(self, live: Any) -> bool:
        """Tell whether the copy can be written into ``live``."""
        return (
            isinstance(live, Tensor)
            and (live.shape, live.dtype) == (self.memory.shape, self.memory.dtype)
            and (live.device, live.layout) == (self.device, self._layout)
            and not live.is_inference()
            and not overlaps(live)
        )

    def into(self, live: Tensor) -> None:
        """Write the copy into ``live``."""
        if self._layout is torch.strided:
            live = live.detach()  # detaching a sparse tensor would make another object
        with torch.no_grad():
            live.copy_(self.memory, non_blocking=True)

    def fresh(self) -> Tensor:
        """Return a new tensor with the copied elements."""
        return self.memory.to(self.device, copy=True)


class WrappedCopy:
    """The copy of a tensor made of other tensors, such as a DTensor or a quantized state.

    Args:
        tensor: The tensor.
        parts: Copies of the inner tensors.
    """

    def __init__(self, tensor: Any, parts: Mapping[str, "TensorCopy"]) -> None:
        self.parts = parts
        names, self._context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.layout = spec_of(tensor) if is_sharded(tensor) else None
        self._others = {name: getattr(tensor, name) for name in names if name not in parts}
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.requires_grad = tensor.requires_grad

    def fits(self, live: Any) -> bool:
        """Tell whether ``live`` has inner tensors that the parts fit."""
        if not isinstance(live, Tensor) or live.shape != self.shape:
            return False
        inner = inner_tensors(live)
        return inner.keys() == self.parts.keys() and all(part.fits(inner[name]) for name, part in self.parts.items())

    def into(self, live: Tensor) -> None:
        """Write the copy into the inner tensors of ``live``."""
        for name, inner in inner_tensors(live).items():
            self.parts[name].into(inner)

    def fresh(self) -> Tensor:
        """Return a new tensor with the copied elements."""
        parts = {name: part.fresh() for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__({**self._others, **parts}, self._context, self.shape, self.stride)


TensorCopy = PlainCopy | WrappedCopy
"""The copy of one tensor: ``into`` writes it to a tensor that it ``fits``, and ``fresh`` makes a new one."""


class _Mapping(dict[Any, Any]):
    """The entries of a dict; ``empty`` is an empty dict of the original type."""

    def __init__(self, empty: dict[Any, Any], entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.empty = empty


class _Sequence(list[Any]):
    """The entries of a list, tuple or deque, whose type (a named tuple's too) is restored."""

    def __init__(self, like: Any, entries: list[Any]) -> None:
        super().__init__(entries)
        self._make = getattr(like, "_make", type(like))
        self._more = {"maxlen": like.maxlen} if isinstance(like, deque) else {}

    def made(self, entries: list[Any]) -> Any:
        return self._make(entries, **self._more)


class StreamOrder:
    """Orders copies on an accelerator, whichever stream is current."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self._events: list[torch.Event] = []

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Let the current streams wait for the copies that `done` marked, without a host sync."""
        self.devices = [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")]
        for device in self.devices:
            refuse_capture(device, "a snapshot")
        for event in self._events:
            event.wait()

    def done(self) -> None:
        """Mark the copies that were enqueued so far."""
        self._events = []
        for device in self.devices:
            if device.type not in PINNED:
                continue  # its copies are synchronous
            with torch.get_device_module(device).device(device):
                event = torch.Event(device)
                event.record()
                self._events.append(event)

    def synchronize(self) -> None:
        """Let the host wait for the marked copies."""
        for event in self._events:
            event.synchronize()


class Restorer:
    """Writes copies back, each into the existing tensor if it fits, else into a new one."""

    def __init__(self) -> None:
        self._places: set[int] = set()
        self._given: dict[int, Any] = {}
        self.known: dict[int, Any] | None = None  # see `Copier.known`

    def write(self, kept: TensorCopy, live: Tensor) -> None:
        """Write the copy into ``live``, once."""
        if self._given.get(id(kept)) is live:
            return
        kept.into(live)
        self._places.add(_place(live))
        self._given.setdefault(id(kept), live)

    def restored(self, kept: Any, live: Any = None) -> Any:
        """Return the value that `Copier.copy` copied, reusing the objects of ``live`` where possible."""
        if isinstance(kept, TensorCopy):
            return self._tensor(kept, live)
        if isinstance(kept, _Mapping):
            into = live if isinstance(live, dict) else copy.copy(kept.empty)
            contents = {key: self.restored(entry, into.get(key)) for key, entry in kept.items()}
            into.clear()
            into.update(contents)
            return into
        if isinstance(kept, _Sequence):
            old = [*live] if isinstance(live, list | tuple | deque) else []
            made = kept.made([self.restored(entry, before) for entry, before in zip_longest(kept, old[: len(kept)])])
            if isinstance(live, list) and type(made) is list:
                live[:] = made
                return live
            return made
        return kept.value if isinstance(kept, Same) else _owned(kept, self.known)

    def _tensor(self, kept: TensorCopy, live: Any) -> Tensor:
        if id(kept) in self._given:
            return self._given[id(kept)]
        # Two places that held two tensors may now hold the same one: the second write would overwrite the first.
        if kept.fits(live) and _place(live) not in self._places:
            self.write(kept, live)
        else:
            self._given[id(kept)] = kept.fresh()
            self._places.add(_place(self._given[id(kept)]))
        return self._given[id(kept)]


def is_plain(value: Any) -> bool:
    """Tell whether ``value`` consists only of numbers, text, tensors, arrays and containers of these."""
    if is_numpy(value):
        return not value.dtype.hasobject or all(isinstance(one, _NEVER_CHANGES) for one in value.ravel().tolist())
    if isinstance(value, set | frozenset):
        return not any(isinstance(entry, Tensor) for entry in value) and all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, int | str) and is_plain(entry) for key, entry in value.items())
    if isinstance(value, list | tuple | deque):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | Tensor)


def _owned(value: Any, known: dict[int, Any] | None) -> Any:
    return value if callable(value) or isinstance(value, _BY_REFERENCE) else copy.deepcopy(value, known)


def _place(tensor: Tensor) -> int:
    for inner in inner_tensors(tensor).values():
        return _place(inner)
    strided = tensor.layout is torch.strided and tensor.numel() > 0
    return tensor.data_ptr() if strided else -id(tensor)


def overlaps(tensor: Tensor) -> bool:
    """Tell whether several elements of ``tensor`` share memory, so that it cannot be written."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
