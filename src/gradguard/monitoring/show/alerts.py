"""Findings on their way to somebody while the run goes on: a function of the user's, or a command."""

import json
import math
import queue
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradguard.errors import CommandError
from gradguard.monitoring.judge.health import KINDS, Finding
from gradguard.monitoring.record.file import Line

CLOSE_SECONDS = 10.0
"""How long the end of a run waits for findings that are still being told."""

COMMAND_SECONDS = 60.0
"""How long a command may take."""


_EXPECTED = "Expected a command, as in --on-finding 'notify-send training'."


class Alerts:
    """Calls a function with each finding, one after the other, in a thread of its own.

    **Guarantees**: whoever tells a finding never waits for the function; what it raises ends nothing, and is told once;
    the process ends whether or not the function returns.

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
        found = _finding(line)
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


def _finding(event: Line) -> Finding:
    value = event.get("value")
    return Finding(
        kind=event["kind"],
        severity=event.get("severity") or "info",
        message=event.get("message") or "",
        advice=event.get("advice") or "",
        first_step=event["i"],
        last_step=event["i"],
        params=tuple(event.get("params") or ()),
        optimizer=event.get("optimizer"),
        value=value if value is None or math.isfinite(value) else None,
    )


class AlertCommand:
    """Runs a command for each finding: as JSON on its stdin, and in words as its last argument.

    No shell sees any of it. It is called by `Alerts`, so that only the thread of those waits for the command.

    Args:
        text: The command, in the words of a POSIX shell.

    Attributes:
        runs: How often it was run.
        failures: How often that failed.
        first_failure: What went wrong the first time.

    Raises:
        CommandError: If the text cannot be read, or there is no such program.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise CommandError(f"--on-finding {text}: {error}. {_EXPECTED}") from error
        if not self._words:
            raise CommandError(f"--on-finding: it is empty. {_EXPECTED}")
        program = shutil.which(self._words[0])
        if program is None:
            raise CommandError(f"--on-finding {text}: there is no program {self._words[0]!r} to run.")
        self._words[0] = str(Path(program).absolute())  # the script may change the working directory
        self.runs, self.failures, self.first_failure = 0, 0, ""

    def __call__(self, found: Finding) -> None:
        """Run the command and wait for it; what goes wrong is counted."""
        self.runs += 1
        problem = self._run(found)
        if problem:
            self.failures += 1
            self.first_failure = self.first_failure or problem

    def _run(self, found: Finding) -> str:
        """Return what went wrong; nothing if all went well."""
        # The words begin with the severity: never with a dash, as a parameter's name might.
        words = f"{found.severity} {found.kind}: {found.message}".replace("\0", "")
        arguments = [*self._words, words.encode("utf-8", "backslashreplace").decode("utf-8")]
        try:
            told = json.dumps(_plain(found)) + "\n"
            done = subprocess.run(
                arguments, input=told, text=True, timeout=COMMAND_SECONDS, check=False,
                start_new_session=True,  # Ctrl-C is for the script, and an alert of its end shall still go out
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it was ended after {COMMAND_SECONDS:g} s"
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return f"exit code {done.returncode}" if done.returncode else ""

    def report(self) -> str:
        """Say in a line how often it failed; empty if it never did."""
        if not self.failures:
            return ""
        times = f"{self.failures} of {self.runs} times"
        return f"--on-finding {self.text} failed {times}, the first time with {self.first_failure}"


def _plain(found: Finding) -> dict[str, Any]:
    return asdict(found) | {"params": list(found.params)}
