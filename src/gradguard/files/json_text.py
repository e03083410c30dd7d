"""Read JSON whose depth and size are known before it is parsed."""

import json
from typing import Any

DEEPEST = 150
"""Brackets within brackets. Who walks through what was read may call itself so often."""

MOST_VALUES = 4_000_000
"""Numbers, texts and containers of one text: some 64 bytes each in memory."""

_SHORT = 1 << 16
"""A text as long as that cannot have many values."""


def decode_json(text: bytes, *, finite: bool = True) -> Any:
    """Return what a JSON text says.

    A key that an object has twice is refused.

    Args:
        text: UTF-8.
        finite: Whether NaN and infinity, which are no JSON, are refused.

    Raises:
        ValueError: It is no JSON, nested more deeply than `DEEPEST`, or it has more than `MOST_VALUES` values.

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
    """Refuse a text that would take much more memory than it is long.

    Raises:
        ValueError: It may have more than `MOST_VALUES` values: so many commas and brackets, also within strings.
    """
    if len(text) > _SHORT and text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")


def is_deep(value: Any) -> bool:
    """Tell whether what was read is nested more deeply than `DEEPEST`; without calling itself."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            one for two in level if type(two) in (list, dict) for one in (two.values() if type(two) is dict else two)
        ]
        if not level:
            return False
    return any(type(one) in (list, dict) for one in level)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


_DECODER_OF_ALL = json.JSONDecoder(object_pairs_hook=_object)
_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_object)
