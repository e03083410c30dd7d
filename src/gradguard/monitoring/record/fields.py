"""What each field of a record must be: one table, and the one place where lines are read.

A record may have been cut, edited, joined from two, or damaged, and it may come from somebody else. Whoever reads a
line that `parse_line` returned need not look at types again.
"""

import json
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from math import isfinite
from operator import is_
from typing import Any

from gradguard.files.json_text import is_deep, refuse_many_values
from gradguard.monitoring.record.lines import ABSENT, Tops, Vectors, as_columns
from gradguard.monitoring.record.text import printable

LONGEST_LINE = 64 * 2**20
"""No line of a record is as long; what is, is no line."""

Rule = Callable[[Any], Any]
"""Takes the value of a field and returns what to keep of it: the value itself, cleaned text, or `_BAD`."""

_BAD = object()
_LARGEST = sys.float_info.max
_MOST = 2**53
_DECADES = 60  # of magnitudes that a histogram counts: 30 as it is measured, moved by a loss scale
_NUMBERS = (int, float)  # and not bool, which is an int
_FLOATS = {float}


def parse_line(raw: bytes) -> tuple[dict[str, Any], int]:
    """Read one line of a record.

    A field that the table does not know is kept as it is, since a later version may have written it.

    Args:
        raw: The line, with or without its end.

    Returns:
        The line, its kind under ``"t"``, and how many of its fields were left out because they held something else
        than they must. Text is printable; numbers are finite, or None for what was not finite.

    Raises:
        ValueError: It is no JSON object with a kind, or lacks a field without which it says nothing.
        RecursionError: It is nested too deeply.

    Example:
        >>> parse_line(b'{"t": "step", "i": 7, "norm": null, "loss": "low"}')
        ({'t': 'step', 'i': 7, 'norm': None}, 1)
    """
    refuse_many_values(raw)
    return _checked_line(_DECODER.decode(raw.decode("utf-8")))


def _checked_line(line: Any) -> tuple[dict[str, Any], int]:
    if type(line) is not dict or type(kind := line.get("t")) is not str:
        raise ValueError('expected an object like {"t": "step", ...}')
    table = _TABLES.get(kind, {})
    _refuse_deep(value for key, value in line.items() if key not in table or key == "params")
    if kind not in _TABLES:
        return line, 0
    line = {_SHARED.get(key, key): value for key, value in line.items()}
    line["t"] = _SHARED[kind]
    dropped = _check(line, table)
    for key in _REQUIRED[kind]:
        if key not in line:
            raise ValueError(f'a "{kind}" line needs {_MEANT[key]} under "{key}"')
    if kind == "meta":
        dropped += _check_parameters(line)
    return line, dropped


def _refuse_deep(values: Iterable[Any]) -> None:
    """Refuse a value that no rule checks if it is nested too deeply to be walked through."""
    if any(type(value) in (list, dict) and is_deep(value) for value in values):
        raise ValueError("nested too deeply")


def begins_run(raw: bytes) -> dict[str, Any] | None:
    """Return the first line of another run that hides in a line that cannot be read, or None.

    The line before it had no end, because its run was killed; or it is damaged itself, and then all that is known is
    that another run begins.

    Args:
        raw: A line that `parse_line` refuses.
    """
    found = _BEGINNING.search(raw)
    if found is None:
        return None
    try:
        return parse_line(raw[found.start() :])[0]
    except (ValueError, RecursionError):
        return {"t": "meta"}


Columns = tuple[list[tuple[str, ...]], dict[str, Sequence[Any]]]
"""The keys of each line, in their order, and a column for each key."""


@dataclass(frozen=True, slots=True)
class ManyLines:
    """Sound lines, as they were read at once.

    Attributes:
        columns: Of steps and of tensors.
        others: All other lines.
    """

    columns: dict[str, Columns]
    others: list[dict[str, Any]]


