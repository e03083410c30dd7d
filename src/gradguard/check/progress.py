"""A line on the terminal for checks that take more than two seconds; nothing where there is no terminal, or no rich."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_PATIENCE = 2.0
_BETWEEN = 0.2


class Progress:
    """Counts forwards, and shows them from the third second on."""

    def __init__(self) -> None:
        self.forwards = 0
        self._started = self._shown = time.monotonic()
        self._status: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def step(self) -> None:
        """Count one forward."""
        self.forwards += 1
        now = time.monotonic()
        if now - self._started < _PATIENCE or now - self._shown < _BETWEEN:
            return
        self._shown = now
        text = f"gradient check: {self.forwards:,} forwards, {now - self._started:.0f} s"
        if self._status is None:
            self._status = _status(text)
        if self._status is not None:
            self._status.update(text)


def _status(text: str) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    status = Console(stderr=True).status(text)
    status.start()
    return status
