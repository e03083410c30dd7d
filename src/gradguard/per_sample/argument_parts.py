"""Look into the arguments of a call: samples' values may lie in lists, arrays and objects, as well as in tensors."""

import copy
from array import array
from collections import UserList
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import tree_flatten, tree_unflatten

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of one call."""

Visit = Callable[[str, Any], Any]
"""Gets the name and the value of a part; returns what stands in its place, or `INSIDE` to look at its parts instead."""

INSIDE: Any = object()
"""Returned by a `Visit` for a value of which only the parts may belong to samples."""

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type, Enum, PurePath, slice,
    torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module,
    FunctionType, BuiltinFunctionType, MethodType, ModuleType,
)  # fmt: skip
"""Classes of values that are never divided, nor looked into."""

_MOST_PARTS = 10_000
"""The most parts of objects that are looked at in one call."""


def is_array(value: Any) -> bool:
    """Return whether ``value`` is an array of NumPy, or one like it: it has a shape, and can take indices."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "take") and not isinstance(value, Tensor)


def is_list(value: Any) -> bool:
    """Return whether ``value`` is a plain list or tuple, of which some entries can be taken."""
    return type(value) is list or type(value) is tuple


def mapped(visit: Visit, arguments: Arguments) -> Arguments:
    """Return the arguments with what ``visit`` puts in the places of their parts; other objects are not copied.

    Raises:
        UnsupportedGradientError: If a part cannot be looked into.
    """
    walk = _Walk(visit)
    args = tuple([walk(str(i), value) for i, value in enumerate(arguments[0])])
    return args, {name: walk(name, value) for name, value in arguments[1].items()}


class _Walk:
    """Visits the parts of nested values, and rebuilds what holds another part than before."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self._left = visit, _MOST_PARTS
        self._rebuilt: dict[int, tuple[Any, Any]] = {}  # objects before and after; the first keeps its id in use
        self._open: dict[int, bool] = {}

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if (instead := self._visit(name, value)) is not INSIDE:
            return instead
        parts, spec = tree_flatten(value, is_leaf=lambda one: one is not value)
        if not (len(parts) == 1 and parts[0] is value):
            names = value if isinstance(value, Mapping) and len(value) == len(parts) else range(len(parts))
            found = [self(f"{name}[{key!r}]", part) for key, part in zip(names, parts, strict=True)]
            # Outside of objects the forward gets lists and dicts of its own, which it may change.
            return value if self._open and not _differ(found, parts) else tree_unflatten(found, spec)
        if id(value) in self._rebuilt:
            return self._rebuilt[id(value)][1]
        if id(value) in self._open:
            self._open[id(value)] = True
            return value
        self._open[id(value)] = False
        instead = self._object(name, value)
        if self._open.pop(id(value)) and instead is not value:
            raise UnsupportedGradientError(
                f"{_kind(name, value)} holds values of samples and refers to itself, so it cannot be divided among "
                "samples. Pass its tensors themselves, or in a dict."
            )
        self._rebuilt[id(value)] = value, instead
        return instead

    def _object(self, name: str, value: Any) -> Any:
        if isinstance(value, Set) and len(value):
            raise UnsupportedGradientError(
                f"{_kind(name, value)} may hold values of the samples, which cannot be told apart in a set. Pass a "
                "tensor or a list with one entry for each sample; or, if it is the same for all samples, a tuple."
            )
        if isinstance(value, Mapping) and not isinstance(value, dict) and not hasattr(value, "__dict__"):
            raise UnsupportedGradientError(
                f"{_kind(name, value)} cannot be divided among samples. Pass a dict: dict(it)."
            )
        parts = [*_parts_of_object(value)]
        self._left -= len(parts)
        if self._left < 0:
            raise UnsupportedGradientError(
                f"{_kind(name, value)} holds too much to be searched for values of samples. Pass the tensors "
                "themselves, or in a dict; make what is the same for all samples an attribute of the module."
            )
        before = [part for _, part, _ in parts]
        found = [self(f"{name}{key}", part) for key, part, _ in parts]
        if not _differ(found, before):
            return value
        try:
            instead = copy.copy(value)
            for (_, before_, put), part in zip(parts, found, strict=True):
                if part is not before_:
                    put(instead, part)
        except Exception as error:
            raise UnsupportedGradientError(
                f"{_kind(name, value)} holds values of samples, and cannot be copied to divide them ({error}). Pass "
                "its tensors themselves, or in a dict."
            ) from error
        return instead


def _kind(name: str, value: Any) -> str:
    return f"argument {name} of the module, a {type(value).__name__},"


def _differ(found: Sequence[Any], before: Sequence[Any]) -> bool:
    return any(new is not old for new, old in zip(found, before, strict=True))


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any, Callable[[Any, Any], None]]]:
    """Yield the parts of an object: the name of each, the part, and a function that puts another into a copy."""

    def item(key: Any) -> Callable[[Any, Any], None]:
        return lambda one, part: dict.__setitem__(one, key, part)

    def attribute(key: str) -> Callable[[Any, Any], None]:
        return lambda one, part: object.__setattr__(one, key, part)

    def entry(key: str) -> Callable[[Any, Any], None]:
        return lambda one, part: vars(one).__setitem__(key, part)

    if isinstance(value, dict):
        for key, part in dict.items(value):
            yield f"[{key!r}]", part, item(key)
    for key, part in dict(getattr(value, "__dict__", None) or {}).items():
        yield f".{key}", part, entry(key)
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key.startswith("__") and not key.endswith("__"):
                key = f"_{kind.__name__.lstrip('_')}{key}"
            if key not in ("__dict__", "__weakref__") and hasattr(value, key):
                yield f".{key}", getattr(value, key), attribute(key)


def taken(value: Any, indices: Sequence[int]) -> Any:
    """Return the entries ``indices`` of a list or tuple; its tensors are cloned and its lists copied."""

    def copied(name: str, part: Any) -> Any:
        del name
        return part.detach().clone() if isinstance(part, Tensor) else INSIDE

    return type(value)([_Walk(copied)("", value[i]) for i in indices])


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, also those in objects."""
    found: list[Tensor] = []

    def note(name: str, part: Any) -> Any:
        del name
        if not isinstance(part, Tensor):
            return INSIDE
        found.append(part)
        return part

    _Walk(note)("", value)
    return found


def entries_of(value: Any) -> int | None:
    """Return the number of entries of a sequence that is no plain list, array or text; None for another value."""
    is_sequence = isinstance(value, Sequence | array) and not isinstance(value, tuple | UserList)
    return len(value) if is_sequence else None
