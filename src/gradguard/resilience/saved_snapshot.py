"""What a snapshot holds, as files of `torch.distributed.checkpoint` and back.

Each process writes its own part, under its rank: tensors as entries that are read in place, and one entry with
everything else, in which each tensor is a number. Both have checksums, which torch's files do not. The checksums of
tensors stand in that entry, and so does a number that is random at each save; the list of all entries has it too.
"""

import ctypes
import io
import pickle
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.distributed.checkpoint import (
    check_written,
    names_of_entries,
    numbers_of_all,
    raise_together,
    rank_in,
    read_entries,
    write_entries,
)
from gradguard.distributed.placements import is_sharded, sharded_as
from gradguard.distributed.sums import number_of_processes
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.resilience.copies import PINNED, Copier, PlainCopy, Restorer, TensorCopy, WrappedCopy

_FORMAT = 2


class StoredTensor(NamedTuple):
    """A tensor that is an entry of its own."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    checksum: int


class StoredShard(NamedTuple):
    """What this process holds of a DTensor."""

    local: StoredTensor
    mesh: tuple[Any, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class StoredInside(NamedTuple):
    """A tensor that is written among everything else: a sparse one."""

    tensor: Tensor
    device: str


class Packer(Restorer):
    """Makes plain data of copies: ``restored`` returns them with numbers in place of tensors.

    Attributes:
        tensors: The tensors, by their numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._known: dict[int, Any] = {}

    def _tensor(self, kept: TensorCopy, live: Any) -> Any:
        del live
        if id(kept) not in self._known:
            self._known[id(kept)] = self._stored(kept)
        return self._known[id(kept)]

    def _stored(self, kept: TensorCopy) -> Any:
        if isinstance(kept, PlainCopy):
            return self._plain(kept)
        assert isinstance(kept, WrappedCopy)
        (local, *more), sharding = kept.parts.values(), kept.sharding
        if sharding is None or more or not isinstance(local, PlainCopy):
            raise UnsupportedGradientError(
                f"the state holds a {kept.kind.__name__}, which cannot be written to a file: expected ordinary tensors "
                "and DTensors. Keep the snapshot in memory, or save checkpoints with your own state_dict."
            )
        stored, (mesh, placements) = self.restored(local), sharding
        return StoredShard(
            stored, _key(mesh), tuple(placements), tuple(kept.shape), tuple(kept.stride), kept.requires_grad
        )

    def _plain(self, kept: PlainCopy) -> StoredTensor | StoredInside:
        memory = kept.memory
        if memory.layout is not torch.strided:
            return StoredInside(memory, str(kept.device))
        self.tensors.append(memory)
        layout = len(self.tensors) - 1, tuple(memory.shape), memory.stride(), memory.dtype
        return StoredTensor(*layout, str(kept.device), _checksum(memory))


class Unpacker(Copier):
    """Makes copies of plain data again; their memory is filled by `fill`.

    Args:
        live: Tensors of the run, in whose device meshes shards lie.
    """

    def __init__(self, live: Iterable[Tensor]) -> None:
        super().__init__()
        self._meshes = {_key(mesh): mesh for t in live if is_sharded(t) for mesh in [t.device_mesh]}  # type: ignore[attr-defined]
        self._known: dict[Any, TensorCopy] = {}
        self._memory: dict[int, tuple[Tensor, int]] = {}

    def copy(self, value: Any) -> Any:
        """Return ``value`` with a `TensorCopy` where a tensor was."""
        if isinstance(value, StoredTensor):
            return self._once(value.number, lambda: self._plain(value))
        if isinstance(value, StoredShard):
            return self._once(("shard", value.local.number), lambda: self._shard(value))
        if isinstance(value, StoredInside):
            return PlainCopy(value.tensor, torch.device(value.device), value.tensor.layout)
        return super().copy(value)

    def _once(self, key: Any, make: Any) -> TensorCopy:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _plain(self, stored: StoredTensor) -> PlainCopy:
        device = torch.device(stored.device)
        pinned = device.type in PINNED
        memory = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="cpu", pin_memory=pinned)
        self._memory[stored.number] = memory, stored.checksum
        return PlainCopy(self.keep(memory), device)

    def _shard(self, stored: StoredShard) -> WrappedCopy:
        mesh = self._meshes.get(stored.mesh)
        if mesh is None:
            raise InvalidValueError(
                f"the snapshot has a tensor on {_mesh_in_words(stored.mesh)}, and no parameter of this model is on "
                "such a one. Shard the model as it was when the snapshot was saved."
            )
        local = self.copy(stored.local)
        like = torch.empty_strided(local.memory.shape, local.memory.stride(), dtype=local.memory.dtype, device="meta")
        empty = torch.empty_like(like, device=local.device)
        whole = sharded_as(empty, mesh, stored.placements, stored.shape, stored.stride)
        names = whole.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return WrappedCopy(whole.requires_grad_(stored.requires_grad), {names[0]: local})

    def fill(self, directory: Path, group: Any) -> None:
        """Read what the memory holds.

        Raises:
            InvalidValueError: If a file is missing or damaged.
        """
        rank = rank_in(group)
        read_entries(directory, {f"{rank}/{number}": memory for number, (memory, _) in self._memory.items()})
        if any(_checksum(memory) != checksum for memory, checksum in self._memory.values()):
            raise InvalidValueError(f"the snapshot in {str(directory)!r} is damaged: a tensor is not what was written.")