def parse_lines(content: bytes) -> ManyLines | None:
    r"""Read many lines at once, in a third of the time, where each is sound and none begins a run.

    **Guarantees**: what is returned says the same as `parse_line` of each, which leaves out no field of them.

    Args:
        content: Lines with their ends; the last may have none.

    Returns:
        What they say; None where `parse_line` has to look at each.

    Example:
        >>> parse_lines(b'{"t": "step", "i": 7, "rule": "norm"}\n{"t": "step", "i": 8}').columns["step"][1]
        {'t': ['step', 'step'], 'i': array('q', [7, 8]), 'rule': ['norm', absent]}
        >>> parse_lines(b'{"t": "step", "i": 7, "x": [1\n2]}\n{"t": "step", "i": 8}')
    """
    content = content.removesuffix(b"\n")
    joined, breaks = content.replace(b"\n", _BETWEEN), content.count(b"\n")
    if joined.count(b"-Infinity") != breaks:
        return None
    try:
        refuse_many_values(content)
        found = _MANY.decode(f"[{joined.decode('utf-8')}]")
        # As many breaks as were put in, with one value between two of them: none of them is inside of a line.
        if len(found) != 2 * breaks + 1 or not all(map(is_, found[1::2], repeat(_BREAK))):
            return None
        kinds: dict[str, list[dict[str, Any]]] = {"step": [], "tensors": []}
        others = []
        for line in found[::2]:
            if type(line) is not dict or line["t"] == "meta":
                return None
            if line["t"] in kinds:
                kinds[line["t"]].append(line)
                continue
            cleaned, dropped = _checked_line(line)
            if dropped:
                return None
            others.append(cleaned)
        columns = {kind: _checked_columns(kind, lines) for kind, lines in kinds.items()}
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return ManyLines(columns, others)


def _checked_columns(kind: str, lines: Sequence[dict[str, Any]]) -> Columns:
    """Return the columns of lines of one kind.

    Returns:
        Nothing that has not been checked.

    Raises:
        ValueError: A field is not what it must be, or is missing.
    """
    shapes, read = as_columns(lines)
    for key in read.keys() - _TABLES[kind].keys():
        _refuse_deep(read[key])
    columns: dict[str, Sequence[Any]] = dict(read)
    for key, rule in _TABLES[kind].items():
        if key in columns:
            columns[key] = _checked_column(rule, read[key])
    if lines and any(key not in columns or ABSENT in read[key] for key in _REQUIRED[kind]):
        raise ValueError("a line lacks what it must have")
    return shapes, columns


def _checked_column(rule: Rule, values: list[Any]) -> Sequence[Any]:
    """Return what to keep of a column.

    Returns:
        What ``rule`` keeps of each value.

    Raises:
        ValueError: A value is not what it must be.
    """
    types = set(map(type, values))
    if types == _FLOATS and rule in _RANGES:
        low, high = _RANGES[rule]
        if isfinite(sum(values)) and (low is None or low <= min(values)) and (high is None or max(values) <= high):
            return array("d", values)
    elif types == {int} and rule is _count and min(values) >= 0 and max(values) < _MOST:
        return array("q", values)
    elif types == {str} and values.count(values[0]) == len(values):
        values = values[:1] * len(values)  # one text, however often it was read
    elif types == {list} and rule is _amounts:
        rows = Vectors(len(values[0]))
        if rows.packed(values) and isfinite(sum(rows.flat)) and min(rows.flat) >= 0:
            return rows
    elif types == {list} and rule is _top:
        tops = Tops()
        if tops.packed(values) and _within(tops.places, _MOST - 1) and _within(tops.shares, _MOST):
            return tops
    kept = [value if value is ABSENT else rule(value) for value in values]
    if any(value is _BAD for value in kept):
        raise ValueError("a field is not what it must be")
    return kept


def _within(values: Sequence[float], largest: float) -> bool:
    """Whether all are numbers from 0 to there; an infinite one is not, and a sum with NaN is not finite."""
    return isfinite(sum(values)) and min(values) >= 0 and max(values) <= largest


