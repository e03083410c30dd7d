"""Numerical derivatives from forward calls alone, each with a bar that says how far off it may be.

Central differences at a ladder of steps, extrapolated (Richardson): the change from one step to the next shows the
truncation error, the rounding of the outputs the rest. So no step has to be chosen. What is extrapolated is the
*disagreement* with the gradient that is checked, where both see the step that was really taken after rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradguard.check.function import Function

STEPS = tuple(1e-3 / 2**k for k in (0, 1, 2, 3)) + tuple(1e-3 / 8 / 4**k for k in range(1, 9))
LOW_STEPS = tuple(6e-2 / 2**k for k in range(10))
"""Relative steps, from the largest: a few close ones that do for a smooth function, then down past kinks nearby.

For float32, where rounding is what limits, they begin further out."""

MULTIPLE = 4.0
RELATIVE = {torch.float64: 5e-9, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""What a gradient may be off by beside the bar, relative to its norm along the direction."""


@dataclass(frozen=True)
class Disagreement:
    """Numerical minus analytical derivative along one direction, for each cotangent."""

    error: Tensor
    bar: Tensor
    """How far off ``error`` may be; infinite if nothing could be computed."""
    scale: Tensor
    """The 2-norm of gradient · direction, element by element."""
    size: Tensor
    """The 2-norm, or what the derivative is at large steps, where that is more."""
    step: float

    def allowed(self, relative: float) -> Tensor:
        """Return the disagreement that is no finding."""
        return MULTIPLE * self.bar + relative * self.scale


class Differences:
    """The function at its point, the cotangents, the gradients that are checked."""

    def __init__(self, function: Function, base: Tensor, cotangents: Tensor, gradients: Tensor) -> None:
        self.function, self.base, self.cotangents, self.gradients = function, base, cotangents, gradients
        self.point = function.point
        self.relative = max(RELATIVE[_real_dtype(o.dtype)] for o in function.outputs)
        input_eps = max(torch.finfo(one.value.dtype).eps for one in function.inputs)
        self.coarsest = max(input_eps, *(torch.finfo(o.dtype).eps for o in function.outputs))
        self.is_low = self.coarsest > 1e-10
        self.steps = LOW_STEPS if self.is_low else STEPS
        self.rounding = function.rounding_of(base)
        self.noise = self.rounding
        self.usable = base.isfinite()
        self.is_finite = bool(self.usable.all())
        self.mean = float(mean_size(self.point))

    def measure_noise(self, direction: Tensor) -> None:
        """Estimate how far outputs are off by rounding: second differences at tiny steps are nothing else.

        Each side of the point by itself, so that a kink or a jump at the point is not taken for noise. Outputs that the
        smallest step does not move may be quantised: they are looked at with larger ones, where noise is what both
        sides show.
        """
        tiny = 4e3 * max(torch.finfo(one.value.dtype).eps for one in self.function.inputs)
        self.noise, still = self.rounding, torch.ones_like(self.base, dtype=torch.bool)
        offset = torch.where(direction != 0, tiny * self.point.abs() * direction.sign(), 0.0)
        for samples in (3, 8, 8, 8):
            moved = torch.zeros_like(still)
            spreads = [self._second_differences(side, samples, moved) for side in (offset, -offset)]
            spread = torch.maximum(*spreads) if samples == 3 else torch.minimum(*spreads)
            self.noise = torch.where(still & (spread > self.noise), spread, self.noise)
            still &= ~moved
            if self.is_low or not bool(still.any()) or not bool(offset.any()):
                break
            offset = 100 * offset

    def _second_differences(self, side: Tensor, samples: int, moved: Tensor) -> Tensor:
        """Return the largest second difference along multiples of ``side``; note in ``moved`` which outputs change."""
        before = self.function.values(self.point + side)
        largest, difference = torch.zeros_like(before), None
        for k in range(2, samples + 1):
            value = self.function.values(self.point + k * side)
            following, before = value - before, value
            moved |= following != 0
            if difference is not None:
                difference.sub_(following).abs_().mul_(2 / math.sqrt(6))
                largest = torch.fmax(largest, difference)
            difference = following
        return largest

    def reaches_a_pole(self, direction: Tensor) -> bool:
        """Tell whether an output that is not finite at the point is, or is another one, a step further."""
        if self.is_finite:
            return False
        beside = [self.function.values(self.point + step * direction) for step in (1e-3, -1e-3)]
        return any(bool((~self.usable & (one != self.base) & ~one.isnan()).any()) for one in beside)

    def jumps(self, direction: Tensor) -> bool:
        """Tell whether an output is elsewhere after any step along ``direction``, however small."""
        for side in (1e-9, -1e-9):
            sizes = [self.function.values(self.point + step * direction) - self.base for step in (side, side / 8)]
            large, small = (torch.where(self.usable, size, 0.0).abs() for size in sizes)
            if not bool(((small > 0.5 * large) & (large > 100 * self.noise)).any()):
                return False
        return True

    def along(self, direction: Tensor) -> Disagreement:
        """Return how much the numerical derivative along ``direction`` and the gradients disagree."""
        product = self.gradients * direction
        scale, enough = norms(product), 1e-11 * product.abs().sum(dim=1)
        ladder, moved = _Ladder(), torch.zeros_like(self.base, dtype=torch.bool)
        for step in self.steps:
            if (found := self._central(direction, step)) is not None:
                moved |= found[1]
                ladder.add(step, found[0], self.rounding_of(moved))
            if ladder.is_settled(enough):
                break
        error, bar, step = ladder.best(len(self.cotangents))
        return Disagreement(
            error, bar, scale, torch.stack([scale, *(c.abs() for c in ladder.central[:2])]).amax(dim=0), step
        )

    def _central(self, direction: Tensor, step: float) -> tuple[Tensor, Tensor] | None:
        """Return the disagreement at one step, and which outputs moved; None where the function is not finite."""
        above = self.function.rounded(self.point + step * direction)
        below = self.function.rounded(self.point - step * direction)
        change = self.usable_part(self.function.values(above).sub_(self.function.values(below)))
        if not bool(change.isfinite().all()):
            return None
        taken = torch.where(direction != 0, above - below, 0.0) / (2 * step)
        numerical = self.cotangents @ change / (2 * step)
        return numerical - self.gradients @ taken, change != 0

    def rounding_of(self, moved: Tensor) -> Tensor:
        """Return how far off Σ cotangent · output may be by rounding, from the outputs that move along a direction.

        An output that one step does not move, and a larger one does, is off by rounding there as well.
        """
        noise = torch.where(moved, self.noise, 0.0)
        total = torch.stack([v.abs().dot(noise) for v in self.cotangents])
        if not self.is_low:
            return total
        return torch.stack([3 * (v * noise).norm() for v in self.cotangents]).minimum(total)

    def negligible(self) -> Tensor:
        """Return below which size Σ cotangent · change, for relative changes of the inputs, is rounding alone."""
        few, finite = min(1e3, 1e-3 / self.coarsest), torch.where(self.usable, self.rounding, 0.0)
        return 2 * few * torch.stack([v.abs().dot(finite) for v in self.cotangents])

    def usable_part(self, change: Tensor) -> Tensor:
        """Return changes of the outputs, 0 for those that are not finite at the point."""
        return change if self.is_finite else torch.where(self.usable, change, 0.0)


