"""State that a call of the checked function changes, put back before the next call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.state.generators import States, generator_states, restore_generators
from gradguard.torch_private import buffer_slots

_DEEPEST = 4
_WITHOUT_MODULES = frozenset({
    Tensor, str, bytes, bool, int, float, complex, type(None), type(random), type(len), torch.dtype, torch.device,
    torch.Size, nn.Parameter,
})  # fmt: skip
"""Types of objects that refer to no module."""


class State:
    """Buffers of the modules that a callable holds, and random number generators."""

    def __init__(self, fn: Callable[..., Any], *arguments: Any) -> None:
        modules = [] if isinstance(fn, nn.Module) else _modules_in(fn)
        modules += _modules_in(list(arguments))
        owners = {id(one): one for module in modules for one in module.modules()}.values()
        self._buffers = [(one, name, b) for one in owners for name, b in buffer_slots(one).items() if b is not None]
        self._generators: States | None = None

    def keep_random(self) -> None:
        """From now on start each call with the random numbers that would come next."""
        self._generators = generator_states()

    def share_random(self, other: State) -> None:
        """Start each call with the random numbers that ``other`` starts with."""
        self._generators = other._generators

    @property
    def is_seeded(self) -> bool:
        """Whether calls draw random numbers."""
        return self._generators is not None

    def begin_call(self) -> None:
        """Lend the modules copies of their buffers, which a graph may keep, and start from the same random numbers."""
        for module, name, buffer in self._buffers:
            buffer_slots(module)[name] = buffer.detach().clone()
        if self._generators is not None:
            restore_generators(self._generators)

    def put_back(self) -> None:
        """Leave everything as it was."""
        for module, name, buffer in self._buffers:
            buffer_slots(module)[name] = buffer
        if self._generators is not None:
            restore_generators(self._generators)


def _modules_in(value: Any) -> list[nn.Module]:
    """Return the modules that a callable, a container or an object refers to."""
    found: dict[int, nn.Module] = {}
    _collect(value, _DEEPEST, {}, found)
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
    held += [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_filled(cell)]
    if (code := getattr(value, "__code__", None)) is not None:
        if not str(getattr(value, "__module__", "")).startswith("torch."):  # whose globals are no user's modules
            held += [value.__globals__.get(name) for name in code.co_names]
        held += [getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)]
    elif not isinstance(value, type) and not has_function:
        held += vars(value).values() if hasattr(value, "__dict__") else []
    return held


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
