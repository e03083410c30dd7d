"""Read a record while it is being written, each line once."""

import os
import stat
from pathlib import Path
from typing import Any

from gradguard.errors import RecordError
from gradguard.files.opening import open_regular
from gradguard.monitoring.record.file import file_of, refuse_at_once
from gradguard.monitoring.record.record_fields import LONGEST_LINE, read_line
from gradguard.monitoring.record.record_lines import without_none

READ_AT_ONCE = 16 * 2**20
"""The number of bytes read from the end of a long record at the first poll, in addition to its first line."""

_ANCHOR = 256


class JsonlReader:
    r"""Read the lines that were added to a record since the last poll.

    **Guarantees**: No line is read twice. An incomplete line is kept until its rest is written. Memory is bounded by
    `READ_AT_ONCE` and the longest line. The file is open only during a poll: its writer may rename or delete it on
    every system.

    **Edge cases**: A missing file gives no lines. An unreadable line is counted in ``unreadable``. A truncated or
    replaced file is read from its start and counted in ``restarts``, even if it is longer than before.

    Args:
        path: The path of the record, or of the folder that holds or will hold it.

    Attributes:
        restarts: The number of times that the file was truncated or replaced.
        unreadable: The number of unreadable lines in the present file.
        dropped: The number of fields left out because their values have another type or range.
        changed: The time of the file's last write, in seconds since the epoch; None before the file exists.
        missing: Whether the file was missing at the last poll.
        skipped: The number of bytes not read because the record was already long at the first poll.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> follower = JsonlReader(path)
        >>> follower.poll()
        []
        >>> _ = path.write_text('{"t": "meta"}\n{"t": "step", "i"')
        >>> follower.poll()
        [{'t': 'meta'}]
        >>> with path.open("a") as file:
        ...     _ = file.write(": 0}\n")
        >>> follower.poll()
        [{'t': 'step', 'i': 0}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.restarts = 0
        self.changed: float | None = None
        self.missing = True
        self._forget()

    def poll(self) -> list[dict[str, Any]]:
        """Return the lines that were added since the last call.

        Returns:
            The lines, in order, as dictionaries with a string ``t``; empty if there is nothing new.

        Raises:
            RecordError: If the file cannot be read, or is no record.
        """
        path = file_of(self.path)
        try:
            self.missing = True
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
                raise RecordError(f"{path} is no file: expected a record, as in gradguard tail run.jsonl")
            with open_regular(path) as file:
                new = self._read(file)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RecordError(
                f"cannot read {path}: {error.strerror or error}. Name a record that you may read"
            ) from error
        self.missing = False
        return without_none(self._parsed(path, raw) for raw in new)

    def _forget(self) -> None:
        self.unreadable = self.dropped = self.skipped = 0
        self._offset = 0
        self._anchor = b""  # the last bytes before the offset; a rewritten file has different ones
        self._torn = b""  # the beginning of an incomplete line
        self._identity: tuple[int, int] | None = None
        self._begun = False

    def _read(self, file: Any) -> list[bytes]:
        found = os.fstat(file.fileno())
        identity = (found.st_dev, found.st_ino)
        self.changed = found.st_mtime
        if self._identity is not None and (self._identity != identity or not self._anchored(file)):
            self._forget()
            self.restarts += 1
        self._identity = identity
        if not self._offset:
            file.seek(0)
            refuse_at_once(self.path, file.read(64))
            file.seek(0)
        head = self._skip(file, found.st_size) if not self._offset else []
        file.seek(self._offset)
        content = file.read(max(0, min(found.st_size - self._offset, READ_AT_ONCE + LONGEST_LINE)))
        self._offset += len(content)
        self._anchor = (self._anchor + content)[-_ANCHOR:]
        *whole, self._torn = (self._torn + content).split(b"\n")
        if len(self._torn) > LONGEST_LINE:
            raise RecordError(f"{self.path} is not a gradguard record: a line is longer than {LONGEST_LINE} bytes")
        return head + whole

    def _anchored(self, file: Any) -> bool:
        """Return whether the bytes before the offset are unchanged."""
        file.seek(self._offset - len(self._anchor))
        return file.read(len(self._anchor)) == self._anchor

    def _skip(self, file: Any, size: int) -> list[bytes]:
        """Return the first line of a long record, and move the offset to its last `READ_AT_ONCE` bytes."""
        if size <= 2 * READ_AT_ONCE:
            return []
        head = file.readline(LONGEST_LINE)
        if not head.endswith(b"\n") or size - len(head) <= READ_AT_ONCE:
            return []
        file.seek(size - READ_AT_ONCE - 1)
        file.readline()  # discard the rest of a line that began earlier
        self._offset = file.tell()
        self.skipped = self._offset - len(head)
        return [head]

    def _parsed(self, path: Path, raw: bytes) -> dict[str, Any] | None:
        if not raw or raw.isspace():
            return None
        line, dropped, fault = read_line(raw if self._begun else raw.removeprefix(b"\xef\xbb\xbf"))
        self.unreadable += bool(fault)
        self.dropped += dropped
        if not self._begun and (fault or line is None or line["t"] != "meta"):
            raise RecordError(
                f'{path} is not a gradguard record: line 1 is not {{"t": "meta", ...}}. '
                "Make one: gradguard run --out DIR train.py"
            )
        self._begun = True
        return line
