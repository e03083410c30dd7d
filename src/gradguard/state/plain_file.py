"""One file of values and tensors: a JSON document, and a raw block of bytes for each tensor. Nothing in it is code.

A value that JSON lacks is encoded as an object with one entry, whose key is its kind: ``{"tuple": [1, 2]}``. The kinds
are a fixed list, so a file never chooses a function to call. A tensor is encoded as the number of its block.
"""

import ctypes
import json
import os
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gradguard.files.blocks import BlockFile, NewBlock, write_blocks
from gradguard.files.json_text import decode_json, is_deep
from gradguard.tensors.layout import is_dense
from gradguard.torch_private import sparse_indices, sparse_values

_CHECKSUM = "crc32"
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DTYPES = {name: d for name, d in _DTYPES.items() if not name.startswith(("q", "bits"))}
_FACTORIES: dict[str, Any] = {"None": None, **{one.__name__: one for one in (list, dict, set, int, float)}}


class PlainError(ValueError):
    """A value cannot be encoded in a file, or a file contains something that is never written."""


class StoredTensor(NamedTuple):
    """A tensor whose bytes are a block of the file, in memory order; ``like`` has its layout but no data."""

    number: int
    like: Tensor
    device: str
    checksum: int


class StoredSparse(NamedTuple):
    """A tensor of the layout `torch.sparse_coo`, as its indices and its values."""

    shape: tuple[int, ...]
    coalesced: bool
    parts: list[StoredTensor]


