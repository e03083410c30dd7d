"""Numerical derivatives from forward calls alone, each with a bar that says how far off it may be.

Central differences at a ladder of steps, extrapolated (Richardson): the change from one step to the next shows the
truncation error, the rounding of the outputs the rest. So no step has to be chosen. What is extrapolated is the
*disagreement* with the gradient that is checked, where both see the step that was really taken after rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradguard.check.flat_vectors import are_finite, clear_of_zero, mean_size, norm, numbers
from gradguard.check.function import Function

STEPS = tuple(1e-3 / 2**k for k in (0, 1, 2, 3)) + tuple(1e-3 / 8 / 4**k for k in range(1, 9))
LOW_STEPS = tuple(6e-2 / 2**k for k in range(10))
"""Relative steps, from the largest: a few close ones that do for a smooth function, then down past kinks nearby.

For float32, where rounding is what limits, they begin further out."""

_AT_ONCE = 3
_FEW = 10_000
"""Up to this many inputs and outputs, several points are computed at a time."""

_AMPLIFIED = 1.5
"""Extrapolation from a step and its double multiplies the rounding at the smaller step by this."""

MULTIPLE = 4.0
RELATIVE = {torch.float64: 5e-9, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""The tolerated error of a gradient beside the bar, relative to the norm of gradient · direction."""


class Disagreement(NamedTuple):
    """Numerical minus analytical derivative of cotangent · outputs along one direction."""

    error: float
    bar: float
    """How far off ``error`` may be; infinite if nothing could be computed."""
    scale: float
    """The 2-norm of gradient · direction, element by element."""
    size: float
    """The larger of the 2-norm and the derivative at large steps."""

    relative: float
    """The tolerated error beside the bar, relative to ``scale``."""

    @property
    def allowed(self) -> float:
        """The disagreement that is no finding."""
        return MULTIPLE * self.bar + self.relative * self.scale

    @property
    def is_wrong(self) -> bool:
        """Whether the disagreement is larger than its bar allows."""
        return abs(self.error) > self.allowed


class Limit(NamedTuple):
    """The limit of derivatives as the step goes to 0, estimated from one step and the larger step before it."""

    value: float
    bar: float
    """How far off ``value`` may be."""
    step: float
    """The smaller of the two steps."""
    rounding: float
    """The part of ``bar`` that is due to rounding."""


NOTHING = Limit(math.nan, math.inf, math.nan, math.nan)
"""The limit where there is none."""


