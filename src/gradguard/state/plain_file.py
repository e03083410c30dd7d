"""One file of values and the tensors in them: a document of plain data, and raw blocks of bytes."""

import ctypes
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gradguard.files.blocks import MOST_DIMENSIONS, BlockFile, NewBlock, is_count, number_of_elements, write_blocks
from gradguard.files.json_text import decode_json
from gradguard.state.plain_values import (
    Codec,
    PlainError,
    array_dtype,
    checked_dtype,
    dtype_name,
    is_array,
)
from gradguard.torch_private import sparse_indices, sparse_values

_CHECKSUM = "crc32"
LAYOUTS = {"sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr, "sparse_csc": torch.sparse_csc}


class StoredTensor(NamedTuple):
    """A tensor whose bytes are a block of the file, in the order of its memory."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    checksum: int


class StoredSparse(NamedTuple):
    """A sparse tensor: its indices and its values."""

    number: int
    layout: str
    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]
    device: str
    coalesced: bool


class StoredShard(NamedTuple):
    """The part of a DTensor that a process holds. `gradguard.state.saved_snapshot` keeps the table of these."""

    number: int
    local: StoredTensor
    mesh: tuple[Any, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


_SPARSE: dict[str, Any] = {
    "sparse_coo": torch.sparse_coo_tensor,
    "sparse_csr": torch.sparse_csr_tensor,
    "sparse_csc": torch.sparse_csc_tensor,
}
_TABLES: dict[type, str] = {StoredTensor: "tensor", StoredSparse: "sparse", StoredShard: "shard"}


def is_stored(value: Any) -> bool:
    """Tell whether ``value`` stands for a tensor of the file."""
    return type(value) in _TABLES


class PlainWriter:
    """Collects values and tensors, sparse ones too, and writes them as one file.

    Args:
        kind: What the file is, such as ``"snapshot"``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.tensors: list[tuple[StoredTensor, Tensor]] = []
        self.sparse: list[StoredSparse] = []
        self._arrays: list[tuple[Any, Any]] = []
        self.codec = Codec(self._entry, {})

    def add(self, memory: Tensor, device: str) -> StoredTensor | StoredSparse:
        """Return the entry of a tensor on the CPU that was on ``device``.

        Raises:
            PlainError: Its dtype or its layout has no name.
        """
        return self._add(memory, device) if memory.layout is torch.strided else self._add_sparse(memory, device)

    def _add(self, memory: Tensor, device: str) -> StoredTensor:
        dtype_name(memory.dtype)
        memory = memory if _is_dense(memory.shape, memory.stride()) else memory.contiguous()
        layout = tuple(memory.shape), memory.stride(), memory.dtype
        stored = StoredTensor(len(self.tensors), *layout, device, zlib.crc32(bytes_of(memory)))
        self.tensors.append((stored, memory))
        return stored

    def _add_sparse(self, memory: Tensor, device: str) -> StoredSparse:
        layout = str(memory.layout).removeprefix("torch.")
        if layout not in LAYOUTS:
            raise PlainError(f"a tensor of the layout {memory.layout}")
        parts = tuple(self._add(part.detach(), device) for part in _sparse_parts(memory))
        coalesced = memory.layout is torch.sparse_coo and memory.is_coalesced()
        self.sparse.append(StoredSparse(len(self.sparse), layout, tuple(memory.shape), parts, device, coalesced))
        return self.sparse[-1]

    def _entry(self, value: Any) -> tuple[str, int] | None:
        if type(value) in _TABLES:
            return _TABLES[type(value)], value.number
        if type(value) is Tensor:
            if value.is_nested or value.is_meta:
                raise PlainError(
                    "a nested tensor" if value.is_nested else "a tensor without numbers, on the meta device"
                )
            memory = value.detach().resolve_conj().resolve_neg().cpu()
            return self._entry(self.add(memory, str(value.device)))
        if is_array(value):
            content = value.tobytes()
            self._arrays.append(([value.dtype.str, list(value.shape), zlib.crc32(content)], content))
            return "array", len(self._arrays) - 1
        return None

    def document(self, about: Mapping[str, Any], content: Any, **tables: Any) -> str:
        """Return what the file says of its blocks.

        Args:
            about: Numbers and texts.
            content: The values, from ``codec``.
            **tables: What else is written, as JSON has it.
        """
        tensors = [[list(t.shape), list(t.stride), dtype_name(t.dtype), t.device, t.checksum] for t, _ in self.tensors]
        arrays = [entry for entry, _ in self._arrays]
        sparse = [[s.layout, s.shape, [p.number for p in s.parts], s.device, s.coalesced] for s in self.sparse]
        told = {**about, "tensors": tensors, "sparse": sparse, "arrays": arrays, **tables, "content": content}
        return json.dumps(told, separators=(",", ":"), allow_nan=False)

    def write(self, file: Any, document: str) -> None:
        """Write a `document` and the blocks.

        Args:
            file: Open for bytes.
            document: From `document`.

        Raises:
            OSError: It cannot be written.
        """
        blocks = {str(t.number): NewBlock("U8", [len(b)], b) for t, m in self.tensors for b in [bytes_of(m)]}
        blocks |= {f"array {i}": NewBlock("U8", [len(one)], one) for i, (_, one) in enumerate(self._arrays)}
        checksum = f"{zlib.crc32(document.encode()):08x}"
        write_blocks(file, {f"gradguard_{self._kind}": document, _CHECKSUM: checksum}, blocks)


class PlainReader:
    """Reads what a `PlainWriter` has written; to be used in a ``with`` block.

    **Guarantees**: nothing in the file is run. Each tensor that it speaks of is a block of the file, of the size that
    its shape and dtype say, before memory is taken for it.

    Args:
        path: The file.
        kind: What it must be.

    Attributes:
        about: Everything it says but its tensors and values.
        tensors: What it says of each tensor.

    Raises:
        OSError: It cannot be read, or it is no regular file.
        ValueError: It is another file, or it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self._file = BlockFile(path)
        try:
            text = self._file.about.get(f"gradguard_{kind}")
            if text is None:
                raise ValueError(f"it says nothing of a {kind}")
            raw = text.encode("utf-8", "surrogatepass")
            if self._file.about.get(_CHECKSUM) != f"{zlib.crc32(raw):08x}":
                raise ValueError("what it says of itself is not what was written")
            self.about = decode_json(raw)
            if type(self.about) is not dict:
                raise ValueError("it says nothing of itself")
            self._content = self.about.pop("content")
            self.tensors = [self._tensor(i, one) for i, one in enumerate(_listed(self.about.pop("tensors")))]
            self._sparse = [self._sparse_of(i, *one) for i, one in enumerate(_listed(self.about.pop("sparse")))]
            self._arrays = _listed(self.about.pop("arrays"))
        except BaseException as error:
            self._file.__exit__(None, None, None)
            if isinstance(error, KeyError | TypeError | AttributeError):
                raise PlainError(f"it is not what is written ({type(error).__name__})") from error
            raise

    def _tensor(self, number: int, told: Any) -> StoredTensor:
        shape, stride, name, device, checksum = told
        dtype = checked_dtype(name)
        block, count = self._file.blocks[str(number)], checked_layout(shape, stride)
        if not _is_dense(shape, stride) or count * dtype.itemsize != block.nbytes:
            raise ValueError("a tensor has another size than its bytes")
        if type(device) is not str or not is_count(checksum):
            raise ValueError("a tensor is not described as one")
        return StoredTensor(number, tuple(shape), tuple(stride), dtype, device, checksum)

    def _sparse_of(self, number: int, layout: Any, shape: Any, parts: Any, device: Any, coalesced: Any) -> StoredSparse:
        number_of_elements(shape)
        if layout not in LAYOUTS or type(coalesced) is not bool or type(device) is not str:
            raise ValueError("a sparse tensor is not described as one")
        return StoredSparse(number, layout, tuple(shape), tuple(map(self.stored, parts)), device, coalesced)

    def content(self) -> Any:
        """Return the values, with tensors on the CPU.

        Raises:
            PlainError: Something in it is no value, or it is damaged.
        """
        return self._decoded({"tensor": self.tensor, "sparse": lambda n: self.full(self._sparse[n])})

    def stored_content(self, **tables: Any) -> Any:
        """Return the values, with what is said of tensors in place of them.

        Args:
            **tables: What else stands in tables: makes it of its number.

        Raises:
            PlainError: Something in it is no value.
        """
        return self._decoded({"tensor": self.stored, "sparse": self._sparse.__getitem__, **tables})

    def _decoded(self, tables: Mapping[str, Any]) -> Any:
        checked = {name: _numbered(function) for name, function in {**tables, "array": self._array}.items()}
        return Codec(lambda value: None, checked).decoded(self._content)

    def full(self, stored: StoredSparse) -> Tensor:
        """Return a sparse tensor.

        Raises:
            PlainError: It is none, or it is damaged.
        """
        parts = [self.tensor(part.number) for part in stored.parts]
        try:
            made = _SPARSE[stored.layout](*parts, stored.shape, check_invariants=True)
        except (RuntimeError, ValueError, TypeError) as error:
            raise PlainError("a sparse tensor is none") from error
        return made.coalesce() if stored.coalesced else made

    def stored(self, number: int) -> StoredTensor:
        """Return what is said of a tensor.

        Raises:
            PlainError: There is none of this number.
        """
        if not is_count(number) or number >= len(self.tensors):
            raise PlainError("a tensor is missing")
        return self.tensors[number]

    def tensor(self, number: int, *, pinned: bool = False) -> Tensor:
        """Return a tensor, in new memory of the host.

        Raises:
            PlainError: There is none of this number, or it is damaged.
        """
        stored = self.stored(number)
        layout = stored.shape, stored.stride
        memory = torch.empty_strided(*layout, dtype=stored.dtype, device="cpu", pin_memory=pinned)
        into = bytes_of(memory)
        if self._file.read_into(str(stored.number), into) != stored.checksum:
            raise PlainError("a tensor is not what was written")
        if stored.dtype is torch.bool and into and memory.as_strided((len(into),), (1,)).view(torch.uint8).max() > 1:
            raise PlainError("a truth value is neither true nor false")
        return memory

    def _array(self, number: int) -> Any:
        import numpy

        name, shape, checksum = self._arrays[number]
        dtype, content = array_dtype(name), self._file.read(f"array {number}")
        if number_of_elements(shape) * dtype.itemsize != len(content) or zlib.crc32(content) != checksum:
            raise PlainError("an array is not what was written")
        if not dtype.itemsize or (dtype.kind == "b" and max(content, default=0) > 1):
            raise PlainError("an array has elements that are none")
        return numpy.frombuffer(content, dtype).reshape(shape).copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(None, None, None)


def _sparse_parts(sparse: Tensor) -> tuple[Tensor, ...]:
    if sparse.layout is torch.sparse_coo:
        return sparse_indices(sparse), sparse_values(sparse)
    if sparse.layout is torch.sparse_csr:
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


def bytes_of(memory: Tensor) -> memoryview:
    """Return the bytes of a dense tensor on the CPU, in the order of its memory; they are its own, and no copy."""
    size = memory.numel() * memory.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(memory.data_ptr())).cast("B")


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory, each once, in whichever order of dimensions."""
    if len(shape) > MOST_DIMENSIONS:
        return False
    if not math.prod(shape):
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def checked_layout(shape: Any, stride: Any) -> int:
    """Return the number of elements of a tensor that a file describes.

    Raises:
        ValueError: It has no shape, or no stride that can be meant.
    """
    count = number_of_elements(shape)
    if type(stride) is not list or len(stride) != len(shape) or not all(map(is_count, stride)):
        raise ValueError("a tensor has no stride that can be meant")
    return count


def _listed(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("a table is no list")
    return value


def _numbered(function: Any) -> Any:
    def checked(number: Any) -> Any:
        if not is_count(number):
            raise PlainError("an entry has no number")
        return function(number)

    return checked
