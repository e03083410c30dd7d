"""Signals sent to a watched program: the record gets its last rows and its end, and the signal is passed on."""

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
"""The signal of a terminal that closes; it often comes twice, from the shell and from the system."""

ENDING: list[int] = without_none((signal.SIGTERM, HANGUP))
"""The signals that end a process without a word to Python; Ctrl-C raises `KeyboardInterrupt`."""


class BySignal(int):
    """The exit code of a program that a signal ended: 128 plus the number of the signal, as shells count.

    Example:
        >>> BySignal.of(signal.SIGTERM), BySignal.of(signal.SIGTERM).number
        (143, 15)
    """

    @classmethod
    def of(cls, number: int) -> Self:
        """Return the exit code for a signal."""
        return cls(128 + number)

    @property
    def number(self) -> int:
        """The number of the signal."""
        return self - 128


class SignalHandlers:
    """Context manager for signals while a program runs and while its record is finished.

    =======================  ===========================================================================================
    while                    a signal
    =======================  ===========================================================================================
    the program runs         Ctrl-C raises `KeyboardInterrupt`, as ever; SIGTERM and SIGHUP raise `SystemExit` with a
                             `BySignal`. A second SIGTERM ends the process at once; a second SIGHUP is passed over,
                             because terminals send two
    the record is finished   is noted; from `hold` on
    the page is drawn        raises `KeyboardInterrupt`; within `raised`
    =======================  ===========================================================================================

    While the program runs, a handler of its own wins, whether it is there already or comes later. A signal that is
    ignored stays so. A forked child ends by a signal as it would without us.

    Args:
        acting: Whether it does anything; it does nothing in a thread that is not the main one either.

    Attributes:
        second: The signal that came while the record was finished.
    """

    def __init__(self, acting: bool = True) -> None:
        self._acting = acting and threading.current_thread() is threading.main_thread()
        self.process, self._before = os.getpid(), dict[int, Any]()
        self._first: int | None = None
        self._held = self._raises = False
        self.second: int | None = None

    def hold(self, number: int | None = None) -> None:
        """From now on note the signals that come.

        Args:
            number: The signal that has ended the program, if one has.
        """
        self._first, self._held = self._first or number, True
        for one in (signal.SIGINT, *ENDING):
            before = signal.getsignal(one)
            if callable(before) or before == signal.SIG_DFL:  # the program is over, and so are its own handlers
                self._take(one)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let signals raise `KeyboardInterrupt` inside the block: at its start, if one has been noted."""
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
        with suppress(ValueError):  # not in the main thread any more
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
    """End this process by a signal, with what the system does at it.

    Args:
        number: The signal.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class LastWord:
    """Lets Python end this process as it always does, and by a signal in place of an exit code.

    Threads are waited for first, and what is registered with `atexit` runs, if it was registered later than this was
    made.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        if os.name != "nt":  # where no process ends by a signal
            atexit.register(self._end)

    def of(self, code: int) -> int:
        """Let the process that exits with ``code`` end by its signal, where it is a `BySignal`.

        Args:
            code: The exit code.

        Returns:
            ``code``.
        """
        self._number = code.number if isinstance(code, BySignal) else None
        return code

    def _end(self) -> None:
        if self._number is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # its terminal may be gone
                    stream.flush()
            end_by(self._number)


def before_signals(close: Callable[[int], object], flush: Callable[[], object]) -> Callable[[], None]:
    """Let SIGTERM and SIGHUP write a record first, and then do what they would have done: end the process, or call its
    handler.

    For somebody's process in which we are a guest: it ends as it would without us. A forked child writes nothing of its
    parent's.

    Args:
        close: Writes the end, where a signal ends the process; gets the exit code.
        flush: Writes what is left, where the program has a handler, after which it may go on.

    Returns:
        A function that forgets both, and gives the signals back with the last of them; harmless where the program has
        taken one.
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
    """All records of a process that a signal is to complete.

    Args:
        number: The signal.
        before: Its handler before.
    """

    def __init__(self, number: int, before: Any) -> None:
        self.process = os.getpid()
        self.known = dict[object, tuple[Callable[[int], object], Callable[[], object]]]()
        self._number, self._before = number, before
        signal.signal(number, self._end)

    def _end(self, number: int, frame: FrameType | None) -> None:
        mine = list(self.known.values()) if os.getpid() == self.process else []
        for close, flush in mine:
            with suppress(Exception):  # the process must end, whatever becomes of its records
                flush() if callable(self._before) else close(BySignal.of(number))
        if callable(self._before):
            self._before(number, frame)
        else:
            end_by(number)

    def leave(self, key: object) -> None:
        """Forget a record; with the last one, give the signal back."""
        self.known.pop(key, None)
        if not self.known and os.getpid() == self.process:
            with suppress(ValueError):  # not in the main thread any more
                if signal.getsignal(self._number) == self._end:
                    signal.signal(self._number, self._before)


_guests = dict[int, _Guests]()


def _guests_of(number: int) -> _Guests | None:
    """Those that a signal is to complete in this process; None where it is ignored, or handled by no Python."""
    guests = _guests.get(number)
    if guests is None or guests.process != os.getpid() or not guests.known:
        before = signal.getsignal(number)
        owner = getattr(before, "__self__", None)
        if isinstance(owner, SignalHandlers | _Guests) and owner.process != os.getpid():  # our parent's
            before = signal.SIG_DFL
        if before in (signal.SIG_IGN, None):
            return None
        guests = _guests[number] = _Guests(number, before)
    return guests
