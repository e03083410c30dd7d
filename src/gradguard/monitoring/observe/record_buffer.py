"""Buffer steps, and write them to the record once their numbers are on the host."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from gradguard.monitoring.judge.health import Finding
from gradguard.monitoring.judge.live import Judge
from gradguard.monitoring.observe.record_copy import AsyncHostCopy
from gradguard.monitoring.observe.shared_norms import refuse_lost
from gradguard.monitoring.observe.step import Entry, ParameterTable, StepMeasurement, lines_of
from gradguard.monitoring.record.file import Line
from gradguard.monitoring.record.record_lines import known_fields
from gradguard.monitoring.show.alerts import Alerts
from gradguard.monitoring.show.sinks import Sinks

FLUSH_ROWS = 50
FLUSH_SECONDS = 2.0
KEPT_ROWS = 1000

MOST_BEHIND = 2
"""From this number of waiting parts on, the training thread writes them itself instead of the background thread.

Memory then stays bounded, and a killed program has lost only its last steps.
"""


class RecordBuffer:
    """Write steps in their order, at the latest `FLUSH_ROWS` steps or `FLUSH_SECONDS` after each.

    Judging a step and writing its lines takes longer than measuring it. With ``in_background``, a background thread
    does both. Steps with tensors on a device are copied to the host at the same interval, and written after the copy
    has arrived. Only the training thread uses the device: another thread might use it during a CUDA graph capture.

    **Guarantees**: `add` never waits for a device; a forked child writes nothing.

    Args:
        sinks: The sinks that the lines are written to.
        every: The number of steps between two writes of each parameter's norm; None for the interval of `lines_of`.
        failed: A function called with the exception of a step that cannot be written; the other steps are written.
        in_background: Whether a background thread writes the steps that need no device.
        on_finding: A function called with each finding, in its own thread.

    Attributes:
        sinks: The sinks that the lines are written to.
        has_begun: Whether the first line has been written; steps wait for it.
        rows: The last `KEPT_ROWS` written ``step`` lines.
        seconds: The CPU time of the background thread.
    """

    def __init__(
        self,
        sinks: Sinks,
        every: int | None,
        failed: Callable[[Exception], object],
        *,
        in_background: bool = False,
        on_finding: Callable[[Finding], object] | None = None,
    ) -> None:
        self.sinks, self._every, self._failed = sinks, every, failed
        self._in_background = in_background
        self._alerts = None if on_finding is None else Alerts(on_finding, self.write)
        self._table, self._judge = ParameterTable(), Judge({})
        self.has_begun = False
        self.rows: deque[Line] = deque(maxlen=KEPT_ROWS)
        self._waiting: list[Entry] = []
        self._sent: deque[tuple[list[Entry], AsyncHostCopy | None]] = deque()
        self._flushed, self.seconds = time.perf_counter(), 0.0
        self._lock = threading.RLock()  # guards the waiting steps
        self._writing = threading.RLock()  # guards the slower writing; `_lock` is never taken while it is held
        self._on_device = False  # whether any numbers were copied from a device
        self._due, self._ended = threading.Event(), False
        self._thread: threading.Thread | None = None

    def begin(self, meta: Line) -> None:
        """Write the first line, whose ``params`` give the order of every later array."""
        with self._writing:
            self._table, self._judge = ParameterTable(meta["params"]), Judge(meta)
            self.sinks.push([known_fields(meta)])
            self.has_begun = True

    def write(self, line: Line) -> None:
        """Write a line that belongs to no step at once."""
        with self._writing:
            self.sinks.push([known_fields(line)])

    def add(self, entry: Entry) -> None:
        """Add a step or an event; write the earlier ones, which are final now, if they are due."""
        with self._lock:
            due = len(self._waiting) >= FLUSH_ROWS or self._is_late()
            if due:
                self._send()
            self._waiting.append(entry)
        if self._in_background and self._thread is None:
            self._thread = threading.Thread(target=self._keep_writing, name="gradguard-record", daemon=True)
            self._thread.start()
        if self._in_background and not self._on_device and len(self._sent) < MOST_BEHIND:
            if due:
                self._due.set()
        elif due or self._sent:
            self._write_arrived()

    def amend(self, change: Callable[[StepMeasurement], StepMeasurement]) -> None:
        """Change the last step if it is still waiting."""
        with self._lock:
            for place in reversed(range(len(self._waiting))):
                if isinstance(entry := self._waiting[place], StepMeasurement):
                    self._waiting[place] = change(entry)
                    return

    @property
    def has_newest(self) -> bool:
        """Whether a step is waiting, which `amend` can change."""
        return any(isinstance(entry, StepMeasurement) for entry in self._waiting)

    def flush(self, wait: bool = False) -> None:
        """Start copying all waiting steps to the host, and write those that have arrived; ``wait`` for the others."""
        with self._lock:
            self._send()
        self._write_arrived(wait)

    def write_late(self) -> None:
        """Write the due steps, and those that have waited for `FLUSH_SECONDS`, unless they need a device."""
        with self._lock:
            if self._is_late() and not any(entry.late for entry in self._waiting):
                self._send()
            if self._on_device:
                return
        self._write_arrived()

    def close(self, end: Line) -> None:
        """Write the remaining steps and the ``end`` line."""
        self._ended = True
        self._due.set()
        with suppress(Exception):  # a failed device must not prevent the `end` line
            self.flush(wait=True)
        if self._alerts is not None:  # without the lock, because its thread may still write an event
            self._alerts.close()
        with self._writing:
            self.write(end)
            self.sinks.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(FLUSH_SECONDS)  # a thread inside PyTorch during Python's shutdown would abort the process

    # --- inside -------------------------------------------------------------------------------------------------------

    def _is_late(self) -> bool:
        return time.perf_counter() - self._flushed > FLUSH_SECONDS

    def _send(self) -> None:
        if not self.has_begun:  # a GradScaler may skip many steps before the first line is written
            return
        waiting, self._waiting = self._waiting, []
        if waiting:
            copy = AsyncHostCopy(waiting) if any([entry.late for entry in waiting]) else None
            self._on_device = self._on_device or (copy is not None and copy.waits)
            self._sent.append((waiting, copy))
        self._flushed = time.perf_counter()

    def _write_arrived(self, wait: bool = False) -> None:
        with self._writing:
            while self._sent and (wait or self._sent[0][1] is None or self._sent[0][1].arrived()):
                self._write_sent(*self._sent.popleft())

    def _write_sent(self, entries: list[Entry], copy: AsyncHostCopy | None) -> None:
        lines: list[Line] = []
        for entry in entries if copy is None else copy.with_numbers():
            lines += self._lines_of(entry)
        if not lines:
            return
        self.rows += [line for line in lines if line["t"] == "step"]
        self.sinks.push(lines)
        if self._alerts is not None:
            for line in lines:
                self._alerts.tell(line)

    def _lines_of(self, entry: Entry) -> list[Line]:
        lines: list[Line] = []
        try:
            if isinstance(entry, StepMeasurement):
                refuse_lost(entry.gradients.lost)
            for line in lines_of(entry, self._table, self._every):
                lines += self._judge.follow(line)
        except Exception as error:  # one bad step must not prevent the other lines
            self._failed(error)
        return lines

    def _keep_writing(self) -> None:
        while not self._ended:
            self._due.wait(FLUSH_SECONDS / 2)
            self._due.clear()
            with suppress(Exception):
                self.write_late()
            self.seconds = time.thread_time()
