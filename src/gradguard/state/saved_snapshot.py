"""Write a snapshot to files of plain data, and read it again.

Each process writes its own file, named by its rank: tensors as raw bytes, and everything else as JSON in which each
tensor is a number (`gradguard.state.plain_file`). Both have checksums. Each save has a random number, which all its
files contain, so that files of two saves are distinguished. No code in a file is run: a snapshot may come from anybody.
"""

import errno
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.checkpoint import first_missing, wait_for
from gradguard.distributed.layout_name import KnownLayouts, LayoutName, layout_name, mesh_in_words
from gradguard.distributed.placements import is_sharded, local_part
from gradguard.distributed.processes import numbers_of_all, raise_together, rank_and_size
from gradguard.errors import GradguardError, InvalidValueError, UnsupportedGradientError
from gradguard.files.opening import is_regular
from gradguard.files.writing import begin_directory, beside_name, drop_directory, end_directory, refuse_used, sync
from gradguard.state.copies import PINNED, Copier, PlainCopy, Restorer, TensorCopy, WrappedCopy
from gradguard.state.plain_file import (
    PlainError,
    PlainReader,
    PlainWriter,
    StoredShard,
    StoredSparse,
    StoredTensor,
    checked_device,
    is_stored,
)

_FORMAT = 4
_KIND = "snapshot"
_TASK = "save a snapshot"


class Packer(Restorer):
    """Converts copies to plain data: ``restored`` returns them with entries of the file in place of tensors.

    Attributes:
        writer: The writer of the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writer = PlainWriter(_KIND)

    def _tensor(self, kept: TensorCopy, live: Any) -> Any:
        del live
        if id(kept) not in self._given:
            self._given[id(kept)] = self._stored(kept)
        return self._given[id(kept)]

    def _stored(self, kept: TensorCopy) -> Any:
        if isinstance(kept, PlainCopy):
            return self.writer.add(kept.memory, str(kept.device))
        assert isinstance(kept, WrappedCopy)
        local, *more = kept.parts.values()
        if kept.layout is None or more or not isinstance(local, PlainCopy):
            raise UnsupportedGradientError(
                f"the state contains a {kept.kind.__name__}, which cannot be written to a file: expected ordinary "
                "tensors and DTensors. Keep the snapshot in memory, or save checkpoints with your own state_dict."
            )
        name, shape, stride = layout_name(kept.layout), tuple(kept.shape), tuple(kept.stride)
        return StoredShard(self.restored(local), name.mesh, name.placements, shape, stride, kept.requires_grad)


class Unpacker(Copier):
    """Converts plain data to copies, in memory that is filled from the file.

    Args:
        reader: The file.
        live: Tensors of the run, whose device meshes the shards use.
    """

    def __init__(self, reader: PlainReader, live: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._reader = reader
        self._layouts = KnownLayouts(live)
        self._known: dict[int, TensorCopy] = {}

    def copy(self, value: Any) -> Any:
        """Return ``value`` with a `TensorCopy` in place of each tensor's entry."""
        if not is_stored(value):
            return super().copy(value)
        first = first_of(value).number
        if first not in self._known:
            self._known[first] = self._copy_of(value)
        return self._known[first]

    def _copy_of(self, stored: Any) -> TensorCopy:
        device = checked_device(first_of(stored).device)
        if isinstance(stored, StoredSparse):
            return PlainCopy(self._reader.full(stored), device, torch.sparse_coo)
        if isinstance(stored, StoredShard):
            return self._shard(stored, device)
        return PlainCopy(self.keep(self._reader.tensor(stored, pinned=device.type in PINNED)), device)

    def _shard(self, stored: StoredShard, device: torch.device) -> WrappedCopy:
        if not self._layouts.has_mesh(stored.mesh):
            raise InvalidValueError(
                f"the snapshot has a tensor on {mesh_in_words(stored.mesh)}, but no parameter of this model is on "
                "such a mesh. Shard the model as it was when the snapshot was saved."
            )
        empty = torch.empty_like(stored.local.like, device=device)
        name = LayoutName(stored.mesh, stored.placements)
        whole = self._layouts.laid_out(empty, name, stored.shape, stored.stride)
        names = whole.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        local = self._copy_of(stored.local)
        return WrappedCopy(whole.requires_grad_(stored.requires_grad), {names[0]: local})


