"""Files of one directory to which each process of a group writes its own: seen by all, or written by none."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.sums import number_of_processes, sum_over
from gradguard.errors import InvalidValueError

_PATIENCE = 60.0
"""Seconds that a network file system may take to show what another process has written."""


def wait_for(missing: Callable[[], str | None], directory: Path) -> None:
    """Wait until this process finds everything in a directory that others write to.

    Args:
        missing: Returns the name of a file that is not there yet, or None.
        directory: How the user calls it.

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


def rank_in(group: Any) -> int:
    """Return the number of this process among those of ``group``."""
    return dist.get_rank(group) if number_of_processes(group) > 1 else 0


def numbers_of_all(number: int, group: Any, task: str) -> list[int]:
    """Return the ``number`` of each process of ``group``, by its rank there; whole, below 2**53. A collective."""
    table = torch.zeros(number_of_processes(group), dtype=torch.float64, device="cpu")
    table[rank_in(group)] = number
    return [int(one) for one in sum_over(table, group, task).tolist()]


def raise_together(error: Exception | None, group: Any, task: str) -> None:
    """Raise ``error``, or that another process of ``group`` has one; nothing if none has. A collective.

    Raises:
        InvalidValueError: If another process has an error.
    """
    mine = torch.full((), float(error is not None), dtype=torch.float64, device="cpu")
    others: Tensor = sum_over(mine, group, task)
    if error is not None:
        raise error
    if others > 0:
        raise InvalidValueError(f"another process refuses to {task}, so this one does too: its own error says why.")
