"""Write and read the record of a run: append-only JSON Lines that people and any language can read.

The first line is ``meta``; ``step``, ``tensors`` and ``event`` lines follow; ``end`` closes a run that reached its end.
JSON has no NaN: a measured value that is not finite is ``null``, and a quantity that was not measured has no key. "Not
measured", "not finite" and 0 therefore remain three different things.
"""

import errno
import functools
import itertools
import json
import operator
import os
import re
import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, TypeVar

from gradguard.errors import InvalidTypeError, RecordError
from gradguard.files.opening import open_regular
from gradguard.monitoring.record.record_fields import LONGEST_LINE, parse_line, read_line
from gradguard.monitoring.record.record_lines import Lines, known_fields, names_of
from gradguard.monitoring.record.text import printable

FILE_NAME = "run.jsonl"

Line = dict[str, Any]
"""One line, with its kind under ``"t"``; before it is written, floats may be NaN or infinite."""

ARRAY, SCALAR = "%.4g", "%.7g"
"""The formats of a float in an array with one number per parameter, and of any other float."""

SCHEMA = 1
"""The version of the lines' meaning; a reader of another version reads the fields that it knows and warns."""

MOST_BUFFERED = 1 << 18
"""Once this many characters are buffered, lines are written without a call of `RecordWriter.flush`."""


