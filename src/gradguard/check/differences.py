"""Numerical derivatives from forward calls alone, each with an error bar.

Central differences are computed at a ladder of steps and extrapolated (Richardson). The change between steps measures
the truncation error; the rounding of the outputs adds the rest of the bar. The caller therefore chooses no step.
The extrapolated quantity is the *disagreement* between the difference and the checked gradient. Both use the step that
remains after the inputs were rounded to their dtypes.
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
"""Relative steps, from the largest: a few close ones, enough for a smooth function, then smaller than nearby kinks.

The steps for float32 start larger, because rounding limits its accuracy."""

_AT_ONCE = 3
_FEW = 10_000
"""Up to this many elements of inputs and outputs, several points are computed at a time."""

_AMPLIFIED = 1.5
"""Extrapolation from a step and its double multiplies the rounding error at the smaller step by this factor."""

MULTIPLE = 4.0
RELATIVE = {torch.float64: 5e-9, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""The tolerated error of a gradient in addition to the bar, relative to the norm of gradient · direction."""


class Disagreement(NamedTuple):
    """Numerical minus analytical derivative of cotangent · outputs along one direction."""

    error: float
    bar: float
    """The bound on the error of ``error``; infinite if no difference could be computed."""
    scale: float
    """The 2-norm of gradient · direction, element by element."""
    size: float
    """The larger of ``scale`` and the largest disagreement at the first two steps."""

    relative: float
    """The tolerated error in addition to the bar, relative to ``scale``."""

    @property
    def allowed(self) -> float:
        """The largest disagreement that is not a finding."""
        return MULTIPLE * self.bar + self.relative * self.scale

    @property
    def is_wrong(self) -> bool:
        """Whether the disagreement exceeds the allowed one."""
        return abs(self.error) > self.allowed


class Limit(NamedTuple):
    """The limit of derivatives as the step goes to 0, estimated from one step and the larger step before it."""

    value: float
    bar: float
    """The bound on the error of ``value``."""
    step: float
    """The smaller of the two steps."""
    rounding: float
    """The part of ``bar`` caused by rounding."""


NOTHING = Limit(math.nan, math.inf, math.nan, math.nan)
"""The placeholder for a limit that could not be estimated."""


