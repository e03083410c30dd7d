"""The record of a run: JSON Lines, one object per line, append-only, readable by eye and by any language.

The first line is ``meta``; ``step``, ``tensors`` and ``event`` lines follow, ``end`` closes a run that reached
its end. JSON has no NaN: a value that was measured and was not finite is ``null``, a quantity that was not
measured has no key, so that "not measured", "not finite" and 0 stay three different things.
"""

import errno
import json
import math
import os
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from gradguard.errors import InvalidTypeError, RecordError

FILE_NAME = "run.jsonl"

Line = dict[str, Any]
"""One line: its kind under ``"t"``; before it is written, floats may be NaN or infinite."""

ARRAY_DIGITS = 4
SCALAR_DIGITS = 7

SCHEMA = 1
"""The version of the lines' meaning; a reader of another version takes what it knows and says so."""

MOST_BUFFERED = 1 << 18
"""Characters after which lines are written without waiting for `RecordWriter.flush`."""


@dataclass(frozen=True)
class Record:
    """Everything that one run wrote down, as plain Python values.

    Attributes:
        path: The file that was read.
        meta: Versions, device, arguments and the parameters, whose order every ``tensors`` line follows.
        steps: One dictionary per optimizer step.
        tensors: Pre-clip norms per parameter, every few steps.
        events: What the watcher wanted a person to know, with advice.
        end: The closing line, or None if the run was killed before it could write one.
        torn: Whether the last line was incomplete and was left out.
    """

    path: Path
    meta: dict[str, Any]
    steps: list[dict[str, Any]]
    tensors: list[dict[str, Any]]
    events: list[dict[str, Any]]
    end: dict[str, Any] | None
    torn: bool

    @property
    def is_newer(self) -> bool:
        """Whether it was written by a later version, whose lines may mean more than is read here."""
        schema = self.meta.get("schema", SCHEMA)
        return isinstance(schema, int) and schema > SCHEMA

    @property
    def names(self) -> list[str]:
        """The parameter names, in the order of every per-tensor array."""
        return [str(parameter.get("name", "?")) for parameter in self.meta.get("params", [])]