class Differences:
    """The function at its point, a cotangent, and the gradient that is checked."""

    def __init__(self, function: Function, cotangent: Tensor, gradient: Tensor, rtol: float = 0.0) -> None:
        self.function, self.base, self.cotangent, self.gradient = function, function.base, cotangent, gradient
        self.point = function.point
        outputs = {one.dtype for one in function.outputs}
        self.rtol = rtol
        self.relative = max(rtol, *(RELATIVE[dtype] for dtype in outputs))
        self.input_eps = max(torch.finfo(one.dtype).eps for one in function.inputs)
        self.coarsest = max(self.input_eps, *(torch.finfo(dtype).eps for dtype in outputs))
        self.is_low = self.coarsest > 1e-10
        self.noise, self.has_noise = self.rounding, False
        self.usable = self.base.isfinite()
        self.is_finite = bool(self.usable.all())
        self.are_few = len(self.point) + len(self.base) <= _FEW

    @property
    def rounding(self) -> Tensor:
        """How far off each output is by rounding to its dtype."""
        return self.function.rounding_of(self.base)

    def measure_noise(self, direction: Tensor, concerned: Tensor) -> None:
        """Estimate the rounding errors of the outputs from second differences at tiny steps, which show nothing else.

        Each side of the point by itself, so that a kink or a jump at the point is not taken for noise. Outputs that the
        smallest step does not move may be quantised: those ``concerned`` are looked at with larger ones, where noise is
        what both sides show.
        """
        noise, still = self.rounding, concerned
        offset = torch.where(direction != 0, self.point.abs().mul_(direction.sign()).mul_(4e3 * self.input_eps), 0.0)
        # A product of x + a and y - a hardly moves.
        offset *= torch.linspace(0.5, 1, len(offset), dtype=torch.float64, device="cpu")
        for samples in (3, 8, 8, 8):
            spread, moved = self._second_differences(offset, samples)
            noise = torch.where(still, torch.maximum(noise, spread), noise) if samples > 3 else noise.maximum(spread)
            still = still & ~moved
            if self.is_low or not bool(still.any()) or not bool(offset.any()):
                break
            offset *= 100
        self.noise, self.has_noise = noise, True

    def _second_differences(self, offset: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Return the largest second difference along multiples of ``offset`` on either side, and which outputs move.

        Of three samples the larger side counts, of more the smaller one.
        """
        moved, spreads = torch.zeros_like(self.usable), []
        for sign in (1, -1):
            rows = (self.function.values((sign * k * offset).add_(self.point)) for k in range(1, samples + 1))
            largest, last = torch.zeros_like(self.base), None
            for one, other in pairwise(rows):
                change = other - one
                moved |= change != 0
                if last is not None:
                    torch.maximum(largest, last.sub_(change).abs_().nan_to_num_(0.0, torch.inf), out=largest)
                last = change
            spreads.append(largest)
        either = torch.maximum if samples == 3 else torch.minimum
        return either(*spreads).mul_(2 / math.sqrt(6)), moved

    def reaches_a_pole(self, direction: Tensor) -> bool:
        """Tell whether an output that is not finite at the point is finite, or another infinity, one step further."""
        if self.is_finite:
            return False
        beside = [self.function.values(self.point + step * direction) for step in (1e-3, -1e-3)]
        return any(bool((~self.usable & (one != self.base) & ~one.isnan()).any()) for one in beside)

    def jumps(self, direction: Tensor) -> bool:
        """Tell whether an output jumps: steps along ``direction`` change it by as much, however small they are."""
        for side in (1e-9, -1e-9):
            sizes = [self.function.values(self.point + step * direction) - self.base for step in (side, side / 8)]
            large, small = (torch.where(self.usable, size, 0.0).abs() for size in sizes)
            if not bool(((small > 0.5 * large) & (large > 100 * self.noise)).any()):
                return False
        return True

    def along(self, direction: Tensor, *, with_noise: bool = False) -> Disagreement:
        """Return how much the numerical derivative along ``direction`` and the gradient disagree.

        From as many steps as it takes. With ``with_noise``, noise is measured if it is not known, of outputs that the
        largest steps move.
        """
        product = direction * self.gradient
        scale, enough = norm(product), 1e-11 * float(product.abs_().sum())
        found: list[tuple[float, float]] = []
        moved, best = torch.zeros_like(self.usable), NOTHING._replace(value=0.0)
        steps, together = LOW_STEPS if self.is_low else STEPS, _AT_ONCE if self.are_few else 1
        for start in range(0, len(steps), together):
            tried = steps[start : start + together]
            gone, change = self.central(numbers(tried)[:, None] * direction)
            gone = torch.where(direction != 0, gone, 0.0)  # of points that are infinite
            apart = (change @ self.cotangent - gone @ self.gradient).tolist()
            usable = [i for i, one in enumerate(apart) if math.isfinite(one)]
            found += [(tried[i], apart[i] / (2 * tried[i])) for i in usable]
            moved |= change[usable].any(dim=0)
            if with_noise and not self.has_noise:
                self.measure_noise(direction, moved)
            noise = self.rounding_of(moved)
            limits = extrapolated([(step, one, noise / step) for step, one in found], 2, _AMPLIFIED)
            best = min(limits, key=_bar, default=best)
            if _bar(best) <= enough or (len(limits) > 2 and _bar(best) <= 2 * limits[-1].rounding):
                break  # smaller steps have nothing to add: accurate enough, or rounding takes over
        largest = max((abs(one) for _, one in found[:2]), default=0.0)
        return Disagreement(best.value, best.bar, scale, max(scale, largest), self.relative)

    def central(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far the point and the outputs move from below the point to above it, by each of ``offsets``."""
        above = self.function.rounded(self.point + offsets)
        values = self.function.values_at(above)
        below = self.function.rounded(self.point - offsets)
        return above.sub_(below), self.usable_part(values.sub_(self.function.values_at(below)))

    def rounding_of(self, moved: Tensor) -> float:
        """Return how far off cotangent · outputs may be by rounding, from the outputs that move along a direction.

        An output that one step does not move, and a larger one does, is off by rounding there as well.
        """
        noise = self.cotangent.abs() * torch.where(moved, self.noise, 0.0)
        total = float(noise.sum())
        return min(3 * float(noise.norm()), total) if self.is_low else total

    @property
    def negligible(self) -> float:
        """The size below which cotangent · change, for relative changes of the inputs, is rounding alone."""
        few = min(1e3, 1e-3 / self.coarsest)
        return 2 * few * float(self.cotangent.abs().dot(torch.where(self.usable, self.rounding, 0.0)))

    def usable_part(self, change: Tensor) -> Tensor:
        """Return changes of the outputs, 0 for those that are not finite at the point."""
        return change if self.is_finite else torch.where(self.usable, change, 0.0)


def extrapolated(derivatives: Sequence[tuple[float, float, float]], order: int, amplified: float = 2.0) -> list[Limit]:
    """Return a limit for each two neighbouring steps, by one Richardson extrapolation.

    ``derivatives`` are (step, derivative, rounding), largest steps first.

    ``order`` is that of the truncation error: 2 for central differences, 1 for one-sided ones. Rounding counts
    ``amplified`` times that of the smaller step.
    """
    raw = []
    for (big, first, _), (small, second, rounding) in pairwise(derivatives):
        ratio = math.prod([big / small] * order)  # infinite beside subnormal numbers, where ** raises
        raw.append((second + (second - first) / (ratio - 1), small, amplified * rounding))
    changes = [abs(one - other) for (one, *_), (other, *_) in pairwise(raw)]
    around = pairwise([*changes[:1], *changes, *changes[-1:]])
    return [Limit(v, max(pair) + noise, step, noise) for pair, (v, step, noise) in zip(around, raw, strict=False)]


def _bar(limit: Limit) -> float:
    return limit.bar if limit.bar == limit.bar else math.inf


def directions(function: Function, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield random directions: signs, sized in turn by max(|x|, mean |x|) and by |x|, where that is not 0.

    By half to one and a half times that, so that equal errors with equal signs do not cancel.
    """
    point = function.point
    while True:
        for keeps_zeros in (False, True):
            found = clear_of_zero(point.shape, generator)
            for part, own in zip(point.split(function.sizes), found.split(function.sizes), strict=True):
                mean, sizes = mean_size(part), part.abs()
                sizes = sizes if are_finite(sizes) else torch.where(sizes.isfinite(), sizes, 0.0)
                own *= torch.where(sizes == 0, mean, sizes) if keeps_zeros else torch.maximum(sizes, mean, out=sizes)
            yield found
