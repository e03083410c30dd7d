"""Values that a file can hold without code: numbers, text, tensors, arrays, and containers of these, as JSON.

What a list cannot say stands in an object of one entry, whose name is its kind: ``{"tuple": [1, 2]}``. Tensors and
arrays are numbers of entries in a table of their own. Kinds are a fixed list: nothing in a file names what is called.
"""

import base64
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from gradguard.files.json_text import DEEPEST

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DTYPES = {name: d for name, d in _DTYPES.items() if not name.startswith(("q", "bits"))}
_LAYOUTS = {str(one): one for one in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)}
_FORMATS = {str(f): f for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last)}
_FORMATS |= {str(torch.channels_last_3d): torch.channels_last_3d}
_FACTORIES: dict[str, Any] = {"None": None, "list": list, "dict": dict, "set": set, "int": int, "float": float}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size,
}  # fmt: skip
_KINDS: dict[type, str] = {kind: name for name, kind in _SEQUENCES.items() if isinstance(kind, type)}
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "ordered dict": OrderedDict, "counter": Counter}
_MAPPING_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "ordered dict", Counter: "counter"}
_KEYS = (type(None), bool, int, float, str, bytes)
_ARRAY = re.compile(r"[<>|=]?[biufcSU]\d{1,6}")
_DEVICE = re.compile(r"[a-z]{1,20}(?::\d{1,4})?")


class PlainError(ValueError):
    """A value has no form in a file; or a file holds something that `encoded` does not write."""


class Reference(NamedTuple):
    """A function or class that a state points to: the run that loads must have the same one in this place."""

    name: str


class Codec:
    """Turns values into what JSON has, and back; tensors and arrays are left to who keeps them.

    Args:
        stored: Returns the number of an object that stands in a table of its own, or None of any other.
        found: Returns the object of a number.
    """

    def __init__(
        self, stored: Callable[[Any], tuple[str, int] | None], found: Mapping[str, Callable[[int], Any]]
    ) -> None:
        self._stored, self._found = stored, found

    def encoded(self, value: Any, depth: int = 0) -> Any:
        """Return ``value`` as JSON has it.

        Raises:
            PlainError: It has no such form; it says what has none.
        """
        if depth > DEEPEST // 5:
            raise PlainError("containers are nested too deeply")
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if (entry := self._stored(value)) is not None:
            return {entry[0]: entry[1]}
        each = lambda items: [self.encoded(item, depth + 1) for item in items]  # noqa: E731
        if (simple := _simple(value)) is not None:
            return simple
        if type(value) in (list, *_KINDS):
            return each(value) if type(value) is list else {_KINDS[type(value)]: each(value)}
        if type(value) is deque:
            return {"deque": [value.maxlen, each(value)]}
        if type(value) in _MAPPING_KINDS:
            told = [_MAPPING_KINDS[type(value)], self._pairs(value, depth)]
            return {"mapping": [*told, self._pairs(vars(value), depth)] if getattr(value, "__dict__", None) else told}
        if type(value) is defaultdict:
            factory = next((name for name, one in _FACTORIES.items() if one is value.default_factory), None)
            if factory is None:
                raise PlainError(f"a defaultdict of {value.default_factory}")
            return {"defaultdict": [factory, self._pairs(value, depth)]}
        if isinstance(value, tuple) and (name := _name_of_class(type(value))):
            return {"named tuple": [*name, list(vars(type(value))["_fields"]), each(value)]}
        name = getattr(value, "__qualname__", None)
        raise PlainError(f"a {type(value).__name__}" if name is None else f"{name}, a {type(value).__name__}")

    def _pairs(self, value: Mapping[Any, Any], depth: int) -> list[list[Any]]:
        for key in value:
            _check_key(key)
        return [[self.encoded(key, depth + 1), self.encoded(one, depth + 1)] for key, one in value.items()]

    def decoded(self, told: Any) -> Any:
        """Return the value that `encoded` has made ``told`` of.

        Raises:
            PlainError: It has made none.
        """
        try:
            return self._decoded(told)
        except (
            TypeError,
            LookupError,
            AttributeError,
            ArithmeticError,
            struct.error,
            ValueError,
            ImportError,
        ) as error:
            raise PlainError(f"a value is not one that is written ({type(error).__name__}: {error})") from error

    def _decoded(self, told: Any) -> Any:
        if type(told) is list:
            return list(map(self._decoded, told))
        if type(told) is not dict:
            return told
        ((kind, content),) = told.items()
        if kind in self._found:
            return self._found[kind](content)
        if kind in _READ:
            return _READ[kind](content)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](list(map(self._decoded, _is(list, content))))
        if kind == "deque":
            longest, items = content
            return deque(map(self._decoded, _is(list, items)), longest)
        if kind == "mapping":
            name, pairs, *attributes = content
            made = _MAPPINGS[name](self._mapping(pairs))
            for own in attributes:
                vars(made).update({_is(str, key): one for key, one in self._mapping(own).items()})
            return made
        if kind == "defaultdict":
            name, pairs = content
            return defaultdict(_FACTORIES[name], self._mapping(pairs))
        if kind == "named tuple":
            module, name, fields, items = content
            return _named_tuple(module, name, fields, list(map(self._decoded, _is(list, items))))
        raise PlainError(f"{kind!a:.40} is no kind of value")

    def _mapping(self, pairs: Any) -> dict[Any, Any]:
        found = {}
        for key, value in _is(list, pairs):
            key = self._decoded(key)
            _check_key(key)
            found[key] = self._decoded(value)
        if len(found) != len(pairs):
            raise PlainError("a mapping has a key twice")
        return found