class Differences:
    """Numerical derivatives of a function at its point, compared with a gradient for one cotangent."""

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
        """The rounding error of each output in its dtype."""
        return self.function.rounding_of(self.base)

    def measure_noise(self, direction: Tensor, concerned: Tensor) -> None:
        """Estimate the rounding errors of the outputs from second differences at tiny steps, which show only rounding.

        The two sides of the point are measured separately, because a kink or a jump at the point is not noise. An
        output that the smallest step does not move may be quantised. The ``concerned`` outputs among those are measured
        again with larger steps, and only noise on both sides counts.
        """
        noise, still = self.rounding, concerned
        offset = torch.where(direction != 0, self.point.abs().mul_(direction.sign()).mul_(4e3 * self.input_eps), 0.0)
        # Steps of equal size may cancel, as in the product of x + a and y - a.
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
        """Return the largest second difference along multiples of ``offset``, and the mask of outputs that move.

        With three samples, the larger of the two sides counts; with more, the smaller one.
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
        """Return whether a non-finite output becomes finite, or an infinity of the other sign, a step away."""
        if self.is_finite:
            return False
        beside = [self.function.values(self.point + step * direction) for step in (1e-3, -1e-3)]
        return any(bool((~self.usable & (one != self.base) & ~one.isnan()).any()) for one in beside)

    def jumps(self, direction: Tensor) -> bool:
        """Return whether an output jumps on both sides: smaller steps along ``direction`` change it by as much."""
        for side in (1e-9, -1e-9):
            sizes = [self.function.values(self.point + step * direction) - self.base for step in (side, side / 8)]
            large, small = (torch.where(self.usable, size, 0.0).abs() for size in sizes)
            if not bool(((small > 0.5 * large) & (large > 100 * self.noise)).any()):
                return False
        return True

    def along(self, direction: Tensor, *, with_noise: bool = False) -> Disagreement:
        """Return the disagreement between the numerical derivative along ``direction`` and the gradient.

        The steps shrink until smaller ones add nothing. With ``with_noise``, the noise of the outputs that the largest
        steps move is measured, unless it has been measured before.
        """
        product = direction * self.gradient
        scale, enough = norm(product), 1e-11 * float(product.abs_().sum())
        found: list[tuple[float, float]] = []
        moved, best = torch.zeros_like(self.usable), NOTHING._replace(value=0.0)
        steps, together = LOW_STEPS if self.is_low else STEPS, _AT_ONCE if self.are_few else 1
        for start in range(0, len(steps), together):
            tried = steps[start : start + together]
            gone, change = self.central(numbers(tried)[:, None] * direction)
            gone = torch.where(direction != 0, gone, 0.0)  # an infinite input yields NaN, even if it does not move
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
                break  # smaller steps add nothing: the bar is small enough, or rounding dominates it
        largest = max((abs(one) for _, one in found[:2]), default=0.0)
        return Disagreement(best.value, best.bar, scale, max(scale, largest), self.relative)

    def central(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the changes of point and outputs from point - offset to point + offset, one row per offset."""
        above = self.function.rounded(self.point + offsets)
        values = self.function.values_at(above)
        below = self.function.rounded(self.point - offsets)
        return above.sub_(below), self.usable_part(values.sub_(self.function.values_at(below)))

    def rounding_of(self, moved: Tensor) -> float:
        """Return the rounding error of cotangent · outputs, summed over the outputs ``moved`` by any step.

        An output that a small step does not move has a rounding error too, if a larger step moves it.
        """
        noise = self.cotangent.abs() * torch.where(moved, self.noise, 0.0)
        total = float(noise.sum())
        return min(3 * float(noise.norm()), total) if self.is_low else total

    @property
    def negligible(self) -> float:
        """The size below which cotangent · change, per relative change of the inputs, is rounding alone."""
        few = min(1e3, 1e-3 / self.coarsest)
        return 2 * few * float(self.cotangent.abs().dot(torch.where(self.usable, self.rounding, 0.0)))

    def usable_part(self, change: Tensor) -> Tensor:
        """Return the changes of the outputs, with 0 for outputs that are not finite at the point."""
        return change if self.is_finite else torch.where(self.usable, change, 0.0)


def extrapolated(derivatives: Sequence[tuple[float, float, float]], order: int, amplified: float = 2.0) -> list[Limit]:
    """Return one limit for each pair of neighbouring steps, by Richardson extrapolation.

    ``derivatives`` are triples (step, derivative, rounding), the largest step first. ``order`` is the order of the
    truncation error: 2 for central differences, 1 for one-sided ones. The rounding of a limit is ``amplified`` times
    the rounding at the smaller step. The first limit needs a second pair for its bar: two steps yield no limit.
    """
    raw = []
    for (big, first, _), (small, second, rounding) in pairwise(derivatives):
        ratio = math.prod([big / small] * order)  # infinite for subnormal steps, where ** would raise
        raw.append((second + (second - first) / (ratio - 1), small, amplified * rounding))
    changes = [abs(one - other) for (one, *_), (other, *_) in pairwise(raw)]
    around = pairwise([*changes[:1], *changes, *changes[-1:]])
    return [Limit(v, max(pair) + noise, step, noise) for pair, (v, step, noise) in zip(around, raw, strict=False)]


def _bar(limit: Limit) -> float:
    return limit.bar if limit.bar == limit.bar else math.inf


def directions(function: Function, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield random directions of random signs, whose sizes alternate between two rules.

    An element's size is max(|x|, mean |x|), or in every second direction |x| (mean |x| where x is 0). Each is
    multiplied by a random factor from 0.5 to 1.5, because equal errors could cancel otherwise.
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
