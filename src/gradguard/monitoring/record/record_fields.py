"""Parse and check the lines of a record against one table of field types.

A record may be truncated, edited, joined from two or damaged, and it may come from an untrusted source. The fields of a
line that `parse_line` returned need no further type checks.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from sys import intern
from typing import Any

from gradguard.files.foreign_fields import MOST, Rule, list_of, mapping_of, number, of_type, row_of, text, truth, whole
from gradguard.files.json_text import is_deep, refuse_many_values
from gradguard.monitoring.record.text import printable

LONGEST_LINE = 64 * 2**20
"""The largest number of bytes in a line; a longer one is refused."""

_FLOATS = {float}


def parse_line(raw: bytes) -> tuple[dict[str, Any], int]:
    """Read one line of a record.

    An unknown field is kept unchanged, because a later version may have written it.

    Args:
        raw: The line, with or without its newline.

    Returns:
        The line, with its kind under ``"t"``, and the number of fields left out because their values have another type
        or range. In known fields, text is printable, and numbers are finite or None.

    Raises:
        ValueError: If the line is no JSON object with a kind, or lacks a required field.
        RecursionError: If the line is nested too deeply.

    Example:
        >>> parse_line(b'{"t": "step", "i": 7, "norm": null, "loss": "low"}')
        ({'t': 'step', 'i': 7, 'norm': None}, 1)
    """
    refuse_many_values(raw)
    text = raw.decode("utf-8").strip(" \t\r\n")
    line, end = _DECODER.raw_decode(text)  # takes three quarters of the time of `decode`
    if end < len(text):
        raise ValueError(f"Extra data: line 1 column {end + 1} (char {end})")
    if type(line) is not dict or type(kind := line.get("t")) is not str:
        raise ValueError('expected an object like {"t": "step", ...}')
    line, dropped = _checked(line, _TABLES.get(kind, {}))
    for key in _REQUIRED.get(kind, ()):
        if key not in line:
            raise ValueError(f'a "{kind}" line needs {_MEANT[key]} under "{key}"')
    if kind == "meta" and "params" in line:  # a faulty entry stays as {}, because later arrays rely on the order
        found = [_checked(one, _PARAMETER) if type(one) is dict else ({}, 1) for one in line["params"]]
        line["params"] = [one for one, _ in found]
        dropped += sum(lost for _, lost in found)
    return line, dropped


def _checked(fields: dict[str, Any], table: Mapping[str, Rule]) -> tuple[dict[str, Any], int]:
    """Return the valid fields, and the number of fields left out."""
    kept, dropped = {}, 0
    for key, value in fields.items():
        try:
            kept[key] = table.get(key, _not_deep)(value)
        except ValueError:
            dropped += 1
    return kept, dropped


def read_line(raw: bytes) -> tuple[dict[str, Any] | None, int, str]:
    """Read one line of a file that may be damaged.

    A new run may begin inside an unreadable line: its first line follows the torn last line of a killed run, without a
    newline between them. If that first line is damaged too, the function returns a ``meta`` line without fields.

    Args:
        raw: The line, with or without its newline.

    Returns:
        The line from `parse_line`, or the first line of a run that begins inside it, or None; the number of fields left
        out; and the reason why the line is unreadable, empty for a readable line.
    """
    try:
        return *parse_line(raw), ""
    except (ValueError, RecursionError) as error:
        begun, fault = _BEGINNING.search(raw), str(error)
    if begun is None:
        return None, 0, fault
    try:
        return parse_line(raw[begun.start() :])[0], 0, fault
    except (ValueError, RecursionError):
        return {"t": "meta"}, 0, fault


_BEGINNING = re.compile(rb'\{\s*"t"\s*:\s*"meta"')
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)  # NaN is not JSON; it means the same as null here


# --- types of fields --------------------------------------------------------------------------------------------------


def _not_deep(value: Any) -> Any:
    """Return an unknown field's value; raise if it is nested too deeply for a recursive walk."""
    if type(value) in (list, dict) and is_deep(value):
        raise RecursionError("nested too deeply")
    return value


def _text(value: Any) -> str:
    return printable(text(value))


def _word(value: Any) -> str:
    """Return a text that many lines share, as one interned object."""
    return _kept(text(value))