def compare_layouts(what: str, stored: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Check that tensors of the same names have the same shape, dtype, device and layout.

    Args:
        what: What they are, in words.
        stored: What `Packer` has made of them.
        live: Those of the run.

    Raises:
        InvalidValueError: If not.
    """
    then = {name: _stored_in_words(one) for name, one in stored.items()}
    now = {name: _live_in_words(one) for name, one in live.items()}
    wrong = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if wrong:
        told = "; ".join(f"{n}: {then.get(n, 'none')}, here {now.get(n, 'none')}" for n in wrong[:5])
        raise InvalidValueError(
            f"the snapshot is of another run: {what} differ ({told}{'; and more' if len(wrong) > 5 else ''}). Nothing "
            "was changed. Make the model and the optimizer as they were when it was saved."
        )


def compare_names(what: str, stored: Iterable[str], live: Iterable[str]) -> None:
    """Check that what was saved and what is there are called alike, in this order.

    Raises:
        InvalidValueError: If not.
    """
    then, now = list(stored), list(live)
    if then != now:
        raise InvalidValueError(
            f"the snapshot is of another run: {what} were {', '.join(then) or 'none'}, here {', '.join(now) or 'none'}."
            " Nothing was changed. Make the model, the optimizer and more= as they were when it was saved."
        )


def save_parts(directory: Path, pack: Callable[[Packer], Any], group: Any) -> None:
    """Write what ``pack`` returns of each process of ``group``; a collective.

    Raises:
        InvalidValueError: On all processes, if the directory is not empty or something cannot be written.
    """
    task, entries, packer = "save a snapshot", {}, Packer()
    number = numbers_of_all(1 << 52 | secrets.randbits(52), group, task)[0]  # no generator of the run draws
    error = None
    try:
        _refuse_used(directory)
        entries = _entries(number, pack(packer), packer.tensors, group)
    except Exception as problem:  # or the others would wait for this process
        error = problem
    raise_together(error, group, task)
    write_entries(directory, entries, group)
    try:
        check_written(directory)
    except InvalidValueError as problem:
        error = problem
    raise_together(error, group, task)


def load_parts(directory: Path, group: Any) -> tuple[int, Any]:
    """Return the number of the save, and what `save_parts` was given by this process; the tensors are not read yet.

    Raises:
        InvalidValueError: If there is no such thing.
    """
    rank, processes = rank_in(group), number_of_processes(group)
    names = names_of_entries(directory)
    if not {str(r) for r in range(processes)} <= names or str(processes) in names:
        whole = sum(name.isdigit() for name in names)
        raise InvalidValueError(
            f"{str(directory)!r} is a snapshot of {whole} processes, and here are {processes}: go on with as many, on "
            "the same mesh."
            if whole
            else f"{str(directory)!r} is a checkpoint of something else: expected what snapshot.save() has written."
        )
    into: dict[str, Any] = {str(rank): b""}
    read_entries(directory, into)
    entry = into[str(rank)]
    if not isinstance(entry, bytes) or zlib.crc32(entry[4:]).to_bytes(4) != entry[:4]:
        raise InvalidValueError(f"the snapshot in {str(directory)!r} is damaged: it is not what was written.")
    version, *content = pickle.loads(entry[4:])
    if version != _FORMAT:
        raise InvalidValueError(f"the snapshot in {str(directory)!r} has the format {version}: expected {_FORMAT}.")
    number, parts = content
    if _save_entry(number) not in names:
        raise InvalidValueError(_mixed(directory))
    return number, parts


def check_save(directory: Path, number: int, error: Exception | None, group: Any) -> None:
    """Check that all processes of ``group`` have read files, and those of one save; a collective.

    Args:
        directory: Where they were.
        number: That of the save from which this process has read.
        error: Why it has not.
        group: A process group.

    Raises:
        InvalidValueError: On all processes, if not.
    """
    raise_together(error, group, "load a snapshot")
    if len(set(numbers_of_all(number, group, "load a snapshot"))) > 1:
        raise InvalidValueError(_mixed(directory))


def _mixed(directory: Path) -> str:
    return (
        f"{str(directory)!r} has files of two different saves, as after a copy over another snapshot that was not "
        "finished: its parts would be of different steps. Nothing was changed. Copy all files of one snapshot to a new "
        "directory, or load another snapshot."
    )


def _save_entry(number: int) -> str:
    return f"save {number:014x}"


def _entries(number: int, parts: Any, tensors: list[Tensor], group: Any) -> dict[str, Any]:
    file = io.BytesIO()
    try:
        _Pickler(file).dump((_FORMAT, number, parts))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnsupportedGradientError(
            f"the state holds something that cannot be written to a file ({error}): keep the snapshot in memory, or "
            "leave it out of the optimizer's groups and of what state_dict() returns."
        ) from error
    content, rank = file.getvalue(), rank_in(group)
    named = {f"{rank}/{number}": tensor for number, tensor in enumerate(tensors)}
    of_save = {_save_entry(number): b""} if rank == 0 else {}
    return {str(rank): zlib.crc32(content).to_bytes(4) + content, **named, **of_save}


class _Pickler(pickle.Pickler):
    """One that refuses what a state points to and does not own: what came back would be another."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module | Optimizer):
            raise pickle.PicklingError(f"a {type(obj).__name__}")
        return NotImplemented


def _refuse_used(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidValueError(
            f"{str(directory)!r} is there already: expected a new or empty directory, because one that was overwritten "
            "in part would hold two states. Name another, such as snapshots/step-1000."
        )


def _checksum(memory: Tensor) -> int:
    flat = memory.contiguous().view(-1).view(torch.uint8)
    return zlib.crc32((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())) if flat.numel() else 0


def _key(mesh: Any) -> tuple[Any, ...]:
    return tuple(mesh.shape), mesh.mesh_dim_names, tuple(mesh.mesh.flatten().tolist())


def _mesh_in_words(key: tuple[Any, ...]) -> str:
    shape, names, ranks = key
    return f"a device mesh of shape {list(shape)}{f' named {names}' if names else ''} over the ranks {list(ranks)}"


def _stored_in_words(stored: Any) -> str:
    if isinstance(stored, StoredShard):
        return _in_words(stored.shape, stored.local.dtype, stored.local.device, stored.placements, stored.mesh)
    if isinstance(stored, StoredInside):
        return _in_words(stored.tensor.shape, stored.tensor.dtype, stored.device)
    return _in_words(stored.shape, stored.dtype, stored.device)


def _live_in_words(live: Any) -> str:
    if not is_sharded(live):
        return _in_words(live.shape, live.dtype, live.device)
    local = live.to_local() if not live.requires_grad else live.detach().to_local()
    return _in_words(live.shape, live.dtype, local.device, tuple(live.placements), _key(live.device_mesh))


def _in_words(shape: Any, dtype: Any, device: Any, placements: Any = None, mesh: Any = None) -> str:
    plain = f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
    return plain if mesh is None else f"{plain}, {placements} over {_mesh_in_words(mesh)}"