class _Ladder:
    """Disagreements at smaller and smaller steps, and what they tend to."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.central: list[Tensor] = []
        self.limits: list[Tensor] = []
        self.amplified: list[float] = []
        self.noise = torch.zeros(())

    def add(self, step: float, central: Tensor, noise: Tensor) -> None:
        """Take in one step; ``noise`` is the rounding of the outputs known by now, for this and all steps before."""
        if self.steps:
            ratio = (self.steps[-1] / step) ** 2
            self.limits.append(central + (central - self.central[-1]) / (ratio - 1))
            self.amplified.append((ratio / step + 1 / self.steps[-1]) / (ratio - 1))
        self.steps.append(step)
        self.central.append(central)
        self.noise = noise

    @property
    def limits_rounding(self) -> list[Tensor]:
        return [self.noise * factor for factor in self.amplified]

    def bars(self) -> list[Tensor]:
        """Return for each limit how far off it may be: the change to its neighbours, and rounding."""
        changes = [(a - b).abs() for a, b in zip(self.limits, self.limits[1:], strict=False)]
        if not changes:
            return [torch.full_like(limit, math.inf) for limit in self.limits]
        padded = [changes[0], *changes, changes[-1]]
        return [torch.maximum(padded[j], padded[j + 1]) + r for j, r in enumerate(self.limits_rounding)]

    def is_settled(self, enough: Tensor) -> bool:
        """Tell whether smaller steps have nothing to add: accurate enough, or rounding takes over."""
        if len(self.limits) < 3:
            return False
        bars = self.bars()
        best = torch.stack(bars).min(dim=0).values
        if bool((best <= enough).all()):
            return True
        return bool((best <= 2 * self.limits_rounding[-1]).all())

    def best(self, count: int) -> tuple[Tensor, Tensor, float]:
        if not self.limits:
            unknown = torch.full((count,), math.inf, dtype=torch.float64)
            return torch.zeros(count, dtype=torch.float64), unknown, math.nan
        bars = torch.stack(self.bars())
        chosen = bars.argmin(dim=0)
        columns = torch.arange(bars.shape[1])
        return torch.stack(self.limits)[chosen, columns], bars[chosen, columns], self.steps[int(chosen[0]) + 1]


def directions(point: Tensor, inputs: list[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
    """Yield random directions: signs, sized in turn by max(|x|, mean |x|) and by |x|, where that is not 0."""
    finite = torch.where(point.isfinite(), point, 0.0).abs()
    means = torch.cat([mean_size(one).expand(one.numel()) for one in inputs])
    sizes = (torch.maximum(finite, means), torch.where(finite == 0, means, finite))
    while True:
        for size in sizes:
            signs = torch.randint(0, 2, point.shape, generator=generator, dtype=torch.float64) * 2 - 1
            yield signs * size


def norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of each row, however large its elements are."""
    if not rows.numel():
        return rows.sum(dim=1)
    largest = rows.abs().amax(dim=1)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return unit * (rows / unit[:, None]).norm(dim=1)


def mean_size(part: Tensor) -> Tensor:
    """Return the mean of the finite |x|, 1 if that is 0."""
    sizes = part.abs()[part.isfinite()]
    mean = sizes.mean() if sizes.numel() else torch.zeros((), dtype=torch.float64)
    return torch.where(mean > 0, mean, torch.ones((), dtype=torch.float64))


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real()
