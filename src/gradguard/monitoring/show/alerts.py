"""Pass findings to a user's function during the run."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from gradguard.json_values import jsonable
from gradguard.monitoring.judge.health import KINDS, Finding
from gradguard.monitoring.record.file import Line

CLOSE_SECONDS = 10.0
"""The longest time in seconds that the end of a run waits for calls of the function."""


class Alerts:
    """Call a function with each finding, one after the other, in a separate thread.

    **Guarantees**: `tell` never waits for the function. An exception of the function stops nothing and is reported
    once. The process can end even if the function does not return.

    **Edge cases**: If no thread can start because Python is shutting down, the function is called at once.

    Args:
        function: A function called with each `Finding`.
        failed: A function called with an event line about the first failure.

    Example:
        >>> told = []
        >>> alerts = Alerts(told.append, print)
        >>> alerts.tell({"t": "event", "i": 3, "kind": "exploding", "severity": "error", "value": 9.0})
        >>> alerts.close()
        >>> told[0].kind, told[0].first_step, told[0].value
        ('exploding', 3, 9.0)
    """

    def __init__(self, function: Callable[[Finding], object], failed: Callable[[Line], object]) -> None:
        self._function, self._failed = function, failed
        self._queue: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_failed, self._last = False, 0

    def tell(self, line: Line) -> None:
        """Queue a line of the record for the function if the line is a finding.

        Args:
            line: Any line, with its kind under ``"t"``.
        """
        if line["t"] != "event" or line.get("kind") not in KINDS:
            return
        found = Finding(
            kind=line["kind"],
            severity=line.get("severity", "info"),
            message=line.get("message", ""),
            advice=line.get("advice", ""),
            first_step=line["i"],
            last_step=line["i"],
            params=tuple(line.get("params", ())),
            optimizer=line.get("optimizer"),
            value=jsonable(line.get("value")),
        )
        self._last = found.last_step
        if self._thread is None:
            thread = threading.Thread(target=self._follow, name="gradguard-findings", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._call(found)
                return
            self._thread = thread
        self._queue.put(found)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until the function was called with all findings, for at most ``seconds``."""
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._queue.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(self._last, f"on_finding had not returned {seconds:g} s after the end of the run")

    def _follow(self) -> None:
        while (found := self._queue.get()) is not None:
            self._call(found)

    def _call(self, found: Finding) -> None:
        try:
            self._function(found)
        except BaseException as error:  # a SystemExit would end the thread, and with it the later calls
            self._fail(found.last_step, f"on_finding raised {type(error).__name__}: {error}")

    def _fail(self, i: int, message: str) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        advice = "training continues unchanged, and later findings still call the function"
        with suppress(Exception):  # the function may have closed the record
            self._failed({"t": "event", "i": i, "kind": "on_finding_failed", "severity": "warning"}
                     | {"message": message, "advice": advice})  # fmt: skip
