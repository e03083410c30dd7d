"""Entries of a `torch.distributed.checkpoint` of which each belongs to one process."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.sums import number_of_processes, sum_over
from gradguard.errors import InvalidValueError

_PATIENCE = 60.0
"""Seconds that a network file system may take to show what another process has written."""


def write_entries(directory: Path, entries: Mapping[str, Any], group: Any) -> None:
    """Write the entries of all processes of ``group``, with names of their own, as one checkpoint; a collective.

    Raises:
        OSError: On all processes, if one of them cannot write.
    """
    from torch.distributed import checkpoint

    alone = number_of_processes(group) == 1
    writer = checkpoint.FileSystemWriter(directory)
    try:
        with _unwarned():
            checkpoint.save(dict(entries), storage_writer=writer, process_group=group, no_dist=alone)
    except checkpoint.CheckpointException as error:  # which is no Exception
        raise OSError(f"no snapshot was written to {str(directory)!r}: {error}") from error


def check_written(directory: Path) -> None:
    """Check that this process sees the whole checkpoint, as whoever reads it must: all files with all their bytes.

    Raises:
        InvalidValueError: If it does not, within a minute.
    """
    until, wait = time.monotonic() + _PATIENCE, 0.01
    while missing := _first_missing(directory):
        if time.monotonic() > until:
            raise InvalidValueError(
                f"{str(directory)!r} was written, and this process does not find {missing} in it: the processes do not "
                "write to one directory, so nobody could load this snapshot. Name one that all of them see, on a "
                "shared file system, by the same path on each."
            )
        time.sleep(wait)
        wait = min(2 * wait, 1.0)


def _first_missing(directory: Path) -> str | None:
    from torch.distributed import checkpoint

    try:
        places = checkpoint.FileSystemReader(directory).read_metadata().storage_data.values()
    except Exception:  # not there, or not whole yet
        return "'.metadata'"
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return next((repr(name) for name, end in ends.items() if _size(directory / name) < end), None)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1


def names_of_entries(directory: Path) -> set[str]:
    """Return what a checkpoint holds, by all processes.

    Raises:
        InvalidValueError: If there is none that was written to its end.
    """
    from torch.distributed import checkpoint

    try:
        return {*checkpoint.FileSystemReader(directory).read_metadata().state_dict_metadata}
    except Exception as error:  # a missing file, or any bytes
        raise InvalidValueError(
            f"{str(directory)!r} holds no snapshot that was written to its end: expected the directory of a "
            f"snapshot.save(directory), with its file '.metadata' ({type(error).__name__}: {error})."
        ) from error


def read_entries(directory: Path, into: dict[str, Any]) -> None:
    """Read the entries that ``into`` names: tensors into those that it holds, anything else in their place.

    Raises:
        InvalidValueError: If they cannot be read.
    """
    from torch.distributed import checkpoint

    try:
        with _unwarned():
            checkpoint.load(into, storage_reader=checkpoint.FileSystemReader(directory), no_dist=True)
    except (Exception, checkpoint.CheckpointException) as error:
        raise InvalidValueError(
            f"the snapshot in {str(directory)!r} cannot be read: a file is missing or damaged "
            f"({type(error).__name__}). Take another one."
        ) from error


@contextmanager
def _unwarned() -> Iterator[None]:
    """Torch warns of one process that reads or writes by itself, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


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
