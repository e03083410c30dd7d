"""Freeze modules and random generators between two runs of a step or a call, so that both start from the same state."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.placements import local_part
from gradguard.state.generators import States, restore_generators
from gradguard.torch_private import buffer_slots

_MOST = 100_000
"""Maximum number of containers that are searched."""

_DEEPEST = 4
_WITHOUT_MODULES = frozenset({
    Tensor, str, bytes, bool, int, float, complex, type(None), type(random), type(len), torch.dtype, torch.device,
    torch.Size, nn.Parameter,
})  # fmt: skip
"""Types of objects that cannot refer to a module."""


class Frozen:
    """The state of modules: their buffers; on request their attributes, and the random generators.

    Attributes include hooks: if a first forward installs hooks, a run that is restored must not keep them. They also
    include layers, which a model may replace in its first forward; and the state of each `torch.Generator` that is an
    attribute, in a container there, or an attribute of an object there.

    Containers are read and written by the methods of their base class, and only those whose content has changed are
    written. A subclass that forbids `update` is therefore written against its will only if its
    content has changed.

    Args:
        modules: The modules, with all their submodules.
        generators: States of the random generators that `lend` and `restore` set; None to leave them alone.
        copies: Copy the values of buffers. Without it only `lend` protects them.
        attributes: Keep the other content of modules: attributes, hooks, layers.

    Attributes:
        generators: The argument ``generators``; another state may be assigned.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        generators: States | None = None,
        *,
        copies: bool = True,
        attributes: bool = False,
    ) -> None:
        owners = list({id(one): one for module in modules for one in module.modules()}.values())
        self._slots = [
            (buffer_slots(one), n, b) for one in owners for n, b in buffer_slots(one).items() if b is not None
        ]
        buffers = {id(b): b for _, _, b in self._slots if copies}.values()
        self._copies = [(b, b.detach().clone()) for b in buffers]
        self.generators = generators
        self._contents: dict[int, tuple[Any, list[Any]]] = {}
        self._empty: list[Any] = []
        waiting: list[Any] = [vars(one) for one in owners] if attributes else []
        while waiting and len(self._contents) < _MOST:
            container = waiting.pop()
            if type(container) in _BASES and not container:  # most of them are tables of hooks
                self._empty.append(container)
            elif id(container) not in self._contents:
                held = _content_of(container)
                self._contents[id(container)] = container, held
                waiting += [one for one in held if isinstance(one, _BASES)]
        found = {id(one): one for _, held in self._contents.values() for one in _generators_in(held)}
        self._own_generators = [(one, one.get_state()) for one in found.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the attributes, and in containers there, that are neither parameters nor buffers."""
        buffers = {id(buffer) for _, _, buffer in self._slots}
        held = chain.from_iterable(content for _, content in self._contents.values())
        tensors = {id(one): one for one in held if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)}
        return [one for key, one in tensors.items() if key not in buffers]

    def lend(self) -> None:
        """Replace the buffers by copies, which a graph may keep, and set the generators to the stored states."""
        for slots, name, buffer in self._slots:
            slots[name] = buffer.detach().clone()
        if self.generators is not None:
            restore_generators(self.generators)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, in the same containers and buffers."""
        if self.generators is not None:
            restore_generators(self.generators)
        for generator, state in self._own_generators:
            generator.set_state(state)
        for container in filter(None, self._empty):
            _refill(container, ())
        for container, before in self._contents.values():
            now = _content_of(container)
            if len(now) != len(before) or not all(map(is_, now, before)):
                _refill(container, before)
        for slots, name, buffer in self._slots:
            slots[name] = buffer
        for buffer, value in self._copies:  # an unchanged buffer may be saved in a graph, and must not be written
            if value.layout is not torch.strided or not torch.equal(local_part(buffer), local_part(value)):
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)
                buffer.copy_(value)


def _generators_in(held: Sequence[Any]) -> Iterator[torch.Generator]:
    """Yield the generators among objects and among the attributes of these, without calling methods of theirs."""
    for one in held:
        if issubclass(type(one), torch.Generator):
            yield one
        elif not issubclass(type(one), (*_WITHOUT_GENERATORS, *_BASES)):
            with suppress(AttributeError):
                attributes = object.__getattribute__(one, "__dict__")
                yield from [inside for inside in attributes.values() if issubclass(type(inside), torch.Generator)]


_WITHOUT_GENERATORS = (nn.Module, Tensor, str, int, float, type, FunctionType, ModuleType)
"""Classes of objects whose attributes are searched elsewhere, or hold no generator."""

_BASES: Any = OrderedDict, dict, list, set, deque
"""Types of containers; methods that a subclass overrides are not called."""


def _base_of(kind: type) -> Any:
    return kind if kind in _BASES else next(base for base in _BASES if issubclass(kind, base))


def _content_of(container: Any) -> list[Any]:
    """Return the objects in a container; for a dict the keys, then the values."""
    base = _base_of(type(container))
    if issubclass(base, dict):
        return [*base.keys(container), *base.values(container)]
    return list(base.__iter__(container))


def _refill(container: Any, held: Sequence[Any]) -> None:
    """Fill a container with the given objects, in their order."""
    base, half = _base_of(type(container)), len(held) // 2
    base.clear(container)
    if issubclass(base, dict):
        for key, value in zip(held[:half], held[half:], strict=True):
            base.__setitem__(container, key, value)
    elif base is set:
        base.update(container, held)
    else:
        base.extend(container, held)


def modules_of_call(fn: Callable[..., Any], *arguments: Any) -> list[nn.Module]:
    """Return the modules that a call of ``fn`` may write to because it refers to them; not ``fn`` itself."""
    found: dict[int, nn.Module] = {}
    if not isinstance(fn, nn.Module):
        _collect(fn, _DEEPEST, {}, found)
    _collect(list(arguments), _DEEPEST, {}, found)
    return list(found.values())


def _collect(value: Any, depth: int, seen: dict[int, int], found: dict[int, nn.Module]) -> None:
    if isinstance(value, nn.Module):
        found[id(value)] = value
    elif seen.get(id(value), 0) < depth:
        seen[id(value)] = depth
        for one in _referred(value):
            if type(one) not in _WITHOUT_MODULES:
                _collect(one, depth - 1, seen, found)


def _referred(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    has_function = hasattr(value, "func")
    held = [getattr(value, "__self__", None)]
    held += [value.func, getattr(value, "args", ()), getattr(value, "keywords", {})] if has_function else []
    held += [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if is_filled(cell)]
    if (code := getattr(value, "__code__", None)) is not None:
        if not str(getattr(value, "__module__", "")).startswith("torch."):  # torch's globals hold no user modules
            held += [value.__globals__.get(name) for name in code.co_names]
        held += [getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)]
    elif not isinstance(value, type) and not has_function:
        held += vars(value).values() if hasattr(value, "__dict__") else []
    return held


def is_filled(cell: Any) -> bool:
    """Tell whether a cell of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
