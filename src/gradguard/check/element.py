"""One direction, looked at closely: is the gradient wrong there, or does the function have a kink, a jump, a pole?

The derivatives from above and from below, at steps over ten decades, tell these apart. At a kink or a tie every value
between the two one-sided derivatives, output by output, is a subgradient and accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradguard.check.differences import Differences

_DECADES = 11
_MOST_STEPS = 30
_CLEAR = 20.0
_DECISIVE = 0.3
_ROUNDED = 1e-9
_SMALL = 1e-6


@dataclass(frozen=True)
class Diagnosis:
    """What one direction shows: ``kind`` is one of ok, kink, jump, singular, nan, mismatch, undecided."""

    kind: str
    is_wrong: bool
    analytical: float
    numerical: float
    bar: float
    step: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class _Step:
    """Derivatives from above and below at one step, of cotangent · outputs; NaN where the function is not finite."""

    size: float
    above: float
    below: float
    low: float
    high: float
    rounding: float
    """Of the derivatives at this step, from all outputs that any of the steps moves, as measured."""
    floor: float = 0.0
    """The same, as the dtype of the outputs has it: the least that it can be."""

    @property
    def central(self) -> float:
        return (self.above + self.below) / 2


class _Limit(NamedTuple):
    """What derivatives at smaller and smaller steps tend to, as seen from one step."""

    value: float
    bar: float
    step: float
    rounding: float


def examine(differences: Differences, direction: Tensor, sizes: list[float]) -> list[Diagnosis]:
    """Return what ``direction`` shows for each cotangent, from steps relative to each of ``sizes``."""
    steps = _steps(differences, direction, sizes)
    analytical = (differences.gradients * torch.where(direction != 0, direction, 0.0)).nan_to_num(0.0, 0.0, 0.0)
    broken = ~(differences.gradients[:, direction != 0].isfinite().all(dim=1))
    found, negligible = [], differences.negligible()
    for k in range(len(differences.cotangents)):
        own = differences.gradients[k][direction != 0]
        value = float(own.sum()) if bool(broken[k]) else float(analytical[k].sum())
        nothing = float(negligible[k]) / max(sizes)
        found.append(diagnose(value, steps[k], differences.relative, _typical(differences, k), nothing))
    return found


def diagnose(analytical: float, steps: list[_Step], relative: float, typical: float, nothing: float = 0.0) -> Diagnosis:
    """Return what the one-sided derivatives say of ``analytical``.

    ``typical`` is the size that a derivative of this function usually has: bars far below it are no lack of power.
    Below ``nothing`` all derivatives are rounding.
    """
    two_sided = [s for s in steps if math.isfinite(s.above) and math.isfinite(s.below)]
    typical = max([typical, *(abs(s.central) for s in two_sided)])
    jumps_above, jumps_below = _jumps(steps, "above"), _jumps(steps, "below")
    if jumps_above and jumps_below:
        return Diagnosis("jump", False, analytical, math.nan, math.inf, math.nan)
    if jumps_above or jumps_below or len(two_sided) < 3:
        side = "below" if jumps_above or _count(steps, "below") > _count(steps, "above") else "above"
        series = [(s.size, getattr(s, side), s.rounding) for s in steps if math.isfinite(getattr(s, side))]
        limits = _limits(series, 1)
        kind = "jump" if jumps_above or jumps_below else "singular"
    else:
        series = [(s.size, s.central, s.rounding) for s in two_sided]
        limits = _limits(series, 2)
        kind = "ok"
    if not limits:
        return Diagnosis("singular", False, analytical, math.nan, math.inf, math.nan)
    for value, bar, step, _ in _candidates(limits):
        allowed = 5 * bar + relative * max(abs(value), abs(analytical))
        decisive = bar < _DECISIVE * max(abs(value), abs(analytical)) or bar <= 1e-3 * typical
        if abs(analytical) <= nothing and abs(value) <= nothing + bar and bar <= 1e3 * nothing:
            return Diagnosis(kind, False, analytical, value, bar, step)
        if math.isfinite(analytical) and abs(value - analytical) <= allowed and decisive:
            return Diagnosis(kind, False, analytical, value, bar, step)
    chosen = _candidates(limits)[-1]
    value, bar, step, _ = chosen
    kink = _kink(two_sided) if kind == "ok" else []
    if kink and step < min(s.size for s in kink) and bar < _DECISIVE * max(abs(value), abs(analytical)):
        kink = []  # smaller steps have settled: what looked like a kink is curvature, or lies beside the point
    for s in kink:
        slack = 5 * s.rounding + 1e-6 * max(abs(s.low), abs(s.high)) + relative * abs(analytical)
        if s.low - slack <= analytical <= s.high + slack:
            return Diagnosis("kink", False, analytical, s.central, s.rounding, s.size, s.low, s.high)
    if _grows(series) and not abs(analytical) <= abs(value):
        return Diagnosis("singular", False, analytical, value, bar, step)
    if not math.isfinite(analytical):
        settled = bar < 1e-2 * max(abs(value), typical)
        if not settled and not kink:
            return Diagnosis("singular", False, analytical, value, bar, step)
        return Diagnosis("nan", True, analytical, value, bar, step)
    if abs(analytical) <= nothing and _is_constant(two_sided, value):
        return Diagnosis("jump", False, analytical, 0.0, bar, step)
    if kink:
        return Diagnosis(
            "kink", True, analytical, kink[-1].central, kink[-1].rounding, kink[-1].size, kink[-1].low, kink[-1].high
        )
    settled = bar < _DECISIVE * max(abs(value), abs(analytical)) and not _wavers(limits, chosen, analytical)
    if settled and abs(value - analytical) > 5 * bar:
        return Diagnosis("mismatch", True, analytical, value, bar, step)
    return Diagnosis("undecided", False, analytical, value, bar, step)


def _typical(differences: Differences, k: int) -> float:
    finite = differences.gradients[k][differences.gradients[k].isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _steps(differences: Differences, direction: Tensor, sizes: list[float]) -> list[list[_Step]]:
    function, base = differences.function, differences.base
    smallest = max(torch.finfo(one.value.dtype).eps for one in function.inputs)
    here = float(differences.point[direction != 0].abs().max())
    wanted = {10.0**-k * size for size in sizes if size > 0 for k in range(2, 2 + _DECADES)}
    wanted |= {10.0**-k for k in range(13, 22)} if here == 0 else set()
    chosen = sorted((h for h in wanted if h > 4 * smallest * here), reverse=True)
    chosen = chosen[:: math.ceil(len(chosen) / _MOST_STEPS)] if chosen else []
    found: list[list[_Step]] = [[] for _ in differences.cotangents]
    moved, lengths, quanta = torch.zeros_like(base, dtype=torch.bool), [], (_Quantum(base), _Quantum(base))
    for size in chosen:
        above = function.rounded(differences.point + size * direction)
        below = function.rounded(differences.point - size * direction)
        own = direction != 0
        up = _length(torch.where(own, above - differences.point, 0.0), direction)
        down = _length(torch.where(own, differences.point - below, 0.0), direction)
        if up <= 0 or down <= 0:
            continue
        rise = torch.where(differences.usable, function.values(above) - base, 0.0)
        fall = torch.where(differences.usable, base - function.values(below), 0.0)
        for quantum, change in zip(quanta, (rise, fall), strict=True):
            quantum.see(change)
        for k, v in enumerate(differences.cotangents):
            from_above, from_below = v * rise / up, v * fall / down
            low, high = torch.minimum(from_above, from_below).sum(), torch.maximum(from_above, from_below).sum()
            found[k].append(_Step(size, float(from_above.sum()), float(from_below.sum()), float(low), float(high), 0.0))
        moved |= ((rise != 0) & rise.isfinite()) | ((fall != 0) & fall.isfinite())
        lengths.append(min(up, down))
    least = (differences.cotangents.abs() @ torch.where(moved, differences.rounding, 0.0)).tolist()
    each = torch.maximum(differences.noise, torch.maximum(*(quantum.size() for quantum in quanta)))
    noise = (differences.cotangents.abs() @ torch.where(moved, each, 0.0)).tolist()
    return [
        [replace(s, rounding=noise[k] / n, floor=least[k] / n) for s, n in zip(one, lengths, strict=True)]
        for k, one in enumerate(found)
    ]


class _Quantum:
    """The least that an output moves by, if small steps leave it where it is: then it is rounded to that."""

    def __init__(self, base: Tensor) -> None:
        self.least, self.most = torch.full_like(base, torch.inf), torch.zeros_like(base)
        self.stuck = torch.zeros_like(base, dtype=torch.bool)

    def see(self, change: Tensor) -> None:
        """Take in what one step does, the largest steps first."""
        size = change.abs().nan_to_num(0.0, 0.0, 0.0)
        self.stuck |= (size == 0) & (self.most > 0)
        self.least = torch.where(size > 0, torch.minimum(self.least, size), self.least)
        self.most = torch.maximum(self.most, size)

    def size(self) -> Tensor:
        """Return the quantum of each output, 0 for those that are not rounded, or that jump."""
        return torch.where(self.stuck & (self.least < _ROUNDED * self.most), self.least, 0.0)


def _is_constant(steps: list[_Step], slope: float) -> bool:
    """Tell whether small steps change nothing at all where ``slope`` would show: a function rounded on purpose."""
    return any(s.above == 0 == s.below and abs(slope) > 1e3 * s.floor for s in steps)


def _grows(series: list[tuple[float, float, float]]) -> bool:
    """Tell whether the derivative is still growing at the smallest steps."""
    last = [abs(derivative) for _, derivative, _ in series[-5:]]
    return len(last) == 5 and all(b > 1.2 * a for a, b in pairwise(last)) and last[-1] > 8 * last[0]


def _length(taken: Tensor, direction: Tensor) -> float:
    """Return how far a step really went along ``direction``."""
    return float((taken @ direction) / (direction @ direction))


def _limits(values: list[tuple[float, float, float]], order: int) -> list[_Limit]:
    """Return what (step, derivative, rounding), largest steps first, tend to: extrapolated once."""
    raw = []
    for (big, first, _), (small, second, rounding) in pairwise(values):
        raw.append((second + (second - first) / ((big / small) ** order - 1), 2 * rounding, small))
    found = []
    for j, (value, rounding, step) in enumerate(raw):
        around = [abs(value - raw[i][0]) for i in (j - 1, j + 1) if 0 <= i < len(raw)]
        if around:
            found.append(_Limit(value, max(around) + rounding, step, rounding))
    return found


def _candidates(limits: list[_Limit]) -> list[_Limit]:
    """Return the most accurate limit, and that of smaller steps which have settled elsewhere, to be preferred."""
    best = min(limits, key=lambda limit: limit.bar)
    smaller = [one for one in limits if one.step < best.step and abs(one.value - best.value) > 5 * (one.bar + best.bar)]
    settled = [one for one in smaller if one.bar < 1e-3 * max(abs(one.value), abs(best.value))]
    return [best, min(settled, key=lambda limit: limit.bar)] if settled else [best]


def _wavers(limits: list[_Limit], chosen: _Limit, analytical: float) -> bool:
    """Tell whether a small deviation is no more than that of smaller steps: as with a solver that stops early."""
    off = abs(chosen.value - analytical)
    below = [one for one in limits if chosen.step / 30 < one.step < chosen.step]
    return off < _SMALL * abs(chosen.value) and any(abs(o.value - chosen.value) > off + o.rounding for o in below)


def _kink(steps: list[_Step]) -> list[_Step]:
    """Return the steps at which the one-sided derivatives differ, clearly and by the same amount over a decade."""
    clear = [s for s in steps if abs(s.above - s.below) > _CLEAR * s.rounding or s.high - s.low > _CLEAR * s.rounding]
    kinked = []
    for s in clear:
        width = s.high - s.low
        alike = [o for o in clear if 0.5 * width <= o.high - o.low <= 2 * width]
        if max((o.size for o in alike), default=0.0) >= 9 * min((o.size for o in alike), default=1.0) and width > 0:
            kinked.append(s)
    return kinked


def _jumps(steps: list[_Step], side: str) -> bool:
    """Tell whether the increment itself does not shrink with the step."""
    rises = [(s.size, abs(getattr(s, side)) * s.size, s.rounding * s.size) for s in steps]
    rises = [(size, rise, noise) for size, rise, noise in rises if math.isfinite(rise)][-8:]
    if len(rises) < 4 or rises[0][0] < 90 * rises[-1][0]:
        return False
    heights = [rise for _, rise, _ in rises]
    return min(heights) > 0.5 * max(heights) and all(rise > 100 * noise for _, rise, noise in rises)


def _count(steps: list[_Step], side: str) -> int:
    return sum(math.isfinite(getattr(s, side)) for s in steps)
