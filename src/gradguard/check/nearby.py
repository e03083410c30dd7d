"""Ties of several values, where the derivative at the point itself is that of none of the pieces which meet there.

The median of five equal values changes with none of them alone, and its gradient of 1/5 each is right all the same: it
lies between the derivatives, 0 and 1, at points nearby.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradguard.check.differences import Differences, mean_size

_POINTS = 64
_RADII = ((1e-5, 1e-3), (1e-7, 1e-2))
_CLEAR = 1e-3
_LOW_RADII = ((1e-2, 1e-1), (3e-3, 1e-1))
"""Relative distances from the point, and steps relative to these: between smooth derivatives less and less fits."""


def is_among_nearby(differences: Differences, direction: Tensor, which: list[int], generator: torch.Generator) -> bool:
    """Return whether the gradient along ``direction`` lies between the derivatives at points nearby, output by output.

    For the cotangents ``which``. At two distances: pieces that meet at the point differ at both, smooth derivatives no
    longer do at the smaller one.
    """
    radii = _LOW_RADII if differences.is_low else _RADII
    return all(_is_between(differences, direction, which, *radius, generator) for radius in radii)


def _apart(differences: Differences, generator: torch.Generator) -> Tensor:
    """Return moves that take tied outputs apart the way the gradient itself has them.

    Where eigenvalues are equal, any basis is right, and one drawn at random is never the one that the gradient took.
    """
    function = differences.function
    rising = torch.linspace(0.5, 1.5, function.size, dtype=torch.float64) * function.with_graph()
    order = torch.randperm(function.size, generator=generator)
    moves = torch.stack([function.gradient(None, one) for one in (rising, rising.flip(0), rising[order])])
    moves = moves.nan_to_num(0.0, 0.0, 0.0)
    return moves / moves.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def _is_between(
    differences: Differences,
    direction: Tensor,
    which: list[int],
    near: float,
    relative: float,
    generator: torch.Generator,
) -> bool:
    point, function = differences.point, differences.function
    radius = near * torch.where(point.isfinite(), torch.maximum(point.abs(), mean_size(point)), 0.0)
    step = relative * radius * direction
    length = 2 * (step @ direction) / (direction @ direction)
    rates = []
    for count in [_POINTS, 0] if differences.are_few else [*[1] * _POINTS, 0]:
        drawn = torch.randn((count, *radius.shape), generator=generator, dtype=torch.float64)
        centers = point + radius * (drawn if count else _apart(differences, generator))
        change = function.values_at(centers + step) - function.values_at(centers - step)
        rates.append(differences.usable_part(change) / length)
    stacked = torch.cat(rates)
    if not bool(stacked.isfinite().all()):
        return False
    for v, gradient in zip(differences.cotangents[which], differences.gradients[which], strict=True):
        low, high = (v * stacked).amin(dim=0), (v * stacked).amax(dim=0)
        moved = float((v.abs() * torch.where(low != high, differences.noise, 0.0)).sum())
        noise, analytical = moved / float(step.abs().max()), float(gradient @ direction)
        least, most = float(low.sum()), float(high.sum())
        if most - least < max(20 * noise, _CLEAR * abs(analytical)):  # nothing but one derivative, and rounding
            return False
        slack = 5 * noise + 1e-6 * (most - least)
        if not least - slack <= analytical <= most + slack:
            return False
    return True
