"""Entries of a `torch.distributed.checkpoint` of which each belongs to one process."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.sums import number_of_processes, sum_over
from gradguard.errors import InvalidValueError


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


def raise_together(error: Exception | None, group: Any, what: str) -> None:
    """Raise ``error``, or that another process of ``group`` has one; nothing if none has. A collective.

    Raises:
        InvalidValueError: If another process has an error.
    """
    mine = torch.full((), float(error is not None), dtype=torch.float64, device="cpu")
    others: Tensor = sum_over(mine, group, what)
    if error is not None:
        raise error
    if others > 0:
        raise InvalidValueError(f"another process refuses {what}, so this one does too: its own error says why.")