@dataclass(frozen=True)
class Record:
    """The whole record of one run, as plain Python values.

    Attributes:
        path: The file that was read.
        meta: The first line: versions, device, arguments and parameters; every ``tensors`` line has their order.
        steps: One line per optimizer step; a list of dictionaries is converted to `Lines`.
        tensors: The norms per parameter before clipping, every few steps; converted in the same way.
        events: The messages of the run for a person, with advice.
        end: The ``end`` line; None if the run was killed before it wrote one.
        torn: Whether the last line was incomplete and was left out.
        unreadable: The number of lines left out because they are damaged or out of order.
        dropped: The number of fields left out because their values have another type or range.
        first_fault: The fault of the first line that was left out; empty without one.
        earlier_runs: The number of earlier runs in the file.
    """

    path: Path
    meta: dict[str, Any]
    steps: Lines
    tensors: Lines
    events: list[dict[str, Any]]
    end: dict[str, Any] | None
    torn: bool
    unreadable: int = 0
    dropped: int = 0
    first_fault: str = ""
    earlier_runs: int = 0
    _answers: dict[Callable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("steps", "tensors"):
            object.__setattr__(self, name, Lines.of(getattr(self, name)))

    @property
    def is_newer(self) -> bool:
        """Whether a later version of gradguard wrote the record, which may have unknown fields."""
        return self.meta.get("schema", SCHEMA) > SCHEMA

    @property
    def script(self) -> str:
        """The script and its arguments, quoted for a shell; ``train.py`` if they are unknown."""
        return shlex.join(map(str, self.meta.get("argv") or ["train.py"]))

    @property
    def closing(self) -> dict[str, Any]:
        """The fields of the ``end`` line; empty for a killed run."""
        return self.end or {}

    @functools.cached_property
    def names(self) -> list[str]:
        """The parameter names, in the order of every per-tensor array."""
        return names_of(self.meta.get("params", []))


Answer = TypeVar("Answer")


def once(function: Callable[[Record], Answer]) -> Callable[[Record], Answer]:
    """Cache a function's result for each record: a report needs the verdict in many places.

    Callers must not change the result, nor the record after the first call.

    Args:
        function: A function of a whole record.

    Returns:
        The cached function.
    """

    @functools.wraps(function)
    def remembered(record: Record) -> Answer:
        if function not in record._answers:
            record._answers[function] = function(record)
        return record._answers[function]

    return remembered


class RecordWriter:
    """Append lines to a new record; an existing file is never replaced, but gets a numbered sibling.

    **Guarantees**: Every line is strict JSON. The writer creates parent folders. A second `close` does nothing. Several
    processes that start at the same time get separate files.

    Args:
        path: The path of the record; if it exists, a number is added to the name.

    Attributes:
        path: The path of the file that was opened.

    Raises:
        RecordError: If the file cannot be opened for writing.

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
        self._lines: list[str] = []  # the file itself is unbuffered: a forked child would write its buffer again
        self._size = 0
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.path, self._file = _created(Path(path))
        except OSError as error:
            raise RecordError(
                f"cannot write a record to {path}: {error.strerror or error}. "
                "Name a folder that you may write to, for example --out runs/first."
            ) from error

    def write(self, kind: str, /, **fields: Any) -> None:
        """Write one line; leave out fields that are None, and write ``null`` for floats that are not finite.

        Args:
            kind: ``"meta"``, ``"step"``, ``"tensors"``, ``"event"`` or ``"end"``.
            **fields: Numbers, strings, booleans, and lists or dictionaries of them.
        """
        self.write_line(known_fields({"t": kind, **fields}))

    def write_line(self, line: Line) -> None:
        """Write one line, given as a dictionary.

        Args:
            line: The kind under ``"t"``, and the fields, none of them None.

        Raises:
            RecordError: If the writer is closed.
        """
        if self._file.closed:
            raise RecordError(f"the record {self.path} is closed; write before close(), or open a new one")
        text = _json(line)
        self._lines.append(text)
        self._size += len(text)
        if self._size > MOST_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Pass the buffered lines to the operating system, where readers find them and a crash does not lose them.

        Raises:
            OSError: If writing fails, for example on a full disk or a deleted file; the record may end in a torn line.
        """
        if self._file.closed or not self._lines:
            return
        data = memoryview("\n".join([*self._lines, ""]).encode("utf-8"))
        self._lines, self._size = [], 0
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError(errno.ENOENT, "it has been deleted")
        while data:
            data = data[self._file.write(data) or 0 :]

    def close(self) -> None:
        """Flush and close the file; a second call does nothing.

        Raises:
            OSError: If `flush` fails; the file is closed nevertheless.
        """
        try:
            self.flush()
        finally:
            self._file.close()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_record(path: str | Path) -> Record:
    """Read the record of one run; a folder stands for the ``run.jsonl`` in it.

    **Guarantees**: Every known field has the type and range of its table (`gradguard.monitoring.record.record_fields`),
    text is printable, and step numbers ascend. From a damaged file, the function reads only what was written, and
    counts what it left out. A file that is no record is refused after its first bytes or its first line, at any length.

    **Edge cases**:

    ============================================  =====================================================================
    a torn last line, left by a killed run        left out; ``torn`` is set
    an unreadable line                            left out and counted in ``unreadable``
    a step number not above the one before        left out and counted in ``unreadable``
    a field of another type or range              left out and counted in ``dropped``
    an unknown kind of line                       ignored
    an unknown field                              kept unchanged
    a second ``meta`` line                        starts another run: the last one is read, the others are counted
    ============================================  =====================================================================

    Args:
        path: The path of a record, or a folder that holds ``run.jsonl``.

    Returns:
        The record; every number in a known field is finite.

    Raises:
        RecordError: If the file is missing, empty or unreadable, or is no record.

    Example:
        >>> read_record("no/such/run.jsonl")
        Traceback (most recent call last):
        gradguard.errors.RecordError: no record at no/such/run.jsonl. Make one: gradguard run ...
    """
    path = _locate(Path(path))
    try:
        with open_regular(path) as file:
            return _read(path, file)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}. {_ADVICE}") from error


_ADVICE = "Make one: gradguard run --out DIR train.py"


def first_line(path: Path) -> Line:
    """Return the first line of a record; an empty dictionary if it cannot be read.

    Args:
        path: The path of the record.
    """
    try:
        with open_regular(path) as file:
            return parse_line(file.readline(LONGEST_LINE))[0]
    except (OSError, ValueError, RecursionError):
        return {}