def first_of(stored: Any) -> StoredTensor:
    """Return the first block of a tensor's entry in a file."""
    if isinstance(stored, StoredSparse):
        return stored.parts[0]
    return stored.local if isinstance(stored, StoredShard) else stored


def compare_layouts(what: str, stored: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Check that tensors of the same names have the same shape, dtype, device and layout.

    Args:
        what: The name of these tensors in the error.
        stored: Their entries in the file.
        live: The tensors of the run.

    Raises:
        InvalidValueError: If any differs.
    """
    then = {name: _in_words(one) for name, one in stored.items()}
    now = {name: _in_words(one) for name, one in live.items()}
    wrong = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if wrong:
        differences = "; ".join(f"{n}: {then.get(n, 'none')}, here {now.get(n, 'none')}" for n in wrong[:5])
        raise InvalidValueError(
            f"the snapshot is of another run: {what} differ ({differences}{'; and more' if len(wrong) > 5 else ''}). "
            "Nothing was changed. Build the model and the optimizer as they were when it was saved."
        )


def compare_names(what: str, stored: Iterable[str], live: Iterable[str]) -> None:
    """Check that the saved names equal the present ones, in the same order.

    Raises:
        InvalidValueError: If they do not.
    """
    then, now = list(stored), list(live)
    if then != now:
        raise InvalidValueError(
            f"the snapshot is of another run: {what} were {', '.join(then) or 'none'}, here {', '.join(now) or 'none'}."
            " Nothing was changed. Build the model, the optimizer and extra_state= as they were when it was saved."
        )


def save_parts(directory: Path, pack: Callable[[Packer], Any], group: Any) -> None:
    """Write the result of ``pack`` of each process of ``group``; a collective.

    The files are written to a temporary directory, which is renamed when all are complete. Until then there is no
    snapshot; and if two jobs save into one directory, one of them fails.

    Raises:
        InvalidValueError: On all processes, if the directory is not empty or a file cannot be written.
        UnsupportedGradientError: If the state contains a value that cannot be encoded in a file.
        OSError: If the disk is full, for example; nothing is left behind then.
    """
    number = numbers_of_all(1 << 52 | secrets.randbits(52), group, _TASK)[0]  # leaves the run's generators alone
    rank, processes = rank_and_size(group)
    filled, packer = beside_name(directory, number), Packer()
    own = filled / file_of(rank)
    about = {"format": _FORMAT, "save": f"{number:014x}", "rank": rank, "processes": processes}
    try:
        with _together(directory, group):
            refuse_used(directory)
            try:
                document = packer.writer.document(about, pack(packer))
            except PlainError as error:
                raise UnsupportedGradientError(
                    f"the state contains something that cannot be written to a file ({error}): expected numbers, text, "
                    "tensors, arrays of numbers or text, and containers of these. Keep the snapshot in memory, or "
                    "remove it from the optimizer's groups and attributes, and from the result of state_dict()."
                ) from error
            if rank == 0:
                begin_directory(directory, filled)
        with _together(directory, group):
            wait_for(lambda: None if filled.is_dir() else file_of(0), directory)
            with own.open("xb") as file:
                packer.writer.write(file, document)
                sync(file)
            size = own.stat().st_size
        sizes = numbers_of_all(size, group, _TASK)
        with _together(directory, group):
            files = [*zip(map(file_of, range(processes)), sizes, strict=True)]
            wait_for(lambda: first_missing(filled, files), directory)
        with _together(directory, group):
            if rank == 0:
                end_directory(directory, filled)
    except BaseException:
        with suppress(OSError):
            own.unlink(missing_ok=True)
        if rank == 0:
            drop_directory(filled)
        raise


def file_of(rank: int | str) -> str:
    """Return the name of a process' file."""
    return f"process-{rank}.safetensors"


@contextmanager
def saved_part(directory: Path, group: Any) -> Iterator[tuple[PlainReader, int]]:
    """Open this process' file of `save_parts`, until the block ends.

    Args:
        directory: The directory of the snapshot.
        group: The processes that load.

    Yields:
        The reader of the file, and the number of the save.

    Raises:
        InvalidValueError: If there is no such file, or its content is invalid.
        PlainError: If the number of the save is invalid; the block's end turns it into an InvalidValueError.
    """
    rank, processes = rank_and_size(group)
    file = directory / file_of(rank)
    if not is_regular(file):
        saved = len([*directory.glob(file_of("*"))])
        if saved not in (0, processes):
            raise InvalidValueError(_other_number(directory, saved, processes))
        raise InvalidValueError(
            f"{str(directory)!r} holds no complete snapshot: expected the directory of a "
            f"snapshot.save(directory), with its file {file.name!r}."
        )
    with _understood(directory), PlainReader(file, _KIND) as reader:
        about = reader.about
        if about["format"] != _FORMAT:
            raise InvalidValueError(
                f"the snapshot in {str(directory)!r} has the format {about['format']!a:.20}: expected {_FORMAT}."
            )
        if (about["rank"], about["processes"]) != (rank, processes):
            raise InvalidValueError(_other_number(directory, about["processes"], processes))
        number = int(about["save"], 16)
        if not 0 < number < 2**53:
            raise PlainError("the number of its save")
        yield reader, number


@contextmanager
def _understood(directory: Path) -> Iterator[None]:
    """Turn any error about the content of a file into one kind of error."""
    try:
        yield
    except GradguardError:
        raise
    except Exception as error:  # a forged file may raise any error, but runs no code
        why = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        reason = why if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {why}"
        raise InvalidValueError(
            f"the snapshot in {str(directory)!r} cannot be read: a file is missing or damaged, or is not a snapshot "
            f"({reason}). Use another one."
        ) from error


@contextmanager
def _together(directory: Path, group: Any) -> Iterator[None]:
    """Run one part of a save, and raise an error of one process on all of them; a collective."""
    error: Exception | None = None
    try:
        yield
    except FileExistsError:
        error = InvalidValueError(
            f"{str(directory)!r} exists already: expected a new or empty directory, because a partly overwritten "
            "snapshot would contain two states. Name another, such as snapshots/step-1000."
        )
    except OSError as problem:
        code, why = problem.errno or errno.EIO, problem.strerror or problem
        error = OSError(code, f"no snapshot was written to {str(directory)!r}: {why}. No part of it is left there")
    except Exception as problem:  # raised below, as the others would wait for this process
        error = problem
    raise_together(error, group, _TASK)


def _other_number(directory: Path, saved: Any, here: int) -> str:
    return (
        f"{str(directory)!r} is a snapshot of {saved!a:.20} processes, but here are {here}: continue with as many, on "
        "the same mesh. To continue with another number, restore it on as many, and save your own checkpoint there "
        "with torch.distributed.checkpoint, which can be loaded on another number."
    )


def check_save(directory: Path, number: int, error: Exception | None, group: Any) -> None:
    """Check that all processes of ``group`` have read files, and files of the same save; a collective.

    Args:
        directory: The directory of the files.
        number: The number of the save from which this process has read.
        error: The error that prevented reading; None if there was none.
        group: A process group.

    Raises:
        InvalidValueError: On all processes, if not.
    """
    raise_together(error, group, "load a snapshot")
    if len(set(numbers_of_all(number, group, "load a snapshot"))) > 1:
        raise InvalidValueError(
            f"{str(directory)!r} has files of two different saves, as after an unfinished copy over another snapshot: "
            "its parts would be of different steps. Nothing was changed. Copy all files of one snapshot to a new "
            "directory, or load another snapshot."
        )


def _in_words(one: Any) -> str:
    """Describe dtype, shape, device and layout of a tensor, or of a tensor's entry in a file."""
    match one:
        case StoredTensor():
            facts = one.like.dtype, one.like.shape, one.device
        case StoredSparse():
            facts = one.parts[-1].like.dtype, one.shape, one.parts[0].device, torch.sparse_coo
        case StoredShard():
            facts = one.local.like.dtype, one.shape, one.local.device, LayoutName(one.mesh, one.placements)
        case _ if is_sharded(one):
            facts = one.dtype, one.shape, local_part(one).device, layout_name(one)
        case _:
            facts = one.dtype, one.shape, one.device, *([] if one.layout is torch.strided else [one.layout])
    dtype, shape, device, *layout = facts
    words = [f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"]
    return ", ".join([*words, *(str(part).removeprefix("torch.") for part in layout)])