_BREAK = object()
_BETWEEN = b",-Infinity,"  # the one constant that can stand in no string but as itself: it is counted
_MANY = json.JSONDecoder(parse_constant={"-Infinity": _BREAK}.get)
_BEGINNING = re.compile(rb'\{\s*"t"\s*:\s*"meta"')
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)  # NaN is no JSON, and says what null does


def _check(fields: dict[str, Any], table: Mapping[str, Rule]) -> int:
    """Clean ``fields`` in place; return how many were left out."""
    changed = None
    for key, value in fields.items():
        rule = table.get(key)
        if rule is not None and (kept := rule(value)) is not value:
            changed = changed or []
            changed.append((key, kept))
    if changed is None:
        return 0
    dropped = 0
    for key, kept in changed:
        if kept is _BAD:
            del fields[key]
            dropped += 1
        else:
            fields[key] = kept
    return dropped


def _check_parameters(meta: dict[str, Any]) -> int:
    """Clean what is said of each parameter; each keeps its place, because later arrays count on it."""
    parameters, dropped = meta.get("params", []), 0
    for place, parameter in enumerate(parameters):
        if type(parameter) is dict:
            dropped += _check(parameter, _PARAMETER)
        else:
            parameters[place] = {}
            dropped += 1
    return dropped


# --- what a field may be ----------------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    """A number; None for one that was not finite."""
    if value is None or (type(value) is float and -_LARGEST <= value <= _LARGEST):
        return value
    if type(value) is not int or not -_LARGEST <= value <= _LARGEST:
        return _BAD
    return value if -_MOST < value < _MOST else float(value)  # what is computed with it overflows as floats do


def _amount(value: Any) -> Any:
    """A number of at least 0; None for one that was not finite."""
    if type(value) is float and 0 <= value <= _LARGEST:
        return value
    kept = _number(value)
    return kept if kept is None or kept is _BAD or kept >= 0 else _BAD


def _seconds(value: Any) -> Any:
    return value if type(value) in _NUMBERS and 0 <= value <= _MOST else _BAD


def _whole(value: Any) -> Any:
    return value if type(value) is int and -_MOST < value < _MOST else _BAD


def _count(value: Any) -> Any:
    return value if type(value) is int and 0 <= value < _MOST else _BAD


def _truth(value: Any) -> Any:
    return value if type(value) is bool else _BAD


def _text(value: Any) -> Any:
    return _BAD if type(value) is not str else value if value.isprintable() else printable(value)


def _list(value: Any) -> Any:
    return value if type(value) is list else _BAD


def _numbers(value: Any) -> Any:
    """A list of numbers, with None for those that were not finite."""
    if type(value) is not list:
        return _BAD
    return value if set(map(type, value)) == _FLOATS and isfinite(sum(value)) else _each_number(value)


def _amounts(value: Any) -> Any:
    """A list of numbers of at least 0, with None for those that were not finite."""
    if type(value) is not list:
        return _BAD
    if set(map(type, value)) == _FLOATS and isfinite(sum(value)) and min(value) >= 0:  # nearly every line, and fast
        return value
    return _each_amount(value)


def _each(rule: Rule) -> Rule:
    def check(value: Any) -> Any:
        if type(value) is not list:
            return _BAD
        kept = [rule(item) for item in value]
        return _BAD if any(item is _BAD for item in kept) else value if all(map(is_, kept, value)) else kept

    return check


_each_number, _each_amount = _each(_number), _each(_amount)


def _top(value: Any) -> Any:
    """A parameter, and its share of the squared norm."""
    if type(value) is not list or len(value) != 2 or _count(value[0]) is _BAD or type(value[1]) not in _NUMBERS:
        return _BAD
    return value if 0 <= value[1] <= _MOST else _BAD


def _clip(value: Any) -> Any:
    """Rule, threshold and coefficient."""
    if type(value) is not list or len(value) != 3:
        return _BAD
    kept = [_text(value[0]), _number(value[1]), _amount(value[2])]
    return _BAD if any(item is _BAD for item in kept) else kept