def is_of_command(path: Path, argv: list[str]) -> bool:
    """Return whether a record has the same command, ignoring numbers; read only its first line.

    Args:
        path: The path of the record.
        argv: The script with its arguments, redacted as in a record.

    Returns:
        Whether each argument equals the record's argument, after numbers are blanked out.
    """
    blank = functools.partial(_NUMBER.sub, "#")
    return bool(argv) and list(map(blank, map(str, first_line(path).get("argv", [])))) == list(map(blank, argv))


_NUMBER = re.compile(r"(?<![\w.])[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?(?![\w.])")


def _created(path: Path) -> tuple[Path, FileIO]:
    """Open a new file at ``path``, with a number added to the name if the path exists."""
    if path.exists() and not path.is_file():  # a pipe is opened; a folder raises
        return path, path.open("wb", buffering=0)
    for number in itertools.count(1):
        free = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        with suppress(FileExistsError):
            return free, free.open("xb", buffering=0)
    raise AssertionError  # unreachable: `itertools.count` does not end


def _json(value: Any, form: str = SCALAR, in_list: str = ARRAY) -> str:
    """Return ``value`` as JSON, with its floats rounded.

    Rounding and writing in one pass takes 15 µs for both lines of a step with 18 tensors. Rounding first and then
    calling the standard library's encoder took 29 µs (benchmarks/LOG.md).

    Args:
        value: A value of a line.
        form: The format of a float.
        in_list: The format of a float in a list; in a list of lists, a float belongs to no parameter and has the
            format `SCALAR`.
    """
    if isinstance(value, float):
        text = form % value
        return text if "." in text or "e" in text else _whole(text)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        if set(map(type, value)) == {float}:
            text = (f"{in_list}, " * len(value) % tuple(value))[:-2]
            if text.count(".") < len(value):  # an integral or non-finite float, or a power of ten, has no point
                text = ", ".join([one if "." in one or "e" in one else _whole(one) for one in text.split(", ")])
            return f"[{text}]"
        return f"[{', '.join([_json(one, in_list, SCALAR) for one in value])}]"
    if isinstance(value, dict):
        return _form(tuple(map(str, value))) % tuple([_PLAIN.get(type(one), _json)(one) for one in value.values()])
    return json.dumps(value, default=_refuse)


@functools.lru_cache(maxsize=256)
def _form(keys: tuple[str, ...]) -> str:
    """Return the JSON template of an object with these keys; cached, because lines have few distinct sets of keys."""
    return f"{{{', '.join([_string(key).replace('%', '%%') + ': %s' for key in keys])}}}"


@functools.lru_cache(maxsize=256)
def _string(text: str) -> str:
    """Return a string as JSON; escape surrogates, which come from arguments that are not UTF-8."""
    return encode_basestring(text.encode("utf-8", "backslashreplace").decode("utf-8"))


_PLAIN: dict[type, Callable[[Any], str]] = {int: str, str: _string}
"""The types of values that need no further checks, with their writers."""


def _whole(text: str) -> str:
    """Return the JSON of a float that the format ``g`` wrote without a point: null if it is not finite."""
    return _WITHOUT_POINT.get(text, f"{text}.0")


_WITHOUT_POINT = {"nan": "null", "inf": "null", "-inf": "null", "-0": "0.0"}


def _refuse(value: object) -> Any:
    raise InvalidTypeError(
        f"a record holds plain numbers, strings, lists and dictionaries, got {type(value).__name__}; "
        "turn a tensor into numbers first, with .item() or .tolist()"
    )


def file_of(path: Path) -> Path:
    """Return the file of a record; for a folder, the ``run.jsonl`` in it.

    Args:
        path: The path of the record, or of the folder that holds or will hold it.
    """
    return path / FILE_NAME if path.is_dir() else path


def _locate(path: Path) -> Path:
    found = file_of(path)
    if not found.exists():
        without = f"{path} is a folder without {FILE_NAME}. Name the record itself."
        words = f"no record at {path}." if found == path else without
        raise RecordError(f"{words} {_ADVICE}")
    return found


