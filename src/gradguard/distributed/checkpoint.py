"""Files of one directory to which each rank of a group writes its own: visible to all ranks, or an error."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gradguard.errors import InvalidValueError

_PATIENCE = 60.0
"""Seconds that a network file system may take to show the files of another rank."""


def wait_for(missing: Callable[[], str | None], directory: Path) -> None:
    """Wait until this rank finds all files in a directory that other ranks write to.

    Args:
        missing: Returns the name of a file that is missing, or None.
        directory: The path as the user typed it.

    Raises:
        InvalidValueError: If a file is missing after a minute.
    """
    until, wait = time.monotonic() + _PATIENCE, 0.01
    while name := missing():
        if time.monotonic() > until:
            raise InvalidValueError(
                f"{str(directory)!r} was written, but this process does not find {name!r} in it: the processes do not "
                "write to one directory, so no process could load this snapshot. Pass a directory on a file system "
                "that all of them share, by the same path on each."
            )
        time.sleep(wait)
        wait = min(2 * wait, 1.0)


def first_missing(directory: Path, sizes: Sequence[tuple[str, int]]) -> str | None:
    """Return the first of some files that is missing or too short; None if all are complete."""
    return next((name for name, size in sizes if _size(directory / name) < size), None)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1
