"""Copies of whatever holds tensors, in memory of their own, that can be written back in place as often as wanted.

Nothing is shared between a copy and what it was taken from, nor with what it is written back to: torch's own
``load_state_dict`` keeps the tensors that it is given, so that the steps after a first restore would change what a
second one finds.
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
"""Devices that copy to pinned memory while the host goes on."""

_BY_REFERENCE = (type, ModuleType, nn.Module, Optimizer)
"""Types that a state may point to and does not own."""

_NEVER_CHANGES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


class Copier:
    """Takes copies into memory that earlier copies no longer need: the second snapshot allocates nothing.

    Attributes:
        known: Objects that are copied already, by their ids, or stay themselves, such as parameters that another object
            points to; None if each is copied by itself.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self._used: list[tuple[tuple[Any, ...], Tensor]] = []
        self._seen: dict[int, tuple[Tensor, TensorCopy]] = {}
        self.known: dict[int, Any] | None = None

    def begin(self) -> None:
        """Give all memory free: what was copied before is lost."""
        for key, memory in self._used:
            self._free[key].append(memory)
        self._used, self._seen = [], {}

    def end(self) -> None:
        """Let go of memory that nothing needed, and of the tensors that were copied."""
        self._free.clear()
        self._seen = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(memory.numel() * memory.element_size() for _, memory in self._used)

    def keep(self, memory: Tensor) -> Tensor:
        """Return ``memory``, which was filled by others: it is this copier's from here on."""
        self._used.append(((tuple(memory.shape), memory.stride(), memory.dtype, memory.is_pinned()), memory))
        return memory

    def copy(self, value: Any) -> Any:
        """Return ``value`` with a `TensorCopy` for each tensor and a copy of everything else.

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
        """Return what to keep of an object: a copy, but of functions, modules and optimizers."""
        return _owned(value, self.known)

    def tensor(self, tensor: Tensor) -> "TensorCopy":
        """Return a copy of one tensor.

        Raises:
            UnsupportedGradientError: If it holds no numbers that could be copied: it is on the meta device.
        """
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor, self._copied(tensor)
        return self._seen[id(tensor)][1]

    def _copied(self, tensor: Tensor) -> "TensorCopy":
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise UnsupportedGradientError(
                f"a snapshot needs the numbers of every tensor, and one ({type(tensor).__name__}, {tensor.device}) has "
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
    """Takes copies for undoing one step: tensors stay on their devices, objects that nothing can change are the same.

    Args:
        lists: Whether tensors in lists are copied; else these are kept as they are, being replaced and never written.
    """

    def __init__(self, lists: bool = True) -> None:
        super().__init__()
        self._lists = lists

    def copy(self, value: Any) -> Any:
        """Return ``value`` with a `TensorCopy` for each tensor."""
        if type(value) is list and not self._lists and all(one is None or isinstance(one, Tensor) for one in value):
            return _Sequence(value, list(map(Same, value)))
        return super().copy(value)

    def other(self, value: Any) -> Any:
        """Return an object as it is, or a copy if a step may change it.

        Raises:
            UnsupportedGradientError: If it cannot be copied, so that such a step could not be undone.
        """
        if isinstance(value, _NEVER_CHANGES):
            return Same(value)
        try:
            return super().other(value)
        except Exception as error:  # of a __deepcopy__, or of what has none
            raise UnsupportedGradientError(
                f"an object of type {type(value).__name__} in the optimizer's state cannot be copied ({error}), so "
                "that a step which changes it could not be skipped. Keep numbers, tensors and containers of these in "
                "the state, or give its class a __deepcopy__."
            ) from error

    def _filled(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class Same(NamedTuple):
    """An object that is not copied."""

    value: Any


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a wrapper is made of, as a DTensor of its local one; none of a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    named = {} if flatten is None else {name: getattr(tensor, name) for name in flatten()[0]}
    return {name: part for name, part in named.items() if isinstance(part, Tensor)}  # and not a DTensor's mesh


class PlainCopy:
    """The copy of a tensor that wraps no other.

    Args:
        memory: A tensor with its elements.
        device: Where it was.
        layout: How it lay there.
    """

    def __init__(self, memory: Tensor, device: torch.device, layout: torch.layout = torch.strided) -> None:
        self.memory, self.device = memory, device
        self._layout = layout

    def fits(self, live: Any) -> bool:
        """Tell whether ``live`` is a tensor that it can be written into."""
        return (
            isinstance(live, Tensor)
            and (live.shape, live.dtype) == (self.memory.shape, self.memory.dtype)
            and (live.device, live.layout) == (self.device, self._layout)
            and not live.is_inference()
            and not overlaps(live)
        )

    def into(self, live: Tensor) -> None:
        """Write it into ``live``."""
        if self._layout is torch.strided:
            live = live.detach()  # of a sparse tensor that is another, of the same elements
        with torch.no_grad():
            live.copy_(self.memory, non_blocking=True)

    def fresh(self) -> Tensor:
        """Return a new tensor that holds it."""
        return self.memory.to(self.device, copy=True)


class WrappedCopy:
    """The copy of a tensor made of others: a DTensor, a quantized state.

    Args:
        tensor: The tensor.
        parts: Copies of those it is made of.
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
        """Tell whether ``live`` is made of such tensors."""
        if not isinstance(live, Tensor) or live.shape != self.shape:
            return False
        inner = inner_tensors(live)
        return inner.keys() == self.parts.keys() and all(part.fits(inner[name]) for name, part in self.parts.items())

    def into(self, live: Tensor) -> None:
        """Write it into what ``live`` is made of."""
        for name, inner in inner_tensors(live).items():
            self.parts[name].into(inner)

    def fresh(self) -> Tensor:
        """Return a new tensor that holds it."""
        parts = {name: part.fresh() for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__({**self._others, **parts}, self._context, self.shape, self.stride)


TensorCopy = PlainCopy | WrappedCopy
"""The copy of one tensor: written ``into`` one that it ``fits``, or made anew, ``fresh``."""


class _Mapping(dict[Any, Any]):
    """The entries of a dict; ``empty`` is one of its type."""

    def __init__(self, empty: dict[Any, Any], entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.empty = empty


class _Sequence(list[Any]):
    """The entries of a list, tuple or deque, whose type (named tuples too) must come back."""

    def __init__(self, like: Any, entries: list[Any]) -> None:
        super().__init__(entries)
        self._make = getattr(like, "_make", type(like))
        self._more = {"maxlen": like.maxlen} if isinstance(like, deque) else {}

    def made(self, entries: list[Any]) -> Any:
        return self._make(entries, **self._more)


class StreamOrder:
    """Lets copies on an accelerator happen one after the other, whichever stream is current."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self._events: list[torch.Event] = []

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Let the current streams wait for what `done` marked; the host does not."""
        self.devices = [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")]
        for device in self.devices:
            refuse_capture(device, "a snapshot")
        for event in self._events:
            event.wait()

    def done(self) -> None:
        """Mark the copies that were asked for."""
        self._events = []
        for device in self.devices:
            if device.type not in PINNED:
                continue  # the copy itself waits
            with torch.get_device_module(device).device(device):
                event = torch.Event(device)
                event.record()
                self._events.append(event)

    def synchronize(self) -> None:
        """Let the host wait for them."""
        for event in self._events:
            event.synchronize()


class Restorer:
    """Writes copies back, each into the tensor that is there if it can, else into a new one."""

    def __init__(self) -> None:
        self._places: set[int] = set()
        self._given: dict[int, Any] = {}
        self.known: dict[int, Any] | None = None  # as of `Copier`

    def write(self, kept: TensorCopy, live: Tensor) -> None:
        """Write into this tensor and no other, once."""
        if self._given.get(id(kept)) is live:
            return
        kept.into(live)
        self._places.add(_place(live))
        self._given.setdefault(id(kept), live)

    def restored(self, kept: Any, live: Any = None) -> Any:
        """Return what `Copier.copy` copied, in the objects of ``live`` as far as they serve."""
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
        # Two places may hold one tensor now that held two before: the second would overwrite the first.
        if kept.fits(live) and _place(live) not in self._places:
            self.write(kept, live)
        else:
            self._given[id(kept)] = kept.fresh()
            self._places.add(_place(self._given[id(kept)]))
        return self._given[id(kept)]


def is_plain(value: Any) -> bool:
    """Tell whether ``value`` is made of numbers, text, tensors, arrays and containers of these only."""
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
    """Tell whether several elements of ``tensor`` are one in memory, so that nothing can be written to it."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
