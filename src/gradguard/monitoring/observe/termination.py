"""What `kill` does to a watched program: its record gets its last rows and its end."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a program that SIGTERM ended, as shells count."""


def end_on_sigterm(heard: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Let SIGTERM raise `SystemExit` with `TERMINATED`, where it would end this process without a word.

    A handler of the program's own wins, whether it is there already or comes later. A second signal ends the process
    at once, and so does the first one in a forked child.

    Args:
        heard: Called before the exit.

    Returns:
        What gives the signal back; harmless where the program has taken it.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None
    process = os.getpid()

    def end(number: int, frame: object) -> NoReturn:
        del frame
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            os.kill(os.getpid(), number)
        heard()
        raise SystemExit(TERMINATED)

    return _install(end, signal.SIG_DFL)


def before_sigterm(close: Callable[[], object], flush: Callable[[], object]) -> Callable[[], None]:
    """Let SIGTERM write a record first, and then do what it would have done: end the process, or call its handler.

    For somebody's process in which we are a guest: it ends as it would without us. A forked child writes nothing of its
    parent's.

    Args:
        close: Writes the end, where the signal ends the process.
        flush: Writes what is left, where the program has a handler, after which it may go on.

    Returns:
        What forgets both, and gives the signal back with the last of them; harmless where the program has taken it.
    """
    global _guests
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    if _guests is None or _guests.process != os.getpid() or not _guests.known:
        before = signal.getsignal(signal.SIGTERM)
        if getattr(before, "gradguard_process", os.getpid()) != os.getpid():  # our parent's
            before = signal.SIG_DFL
        if before in (signal.SIG_IGN, None):
            return lambda: None
        _guests = _Guests(before)
    guests, key = _guests, object()
    guests.known[key] = close, flush
    return lambda: guests.leave(key)


class _Guests:
    """All records of a process that SIGTERM is to complete.

    Args:
        before: What the signal did.
    """

    def __init__(self, before: Any) -> None:
        self.process, self.known = os.getpid(), dict[object, tuple[Callable[[], object], Callable[[], object]]]()
        self._before, self._give_back = before, _install(self._end, before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        mine = list(self.known.values()) if os.getpid() == self.process else []
        for close, flush in mine:
            with suppress(Exception):  # the process must end, whatever becomes of its records
                flush() if callable(self._before) else close()
        if callable(self._before):
            self._before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def leave(self, key: object) -> None:
        """Forget a record."""
        self.known.pop(key, None)
        if not self.known:
            self._give_back()


_guests: _Guests | None = None


def _install(act: Callable[[int, FrameType | None], object], before: Any) -> Callable[[], None]:
    process = os.getpid()

    def handler(number: int, frame: FrameType | None) -> None:
        act(number, frame)

    handler.gradguard_process = process  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, handler)

    def give_back() -> None:
        with suppress(ValueError):  # not in the main thread any more
            if os.getpid() == process and signal.getsignal(signal.SIGTERM) is handler:
                signal.signal(signal.SIGTERM, before)

    return give_back
