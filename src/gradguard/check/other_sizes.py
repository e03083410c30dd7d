"""Call a function with other lengths: kernels work in tiles, and are often wrong at the edge of a tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradguard.check.flat_vectors import drawn
from gradguard.errors import InvalidValueError
from gradguard.torch_private import tree_leaves, tree_map

_SHRUNK = 0.1

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_other_sizes(
    arguments: Arguments, sizes: Mapping[int, int | Sequence[int]], generator: torch.Generator
) -> Iterator[tuple[str, Arguments]]:
    """Yield the arguments with another length, changing one length at a time.

    The elements repeat the given ones. Each is moved a little towards 0, which keeps it in the domain and makes no two
    equal.

    Args:
        arguments: The positional and the keyword arguments.
        sizes: For each length, the lengths to try, or the size n of a tile, which stands for 1, n - 1, n and n + 1.
        generator: The generator of the moves.

    Yields:
        A description of the change, and the arguments.

    Raises:
        InvalidValueError: If no argument has such a length, or a tile is smaller than 1.
    """
    shapes = [tuple(one.shape) for one in tree_leaves(arguments) if isinstance(one, Tensor)]
    for length, wanted in sizes.items():
        if not any(length in shape for shape in shapes):
            raise InvalidValueError(f"sizes has the length {length!r}, which no argument has: the shapes are {shapes}.")
        if isinstance(wanted, int):
            if wanted < 1:
                raise InvalidValueError(f"sizes has a tile of {wanted}: expected at least 1.")
            wanted = sorted({1, max(1, wanted - 1), wanted, wanted + 1})
        for other in wanted:
            if other != length:
                resize = lambda one, a=length, b=other: _resized(one, a, b, generator)  # noqa: E731
                yield f"with {other} in place of {length}", tree_map(resize, arguments)


def _resized(value: Any, length: int, other: int, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or length not in value.shape:
        return value
    result = value.detach()
    for dim in (dim for dim, size in enumerate(value.shape) if size == length):
        result = result.index_select(dim, torch.arange(other, device=value.device) % max(1, length))
    if result.is_floating_point() or result.is_complex():
        shares = _SHRUNK / 2 * (1 + drawn(result.shape, generator))
        result = (result * (1 - shares.to(value.device))).to(value.dtype)
    return result.requires_grad_(value.requires_grad)
