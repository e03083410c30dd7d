"""A file of texts and raw blocks of bytes in the layout of safetensors: a JSON header, then the bytes.

No part of such a file is code. The sizes in the header are compared with the length of the file before any block is
read or allocated.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from io import BufferedReader
from types import TracebackType
from typing import Any, NamedTuple, Self

from gradguard.files.foreign_fields import Rule, list_of, mapping_of, of_type, row_of, text, whole
from gradguard.files.json_text import decode_json
from gradguard.files.opening import open_regular, size_of

LONGEST_HEADER = 256 * 2**20
"""The longest header that is read, in bytes: three times that of a model of a million tensors."""

MOST_DIMENSIONS = 64  # the most dimensions of a shape that is read
_AT_ONCE = 2**24  # the number of bytes that one call reads or writes
_ITEMSIZE = {"U8": 1, "F64": 8}

Buffer = bytes | bytearray | memoryview


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape that was read from a file.

    Raises:
        ValueError: If ``value`` is not a list of counts, or there are 2**63 elements or more.
    """
    shape = tuple(_counts(value))
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) >= 2**63:
        raise ValueError("a shape has implausibly many elements or dimensions")
    return shape


_count, _object = whole(0, 2**63 - 1), of_type(dict)
_counts = list_of(_count)
_DESCRIPTION: Mapping[str, Rule] = {"dtype": text, "shape": shape_of, "data_offsets": row_of(_count, _count)}


class Block(NamedTuple):
    """The description of one block of bytes in a file.

    Attributes:
        dtype: ``"U8"`` or ``"F64"``, in little-endian order.
        shape: The number of elements along each dimension.
        start: Offset of its first byte in the file.
        end: Offset after its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of the block."""
        return self.end - self.start


class NewBlock(NamedTuple):
    """A block to be written."""

    dtype: str
    shape: Sequence[int]
    content: Buffer


def write_blocks(file: Any, about: Mapping[str, str], blocks: Mapping[str, NewBlock]) -> None:
    """Write texts and blocks.

    Args:
        file: A file opened for writing, at its start.
        about: Texts by their names.
        blocks: Blocks by their names.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name, block in blocks.items():
        start, end = end, end + len(block.content)
        header[name] = {"dtype": block.dtype, "shape": list(block.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    for block in blocks.values():
        content = memoryview(block.content)
        for begin in range(0, len(content), _AT_ONCE):
            file.write(content[begin : begin + _AT_ONCE])


class BlockFile:
    """Reader of a file in the format of `write_blocks`; use it in a ``with`` block.

    Args:
        path: The file.

    Attributes:
        about: Its texts by their names.
        blocks: The description of each block; each is within the file, with the length of its dtype and shape.

    Raises:
        OSError: If the file cannot be read, or is not a regular file.
        ValueError: If the file is of another format, is cut off, or is longer than its blocks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: BufferedReader = open_regular(path)
        try:
            self._size = size_of(self._file)
            length = int.from_bytes(self._file.read(8), "little")
            if not 2 <= length <= min(self._size - 8, LONGEST_HEADER):
                raise ValueError("its header has an implausible length, or it is cut off")
            header = _object(decode_json(self._file.read(length)))
            self.about: dict[str, str] = mapping_of(text)(header.pop("__metadata__", {}))
            self.blocks = {name: self._block(one, 8 + length) for name, one in header.items()}
            ends = sorted((block.start, block.end) for block in self.blocks.values())
            if [8 + length, *(end for _, end in ends)] != [*(start for start, _ in ends), self._size]:
                raise ValueError("its blocks do not cover it exactly")
        except BaseException:
            self._file.close()
            raise

    def _block(self, description: Any, begin: int) -> Block:
        if _object(description).keys() != _DESCRIPTION.keys():
            raise ValueError("a block lacks a field of its description, or has another one")
        dtype, shape, (start, end) = (rule(description[name]) for name, rule in _DESCRIPTION.items())
        length = _ITEMSIZE.get(dtype, math.nan) * math.prod(shape)
        if not start <= end <= self._size - begin or end - start != length:
            raise ValueError("a block's size differs from its dtype and shape, or it is cut off")
        return Block(dtype, shape, begin + start, begin + end)

    def read(self, name: str) -> bytes:
        """Return the bytes of a block.

        Args:
            name: The name of the block.

        Raises:
            KeyError: If no block has this name.
            ValueError: If the file was cut off after it was opened.
        """
        content = bytearray(self.blocks[name].nbytes)
        self.read_into(name, memoryview(content))
        return bytes(content)

    def read_into(self, name: str, memory: memoryview) -> int:
        """Read a block into ``memory``, which has the block's number of bytes.

        Args:
            name: The name of the block.
            memory: The destination, as bytes.

        Returns:
            The CRC-32 of the bytes.

        Raises:
            KeyError: If no block has this name.
            ValueError: If ``memory`` has another number of bytes, or the file was cut off after it was opened.
        """
        block, checksum = self.blocks[name], 0
        if len(memory) != block.nbytes:
            raise ValueError("a block's size differs from the memory that it is read into")
        self._file.seek(block.start)
        for begin in range(0, len(memory), _AT_ONCE):
            part = memory[begin : begin + _AT_ONCE]
            if self._file.readinto(part) != len(part):
                raise ValueError("it is cut off")
            checksum = zlib.crc32(part, checksum)
        return checksum

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
