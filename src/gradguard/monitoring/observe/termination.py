"""`kill` ends a watched program as Ctrl-C does, so that its record has an end."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

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

    def give_back() -> None:
        with suppress(ValueError):  # not in the main thread any more
            if signal.getsignal(signal.SIGTERM) is end:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, end)
    return give_back