class StoredShard(NamedTuple):
    """A process' part of a DTensor."""

    local: StoredTensor
    mesh: tuple[Any, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class _Kind(NamedTuple):
    """How values of one type are encoded as simpler ones, and decoded from them."""

    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _fields(kind: Any) -> _Kind:
    return _Kind(kind, list, lambda encoded: kind(*encoded))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a file.

    Raises:
        PlainError: If the dtype has none, such as a quantized one.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise PlainError(f"a tensor of {dtype}")
    return name


def checked_device(text: str) -> torch.device:
    """Return the device of this name, if this machine has it.

    Raises:
        PlainError: If it does not.
    """
    device = torch.device(text)
    if device.type != "cpu" and torch.get_device_module(device).device_count() <= (device.index or 0):
        raise PlainError(f"a tensor was on {device}, which this machine does not have")
    return device


def _encode_mapping(value: Mapping[Any, Any]) -> list[Any]:
    for key in value:
        for part in key if type(key) is tuple else [key]:
            if type(part) not in (type(None), bool, int, float, str, bytes):
                raise PlainError(f"a key that is a {type(part).__name__}")
    return [[key, one] for key, one in value.items()]


def _decode_ordered_dict(encoded: Any) -> OrderedDict[Any, Any]:
    pairs, attributes = encoded
    made = OrderedDict(pairs)
    vars(made).update(attributes)
    return made


def _encode_defaultdict(value: defaultdict[Any, Any]) -> list[Any]:
    if value.default_factory not in _FACTORIES.values():
        raise PlainError(f"a defaultdict of {value.default_factory}")
    return [getattr(value.default_factory, "__name__", "None"), _encode_mapping(value)]


_KINDS = {
    "tuple": _Kind(tuple, list, tuple),
    "set": _Kind(set, list, set),
    "frozenset": _Kind(frozenset, list, frozenset),
    "size": _Kind(torch.Size, list, torch.Size),
    "deque": _Kind(deque, lambda value: [value.maxlen, list(value)], lambda encoded: deque(encoded[1], encoded[0])),
    "complex": _Kind(complex, lambda value: [value.real, value.imag], lambda encoded: complex(*encoded)),
    "bytes": _Kind(bytes, bytes.hex, bytes.fromhex),
    "dtype": _Kind(torch.dtype, dtype_name, _DTYPES.__getitem__),
    "device": _Kind(torch.device, str, checked_device),
    "mapping": _Kind(dict, _encode_mapping, dict),
    "counter": _Kind(Counter, _encode_mapping, lambda encoded: Counter(dict(encoded))),
    "ordered dict": _Kind(OrderedDict, lambda value: [_encode_mapping(value), vars(value)], _decode_ordered_dict),
    "defaultdict": _Kind(
        defaultdict, _encode_defaultdict, lambda encoded: defaultdict(_FACTORIES[encoded[0]], encoded[1])
    ),
    "sparse": _fields(StoredSparse),
    "shard": _fields(StoredShard),
}
_NAMES = {kind.type: name for name, kind in _KINDS.items()}
_JSON_TYPES = (type(None), bool, int, float, str)
"""Types that JSON represents; floats include NaN and infinity, as Python writes them."""


def is_stored(value: Any) -> bool:
    """Tell whether ``value`` is the entry of a tensor of the file."""
    return isinstance(value, StoredTensor | StoredSparse | StoredShard)


class PlainWriter:
    """Collects values and tensors, also sparse ones, and writes them as one file.

    Args:
        kind: The kind of the file, such as ``"snapshot"``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._tensors: list[tuple[StoredTensor, Tensor]] = []

    def add(self, memory: Tensor, device: str) -> StoredTensor | StoredSparse:
        """Return the entry of a tensor on the CPU that was on ``device``.

        Raises:
            PlainError: If its dtype or its layout has no name.
        """
        if memory.layout is not torch.strided:
            if memory.layout is not torch.sparse_coo:
                raise PlainError(f"a tensor of the layout {memory.layout}")
            parts: list[Any] = [
                self.add(one.detach(), device) for one in (sparse_indices(memory), sparse_values(memory))
            ]
            return StoredSparse(tuple(memory.shape), memory.is_coalesced(), parts)
        dtype_name(memory.dtype)
        memory = memory if is_dense(memory) else memory.contiguous()
        stored = StoredTensor(len(self._tensors), memory.to("meta"), device, zlib.crc32(bytes_of(memory)))
        self._tensors.append((stored, memory))
        return stored

    def document(self, about: Mapping[str, Any], content: Any) -> str:
        """Return the JSON document of the file, and collect the tensors of ``content``.

        Args:
            about: Numbers and texts by their names.
            content: The values.

        Raises:
            PlainError: If a value cannot be encoded; the message names it.
        """
        encoded = self._encoded(content)
        tensors = [
            [list(one.like.shape), list(one.like.stride()), dtype_name(one.like.dtype), one.device, one.checksum]
            for one, _ in self._tensors
        ]
        document = {**about, "tensors": tensors, "content": encoded}
        if is_deep(document):
            raise PlainError("containers that are nested too deeply")
        return json.dumps(document, separators=(",", ":"))

    def _encoded(self, value: Any) -> Any:
        if type(value) is list:
            return list(map(self._encoded, value))
        if type(value) in _JSON_TYPES:
            return value
        kind, content = self._encoding(value)
        return {kind: self._encoded(content)}

    def _encoding(self, value: Any) -> tuple[str, Any]:
        """Return the kind of a value, and simpler values that encode it."""
        if isinstance(value, StoredTensor):
            return "tensor", value.number
        if type(value) in _NAMES:
            name = _NAMES[type(value)]
            return name, _KINDS[name].encode(value)
        if type(value) is Tensor:
            if value.is_nested or value.is_meta:
                raise PlainError(
                    "a nested tensor" if value.is_nested else "a tensor without numbers, on the meta device"
                )
            memory = value.detach().resolve_conj().resolve_neg().cpu()
            return self._encoding(self.add(memory, str(value.device)))
        if is_array(value):
            array = sys.modules["numpy"].asarray(value)  # here an empty string has room for one character
            raw = torch.from_numpy(array.reshape(-1).view("u1").copy())
            return "array", [array.dtype.str, list(array.shape), array is not value, raw]
        kind, name = type(value).__name__, getattr(value, "__qualname__", None)
        raise PlainError(f"a {kind}" if name is None else f"{name}, a {kind}")

    def write(self, file: Any, document: str) -> None:
        """Write a `document` and the blocks.

        Args:
            file: The file, open for writing bytes.
            document: The result of `document`.

        Raises:
            OSError: If it cannot be written.
        """
        blocks = {str(t.number): NewBlock("U8", [len(b)], b) for t, m in self._tensors for b in [bytes_of(m)]}
        checksum = f"{zlib.crc32(document.encode()):08x}"
        write_blocks(file, {f"gradguard_{self._kind}": document, _CHECKSUM: checksum}, blocks)


class PlainReader:
    """Reads a file of `PlainWriter`; use it in a ``with`` block.

    **Guarantees**: nothing in the file is run. Each tensor that the document names is a block of the file. Before
    memory is allocated for it, the block's size is compared with its shape and dtype.

    Args:
        path: The file.
        kind: The kind with which the file must have been written.

    Attributes:
        about: All fields of the document except its tensors and values.

    Raises:
        OSError: If it cannot be read, or is not a regular file.
        ValueError: If it is another file, or is damaged. A forged file may raise any error here and in `content`.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self._file = BlockFile(path)
        try:
            text = self._file.about.get(f"gradguard_{kind}")
            if text is None:
                raise ValueError(f"it does not contain a {kind}")
            raw = text.encode("utf-8", "surrogatepass")
            if self._file.about.get(_CHECKSUM) != f"{zlib.crc32(raw):08x}":
                raise ValueError("its document does not match its checksum")
            self.about = decode_json(raw, finite=False)
            self._content = self.about.pop("content")
            self._tensors = {i: self._described(i, *one) for i, one in enumerate(self.about.pop("tensors"))}
        except BaseException:
            self._file.__exit__(None, None, None)
            raise

    def _described(self, number: int, shape: Any, stride: Any, name: str, device: str, checksum: Any) -> StoredTensor:
        like = torch.empty_strided(shape, stride, dtype=_DTYPES[name], device="meta")
        if not is_dense(like) or like.numel() * like.itemsize != self._file.blocks[str(number)].nbytes:
            raise ValueError("a tensor's size differs from the number of its bytes")
        return StoredTensor(number, like, device, checksum)

    def content(self) -> Any:
        """Return the values, with entries of the file in place of tensors; invalid content may raise any error."""
        return self._decoded(self._content)

    def _decoded(self, encoded: Any) -> Any:
        if type(encoded) is list:
            return list(map(self._decoded, encoded))
        if type(encoded) is not dict:
            return encoded
        ((kind, content),) = encoded.items()
        content = self._decoded(content)
        if kind == "tensor":
            return self._tensors[content]
        if kind != "array":
            return _KINDS[kind].decode(content)
        import numpy

        name, shape, is_scalar, raw = content
        array = self.tensor(raw).numpy().view(numpy.dtype(name)).reshape(shape)
        if not is_array(array):
            raise PlainError("an array has a dtype that is not known")
        return array[()] if is_scalar else array

    def full(self, stored: StoredSparse) -> Tensor:
        """Return a sparse tensor.

        Raises:
            RuntimeError: If it is not a valid sparse tensor.
            PlainError: If it is damaged.
        """
        indices, values = map(self.tensor, stored.parts)
        made = torch.sparse_coo_tensor(indices, values, stored.shape, check_invariants=True)
        return made.coalesce() if stored.coalesced else made

    def tensor(self, stored: StoredTensor, *, pinned: bool = False) -> Tensor:
        """Return a tensor, in new host memory.

        Raises:
            PlainError: If it is damaged.
        """
        memory = torch.empty_like(stored.like, device="cpu", pin_memory=pinned)
        into = bytes_of(memory)
        if self._file.read_into(str(stored.number), into) != stored.checksum:
            raise PlainError("a tensor does not match its checksum")
        if memory.dtype is torch.bool and into and memory.as_strided((len(into),), (1,)).view(torch.uint8).max() > 1:
            raise PlainError("a bool is neither 0 nor 1")
        return memory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(None, None, None)


def is_numpy(value: Any) -> bool:
    """Tell whether ``value`` is a NumPy array or number."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def is_array(value: Any) -> bool:
    """Tell whether ``value`` is a NumPy array or number that a file can hold: of numbers or text of a fixed length."""
    plain = is_numpy(value) and type(value) in (sys.modules["numpy"].ndarray, value.dtype.type)
    return plain and value.dtype.kind in "biufcSU"


def bytes_of(memory: Tensor) -> memoryview:
    """Return the bytes of a dense tensor on the CPU, in memory order, as a view."""
    size = memory.numel() * memory.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(memory.data_ptr())).cast("B")