def reference_to(value: Any) -> Reference | None:
    """Return how to tell a function or class that a state points to; None of what no other process could have."""
    name = _name_of(value)
    return Reference(name) if name is not None else None


def with_references(value: Any, live: Any, where: str) -> Any:
    """Return ``value`` with what ``live`` has in the place of each `Reference`: a file chooses no function.

    Raises:
        PlainError: ``live`` has something else there.
    """
    if isinstance(value, Reference):
        if _name_of(live) != value.name:
            raise PlainError(f"{where} was {value.name!a:.80} when it was saved, and here it is {live!r:.80}")
        return live
    if type(value) is dict:
        known = live if isinstance(live, Mapping) else {}
        return {key: with_references(one, known.get(key), f"{where}.{key}") for key, one in value.items()}
    return value


def _simple(value: Any) -> Any:
    if type(value) is complex:
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) in (torch.dtype, torch.layout, torch.memory_format, torch.device):
        kind = str(type(value)).split(".")[-1].removesuffix("'>")
        known: dict[str, Mapping[str, Any]] = {"dtype": _DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS}
        text = str(value).removeprefix("torch.") if kind == "dtype" else str(value)
        return {kind: text} if kind == "device" or text in known[kind] else None
    if isinstance(value, Reference):
        return {"reference": value.name}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and _ARRAY.fullmatch(value.dtype.str):
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    return None


def is_array(value: Any) -> bool:
    """Tell whether ``value`` is an array of NumPy's whose elements are numbers or text of a fixed length."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and _ARRAY.fullmatch(value.dtype.str) is not None


def array_dtype(name: Any) -> Any:
    """Return the dtype of NumPy's of this name.

    Raises:
        PlainError: There is none, or not for a file.
    """
    import numpy

    if type(name) is not str or _ARRAY.fullmatch(name) is None:
        raise PlainError("an array has a dtype that is not known")
    return numpy.dtype(name)


def checked_device(text: Any) -> torch.device:
    """Return the device of this name, which this machine has.

    Raises:
        PlainError: It has none.
    """
    if type(text) is not str or _DEVICE.fullmatch(text) is None:
        raise PlainError("a device has no name")
    try:
        device = torch.device(text)
        there = device.type == "cpu" or torch.get_device_module(device).device_count() > (device.index or 0)
    except (RuntimeError, AttributeError):
        there = False
    if not there:
        raise PlainError(f"a tensor was on {text}, which this machine has not")
    return torch.device(text)


def checked_dtype(name: Any) -> torch.dtype:
    """Return torch's dtype of this name.

    Raises:
        PlainError: There is none for a file.
    """
    if name not in _DTYPES:
        raise PlainError("a tensor has a dtype that is not known")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as `checked_dtype` takes it.

    Raises:
        PlainError: It has none in a file, as quantized ones.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise PlainError(f"a tensor of {dtype}")
    return name


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise PlainError(f"a {type(value).__name__} where a {kind.__name__} must be")
    return value


def _check_key(key: Any) -> None:
    if type(key) is tuple:
        for part in key:
            _check_key(part)
    elif type(key) not in _KEYS:
        raise PlainError(f"a key that is a {type(key).__name__}")


def _whole(text: str) -> int:
    return int(_is(str, text), 16)


def _float(text: str) -> float:
    return struct.unpack(">d", bytes.fromhex(text))[0]


def _complex(text: str) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(text)))


def _scalar(told: list[str]) -> Any:
    import numpy

    name, content = told
    (one,) = numpy.frombuffer(bytes.fromhex(content), array_dtype(name))
    return one


_READ: dict[str, Callable[[Any], Any]] = {
    "int": _whole,
    "float": _float,
    "complex": _complex,
    "bytes": lambda text: base64.b64decode(_is(str, text), validate=True),
    "scalar": _scalar,
    "dtype": _DTYPES.__getitem__,
    "layout": _LAYOUTS.__getitem__,
    "memory_format": _FORMATS.__getitem__,
    "device": checked_device,
    "reference": lambda name: Reference(_is(str, name)),
}


def _name_of(value: Any) -> str | None:
    """Where a function or class is found by its name; None of one that is not, such as a lambda."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if type(module) is not str or type(name) is not str:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value and found is not None else None


def _name_of_class(kind: type) -> tuple[str, str] | None:
    named = "_fields" in vars(kind) and _name_of(kind) is not None and "." not in kind.__qualname__
    return (kind.__module__, kind.__qualname__) if named else None


def _named_tuple(module: Any, name: Any, fields: Any, items: Iterable[Any]) -> Any:
    """A named tuple of a class that this program has loaded already; nothing of the class is called."""
    loaded = sys.modules.get(_is(str, module))
    kind = None if loaded is None else vars(loaded).get(_is(str, name))
    items = tuple(items)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and type(kind) is type):
        raise PlainError(f"a named tuple {name!a:.40} of {module!a:.40}, which this program has not loaded")
    if list(vars(kind).get("_fields", ())) != fields or len(items) != len(fields) or kind.__base__ is not tuple:
        raise PlainError(f"a named tuple {name!a:.40} of {module!a:.40} has other fields here")
    return tuple.__new__(kind, items)
