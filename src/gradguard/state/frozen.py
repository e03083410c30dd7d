"""Modules and random generators between two runs of a step or a call, so that the second finds what the first found."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.fully_sharded import GatheredLayers
from gradguard.distributed.placements import local_part
from gradguard.state.generators import States, restore_generators
from gradguard.torch_private import buffer_slots

_MOST = 100_000
"""Containers that are looked into."""

_DEEPEST = 4
_WITHOUT_MODULES = frozenset({
    Tensor, str, bytes, bool, int, float, complex, type(None), type(random), type(len), torch.dtype, torch.device,
    torch.Size, nn.Parameter,
})  # fmt: skip
"""Types of objects that refer to no module."""


class Frozen:
    """Modules as they are: their buffers; on request their attributes, and the random generators.

    Hooks are among the attributes: a model that puts hooks on its layers the first time it is asked for hidden states
    must not keep them from a run that never was. So are layers, which a model may replace in its first forward.

    Containers are read and written by the methods of their base class, and only those that hold other objects than
    before are written: a subclass that forbids `update` is the user's business.

    Args:
        modules: The modules, with all inside them.
        generators: States of the random generators that `lend` and `restore` put back; None leaves these alone.
        copies: Keep the values of buffers. Without it only `lend` may write them.
        attributes: Keep what the modules hold besides: attributes, hooks, layers.

    Attributes:
        generators: As given; another state may be set.
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
        self._gathered = [GatheredLayers(module) for module in modules] if attributes else []
        self._contents: dict[int, tuple[Any, list[Any]]] = {}
        self._empty: list[Any] = []
        waiting: list[Any] = [vars(one) for one in owners] if attributes else []
        while waiting and len(self._contents) < _MOST:
            container = waiting.pop()
            if type(container) in _BASES and not container:  # most are tables of hooks
                self._empty.append(container)
            elif id(container) not in self._contents:
                held = _content_of(container)
                self._contents[id(container)] = container, held
                waiting += [one for one in held if isinstance(one, _BASES)]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the attributes, and in containers there, that are neither parameters nor buffers."""
        buffers = {id(buffer) for _, _, buffer in self._slots}
        held = chain.from_iterable(content for _, content in self._contents.values())
        tensors = {id(one): one for one in held if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)}
        return [one for key, one in tensors.items() if key not in buffers]

    def lend(self) -> None:
        """Lend the modules copies of their buffers, which a graph may keep, and start from the kept generators."""
        for slots, name, buffer in self._slots:
            slots[name] = buffer.detach().clone()
        if self.generators is not None:
            restore_generators(self.generators)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in the same containers and buffers."""
        if self.generators is not None:
            restore_generators(self.generators)
        for layers in self._gathered:  # before their parameters are put back, which they would not notice
            layers.shard_again()
        for container in filter(None, self._empty):
            _refill(container, ())
        for container, before in self._contents.values():
            now = _content_of(container)
            if len(now) != len(before) or not all(map(is_, now, before)):
                _refill(container, before)
        for slots, name, buffer in self._slots:
            slots[name] = buffer
        for buffer, value in self._copies:  # one that has not changed may be in a graph, which no write may meet
            if value.layout is not torch.strided or not torch.equal(local_part(buffer), local_part(value)):
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)
                buffer.copy_(value)


_BASES: Any = OrderedDict, dict, list, set, deque
"""Kinds of containers; what a subclass has overridden is not called."""


def _base_of(kind: type) -> Any:
    return kind if kind in _BASES else next(base for base in _BASES if issubclass(kind, base))


def _content_of(container: Any) -> list[Any]:
    """Return the objects that a container holds; of a dictionary the keys, and then the values."""
    base = _base_of(type(container))
    if issubclass(base, dict):
        return [*base.keys(container), *base.values(container)]
    return list(base.__iter__(container))


def _refill(container: Any, held: Sequence[Any]) -> None:
    """Let a container hold the same objects again, in the same order."""
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
    """Return the modules that a call of ``fn`` may write to, those it refers to; not ``fn`` itself."""
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
        if not str(getattr(value, "__module__", "")).startswith("torch."):  # whose globals are no user's modules
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