@lru_cache(maxsize=64)
def _kept(word: str) -> str:
    return intern(printable(word))


def _amounts(value: Any) -> list[float | None]:
    """Return a list of numbers of at least 0, with None for numbers that were not finite.

    Records round these numbers to four digits: a million lines have some ten thousand distinct ones. Equal numbers
    share one object, which halves the memory of a line (benchmarks/LOG.md).

    Returns:
        The list.

    Raises:
        ValueError: If ``value`` is no such list.
    """
    if type(value) is list and set(map(type, value)) == _FLOATS and isfinite(sum(value)) and min(value) > 0:
        if len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.clear()
        return list(map(_KNOWN.setdefault, value, value))
    return _each_amount(value)


_KNOWN: dict[float, float] = {}
_MOST_KNOWN = 2**17


def _fact(value: Any) -> Any:
    return _FACTS.get(type(value), _number)(value)


def _severity(value: Any) -> str:
    if value in ("info", "warning", "error"):
        return value
    raise ValueError("expected a severity")


def _params(value: Any) -> list[Any]:
    return _not_deep(_list(value))


_number, _amount, _seconds = number(null=True), number(0, null=True), number(0, MOST)
_count, _each_amount, _list = whole(), list_of(_amount), of_type(list)
_FACTS: Mapping[type, Rule] = {str: _text, bool: truth}

_PARAMETER: Mapping[str, Rule] = {
    "name": _text,
    "shape": list_of(_count),
    "numel": _count,
    "dtype": _text,
    "group": _count,
    "optimizer": _count,
    "frozen": truth,
    "order": _count,
    "uses": _count,
    "weight_decay": _number,
}

_TABLES: Mapping[str, Mapping[str, Rule]] = {
    "meta": {
        "t": _word,
        "version": _text,
        "schema": _count,
        "argv": list_of(_text),
        "clip": _text,
        "torch": _text,
        "python": _text,
        "host_platform": _text,
        "git": _text,
        "device": _text,
        "world": _count,
        "rank": _count,
        "mesh": mapping_of(_count, _text),
        "optimizers": list_of(_text),
        "eps": list_of(_amount),
        "params": _params,
        "pid": _count,
        "parent": _count,
        "root": _count,
        "compute": list_of(_text),
        "leaves": _count,
        "loss_factor": _number,
        "doubled": list_of(_text),
        "followed": mapping_of(_fact, _text),
    },
    "step": {
        "t": _word,
        "i": _count,
        "wall": _seconds,
        "loss": _number,
        "lr": _number,
        "norm": _amount,
        "post_norm": _amount,
        "coefficient": _amount,
        "threshold": _number,
        "rule": _word,
        "clips": list_of(row_of(_text, _number, _amount)),
        "clips_disjoint": truth,
        "user_max_norm": _number,
        "amp_scale": _amount,
        "skipped": truth,
        "update": _amount,
        "over_rule": _number,
        "logit": _number,
        "logit_of": _word,
        "spike": truth,
        "nonfinite": _count,
        "top": row_of(_count, _seconds),
        "optimizer": _count,
        "scaled_clip": truth,
        "kept_gradients": truth,
        "backwards": _count,
        "empty_batches": _amount,
        "origin": list_of(_text),
    },
    "tensors": {
        "t": _word,
        "i": _count,
        "norm": _amounts,
        "max": _amounts,
        "weight": _amounts,
        "update": _amounts,
        "moved": _amounts,
        "added": _amounts,
        "rates": list_of(_number),
        "absent": list_of(_count),
    },
    "event": {
        "t": _word,
        "i": _count,
        "kind": _text,
        "severity": _severity,
        "message": _text,
        "advice": _text,
        "params": list_of(_text),
        "value": _number,
        "optimizer": _count,
        "lost": _count,
        "recovery": _count,
        "slowed_down": truth,
    },
    "end": {
        "t": _word,
        "steps": _count,
        "wall": _seconds,
        "overhead_ms": _seconds,
        "exit": whole(1 - MOST),
        "interrupted": truth,
        "clips": _count,
        "idle_steps": _count,
    },
}

_REQUIRED = {"meta": (), "step": ("i",), "tensors": ("i", "norm"), "event": ("i",), "end": ()}
_MEANT = {"i": "the number of a step", "norm": "a list of norms"}
