"""Classify one direction: the gradient is wrong, or the function has a kink, a jump or a pole.

The derivatives from above and from below, at steps over ten decades, tell these cases apart. At a kink or a tie, every
value between the two one-sided derivatives of each output is a subgradient, and accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gradguard.check.differences import LOW_STEPS, NOTHING, Differences, Limit, extrapolated
from gradguard.check.flat_vectors import finite, norm, numbers

_DECADES = 11
_MOST_STEPS = 40
_APART = 0.7
_CLEAR = 20.0
_DECISIVE = 0.3
_ROUNDED = 1e-9
_SMALL = 1e-6
_FEW_ROUNDINGS = 5.0
LITTLE_OF_TYPICAL = 1e-3
"""A bar is narrow enough below this share of a typical derivative."""


@dataclass(frozen=True)
class ElementVerdict:
    """The verdict on one direction: ``kind`` is one of ok, kink, jump, singular, nan, mismatch, undecided."""

    kind: str
    is_wrong: bool
    analytical: float
    numerical: Limit
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class _StepSize:
    """The one-sided derivatives of cotangent · outputs at one step; NaN where the function is not finite."""

    size: float
    above: float
    below: float
    low: float
    high: float
    rounding: float
    """The measured rounding error of the derivatives at this step, summed over all outputs that any step moves."""
    floor: float = 0.0
    """The rounding error implied by the dtype of the outputs, a lower bound of ``rounding``."""

    @property
    def central(self) -> Limit:
        """The central difference at this step, without extrapolation."""
        return Limit((self.above + self.below) / 2, self.rounding, self.size, self.rounding)

    def is_level(self, relative: float) -> bool:
        """Return whether the function rises equally on both sides up to rounding, like a loss at its minimum."""
        slope = max(abs(self.above), abs(self.below))
        return abs(self.central.value) <= max(_FEW_ROUNDINGS * self.rounding, relative * slope)


def examine(differences: Differences, direction: Tensor, sizes: Sequence[float]) -> ElementVerdict:
    """Return the verdict on ``direction``, computed from steps relative to each of ``sizes``."""
    moved = direction != 0
    own = differences.gradient[moved]
    value = float((own * direction[moved]).sum()) if bool(own.isfinite().all()) else float(own.sum())
    steps = _steps(differences, direction, sizes)
    kind, is_wrong, *shown = _diagnosis(differences, value, steps, differences.negligible / max(sizes))
    return ElementVerdict(kind, is_wrong, value, *shown)


def _diagnosis(differences: Differences, analytical: float, steps: list[_StepSize], nothing: float) -> tuple[Any, ...]:
    """Return the fields of `ElementVerdict` without ``analytical``; low and high only at a kink.

    A derivative below ``nothing`` is rounding alone.
    """
    relative, typical = differences.relative, typical_size(differences)
    two_sided = [s for s in steps if math.isfinite(s.above) and math.isfinite(s.below)]
    if analytical == typical == 0 and two_sided and all(s.is_level(relative) for s in two_sided):
        return "ok", False, _most_accurate([s.central for s in two_sided])
    # A bar far below the typical derivative is narrow enough, even if this derivative is smaller.
    typical = max([typical, *(abs(s.central.value) for s in two_sided)])
    kind, series, order = _usable_side(steps, two_sided)
    limits = extrapolated(series, order)
    if not limits:
        return kind, False, NOTHING
    candidates = _candidates(limits)
    for one in candidates:
        is_nothing = abs(one.value) <= nothing + one.bar and one.bar <= 1e3 * nothing
        if abs(analytical) <= nothing and is_nothing:
            return kind, False, one
        size = max(abs(one.value), abs(analytical))
        is_narrow = one.bar < _DECISIVE * size or one.bar <= LITTLE_OF_TYPICAL * typical
        if math.isfinite(analytical) and is_narrow and abs(one.value - analytical) <= 5 * one.bar + relative * size:
            return kind, False, one
    chosen = candidates[-1]
    decisive = chosen.bar < _DECISIVE * max(abs(chosen.value), abs(analytical))
    kink = _kink(two_sided) if kind == "ok" else []
    if kink and decisive and chosen.step < min(s.size for s in kink):
        kink = []  # smaller steps have settled: the apparent kink is curvature, or is beside the point
    between = _subgradients(kink) if kink else None
    if between is not None:
        slack = 5 * between.rounding + relative * max(abs(between.low), abs(between.high), abs(analytical))
        if between.low - slack <= analytical <= between.high + slack:
            return "kink", False, between.central, between.low, between.high
    last = [abs(derivative) for _, derivative, _ in series[-5:]]
    grows = len(last) == 5 and all(b > 1.2 * a for a, b in pairwise(last)) and last[-1] > 8 * last[0]
    if grows and not abs(analytical) <= abs(chosen.value):
        return "singular", False, chosen
    if not math.isfinite(analytical):
        has_derivative = bool(kink) or chosen.bar < 1e-2 * max(abs(chosen.value), typical)
        return "nan" if has_derivative else "singular", has_derivative, chosen
    # A function that rounds on purpose is constant under small steps that would show its slope.
    is_constant = any(s.above == 0 == s.below and abs(chosen.value) > 1e3 * s.floor for s in two_sided)
    if abs(analytical) <= nothing and is_constant:
        return "jump", False, chosen._replace(value=0.0)
    if between is not None:
        return "kink", True, between.central, between.low, between.high
    off = abs(chosen.value - analytical)
    # With a solver that stops early, the deviation is small, and does not shrink with the step.
    below = [one for one in limits if chosen.step / 30 < one.step < chosen.step]
    wavers = off < _SMALL * abs(chosen.value) and any(abs(o.value - chosen.value) > off + o.rounding for o in below)
    if decisive and off > 5 * chosen.bar and not wavers:
        return "mismatch", True, chosen
    return "undecided", False, chosen


def _usable_side(
    steps: list[_StepSize], two_sided: list[_StepSize]
) -> tuple[str, list[tuple[float, float, float]], int]:
    """Return the kind of the point, triples (step, derivative, rounding), and the order of convergence.

    The triples come from the sides on which the function is continuous. The order is 2 for central differences and 1
    for one side.
    """
    above, below = _series(steps, "above"), _series(steps, "below")
    jumps_above, jumps_below = _jumps(above), _jumps(below)
    if jumps_above and jumps_below:
        return "jump", [], 1
    if not (jumps_above or jumps_below) and len(two_sided) >= 3:
        return "ok", [(s.size, s.central.value, s.rounding) for s in two_sided], 2
    series = below if jumps_above or len(below) > len(above) else above
    return "jump" if jumps_above or jumps_below else "singular", series, 1


def _series(steps: list[_StepSize], name: str) -> list[tuple[float, float, float]]:
    """Return (step, derivative, rounding) for each step whose derivative ``name`` is finite."""
    return [(s.size, getattr(s, name), s.rounding) for s in steps if math.isfinite(getattr(s, name))]


def typical_size(differences: Differences) -> float:
    """Return the root mean square of the finite elements of the gradient."""
    finite = differences.gradient[differences.gradient.isfinite()]
    return norm(finite) / max(1, len(finite)) ** 0.5


def _steps(differences: Differences, direction: Tensor, sizes: Sequence[float]) -> list[_StepSize]:
    function, base, point, own = differences.function, differences.base, differences.point, direction != 0
    found: list[list[float]] = []
    moved, quanta = torch.zeros_like(base, dtype=torch.bool), (_Quantum(base), _Quantum(base))
    chosen = _chosen_sizes(differences, float(point[own].abs().max()), sizes)
    together = max(1, len(chosen)) if differences.are_few else 1
    for start in range(0, len(chosen), together):
        block = numbers(chosen[start : start + together])[:, None]
        above, below = function.rounded(point + block * direction), function.rounded(point - block * direction)
        up, down = (  # the distance along the direction that remains after rounding, one step per row
            torch.where(own, taken, 0.0) @ direction[:, None] / (direction @ direction)
            for taken in (above - point, point - below)
        )
        taken = ((up > 0) & (down > 0))[:, 0]
        if not bool(taken.any()):
            continue
        up, down = up[taken], down[taken]
        rise = differences.usable_part(function.values_at(above[taken]) - base)
        fall = differences.usable_part(base - function.values_at(below[taken]))
        for quantum, change in zip(quanta, (rise, fall), strict=True):
            quantum.see(change)
            moved |= ((change != 0) & change.isfinite()).any(dim=0)
        from_above, from_below = differences.cotangent * rise / up, differences.cotangent * fall / down
        low, high = torch.minimum(from_above, from_below), torch.maximum(from_above, from_below)
        sums = [one.sum(dim=1, keepdim=True) for one in (from_above, from_below, low, high)]
        found += torch.cat([block[taken], *sums, torch.minimum(up, down)], dim=1).tolist()
    shares = differences.cotangent.abs() * moved
    floor = float(shares @ finite(differences.rounding))
    each = torch.maximum(differences.noise, torch.maximum(*(quantum.size() for quantum in quanta)))
    noise = float(shares @ finite(each))
    return [
        _StepSize(size, above, below, low, high, noise / length, floor / length)
        for size, above, below, low, high, length in found
    ]


def _chosen_sizes(differences: Differences, here: float, sizes: Sequence[float]) -> list[float]:
    """Return steps over ten decades below each of ``sizes``, the largest first; ``here`` is the coordinate's size."""
    wanted = {10.0**-k * size for size in sizes for k in range(2, 2 + _DECADES)}
    wanted |= {10.0**-k for k in range(13, 22)} if here == 0 else set()
    wanted |= {step * size for size in sizes for step in LOW_STEPS} if differences.is_low else set()
    chosen: list[float] = []
    for h in sorted((h for h in wanted if h > 4 * differences.input_eps * here), reverse=True):
        # Nearly equal steps would agree whatever their error.
        chosen += [h] if not chosen or h < _APART * chosen[-1] else []
    return chosen[:: max(1, math.ceil(len(chosen) / _MOST_STEPS))]


