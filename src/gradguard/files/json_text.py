"""Read JSON of unknown origin: its number of values is bounded before parsing, and its depth afterwards."""

import json
from typing import Any

DEEPEST = 150
"""The deepest nesting of brackets: a function that walks through the value may recurse to this depth."""

MOST_VALUES = 4_000_000
"""The largest number of numbers, strings and containers in one text; each takes some 64 bytes of memory."""

_SHORT = 1 << 16
"""Length in bytes up to which a text cannot have too many values."""


def decode_json(text: bytes, *, finite: bool = True) -> Any:
    """Return the value of a JSON text; an object with a repeated key is refused.

    Args:
        text: The JSON, in UTF-8.
        finite: Whether NaN and infinity, which are not JSON, are refused.

    Raises:
        ValueError: If the text is not JSON, is nested more deeply than `DEEPEST`, or has more than `MOST_VALUES`
            values.

    Example:
        >>> decode_json(b'{"a": [1, 2.5, null]}')
        {'a': [1, 2.5, None]}
        >>> decode_json(b"[" * 100000 + b"]" * 100000)
        Traceback (most recent call last):
        ValueError: nested more deeply than 150 brackets
    """
    refuse_many_values(text)
    try:
        value = (_DECODER if finite else _DECODER_OF_ALL).decode(text.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"nested more deeply than {DEEPEST} brackets") from None
    if is_deep(value):
        raise ValueError(f"nested more deeply than {DEEPEST} brackets")
    return value


def refuse_many_values(text: bytes) -> None:
    """Refuse a text whose values would take much more memory than the text.

    Raises:
        ValueError: If the text has more than `MOST_VALUES` commas and opening brackets, those in strings included.
    """
    if len(text) > _SHORT and text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")


def is_deep(value: Any) -> bool:
    """Tell whether a decoded value is nested more deeply than `DEEPEST`; the function itself does not recurse."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            one for two in level if type(two) in (list, dict) for one in (two.values() if type(two) is dict else two)
        ]
        if not level:
            return False
    return any(type(one) in (list, dict) for one in level)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


_DECODER_OF_ALL = json.JSONDecoder(object_pairs_hook=_object)
_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_object)
