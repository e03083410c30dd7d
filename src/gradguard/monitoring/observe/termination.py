"""Handle signals to a recorded program: complete the record, then pass the signal on."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from gradguard.monitoring.record.record_lines import without_none

HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""The signal of a closing terminal; the shell and the system often send one each."""

ENDING: list[int] = without_none((signal.SIGTERM, HANGUP))
"""The signals that end a process without raising an exception in Python; Ctrl-C raises `KeyboardInterrupt`."""


class BySignal(int):
    """The exit code of a program that a signal ended: 128 plus the number of the signal, the shells' convention.

    Example:
        >>> BySignal.of(signal.SIGTERM), BySignal.of(signal.SIGTERM).number
        (143, 15)
    """

    @classmethod
    def of(cls, number: int) -> Self:
        """Return the exit code of a program that the signal ``number`` ended."""
        return cls(128 + number)

    @property
    def number(self) -> int:
        """The number of the signal."""
        return self - 128


class SignalHandlers:
    """Handle signals while a program runs and while its record is completed; a context manager.

    =======================  ===========================================================================================
    while                    a signal
    =======================  ===========================================================================================
    the program runs         Ctrl-C raises `KeyboardInterrupt` as usual; SIGTERM and SIGHUP raise `SystemExit` with a
                             `BySignal`. A second SIGTERM ends the process at once. A second SIGHUP is ignored, because
                             terminals send two
    the record is completed  (after `hold`) is stored in `second`
    the page is drawn        (within `raised`) raises `KeyboardInterrupt`
    =======================  ===========================================================================================

    While the program runs, its own handler has priority, whether it was installed before or later. An ignored signal
    stays ignored. A signal ends a forked child as usual.

    Args:
        acting: Whether to install handlers; outside the main thread, none are installed.

    Attributes:
        second: The signal that arrived while the record was being completed; None without one.
    """

    def __init__(self, acting: bool = True) -> None:
        self._acting = acting and threading.current_thread() is threading.main_thread()
        self.process, self._before = os.getpid(), dict[int, Any]()
        self._first: int | None = None
        self._held = self._raises = False
        self.second: int | None = None

    def hold(self, number: int | None = None) -> None:
        """Store signals from now on instead of ending the program.

        Args:
            number: The signal that has ended the program, if any.
        """
        self._first, self._held = self._first or number, True
        for one in (signal.SIGINT, *ENDING):
            before = signal.getsignal(one)
            if callable(before) or before == signal.SIG_DFL:  # the program's own handlers are obsolete after its end
                self._take(one)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let signals raise `KeyboardInterrupt` inside the block, at once if a signal has been stored before."""
        self._raises = True
        try:
            if self.second is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def __enter__(self) -> Self:
        for number in ENDING:
            if signal.getsignal(number) == signal.SIG_DFL:
                self._take(number)
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(ValueError):  # outside the main thread, `signal.signal` raises
            for number, before in self._before.items():
                if os.getpid() == self.process and signal.getsignal(number) == self._came:
                    signal.signal(number, before)

    def _take(self, number: int) -> None:
        before = signal.getsignal(number)
        if self._acting and before != self._came and os.getpid() == self.process:
            self._before[number] = before
            signal.signal(number, self._came)

    def _came(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self.process:
            end_by(number)
        again = self._first is not None
        self._first = self._first or number
        if again and number == HANGUP:
            return
        if not self._held:
            if again:
                end_by(number)
            raise SystemExit(BySignal.of(number))
        self.second = self.second or number
        if self._raises:
            raise KeyboardInterrupt


def end_by(number: int) -> None:
    """End this process with the default action of a signal.

    Args:
        number: The signal.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class LastWord:
    """Let this process end by a signal, instead of an exit code, after Python's normal shutdown.

    Python first waits for its threads and runs the `atexit` handlers that were registered after this object was made.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        if os.name != "nt":  # no process ends by a signal on Windows
            atexit.register(self._end)

    def of(self, code: int) -> int:
        """Let the process end by the signal of ``code`` if that is a `BySignal`.

        Args:
            code: The exit code.

        Returns:
            The same ``code``.
        """
        self._number = code.number if isinstance(code, BySignal) else None
        return code

    def _end(self) -> None:
        if self._number is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # the terminal may be closed
                    stream.flush()
            end_by(self._number)


def before_signals(close: Callable[[int], object], flush: Callable[[], object]) -> Callable[[], None]:
    """Let SIGTERM and SIGHUP write a record before they end the process or call the program's own handler.

    A forked child does not write its parent's record.

    Args:
        close: A function that writes the end of the record, called with the exit code if the signal ends the process.
        flush: A function that writes the remaining lines, called if the program has a handler and may continue.

    Returns:
        A function that removes both, and restores the signals' handlers after the last record. It leaves a handler
        that the program has installed since.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    key = object()
    heard = without_none(map(_guests_of, ENDING))
    for guests in heard:
        guests.known[key] = close, flush

    def leave() -> None:
        for guests in heard:
            guests.leave(key)

    return leave


class _Guests:
    """The handler of one signal, which completes all records of this process.

    Args:
        number: The signal.
        before: The signal's earlier handler.
    """

    def __init__(self, number: int, before: Any) -> None:
        self.process = os.getpid()
        self.known = dict[object, tuple[Callable[[int], object], Callable[[], object]]]()
        self._number, self._before = number, before
        signal.signal(number, self._end)

    def _end(self, number: int, frame: FrameType | None) -> None:
        mine = list(self.known.values()) if os.getpid() == self.process else []
        for close, flush in mine:
            with suppress(Exception):  # the process must end even if its records cannot be completed
                flush() if callable(self._before) else close(BySignal.of(number))
        if callable(self._before):
            self._before(number, frame)
        else:
            end_by(number)

    def leave(self, key: object) -> None:
        """Remove a record; after the last one, restore the signal's earlier handler."""
        self.known.pop(key, None)
        if not self.known and os.getpid() == self.process:
            with suppress(ValueError):  # outside the main thread, `signal.signal` raises
                if signal.getsignal(self._number) == self._end:
                    signal.signal(self._number, self._before)


_guests = dict[int, _Guests]()


def _guests_of(number: int) -> _Guests | None:
    """Return the handler of a signal in this process; None if the signal is ignored or has a handler outside Python."""
    guests = _guests.get(number)
    if guests is None or guests.process != os.getpid() or not guests.known:
        before = signal.getsignal(number)
        owner = getattr(before, "__self__", None)
        if isinstance(owner, SignalHandlers | _Guests) and owner.process != os.getpid():  # inherited from the parent
            before = signal.SIG_DFL
        if before in (signal.SIG_IGN, None):
            return None
        guests = _guests[number] = _Guests(number, before)
    return guests