class RecordWriter:
    """Append lines to a new record; an existing file at that path is replaced.

    **Guarantees**: every line is strict JSON; parent folders are made; closing twice is harmless.

    Args:
        path: Where the record goes.

    Raises:
        RecordError: The file cannot be opened for writing.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> with RecordWriter(path) as writer:
        ...     writer.write("meta", version="0.1.0", clip=None)
        ...     writer.write("step", i=0, norm=float("inf"), loss=4.1)
        >>> print(path.read_text())
        {"t": "meta", "version": "0.1.0"}
        {"t": "step", "i": 0, "norm": null, "loss": 4.1}
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lines: list[str] = []  # in no buffer of the file's, which a forked child would write once more
        self._size = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise RecordError(
                f"cannot write a record to {self.path}: {error.strerror or error}. "
                "Name a folder that you may write to, for example --out runs/first"
            ) from error

    def write(self, kind: str, /, **fields: Any) -> None:
        """Write one line; a field that is None is left out, a float that is not finite becomes ``null``.

        Args:
            kind: ``"meta"``, ``"step"``, ``"tensors"``, ``"event"`` or ``"end"``.
            **fields: Numbers, strings, booleans, and lists or dictionaries of them.

        Raises:
            RecordError: The writer is closed.
        """
        if self._file.closed:
            raise RecordError(f"the record {self.path} is closed; write before close(), or open a new one")
        line = {"t": kind}
        for key, value in fields.items():
            if value is not None:
                line[key] = _plain(value)
        text = _ENCODER.encode(line)
        self._lines.append(text)
        self._size += len(text)
        if self._size > MOST_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Hand what was written to the operating system, so that a reader and a crash both find it.

        Raises:
            OSError: The disk is full, the file has been deleted, or the like; the record may then end in a torn line.
        """
        if self._file.closed or not self._lines:
            return
        data = memoryview("".join(f"{line}\n" for line in self._lines).encode("utf-8"))
        self._lines, self._size = [], 0
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError(errno.ENOENT, "it has been deleted")
        while data:
            data = data[self._file.write(data) or 0 :]

    def close(self) -> None:
        """Flush and close the file; a second call does nothing.

        Raises:
            OSError: As for `flush`; the file is closed nevertheless.
        """
        try:
            self.flush()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close the file without writing what is left."""
        self._lines = []
        self._file.close()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_record(path: str | Path) -> Record:
    """Read the record of one run; a folder stands for the ``run.jsonl`` in it.

    A torn last line, which a killed run leaves behind, is left out and reported as ``torn``. Kinds of line
    that this version does not know are passed over.

    Args:
        path: A record, or a folder that holds ``run.jsonl``.

    Returns:
        The record; every number in it is finite.

    Raises:
        RecordError: The file is missing, empty, broken inside, or no record at all.

    Example:
        >>> read_record("no/such/run.jsonl")
        Traceback (most recent call last):
        gradguard.errors.RecordError: no record at no/such/run.jsonl. Make one: gradguard run ...
    """
    path = _locate(Path(path))
    lines, torn = _parse(path, _lines_of(path))
    if not lines or lines[0]["t"] != "meta":
        raise RecordError(f'{path} is not a gradguard record: line 1 is not {{"t": "meta", ...}}. {_ADVICE}')
    ends = _of_kind(lines, "end")
    return Record(
        path=path,
        meta=lines[0],
        steps=_of_kind(lines, "step"),
        tensors=_of_kind(lines, "tensors"),
        events=_of_kind(lines, "event"),
        end=ends[-1] if ends else None,
        torn=torn,
    )


_ADVICE = "Make one: gradguard run --out DIR train.py"


def _plain(value: Any, digits: int = SCALAR_DIGITS) -> Any:
    # Round floats, turn non-finite ones into None, and go down into lists and dictionaries.
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") + 0.0 if isfinite(value) else None  # no -0.0
    if isinstance(value, str):  # an argument that is not UTF-8 arrives with surrogates, which no file can hold
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (list, tuple)):  # a few rows, no array: what stands in them are scalars
            return [[_plain(x) for x in row] for row in value]
        return [
            (float(f"{x:.4g}") + 0.0 if isfinite(x) else None) if type(x) is float else _plain(x, ARRAY_DIGITS)
            for x in value
        ]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _refuse(value: object) -> None:
    raise InvalidTypeError(
        f"a record holds plain numbers, strings, lists and dictionaries, got {type(value).__name__}; "
        "turn a tensor into numbers first, with .item() or .tolist()"
    )


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=_refuse)  # json.dumps would make one a line


def _locate(path: Path) -> Path:
    if path.is_dir():
        if not (path / FILE_NAME).is_file():
            raise RecordError(f"{path} is a folder without {FILE_NAME}. Name the record itself. {_ADVICE}")
        return path / FILE_NAME
    if not path.exists():
        raise RecordError(f"no record at {path}. Make one: gradguard run --out DIR train.py")
    return path


def _lines_of(path: Path) -> list[tuple[int, bytes]]:
    # Undecoded, because a torn line may end inside a character.
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}. {_ADVICE}") from error
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    if not lines:
        raise RecordError(f"{path} is empty: the run wrote nothing. {_ADVICE}")
    return lines


def _parse(path: Path, lines: list[tuple[int, bytes]]) -> tuple[list[dict[str, Any]], bool]:
    parsed = []
    for number, line in lines:
        try:
            parsed.append(_parse_line(line))
        except (ValueError, RecursionError) as error:
            if not parsed:
                message = f"{path} is not a gradguard record: line {number}: {error}. {_ADVICE}"
                raise RecordError(message) from error
            if number == lines[-1][0]:
                return parsed, True
            raise RecordError(
                f"{path} is broken at line {number}: {error}. "
                f"Only the last line may be incomplete; delete line {number} or record the run again"
            ) from error
    return parsed, False


_NUMBERS = ("norm", "post_norm", "coefficient", "threshold", "loss", "lr", "wall")
_PLAIN_NUMBERS, _LARGEST = (int, float), sys.float_info.max
_REQUIRED = {"step": ("i", int), "tensors": ("norm", list), "event": ("i", int)}


def _parse_line(line: bytes) -> dict[str, Any]:
    found = json.loads(line.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    if not isinstance(found, dict) or not isinstance(found.get("t"), str):
        raise ValueError('expected an object like {"t": "step", ...}')
    key, kind = _REQUIRED.get(found["t"], ("t", str))
    if not isinstance(found.get(key), kind):
        raise ValueError(f'a "{found["t"]}" line needs "{key}" of type {kind.__name__}')
    if found["t"] == "step":
        _check_step(found)
    elif found["t"] == "meta" and not isinstance(found.get("params", []), list):
        raise ValueError('"params" of a "meta" line is no list')
    return found


def _check_step(step: dict[str, Any]) -> None:
    for key in _NUMBERS:
        value = step.get(key)
        if value is not None and not (type(value) in _PLAIN_NUMBERS and -_LARGEST <= value <= _LARGEST):
            raise ValueError(f'"{key}" of a "step" line is no number')
    if (step.get("norm") or 0) < 0:
        raise ValueError('"norm" of a "step" line is below 0')


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON, a record writes null instead")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a 64-bit float, a record writes null instead")
    return number


def _of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["t"] == kind]