class _Quantum:
    """The quantum of each output that is rounded to multiples of one, and that small steps leave unchanged."""

    def __init__(self, base: Tensor) -> None:
        self.least, self.most = torch.full_like(base, torch.inf), torch.zeros_like(base)
        self.stuck = torch.zeros_like(base, dtype=torch.bool)

    def see(self, changes: Tensor) -> None:
        """Update with the changes of the outputs, one row per step, the largest step first."""
        sizes = finite(changes).abs()
        before = torch.cat([self.most[None], sizes]).cummax(dim=0).values
        self.stuck |= ((sizes == 0) & (before[:-1] > 0)).any(dim=0)
        self.least = torch.minimum(self.least, torch.where(sizes > 0, sizes, torch.inf).amin(dim=0))
        self.most = before[-1]

    def size(self) -> Tensor:
        """Return the quantum of each output; 0 for an output that is not rounded, or that jumps."""
        return torch.where(self.stuck & (self.least < _ROUNDED * self.most), self.least, 0.0)


def _candidates(limits: list[Limit]) -> list[Limit]:
    """Return the most accurate limit, then a preferred one if smaller steps have settled at another value."""
    best = _most_accurate(limits)
    smaller = [one for one in limits if one.step < best.step and abs(one.value - best.value) > 5 * (one.bar + best.bar)]
    settled = [one for one in smaller if one.bar < 1e-3 * max(abs(one.value), abs(best.value))]
    return [best, _most_accurate(settled)] if settled else [best]


