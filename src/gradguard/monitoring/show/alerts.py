"""Findings on their way to a function of the user's while the run goes on."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from gradguard.json_values import jsonable
from gradguard.monitoring.judge.health import KINDS, Finding
from gradguard.monitoring.record.file import Line

CLOSE_SECONDS = 10.0
"""Seconds for which the end of a run waits for findings that the function has not taken yet."""


class Alerts:
    """Calls a function with each finding, one after the other, in a thread of its own.

    **Guarantees**: the reporter of a finding never waits for the function; what it raises ends nothing, and is told
    once; the process ends whether or not the function returns.

    **Edge cases**: where no thread can begin any more, because Python is ending, the function is called at once.

    Args:
        function: Called with a `Finding`.
        failed: Called with an event line that says what went wrong, the first time.

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
        """Let the function know of a line of the record, if it is a finding; does not wait for it.

        Args:
            line: Any line, its kind under ``"t"``.
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
        """Wait until everything is told, but not for longer than ``seconds``."""
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
        except BaseException as error:  # a SystemExit would end the thread, and with it all later calls
            self._fail(found.last_step, f"on_finding raised {type(error).__name__}: {error}")

    def _fail(self, i: int, message: str) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        advice = "training goes on untouched, and so do the calls for later findings"
        with suppress(Exception):  # the function may have closed the record
            self._failed({"t": "event", "i": i, "kind": "on_finding_failed", "severity": "warning"}
                     | {"message": message, "advice": advice})  # fmt: skip