class _Run:
    """Collect the lines of one run in a file."""

    def __init__(self, meta: Line, earlier: int) -> None:
        self.meta, self.earlier, self.end = meta, earlier, None
        self.lines = {"step": Lines(), "tensors": Lines()}
        self.events: list[Line] = []
        self.unreadable, self.dropped, self.first_fault = 0, 0, ""

    def add(self, line: Line, dropped: int) -> None:
        kind = line["t"]
        if kind in self.lines:
            self.lines[kind].append(line)
        elif kind == "event":
            self.events.append(line)
        elif kind == "end":
            self.end = line
        self.dropped += dropped

    def fault(self, count: int, words: str) -> None:
        self.unreadable += count
        self.first_fault = self.first_fault or words

    def record(self, path: Path, torn: bool) -> Record:
        steps, tensors = (_ascending(lines) for lines in self.lines.values())
        lost = sum(map(len, self.lines.values())) - len(steps) - len(tensors)
        if lost:
            self.fault(lost, "the number of a step is not above the one before")
        return Record(
            path, self.meta, steps, tensors, self.events, self.end, torn,
            unreadable=self.unreadable, dropped=self.dropped, first_fault=self.first_fault, earlier_runs=self.earlier,
        )  # fmt: skip


def _read(path: Path, file: BufferedReader) -> Record:
    refuse_at_once(path, file.peek(64)[:64])
    run, last_fault = None, ""
    for number, raw in enumerate(_lines_of(file), 1):
        if raw.isspace():
            continue
        line, dropped, fault = read_line(raw)
        if run is None and (line is None or fault):
            raise RecordError(f"{path} is not a gradguard record: line {number}: {printable(fault)}. {_ADVICE}")
        if line is not None and line["t"] == "meta":
            run, last_fault, fault = _Run(line, 0 if run is None else run.earlier + 1), "", ""
        if run is None:
            raise RecordError(f'{path} is not a gradguard record: line {number} is not {{"t": "meta", ...}}. {_ADVICE}')
        if last_fault:  # only the last line can be torn
            run.fault(1, last_fault)
        last_fault = fault and f"line {number}: {printable(fault)}"
        if line is not None:
            run.add(line, dropped)
    if run is None:
        raise RecordError(f"{path} is empty: the run wrote nothing. {_ADVICE}")
    return run.record(path, torn=bool(last_fault))


def refuse_at_once(path: Path, head: bytes) -> None:
    """Refuse a file that is no record by its first bytes, without reading the rest.

    Args:
        path: The path of the file.
        head: The first bytes of the file, some dozens.

    Raises:
        RecordError: If the bytes cannot begin a record.
    """
    if head.startswith(_GZIP):
        raise RecordError(f"{path} is compressed: gunzip it first.")
    start = head.removeprefix(_BOM).lstrip()
    if start and not start.startswith(b"{"):
        raise RecordError(f'{path} is not a gradguard record: line 1 is not {{"t": "meta", ...}}. {_ADVICE}')


_GZIP, _BOM = b"\x1f\x8b", b"\xef\xbb\xbf"


def _lines_of(file: BufferedReader) -> Iterator[bytes]:
    """Yield each line; yield a zero byte instead of a line that is longer than `LONGEST_LINE`."""
    raw = file.readline(LONGEST_LINE).removeprefix(_BOM)
    while raw:
        if len(raw) < LONGEST_LINE or raw.endswith(b"\n"):
            yield raw
        else:
            yield b"\0"
            while (rest := file.readline(2**20)) and not rest.endswith(b"\n"):
                pass
        raw = file.readline(LONGEST_LINE)


def _ascending(lines: Lines) -> Lines:
    """Return the longest subsequence with ascending step numbers: all lines, unless records were joined or edited."""
    numbers = lines.column("i")
    if all(map(operator.lt, numbers, itertools.islice(numbers, 1, None))):
        return lines
    # For each length, keep the chain with the smallest last number; of two equally long chains, take the later lines.
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect_left(ends, number)
        before.append(places[length - 1] if length else -1)
        ends[length : length + 1], places[length : length + 1] = [number], [place]
    kept, place = bytearray(len(lines)), places[-1]
    while place >= 0:
        kept[place] = True
        place = before[place]
    return lines.where(kept)