def _most_accurate(limits: list[Limit]) -> Limit:
    return min(limits, key=lambda limit: limit.bar)


def _kink(steps: list[_StepSize]) -> list[_StepSize]:
    """Return the steps at which the one-sided derivatives clearly differ, by similar amounts over about a decade."""
    clear = [s for s in steps if max(abs(s.above - s.below), s.high - s.low) > _CLEAR * s.rounding]
    kinked = []
    for s in clear:
        width = s.high - s.low
        alike = [o.size for o in clear if 0.5 * width <= o.high - o.low <= 2 * width]
        if width > 0 and max(alike) >= 9 * min(alike):
            kinked.append(s)
    return kinked


def _subgradients(kink: list[_StepSize]) -> _StepSize:
    """Return the limits of the one-sided derivatives as a `_StepSize` whose ``rounding`` is their error bar."""
    sides = []
    for side in ("low", "high"):
        series = [(s.size, getattr(s, side), s.rounding) for s in kink]
        size, value, rounding = series[-1]
        sides.append(_most_accurate(extrapolated(series, 1) or [Limit(value, rounding, size, rounding)]))
    low, high = sides
    bar = max(low.bar, high.bar)
    return replace(kink[-1], size=min(low.step, high.step), low=low.value, high=high.value, rounding=bar)


def _jumps(series: list[tuple[float, float, float]]) -> bool:
    """Return whether the function jumps: its increment does not shrink with the step."""
    last = series[-8:]
    if len(last) < 4 or last[0][0] < 90 * last[-1][0]:
        return False
    heights = [abs(derivative) * size for size, derivative, _ in last]
    return min(heights) > 0.5 * max(heights) and all(abs(d) > 100 * rounding for _, d, rounding in last)
