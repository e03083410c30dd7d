"""Many points in one call by `torch.func.vmap`, where that gives the same values and is faster than a loop."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradguard.check.function import Function

Values = Callable[[Tensor], Tensor]
"""From points, one a row, to the outputs at each, one a row."""

_LARGEST = 32
_BYTES = 256 * 2**20
_COPIES = 8
"""Values of a point that a forward may hold at a time, in units of inputs and outputs together."""


def batch_size(function: Function) -> int:
    """Return how many points fit into the memory that may be used."""
    return max(1, min(_LARGEST, _BYTES // (8 * _COPIES * (sum(function.sizes) + function.size))))


def best_values(function: Function) -> Values:
    """Return a loop over the points, or vmap if it works here, is right for two points, and is faster for a batch."""

    def loop(points: Tensor) -> Tensor:
        return torch.stack([function.values(point) for point in points])

    def mapped(points: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.func.vmap(lambda point: function.flatten(function.call(function.split(point))))(points)

    count = batch_size(function)
    if count < 4 or function.state.is_seeded or any(not one.value.is_contiguous() for one in function.inputs):
        return loop
    around = function.point * (1 + 1e-3 * torch.linspace(-1, 1, count, dtype=torch.float64)[:, None])
    try:
        mapped(around)  # the first call is slow
        started = time.perf_counter()
        found = mapped(around)
        by_map = time.perf_counter() - started
        expected = loop(around)
        by_loop = time.perf_counter() - started - by_map
    except Exception:  # not every function can be mapped: the loop always works
        return loop
    same = torch.allclose(found, expected, rtol=1e-12, atol=1e-13, equal_nan=True)
    return mapped if same and 1.2 * by_map < by_loop else loop
