"""Ties: points where smooth pieces of a function meet, and its derivative equals that of none of the pieces.

The median of five equal values does not change with any of them alone. Its gradient of 1/5 each is still right, because
1/5 lies between the derivatives 0 and 1 of nearby points.

A value between nearby derivatives is evidence only if pieces do meet at the point. Along a ray from the point, the
derivative at shrinking distances tends to a limit: the derivative of one piece. If the limits of two rays differ by
more than their uncertainty, two pieces meet. A smooth function has one limit along all rays; differences between its
derivatives at nearby points prove nothing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradguard.check.differences import Differences
from gradguard.check.flat_vectors import finite, mean_size, normal

_RAYS = 64
_DISTANCES, _STEP = (1e-5, 1e-6, 1e-7), 1e-2
_LOW_DISTANCES, _LOW_STEP = (3e-2, 1e-2, 3e-3), 1e-1
"""Distances from the point relative to its size, and steps relative to these distances."""
_CLEAR = 20.0
_SETTLED = 0.1
"""A limit is known if its uncertainty is at most this share of the spread between the limits of all rays."""
_MOST = 0.8


class Pieces(NamedTuple):
    """The interval that contains the derivatives of the pieces; the lows and the highs are sums over outputs."""

    low: float
    high: float


def pieces_around(differences: Differences, direction: Tensor, generator: torch.Generator) -> Pieces | None:
    """Return the interval of the derivatives, along ``direction``, of the pieces that meet at the point.

    Returns:
        The interval; None if nothing proves that pieces meet, or if the gradient is outside of the interval.
    """
    v, analytical = differences.cotangent, float(differences.gradient @ direction)
    limits, bars = _limits(differences, direction, generator)
    moves = (limits != 0).any(dim=0) & (v != 0)
    if not bool(moves.any()) or not bool(limits[:, moves].isfinite().all()):
        return None
    values, off = (v * limits)[:, moves], (v.abs() * bars)[:, moves]
    spread = values.amax(dim=0) - values.amin(dim=0)
    known = off <= _SETTLED * spread
    is_tied = (known.double().mean(dim=0) >= _MOST) & (spread > _CLEAR * off.median(dim=0).values)
    if not bool(is_tied.any()):
        return None
    low = torch.where(known, values, torch.inf).amin(dim=0)
    high = torch.where(known, values, -torch.inf).amax(dim=0)
    middle, bar = values.median(dim=0).values, off.median(dim=0).values
    least = float(torch.where(is_tied, low, middle).sum())
    most = float(torch.where(is_tied, high, middle).sum())
    slack = float(bar.sum()) + 1e-6 * (most - least)
    return Pieces(least, most) if least - slack <= analytical <= most + slack else None


def _limits(differences: Differences, direction: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the limits of the outputs' derivatives, one row per ray, and the error bar of each limit."""
    point, function = differences.point, differences.function
    distances, relative = (_LOW_DISTANCES, _LOW_STEP) if differences.is_low else (_DISTANCES, _STEP)
    size = torch.where(point.isfinite(), torch.maximum(point.abs(), mean_size(point)), 0.0)
    moved = direction != 0
    unit = direction / float((direction[moved].abs() / size[moved]).max())
    rays = normal((_RAYS, *size.shape), generator)
    rays = size * torch.cat([rays, _apart(differences, generator.clone_state())])
    rates = []
    whole = 2 * relative * (unit @ direction) / (direction @ direction)
    for distance in distances:
        step, rows = relative * distance * unit, []
        for some in (point + distance * rays).split(len(rays) if differences.are_few else 1):
            change = function.values_at(some + step) - function.values_at(some - step)
            rows.append(differences.usable_part(change) / (whole * distance))
        rates.append(torch.cat(rows))
    first, second = (
        small + (small - large) / (first / second - 1)
        for (large, small), (first, second) in zip(pairwise(rates), pairwise(distances), strict=True)
    )
    weight = 1 + 2 / (distances[-2] / distances[-1] - 1)
    rounding = weight * differences.noise / (0.5 * whole * distances[-1])
    return second, (second - first).abs() + 3 * rounding


def _apart(differences: Differences, generator: torch.Generator) -> Tensor:
    """Return moves of the inputs, taken from gradients, that separate tied outputs.

    For equal eigenvalues any basis of eigenvectors is right. A random move never selects the basis that the backward
    used; a move along a gradient does.
    """
    function = differences.function
    rising = torch.linspace(0.5, 1.5, function.size, dtype=torch.float64, device="cpu") * function.with_graph()
    order = torch.randperm(function.size, generator=generator, device="cpu")
    moves = torch.stack([function.gradient(None, one) for one in (rising, rising.flip(0), rising[order])])
    moves = finite(moves)
    return moves / moves.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