def _histogram(value: Any) -> Any:
    """Ascending edges, as log10, and a count for each bin between two of them."""
    if type(value) is not dict or value.keys() != {"edges", "counts"}:
        return _BAD
    edges, counts = value["edges"], value["counts"]
    if type(edges) is not list or type(counts) is not list or len(edges) != len(counts) + 1:
        return _BAD
    if any(type(edge) not in _NUMBERS or not -_DECADES < edge < _DECADES for edge in edges):
        return _BAD
    rises = all(low < high for low, high in pairwise(edges))
    return value if rises and all(_count(count) is not _BAD for count in counts) else _BAD


def _mesh(value: Any) -> Any:
    if type(value) is not dict or any(_count(size) is _BAD for size in value.values()):
        return _BAD
    return {printable(name): size for name, size in value.items()}


def _facts(value: Any) -> Any:
    """Some texts, numbers and truths by name."""
    if type(value) is not dict or len(value) > _MOST_FACTS:
        return _BAD
    kept = {
        name: _text(one) if type(one) is str else one if type(one) is bool else _number(one)
        for name, one in value.items()
    }
    return _BAD if any(one is _BAD for one in kept.values()) else {printable(name): one for name, one in kept.items()}


_MOST_FACTS = 20


def _severity(value: Any) -> Any:
    return value if value in ("info", "warning", "error") else _BAD


_PARAMETER: Mapping[str, Rule] = {
    "name": _text, "shape": _each(_count), "numel": _count, "dtype": _text, "group": _count, "optimizer": _count,
    "frozen": _truth, "order": _count, "uses": _count,
}  # fmt: skip

_TABLES: Mapping[str, Mapping[str, Rule]] = {
    "meta": {
        "version": _text, "schema": _count, "argv": _each(_text), "clip": _text, "torch": _text, "python": _text,
        "host_platform": _text, "git": _text, "device": _text, "world": _count, "rank": _count, "mesh": _mesh,
        "optimizers": _each(_text), "eps": _each(_amount), "params": _list, "pid": _count, "parent": _count,
        "root": _count, "compute": _each(_text), "leaves": _count, "loss_factor": _number, "followed": _facts,
    },
    "step": {
        "i": _count, "wall": _seconds, "loss": _number, "lr": _number, "norm": _amount, "post_norm": _amount,
        "coefficient": _amount, "threshold": _number, "rule": _text, "clips": _each(_clip), "user_max_norm": _number,
        "amp_scale": _amount, "skipped": _truth, "spike": _truth, "nonfinite": _count, "top": _top, "optimizer": _count,
        "noise_scale": _number, "noise_scale_low": _number, "noise_scale_high": _number, "batch_size": _number,
        "scaled_clip": _truth, "kept_gradients": _truth, "backwards": _count, "origin": _each(_text),
    },
    "tensors": {
        "i": _count, "norm": _amounts, "max": _amounts, "zeros": _amounts, "weight": _amounts, "update": _amounts,
        "absent": _each(_count), "zero_rows": _numbers, "histogram": _histogram,
    },
    "event": {
        "i": _count, "kind": _text, "severity": _severity, "message": _text, "advice": _text, "params": _each(_text),
        "value": _number, "optimizer": _count, "lost": _count, "recovery": _count, "slowed_down": _truth,
    },
    "end": {
        "steps": _count, "wall": _seconds, "overhead_ms": _seconds, "exit": _whole, "interrupted": _truth,
        "clips": _count, "idle_steps": _count,
    },
}  # fmt: skip

# A parser makes new text of each key of each line: a million lines that share theirs take a quarter less memory.
_SHARED: dict[Any, str] = {key: key for key in ("t", *_TABLES, *(key for table in _TABLES.values() for key in table))}
_RANGES: Mapping[Rule, tuple[float | None, float | None]] = {
    _number: (None, None), _amount: (0.0, None), _seconds: (0.0, _MOST),
}  # fmt: skip
"""The rules that keep every finite float from here to there: a column of them is checked at once."""

_REQUIRED = {"meta": (), "step": ("i",), "tensors": ("i", "norm"), "event": ("i",), "end": ()}
_MEANT = {"i": "the number of a step", "norm": "a list of norms"}
