"""Which way to find each norm: the fastest, within a budget of bytes.

Times are estimates from three numbers of a device; only their ratios matter. For T positions and a weight of l x r,
beside what a plain step does:

* ``keep``: each sample's gradient is made and held. The clipped sum is then one pass over them in place of a product,
  so this costs hardly more than the plain step's own weight gradient, but memory.
* ``ghost``: two ``[T, T]`` Gram matrices for each sample's norm, then one product for the clipped sum.
* ``drop``: each sample's gradient is made and dropped, then one product for the clipped sum.
"""

from typing import NamedTuple

import torch

from gradguard.per_sample.contributions import Contribution, Direct, Outer, Tied

_CACHE = 4 << 20
"""Bytes of gradients that ``drop`` makes at a time: what fits into a cache."""

_FRESH = 32 << 20
"""Blocks from this size on are mapped afresh by the C library, page by page."""


class Speed(NamedTuple):
    """What a device does in a second: multiply-adds in a product, bytes to or from memory, bytes of new pages."""

    products: float
    traffic: float
    pages: float


CPU = Speed(products=4e10, traffic=2e10, pages=3e9)
ACCELERATOR = Speed(products=2e13, traffic=2e12, pages=float("inf"))  # its allocator keeps what was freed


def settle(contribution: Contribution, budget: int, device: torch.device) -> Contribution:
    """Return ``contribution`` kept, if that is fastest and takes at most ``budget`` bytes; else set its other ways."""
    speed = CPU if device.type == "cpu" else ACCELERATOR
    size = kept_bytes(contribution)
    row = size // max(1, contribution.batch_size)
    if isinstance(contribution, Direct):
        contribution.chunk = max(1, _CACHE // max(1, row))
        return contribution.keep() if size <= budget else contribution
    if isinstance(contribution, Tied):
        settle(contribution.multiplied, 0, device)
    if not isinstance(contribution, Outer) or contribution.positions == 1:
        return contribution
    keep, ghost, drop = _seconds(contribution, size, speed)
    if size <= budget and keep <= min(ghost, drop):
        return contribution.keep()
    contribution.ghost = ghost < drop
    contribution.chunk = max(1, _CACHE // max(1, row))
    return contribution


def kept_bytes(contribution: Contribution) -> int:
    """Return the bytes of all samples' gradients."""
    return 4 * contribution.batch_size * contribution.shape.numel()


def _seconds(outer: Outer, size: int, speed: Speed) -> tuple[float, float, float]:
    """Estimated seconds to ``keep``, by ``ghost`` and by ``drop``, the clipped sum included."""
    samples, positions, (left, right) = outer.batch_size, outer.positions, outer.shape
    product = samples * positions * left * right / speed.products
    grams = samples * positions * positions
    return (
        product + 3 * size / speed.traffic + (size / speed.pages if size > _FRESH else 0),
        product + grams * (left + right) / speed.products + 16 * grams / speed.traffic,
        2 * product + size / speed.traffic,
    )
