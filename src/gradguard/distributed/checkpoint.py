"""Files of one directory to which each process of a group writes its own: seen by all, or written by none."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gradguard.errors import InvalidValueError

_PATIENCE = 60.0
"""Seconds that a network file system may take to show what another process has written."""


def wait_for(missing: Callable[[], str | None], directory: Path) -> None:
    """Wait until this process finds everything in a directory that others write to.

    Args:
        missing: Returns the name of a file that is not there yet, or None.
        directory: The path as the user wrote it.

    Raises:
        InvalidValueError: If something is missing after a minute.
    """
    until, wait = time.monotonic() + _PATIENCE, 0.01
    while name := missing():
        if time.monotonic() > until:
            raise InvalidValueError(
                f"{str(directory)!r} was written, and this process does not find {name!r} in it: the processes do not "
                "write to one directory, so nobody could load this snapshot. Name one that all of them see, on a "
                "shared file system, by the same path on each."
            )
        time.sleep(wait)
        wait = min(2 * wait, 1.0)


def first_missing(directory: Path, sizes: Sequence[tuple[str, int]]) -> str | None:
    """Return the first of some files that is not there with all its bytes; None if all are."""
    return next((name for name, size in sizes if _size(directory / name) < size), None)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1
