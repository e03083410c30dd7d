"""The record of a run: JSON Lines, one object per line, append-only, readable by eye and by any language.

The first line is ``meta``; ``step``, ``tensors`` and ``event`` lines follow, ``end`` closes a run that reached
its end. JSON has no NaN: a value that was measured and was not finite is ``null``, a quantity that was not
measured has no key, so that "not measured", "not finite" and 0 stay three different things.
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
"""One line: its kind under ``"t"``; before it is written, floats may be NaN or infinite."""

ARRAY, SCALAR = "%.4g", "%.7g"
"""How many digits of a number are written: in an array of one for each parameter, and elsewhere."""

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
        steps: One line per optimizer step, each read as a dictionary; lists of dictionaries become `Lines` too.
        tensors: Pre-clip norms per parameter, every few steps, in the same form.
        events: Messages of the watcher for a person, with advice.
        end: The closing line, or None if the run was killed before it could write one.
        torn: Whether the last line was incomplete and was left out.
        unreadable: How many lines were left out because they are damaged or out of order.
        dropped: How many fields were left out because they held something else than they must.
        first_fault: The fault of the first of these lines; empty without one.
        earlier_runs: How many runs the file holds before this one.
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
        """Whether it was written by a later version, whose lines may mean more than is read here."""
        return self.meta.get("schema", SCHEMA) > SCHEMA

    @property
    def script(self) -> str:
        """The script and its arguments, as a shell takes them; ``train.py`` where it is not known."""
        return shlex.join(map(str, self.meta.get("argv") or ["train.py"]))

    @property
    def closing(self) -> dict[str, Any]:
        """The fields of the closing line; none of a run that was killed."""
        return self.end or {}

    @functools.cached_property
    def names(self) -> list[str]:
        """The parameter names, in the order of every per-tensor array."""
        return names_of(self.meta.get("params", []))


Answer = TypeVar("Answer")


def once(function: Callable[[Record], Answer]) -> Callable[[Record], Answer]:
    """Let a function of a record work once for each record: a report asks for its verdict in many places.

    Nobody may change the answer, nor the record after the first one.

    Args:
        function: A function of a whole record.

    Returns:
        The function with a memory.
    """

    @functools.wraps(function)
    def remembered(record: Record) -> Answer:
        if function not in record._answers:
            record._answers[function] = function(record)
        return record._answers[function]

    return remembered


class RecordWriter:
    """Append lines to a new record. A file that exists is never replaced: the new one gets a number in its name.

    **Guarantees**: every line is strict JSON; parent folders are made; closing twice is harmless; of several processes
    that begin at once each has a file of its own.

    Args:
        path: Where the record goes, if nothing is there.

    Attributes:
        path: Where it is.

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
        self._lines: list[str] = []  # in no buffer of the file's, which a forked child would write once more
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
        """Write one line; a field that is None is left out, a float that is not finite becomes ``null``.

        Args:
            kind: ``"meta"``, ``"step"``, ``"tensors"``, ``"event"`` or ``"end"``.
            **fields: Numbers, strings, booleans, and lists or dictionaries of them.
        """
        self.write_line(known_fields({"t": kind, **fields}))

    def write_line(self, line: Line) -> None:
        """Write one line, as `write` does.

        Args:
            line: Its kind under ``"t"``, and its fields, none of them None.

        Raises:
            RecordError: The writer is closed.
        """
        if self._file.closed:
            raise RecordError(f"the record {self.path} is closed; write before close(), or open a new one")
        text = _json(line)
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
        data = memoryview("\n".join([*self._lines, ""]).encode("utf-8"))
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

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_record(path: str | Path) -> Record:
    """Read the record of one run; a folder stands for the ``run.jsonl`` in it.

    **Guarantees**: every field of the record is what its table says (`gradguard.monitoring.record.record_fields`),
    text is printable, and steps ascend; what is read of a damaged file is what was written, and how much of it was
    left out is counted. A file that is no record is refused by its first bytes or its first line, however long it is.

    **Edge cases**:

    ============================================  =====================================================================
    a torn last line, as a killed run leaves it   left out; ``torn``
    a line that cannot be read, a step number     left out and counted in ``unreadable``
    that is not above the one before
    a field of another type or range              left out and counted in ``dropped``
    kinds of line and fields that are not known   passed over
    a second ``meta`` line                        another run begins: the last one is read, the others are counted
    ============================================  =====================================================================

    Args:
        path: A record, or a folder that holds ``run.jsonl``.

    Returns:
        The record; every number in it is finite.

    Raises:
        RecordError: The file is missing, empty, cannot be read, or is no record.

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
    """Return the first line of a record; an empty dictionary where none can be read.

    Args:
        path: The record.
    """
    try:
        with open_regular(path) as file:
            return parse_line(file.readline(LONGEST_LINE))[0]
    except (OSError, ValueError, RecursionError):
        return {}


def is_of_command(path: Path, argv: list[str]) -> bool:
    """Tell whether a record is of the same command, but for numbers; only its first line is read.

    Args:
        path: The record.
        argv: The script with its arguments, as records have them.

    Returns:
        Whether each argument is that of the record, numbers apart.
    """
    blank = functools.partial(_NUMBER.sub, "#")
    return bool(argv) and list(map(blank, map(str, first_line(path).get("argv", [])))) == list(map(blank, argv))


_NUMBER = re.compile(r"(?<![\w.])[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?(?![\w.])")


def _created(path: Path) -> tuple[Path, FileIO]:
    """Open a new file at ``path``, or with a number in its name where that is taken."""
    if path.exists() and not path.is_file():  # a pipe, or a folder, which is an error
        return path, path.open("wb", buffering=0)
    for number in itertools.count(1):
        free = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        with suppress(FileExistsError):
            return free, free.open("xb", buffering=0)
    raise AssertionError  # numbers do not end


def _json(value: Any, form: str = SCALAR, in_list: str = ARRAY) -> str:
    """Return ``value`` as JSON, with its floats rounded.

    Rounding and writing in one takes 15 µs for both lines of a step with 18 tensors; rounding, then the standard
    library's encoder, took 29 (benchmarks/LOG.md).

    Args:
        value: A value of a line.
        form: How a float is written.
        in_list: How a float in a list is; one in a list of lists is no number of a parameter, and keeps its digits.
    """
    if isinstance(value, float):
        text = form % value
        return text if "." in text or "e" in text else _whole(text)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        if set(map(type, value)) == {float}:
            text = (f"{in_list}, " * len(value) % tuple(value))[:-2]
            if text.count(".") < len(value):  # one that is whole, not finite, or a power of ten
                text = ", ".join([one if "." in one or "e" in one else _whole(one) for one in text.split(", ")])
            return f"[{text}]"
        return f"[{', '.join([_json(one, in_list, SCALAR) for one in value])}]"
    if isinstance(value, dict):
        return _form(tuple(map(str, value))) % tuple([_PLAIN.get(type(one), _json)(one) for one in value.values()])
    return json.dumps(value, default=_refuse)


@functools.lru_cache(maxsize=256)
def _form(keys: tuple[str, ...]) -> str:
    """Return the JSON of an object with these keys, a gap for each value: the lines of a record share few of them."""
    return f"{{{', '.join([_string(key).replace('%', '%%') + ': %s' for key in keys])}}}"


@functools.lru_cache(maxsize=256)
def _string(text: str) -> str:
    """Write a string: an argument that is not UTF-8 arrives with surrogates, which no file can hold."""
    return encode_basestring(text.encode("utf-8", "backslashreplace").decode("utf-8"))


_PLAIN: dict[type, Callable[[Any], str]] = {int: str, str: _string}
"""Values of a line that need no look at what they are."""


def _whole(text: str) -> str:
    """Return the JSON of a float that a format with ``g`` has written without a point: null if it is not finite."""
    return _WITHOUT_POINT.get(text, f"{text}.0")


_WITHOUT_POINT = {"nan": "null", "inf": "null", "-inf": "null", "-0": "0.0"}


def _refuse(value: object) -> Any:
    raise InvalidTypeError(
        f"a record holds plain numbers, strings, lists and dictionaries, got {type(value).__name__}; "
        "turn a tensor into numbers first, with .item() or .tolist()"
    )


def file_of(path: Path) -> Path:
    """Return the file of a record: of a folder the one in it.

    Args:
        path: The record, or the folder that it is or will be in.
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
    """One run of a file, while its lines are read."""

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
        if last_fault:  # another line has come, so that it is not torn
            run.fault(1, last_fault)
        last_fault = fault and f"line {number}: {printable(fault)}"
        if line is not None:
            run.add(line, dropped)
    if run is None:
        raise RecordError(f"{path} is empty: the run wrote nothing. {_ADVICE}")
    return run.record(path, torn=bool(last_fault))


def refuse_at_once(path: Path, head: bytes) -> None:
    """Refuse what cannot be a record by its first bytes, however long it is.

    Args:
        path: The file.
        head: Its first bytes, some dozens.

    Raises:
        RecordError: It is something else.
    """
    if head.startswith(_GZIP):
        raise RecordError(f"{path} is compressed: gunzip it first.")
    start = head.removeprefix(_BOM).lstrip()
    if start and not start.startswith(b"{"):
        raise RecordError(f'{path} is not a gradguard record: line 1 is not {{"t": "meta", ...}}. {_ADVICE}')


_GZIP, _BOM = b"\x1f\x8b", b"\xef\xbb\xbf"


def _lines_of(file: BufferedReader) -> Iterator[bytes]:
    """Yield each line; a zero byte in place of one that is longer than any line may be."""
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
    """As many of the lines as have ascending numbers: all of them, unless somebody has joined or edited records."""
    numbers = lines.column("i")
    if all(map(operator.lt, numbers, itertools.islice(numbers, 1, None))):
        return lines
    # Of each length, the chain with the smallest last number; where two are as long, the later lines are taken.
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
