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

from gradguard.check.function import Function

STEPS = tuple(1e-3 / 2**k for k in (0, 1, 2, 3)) + tuple(1e-3 / 8 / 4**k for k in range(1, 9))
LOW_STEPS = tuple(6e-2 / 2**k for k in range(10))
"""Relative steps, from the largest: a few close ones that do for a smooth function, then down past kinks nearby.

For float32, where rounding is what limits, they begin further out."""

_AT_ONCE = 3
_FEW = 10_000
"""Of numbers at a point, and at most so many, several points are computed with at a time."""

_UNDERFLOWS = 1e-140
"""At a 2-norm below this, squares of elements have lost digits."""

MULTIPLE = 4.0
RELATIVE = {torch.float64: 5e-9, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""What a gradient may be off by beside the bar, relative to its norm along the direction."""


class Disagreement(NamedTuple):
    """Numerical minus analytical derivative along one direction, or several, one in each row, for each cotangent."""

    error: Tensor
    bar: Tensor
    """How far off ``error`` may be; infinite if nothing could be computed."""
    scale: Tensor
    """The 2-norm of gradient · direction, element by element."""
    size: Tensor
    """The 2-norm, or what the derivative is at large steps, where that is more."""

    @staticmethod
    def together(rows: Sequence[Disagreement]) -> Disagreement:
        """Return what is known along several directions."""
        if len(rows) == 1:
            return Disagreement(*(one[None] for one in rows[0]))
        return Disagreement(*map(torch.stack, zip(*rows, strict=True)))

    def of(self, i: int) -> Disagreement:
        """Return what is known along direction ``i``."""
        return Disagreement(*(one[i] for one in self))

    def allowed(self, relative: float) -> Tensor:
        """Return the disagreement that is no finding."""
        return MULTIPLE * self.bar + relative * self.scale


class Differences:
    """The function at its point, the cotangents, the gradients that are checked."""

    def __init__(
        self, function: Function, base: Tensor, cotangents: Tensor, gradients: Tensor, rtol: float = 0.0
    ) -> None:
        self.function, self.base, self.cotangents, self.gradients = function, base, cotangents, gradients
        self.point = function.point
        self.relative = max(rtol, *(RELATIVE[_real_dtype(o.dtype)] for o in function.outputs))
        input_eps = max(torch.finfo(one.value.dtype).eps for one in function.inputs)
        self.coarsest = max(input_eps, *(torch.finfo(o.dtype).eps for o in function.outputs))
        self.is_low = self.coarsest > 1e-10
        self.steps = LOW_STEPS if self.is_low else STEPS
        self.noise, self.has_noise = self.rounding, False
        self.usable = base.isfinite()
        self.is_finite = bool(self.usable.all())
        self.has_finite_point = are_finite(self.point)
        self.mean = float(mean_size(self.point))
        self.are_few = len(self.point) + len(base) <= _FEW
        together = _AT_ONCE if self.are_few else 1
        self._batches = [self.steps[i : i + together] for i in range(0, len(self.steps), together)]

    @property
    def rounding(self) -> Tensor:
        """How far off each output is by rounding to its dtype."""
        return self.function.rounding_of(self.base)

    def measure_noise(self, direction: Tensor, concerned: Tensor | None = None) -> None:
        """Estimate how far outputs are off by rounding: second differences at tiny steps are nothing else.

        Each side of the point by itself, so that a kink or a jump at the point is not taken for noise. Outputs that the
        smallest step does not move may be quantised: those ``concerned``, all if None, are looked at with larger ones,
        where noise is what both sides show.
        """
        tiny = 4e3 * max(torch.finfo(one.value.dtype).eps for one in self.function.inputs)
        noise, still = self.rounding, torch.ones_like(self.usable) if concerned is None else concerned
        offset = torch.where(direction != 0, self.point.abs().mul_(direction.sign()).mul_(tiny), 0.0)
        offset *= torch.linspace(0.5, 1, len(offset), dtype=torch.float64)  # a product of x + a and y - a hardly moves
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
        steps = torch.arange(1, samples + 1, dtype=torch.float64)[:, None]
        for sign in (1, -1):
            points = ((k * offset).add_(self.point) for k in sign * steps)
            rows = (
                self.function.values_at(torch.stack([*points])) if self.are_few else map(self.function.values, points)
            )
            largest, change = torch.zeros_like(self.base), None
            for one, other in pairwise(rows):
                last, change = change, other - one
                del one
                moved |= change != 0
                if last is not None:
                    torch.maximum(largest, last.sub_(change).abs_().nan_to_num_(0.0, torch.inf), out=largest)
                del last, other
            del change
            spreads.append(largest)
        either = torch.maximum if samples == 3 else torch.minimum
        return either(*spreads).mul_(2 / math.sqrt(6)), moved

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
        return self._climbed(direction[None], self._central(direction[None], self._batches[0])).of(0)

    def along_each(self, directions: Tensor, *, with_noise: bool = False) -> Disagreement:
        """Return the disagreement along each of ``directions``, one in each row.

        Noise is measured along the first of them, if at all, of outputs that the largest steps move.
        """
        together = len(directions) if self.are_few else 1
        first = self._central(directions[:together], self._batches[0])
        if with_noise and not self.has_noise:
            self.measure_noise(directions[0], first.moved.any(dim=0))
        found = self._climbed(directions[:together], first)
        if together == len(directions):
            return found
        return Disagreement.together([found.of(0), *map(self.along, directions[1:])])

    def _climbed(self, directions: Tensor, first: _Central) -> Disagreement:
        """Return the disagreements, from smaller steps where ``first`` does not settle them."""
        scales, enough = self._sizes(directions)
        allowed = enough.tolist()
        return Disagreement.together(
            [
                self._down_the_ladder(row, first.of(i), scales[i], allowed[i])
                for i, row in enumerate(directions.split(1))
            ]
        )

    def _sizes(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of gradient · direction, and the bar that is narrow enough, for each cotangent."""
        together = len(self.gradients) if self.are_few else 1
        scales, enough = [], []
        for gradients in self.gradients.split(together):
            product = directions[:, None] * gradients
            enough.append(1e-11 * torch.linalg.vector_norm(product, 1, dim=-1))
            scales.append(norms(product))
        return torch.cat(scales, dim=-1), torch.cat(enough, dim=-1)

    def _down_the_ladder(
        self, direction: Tensor, first: _Central, scale: Tensor, enough: Sequence[float]
    ) -> Disagreement:
        """Return the disagreement along one direction, from as many steps as it takes."""
        ladders, moved = [_Ladder() for _ in self.cotangents], first.moved
        first.add_to(ladders, self._batches[0], self.rounding_of(moved)[0].tolist())
        for steps in self._batches[1:]:
            if all(ladder.is_settled(own) for ladder, own in zip(ladders, enough, strict=True)):
                break
            more = self._central(direction, steps)
            moved = moved | more.moved
            more.add_to(ladders, steps, self.rounding_of(moved)[0].tolist())
        return _disagreement(ladders, scale)

    def _central(self, directions: Tensor, steps: Sequence[float]) -> _Central:
        """Return the disagreement at each step along each of ``directions``."""
        sizes, count = torch.tensor(steps, dtype=torch.float64)[:, None], len(directions)
        offsets = (sizes * directions[:, None]).flatten(0, 1)
        above = self._rounded(self.point + offsets)
        values = None if self.are_few else self.function.values_at(above)
        below = self._rounded(offsets.neg_().add_(self.point))
        if values is None:
            values, others = self.function.values_at(torch.cat([above, below])).chunk(2)
        else:
            others = self.function.values_at(below)
        change = self.usable_part(values.sub_(others))
        del others
        taken = above.sub_(below)
        if not self.has_finite_point:
            taken = torch.where(directions.repeat_interleave(len(steps), dim=0) != 0, taken, 0.0)
        del below, offsets
        finite = torch.ones(len(change), dtype=torch.bool)
        if not are_finite(change):
            finite = change.isfinite().all(dim=1)
            change = torch.where(finite[:, None], change, 0.0)
        central = (change @ self.cotangents.T - taken @ self.gradients.T) / (2 * sizes.repeat(count, 1))
        moved = (change != 0).view(count, len(steps), len(self.base)).any(dim=1)
        return _Central(central.view(count, len(steps), -1), finite.view(count, -1), moved)

    def _rounded(self, points: Tensor) -> Tensor:
        return points if self.function.is_wide else self.function.rounded_each(points)

    def rounding_of(self, moved: Tensor) -> Tensor:
        """Return how far off Σ cotangent · output may be by rounding, from the outputs that move along a direction.

        An output that one step does not move, and a larger one does, is off by rounding there as well.
        """
        noise, found = torch.where(moved, self.noise, 0.0), []
        for v in self.cotangents:
            total = noise @ v.abs()
            found.append(torch.minimum(3 * (noise * v).norm(dim=-1), total) if self.is_low else total)
        return torch.stack(found, dim=-1)

    def negligible(self) -> Tensor:
        """Return below which size Σ cotangent · change, for relative changes of the inputs, is rounding alone."""
        few, finite = min(1e3, 1e-3 / self.coarsest), torch.where(self.usable, self.rounding, 0.0)
        return 2 * few * torch.stack([v.abs().dot(finite) for v in self.cotangents])

    def usable_part(self, change: Tensor) -> Tensor:
        """Return changes of the outputs, 0 for those that are not finite at the point."""
        return change if self.is_finite else torch.where(self.usable, change, 0.0)


class _Central(NamedTuple):
    """What central differences say, by direction and step."""

    disagreement: Tensor
    """For each cotangent."""
    is_finite: Tensor
    """Whether all outputs are."""
    moved: Tensor
    """Which outputs change along each direction."""

    def of(self, i: int) -> _Central:
        """Return what they say along direction ``i``."""
        return _Central(*(one[i : i + 1] for one in self))

    def add_to(self, ladders: list[_Ladder], steps: Sequence[float], noise: list[float]) -> None:
        """Give ``ladders`` the steps along the only direction."""
        for step, central, is_finite in zip(
            steps, self.disagreement[0].tolist(), self.is_finite[0].tolist(), strict=True
        ):
            for ladder, one, own in zip(ladders, central, noise, strict=True):
                if is_finite:
                    ladder.add(step, one, own)


def _disagreement(ladders: list[_Ladder], scale: Tensor) -> Disagreement:
    largest = [max(map(abs, ladder.central[:2]), default=0.0) for ladder in ladders]
    best = [ladder.best() for ladder in ladders]
    error, bar, size = torch.tensor([[e, b, s] for (e, b), s in zip(best, largest, strict=True)], dtype=torch.float64).T
    return Disagreement(error, bar, scale, torch.maximum(scale, size))


class _Ladder:
    """Disagreements at smaller and smaller steps for one cotangent, and what they tend to."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.central: list[float] = []
        self.limits: list[float] = []
        self.amplified: list[float] = []
        self.noise = 0.0

    def add(self, step: float, central: float, noise: float) -> None:
        """Take in one step; ``noise`` is the rounding of the outputs known by now, for this and all steps before."""
        if self.steps:
            weight, amplified = _weights(self.steps[-1], step)
            self.limits.append(central + (central - self.central[-1]) / weight)
            self.amplified.append(amplified)
        self.steps.append(step)
        self.central.append(central)
        self.noise = noise

    def bars(self) -> list[float]:
        """Return for each limit how far off it may be: the change to its neighbours, and rounding."""
        changes = [abs(a - b) for a, b in pairwise(self.limits)]
        if not changes:
            return [math.inf for _ in self.limits]
        around = pairwise([changes[0], *changes, changes[-1]])
        bars = [max(pair) + self.noise * factor for pair, factor in zip(around, self.amplified, strict=True)]
        return [bar if bar == bar else math.inf for bar in bars]

    def is_settled(self, enough: float) -> bool:
        """Tell whether smaller steps have nothing to add: accurate enough, or rounding takes over."""
        if len(self.limits) < 2:
            return False
        best = min(self.bars())
        return best <= enough or (len(self.limits) > 2 and best <= 2 * self.noise * self.amplified[-1])

    def best(self) -> tuple[float, float]:
        """Return the limit that is known best, and its bar."""
        if not self.limits:
            return 0.0, math.inf
        bars = self.bars()
        chosen = bars.index(min(bars))
        return self.limits[chosen], bars[chosen]


def _weights(large: float, small: float) -> tuple[float, float]:
    """Return what extrapolates from two steps: what to divide their difference by, and how rounding is amplified."""
    ratio = (large / small) ** 2
    return ratio - 1, (ratio / small + 1 / large) / (ratio - 1)


def directions(point: Tensor, inputs: list[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
    """Yield random directions: signs, sized in turn by max(|x|, mean |x|) and by |x|, where that is not 0.

    By half to one and a half times that, so that equal errors with equal signs do not cancel.
    """
    while True:
        for keeps_zeros in (False, True):
            yield _direction(point, inputs, keeps_zeros, generator)


def _direction(point: Tensor, inputs: list[Tensor], keeps_zeros: bool, generator: torch.Generator) -> Tensor:
    found = torch.rand(point.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
    found.add_(found.sign(), alpha=0.5)
    for part, own in zip(inputs, found.split([one.numel() for one in inputs]), strict=True):
        mean, sizes = mean_size(part), part.abs()
        sizes = sizes if are_finite(sizes) else torch.where(sizes.isfinite(), sizes, 0.0)
        own *= torch.where(sizes == 0, mean, sizes) if keeps_zeros else torch.maximum(sizes, mean, out=sizes)
    return found


def norms(rows: Tensor) -> Tensor:
    """Return the 2-norm along the last dimension, however large or small the elements are."""
    plain = torch.linalg.vector_norm(rows, dim=-1)
    if not rows.numel() or bool(((plain > _UNDERFLOWS) & (plain < torch.inf)).all()):
        return plain
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True)
    unit = torch.where((largest > 0) & (largest < torch.inf), largest, 1.0)
    return unit.squeeze(-1) * (rows / unit).norm(dim=-1)


def are_finite(values: Tensor) -> bool:
    """Tell whether all of ``values`` are finite: their sum is quick, and may only overflow."""
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def mean_size(part: Tensor) -> Tensor:
    """Return the mean of the finite |x|, 1 if that is 0."""
    sizes = part.abs()
    sizes = sizes if are_finite(sizes) else sizes[sizes.isfinite()]
    mean = sizes.mean() if sizes.numel() else torch.zeros((), dtype=torch.float64)
    return torch.where(mean > 0, mean, 1.0)


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real()
