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
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from gradguard.files.json_text import DEEPEST

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DTYPES = {name: d for name, d in _DTYPES.items() if not name.startswith(("q", "bits"))}
_FACTORIES: dict[str, Any] = {"None": None, "list": list, "dict": dict, "set": set, "int": int, "float": float}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered dict": OrderedDict, "counter": Counter}
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
        stored: Returns the table and the number of an object that stands in a table of its own, or None of any other.
        found: Returns the object of a number, by the name of its table.
    """

    def __init__(
        self, stored: Callable[[Any], tuple[str, int] | None], found: Mapping[str, Callable[[int], Any]]
    ) -> None:
        self._stored, self._found = stored, found

    def encoded(self, value: Any, depth: int = 10) -> Any:
        """Return ``value`` as JSON has it.

        Args:
            value: The value.
            depth: How many brackets are round it in the file, at most.

        Raises:
            PlainError: It has no such form; it says what has none.
        """
        if depth > DEEPEST:
            raise PlainError("containers are nested too deeply")
        if type(value) is list:
            return [self.encoded(item, depth + 1) for item in value]
        if _is_itself(value):
            return value
        kind, content = self._stored(value) or _told(value)
        return {kind: self.encoded(content, depth + 1)}

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
        made = self._found.get(kind) or _READ.get(kind)
        if made is None:
            raise PlainError(f"{kind!a:.40} is no kind of value")
        return made(self._decoded(content))


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


def _is_itself(value: Any) -> bool:
    """Whether JSON has a value as it is."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, str)


def _check_key(key: Any) -> None:
    if type(key) is tuple:
        for part in key:
            _check_key(part)
    elif type(key) not in _KEYS:
        raise PlainError(f"a key that is a {type(key).__name__}")


# Each kind of value is told by simpler ones, and made of these again.


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    for key in value:
        _check_key(key)
    return [[key, one] for key, one in value.items()]


def _of_pairs(pairs: Any) -> dict[Any, Any]:
    for key, _ in _is(list, pairs):
        _check_key(key)
    found = dict(pairs)
    if len(found) != len(pairs):
        raise PlainError("a mapping has a key twice")
    return found


def _told_mapping(name: str, value: Any) -> list[Any]:
    own = getattr(value, "__dict__", None)
    return [name, _pairs(value), _pairs(own)] if own else [name, _pairs(value)]


def _mapping(told: Any) -> Any:
    name, pairs, *own = told
    made = _MAPPINGS[name](_of_pairs(pairs))
    for attributes in own:
        vars(made).update({_is(str, key): one for key, one in _of_pairs(attributes).items()})
    return made


def _told_defaultdict(value: Any) -> list[Any]:
    names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
    if not names:
        raise PlainError(f"a defaultdict of {value.default_factory}")
    return [names[0], _pairs(value)]


def _scalar(told: Any) -> Any:
    import numpy

    name, content = told
    (one,) = numpy.frombuffer(bytes.fromhex(content), array_dtype(name))
    return one


_TOLD: dict[type, tuple[str, Callable[[Any], Any]]] = {
    int: ("int", hex),
    float: ("float", lambda value: struct.pack(">d", value).hex()),
    complex: ("complex", lambda value: struct.pack(">dd", value.real, value.imag).hex()),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    torch.dtype: ("dtype", dtype_name),
    torch.device: ("device", str),
    Reference: ("reference", lambda value: value.name),
    deque: ("deque", lambda value: [value.maxlen, list(value)]),
    defaultdict: ("defaultdict", _told_defaultdict),
    **{kind: (name, list) for name, kind in _SEQUENCES.items()},
    **{kind: ("mapping", partial(_told_mapping, name)) for name, kind in _MAPPINGS.items()},
}
_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(_is(str, text), 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "bytes": lambda text: base64.b64decode(_is(str, text), validate=True),
    "scalar": _scalar,
    "dtype": _DTYPES.__getitem__,
    "device": checked_device,
    "reference": lambda name: Reference(_is(str, name)),
    "list": partial(_is, list),
    "deque": lambda told: deque(_is(list, told[1]), told[0]),
    "defaultdict": lambda told: defaultdict(_FACTORIES[told[0]], _of_pairs(told[1])),
    "mapping": _mapping,
    **{name: lambda items, kind=kind: kind(_is(list, items)) for name, kind in _SEQUENCES.items()},
}


def _told(value: Any) -> tuple[str, Any]:
    """Return the kind of a value, and the simpler ones that tell it.

    Raises:
        PlainError: It is of no kind.
    """
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind in _TOLD:
        name, content = _TOLD[kind]
        return name, content(value)
    if numpy is not None and isinstance(value, numpy.generic) and _ARRAY.fullmatch(value.dtype.str):
        array = numpy.asarray(value)  # in which an empty text has room for a character
        return "scalar", [array.dtype.str, array.tobytes().hex()]
    name = getattr(value, "__qualname__", None)
    raise PlainError(f"a {kind.__name__}" if name is None else f"{name}, a {kind.__name__}")


def _name_of(value: Any) -> str | None:
    """Where a function or class is found by its name; None of one that is not, such as a lambda."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if type(module) is not str or type(name) is not str:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value and found is not None else None
