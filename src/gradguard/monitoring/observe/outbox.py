"""Rows on their way into the record, and the end of recording: a full disk ends that and never the training."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from gradguard.errors import RecordError
from gradguard.monitoring.judge.judged import Judge, JudgedWriter
from gradguard.monitoring.observe.rows import Latest, Row, ScaleUpdate, write_row
from gradguard.monitoring.observe.transfer import Copy, Parcel, put_back, tensors_in
from gradguard.monitoring.record.file import RecordWriter

FLUSH_ROWS = 50
FLUSH_SECONDS = 2.0

Thing = Row | ScaleUpdate


class Outbox:
    """Writes rows in the order they came, at the latest `FLUSH_ROWS` rows or `FLUSH_SECONDS` after.

    Rows of the CPU are written by the thread that trains or, where a step takes longer than that, by one of our own.
    Rows with tensors on a device are sent for as often, and written when they have arrived; only the thread that
    trains touches a device, because another one might do so while a CUDA graph is captured.

    **Guarantees**: `add` never waits for a device; after an `OSError` one warning goes to stderr and nothing more is
    written; nothing is written by a forked child.

    Args:
        writer: The record; None to write nothing.
        every: Write the norm of each parameter every so many steps; None for about 200 bytes a step.
        copy: How numbers come from a device, for tests.
        seen: Called with each row when its numbers are known, before it is written.
        failed: Called with what went wrong with a row; the others are written all the same.

    Attributes:
        has_begun: Whether the first line has been written; rows wait for it.
    """

    def __init__(
        self,
        writer: RecordWriter | None,
        every: int | None = None,
        copy: Copy | None = None,
        seen: Callable[[Row], object] = lambda row: None,
        failed: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        self._writer, self._every, self._copy, self._seen, self._failed = writer, every, copy, seen, failed
        self._names: list[str] = []
        self._judged: JudgedWriter | None = None
        self.has_begun = False
        self._latest = Latest(0)
        self._rows: list[Thing] = []
        self._sent: deque[tuple[list[Thing], Parcel | None]] = deque()
        self._flushed = time.perf_counter()
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether lines are still written."""
        return self._writer is not None

    def begin(self, names: list[str], **meta: Any) -> None:
        """Write the first line, whose ``params`` have ``names``."""
        with self._lock:
            self._names, self._latest, self.has_begun = names, Latest(len(names)), True
            if self._writer is not None:
                self.write("meta", **meta)
                self._judged = JudgedWriter(self._writer, Judge(meta))

    def write(self, kind: str, /, **fields: Any) -> None:
        """Write a line that is no row."""
        with self._lock:
            if self._writer is not None:
                self._writer.write(kind, **fields)

    def add(self, row: Thing) -> None:
        """Take a row; write what is due."""
        with self._lock:
            if self._writer is None:
                return
            self._rows.append(row)
            if self._thread is None:
                self._start()
            if len(self._rows) >= FLUSH_ROWS or time.perf_counter() - self._flushed > FLUSH_SECONDS:
                self.flush()
            elif self._sent:
                self._write_arrived()

    def flush(self, wait: bool = False) -> None:
        """Send for all rows, and write those that are here; ``wait`` for the others."""
        with self._lock:
            if not self.has_begun:  # a scaler may search its scale for long before the first step
                return
            rows, self._rows = self._rows, []
            if rows:
                self._send(rows)
            self._write_arrived(wait)
            self._flushed = time.perf_counter()

    def write_late(self) -> None:
        """Write rows that have waited long for another one, unless that takes a look at a device."""
        with self._lock:
            late = time.perf_counter() - self._flushed > FLUSH_SECONDS
            if late and self._rows and not self._sent and not _needs_device(self._rows):
                self.flush()

    def close(self, **end: Any) -> None:
        """Write what is left, and the last line."""
        self._stop.set()
        with self._lock:
            with suppress(Exception):  # a device that failed must not take the last line with it
                self.flush(wait=True)
            self.write("end", **end)
            try:
                if self._writer is not None:
                    self._writer.close()
            except OSError as error:
                self.give_up(error)
            self._writer = None

    def give_up(self, error: OSError | RecordError) -> None:
        """End the recording with one warning."""
        writer, self._writer = self._writer, None
        self._stop.set()
        if writer is None:
            return
        with suppress(OSError):
            writer.abandon()
        reason = getattr(error, "strerror", None) or error
        warn(f"the recording to {writer.path} ended: {reason}. The program goes on without it.")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _send(self, rows: list[Thing]) -> None:
        if self._writer is None:
            return
        tensors = list(tensors_in(_parts(rows))) if any([row.late for row in rows]) else []
        self._sent.append((rows, Parcel(tensors, self._copy) if tensors else None))

    def _write_arrived(self, wait: bool = False) -> None:
        try:
            while self._sent and (wait or self._sent[0][1] is None or self._sent[0][1].arrived()):
                rows, parcel = self._sent.popleft()
                if parcel is not None:
                    put_back(_parts(rows), iter(parcel.values()))
                for row in rows:
                    self._write_row(row)
            if self._writer is not None:
                self._writer.flush()
        except OSError as error:
            self.give_up(error)

    def _write_row(self, row: Thing) -> None:
        try:
            if isinstance(row, Row):
                self._seen(row)
            if self._writer is not None:
                every = self._every or max(1, len(self._names) // 20)
                write_row(cast("RecordWriter", self._judged or self._writer), row, self._names, every, self._latest)
        except OSError:
            raise
        except Exception as error:  # one bad row must not take the others, or the end, with it
            self._failed(error)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._keep_flushing, name="gradguard-record", daemon=True)
        self._thread.start()

    def _keep_flushing(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS / 2):
            with suppress(Exception):
                self.write_late()


def warn(message: str) -> None:
    """Print one line on stderr, whatever became of stderr."""
    with suppress(Exception):
        print(f"gradguard: {message}", file=sys.stderr, flush=True)


def _parts(rows: list[Thing]) -> list[Any]:
    found = [(row, getattr(row, "extras", None), *getattr(row, "clips", ())) for row in rows]
    return [part for parts in found for part in parts if part is not None]


def _needs_device(rows: list[Thing]) -> bool:
    return any([row.late for row in rows]) and any(not tensor.is_cpu for tensor in tensors_in(_parts(rows)))
