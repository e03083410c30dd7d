"""Encode the attributes of a rule as strings, which compiled code accepts as constants and recompiles when they change.

The compiler treats a number among a function's arguments as a dynamic input, and traces into an object. It only
compares strings.
"""

import ast
import itertools
import math
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

Kind = tuple[str, tuple[tuple[str, str], ...]]
"""A rule without its thresholds: the class, and the encoded attributes."""

_TENSOR = "tensor"
_OBJECT = "object "
_PLAIN = (bool, int, float, str, bytes, type(None))


class _Reference:
    """An object without a string form, encoded by a number that is never used again."""

    def __init__(self, value: Any) -> None:
        self.value, self.text = value, f"{_OBJECT}{next(_serials)}"
        _by_text[self.text] = self


_serials = itertools.count()
_by_text: WeakValueDictionary[str, _Reference] = WeakValueDictionary()
_by_identity: WeakValueDictionary[int, _Reference] = WeakValueDictionary()


def encode_attributes(state: dict[str, Any]) -> tuple[tuple[tuple[str, str], ...], tuple[_Reference, ...]]:
    """Return a string for each attribute, and the references to keep alive as long as the strings are in use."""
    texts, references = [], []
    for name, value in state.items():
        if isinstance(value, Tensor):
            texts.append((name, _TENSOR))
        elif _is_plain(value):
            texts.append((name, repr(value)))
        else:
            reference = _by_identity.get(id(value))
            if reference is None:
                reference = _by_identity[id(value)] = _Reference(value)
            references.append(reference)
            texts.append((name, reference.text))
    return tuple(texts), tuple(references)


def is_encoded_tensor(text: str) -> bool:
    """Return whether the attribute is a tensor, which compiled code receives as an input."""
    return text == _TENSOR


def decode_attribute(text: str) -> Any:
    """Return the attribute that ``text`` encodes."""
    if text.startswith(_OBJECT):
        return _by_text[text].value
    return float(text) if text in {"inf", "-inf", "nan"} else ast.literal_eval(text)


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(_is_plain(one) and (type(one) is not float or math.isfinite(one)) for one in value)
    return type(value) in _PLAIN
