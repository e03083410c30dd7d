r"""The gradient noise scale: up to which batch size more samples pay, from the norms that clipping needs anyway.

.. math:: B_\text{noise} = \frac{S}{|G|^2}, \qquad
    \hat S = \frac{1}{B - 1} \sum_i |g_i - \bar g|^2, \qquad
    \widehat{|G|^2} = |\bar g|^2 - \frac{\hat S}{B}

with :math:`g_i` the samples' own gradients before clipping, :math:`\bar g` their average, :math:`S` the trace of their
covariance. Both estimates are unbiased, and need only :math:`\sum_i |g_i|^2` and :math:`|\sum_i g_i|`.

References: McCandlish et al. 2018, arXiv 1812.06162 (the scale and what it says); Gray et al. 2024, arXiv 2411.00999
(from per-sample norms, by layer); Fieller 1954 (the interval of a ratio).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradguard.errors import InvalidValueError
from gradguard.per_sample.contributions import Contribution, row_squares
from gradguard.per_sample.sample_loop import sum_together

SMOOTHING = 0.95
"""The weight of earlier measurements when one comes: an average over some 40 of them."""

FEWEST = 5
"""Measurements below which their spread says nothing."""

_DECAY = (SMOOTHING, SMOOTHING**2, 1.0, *[SMOOTHING] * 5)
"""For the sums of w, w² and 1, and of w times x, y, x², xy, y²; x estimates the noise and y the squared gradient."""


@dataclass(frozen=True)
class NoiseEstimate:
    r"""The noise scale of all parameters, or of one.

    Attributes:
        noise: Estimate of S, smoothed over steps; in units of a sample's own squared gradient.
        squared_gradient: Estimate of :math:`|G|^2`, smoothed over steps; noise may take it below 0.
        scale: Their ratio, a number of samples, never below 0; ``inf`` where the squared gradient cannot be told from
            0, ``nan`` where no gradient came.
        error: Standard error of ``scale`` by the delta method, from how much the estimates of steps scatter, which are
            taken as independent; ``nan`` below 5 measurements.
        interval: Fieller's 95 % confidence interval, which need not be symmetric; ``(0, inf)`` below 5 measurements.
    """

    noise: float
    squared_gradient: float
    scale: float
    error: float
    interval: tuple[float, float]


@dataclass(frozen=True, eq=False)
class NoiseScale:
    r"""The gradient noise scale :math:`S / |G|^2`, smoothed over steps; **not private**.

    Training with a batch as large as the noise scale takes about twice the fewest steps and twice the fewest samples
    that reach the same loss. At much smaller batches twice the batch halves the steps; at much larger ones it buys
    little.

    Noise and squared gradient are averaged over steps each for itself, with weights that fall by 5 % at each
    measurement, and divided then: the average of ratios would be biased. The first read waits for the device.

    Attributes:
        names: Of the trained parameters.
        moments: Weighted sums over steps, for all parameters together and for each; `overall` and `layers` read them.
        batch_size: Number of samples in the last measured step, those that are not finite included.
        nonfinite: How many of them were not finite, and left out.
    """

    names: Sequence[str]
    moments: Tensor
    batch_size: int
    nonfinite: Tensor

    @cached_property
    def _estimates(self) -> list[NoiseEstimate]:
        return [_estimate(*row) for row in self.moments.tolist()]

    @property
    def overall(self) -> NoiseEstimate:
        """The estimate for all parameters together."""
        return self._estimates[0]

    @property
    def layers(self) -> dict[str, NoiseEstimate]:
        """The estimate for each parameter, by name. Their noises, and squared gradients, add up to the overall ones."""
        return dict(zip(self.names, self._estimates[1:], strict=True))

    @property
    def total(self) -> float:
        """The noise scale of all parameters, in samples; ``inf`` where the gradient cannot be told from 0."""
        return self.overall.scale

    @property
    def error(self) -> float:
        """Standard error of `total`; see `NoiseEstimate`."""
        return self.overall.error

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of `total`; see `NoiseEstimate`."""
        return self.overall.interval

    @property
    def by_layer(self) -> dict[str, float]:
        """The noise scale of each parameter, by name."""
        return {name: estimate.scale for name, estimate in self.layers.items()}

    @property
    def steps(self) -> int:
        """Number of steps measured; one with fewer than two finite samples tells nothing and is left out."""
        return int(self.moments[0, 2])

    @property
    def batch_size_suggested(self) -> int | None:
        """The batch at which steps and samples are balanced: `total`; None where that is not known."""
        return max(1, round(self.total)) if math.isfinite(self.total) else None

    def scalars(self, layers: bool = False) -> dict[str, float]:
        """Return what a record needs: ``monitor.log(**clipper.noise_scale.scalars())``.

        Args:
            layers: Also the noise scale of each parameter, as ``noise_scale/weight`` for ``weight``.
        """
        low, high = self.interval
        return {
            "noise_scale": self.total,
            "noise_scale_low": low,
            "noise_scale_high": high,
            "batch_size": float(self.batch_size),
            **({f"noise_scale/{name}": scale for name, scale in self.by_layer.items()} if layers else {}),
        }

    def __str__(self) -> str:
        low, high = self.interval
        if math.isnan(self.total):
            return "gradient noise scale: nothing measured yet"
        if math.isinf(self.total):
            return (
                f"gradient noise scale: not known, probably above {low:,.3g} samples: the gradient cannot be told from "
                f"its noise after {self.steps} measurements"
            )
        if math.isinf(high):
            return f"gradient noise scale: {self.total:,.3g} samples; too few measurements ({self.steps}) for an error"
        return f"gradient noise scale: {self.total:,.3g} samples ({low:,.3g} to {high:,.3g})"


class NoiseScaleMeter:
    """Gathers the sums of one step, and smooths over steps.

    Where no sample was clipped the clipped sum is the unclipped one; else a measured step takes one more weighted sum
    for each parameter, and holds one more gradient.

    Args:
        every: Measure every so many steps; 0 for never.

    Attributes:
        latest: The last result; None before the first.
    """

    def __init__(self, every: int) -> None:
        self.latest: NoiseScale | None = None
        self._every, self._step = every, 0
        self._names: list[str] = []
        self._moments: Tensor | None = None
        self._squares: Tensor | None = None
        self._finite: Tensor | None = None
        self._unclipped: dict[str, Tensor] = {}

    @property
    def is_due(self) -> bool:
        """Whether the running step is measured."""
        return self._every > 0 and self._step % self._every == 0

    def prepare(self, names: Sequence[str]) -> None:
        """Begin anew with other parameters."""
        self._names, self._moments, self.latest = list(names), None, None
        self.drop()

    def state_dict(self) -> dict[str, Any]:
        """Return what was smoothed over steps, and the number of steps; nothing of a step that is running."""
        latest = self.latest
        return {
            "step": self._step,
            "names": list(self._names),
            "moments": None if latest is None else latest.moments.cpu(),
            "batch_size": 0 if latest is None else latest.batch_size,
            "nonfinite": 0 if latest is None else int(latest.nonfinite),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, with the step that comes next.

        Raises:
            InvalidValueError: If it is of other parameters.
        """
        names, moments = list(state_dict["names"]), state_dict["moments"]
        if names != self._names:
            raise InvalidValueError(
                f"the saved noise scale is of {len(names)} parameters, {names[:3]}, and this clipper trains "
                f"{len(self._names)}, {self._names[:3]}: leave its state out to measure anew."
            )
        self.drop()
        self._step, self._moments, self.latest = int(state_dict["step"]), None, None
        if moments is not None and self._every > 0:
            self._moments = moments = moments.clone()
            nonfinite = torch.tensor(float(state_dict["nonfinite"]), dtype=torch.float64, device="cpu")
            self.latest = NoiseScale(self._names, moments, int(state_dict["batch_size"]), nonfinite)

    def drop(self) -> None:
        """Forget the running step."""
        self._squares, self._finite, self._unclipped = None, None, {}

    def add(
        self,
        contributions: Mapping[str, Contribution],
        norms: Mapping[str, Tensor],
        factors: Mapping[str, Tensor],
        share: Tensor | float,
        bad: Tensor | None,
        accumulated: Mapping[str, Tensor],
    ) -> None:
        """Take up a mini-batch, before its clipped sums are added to ``accumulated``.

        Args:
            contributions: Of the parameters that it used.
            norms: Of all parameters, ``[B]`` each, in units of a sample's own gradient.
            factors: What the samples' gradients are clipped with, for each of ``contributions``.
            share: What one gradient is multiplied by besides.
            bad: The samples that are not finite; None: none.
            accumulated: The clipped sums of the mini-batches before.
        """
        columns = torch.stack(list(norms.values()))
        columns = columns if bad is None else columns.masked_fill(bad, 0)
        squares = columns.square().sum(1)
        finite = squares.new_tensor(columns.shape[1]) if bad is None else (~bad).sum().to(squares)
        self._squares = squares if self._squares is None else self._squares + squares
        self._finite = finite if self._finite is None else self._finite + finite
        clipped = _binding(factors, bad) | self._unclipped.keys()
        weights = {n: torch.ones_like(f) * share for n, f in factors.items() if n in clipped}
        sum_together({name: contributions[name] for name in weights}, weights, bad)
        for name, ones in weights.items():
            total = contributions[name].weighted_sum(ones, bad)
            before = self._unclipped.get(name, accumulated.get(name))
            self._unclipped[name] = total if before is None else before + total

    def sums(self, clipped: Mapping[str, Tensor], unit: float) -> dict[str, Tensor]:
        """Return the unclipped sums of the step, for each parameter that has one.

        Args:
            clipped: The clipped sums, which stand for those that are the same.
            unit: What the unclipped ones are to be multiplied by; ``clipped`` is already.
        """
        own = {name: total if unit == 1 else total * unit for name, total in self._unclipped.items()}
        return {**clipped, **own}

    def counts(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return the squares' sums and the number of finite samples, zeros in a step without samples."""
        if self._squares is None or self._finite is None:
            return [torch.zeros(len(self._names), dtype=dtype, device=device), torch.zeros(1, device=device)]
        return [self._squares, self._finite.reshape(1)]

    def finish(self, sums: Mapping[str, Tensor], unit: float, counts: Sequence[Tensor], size: int) -> None:
        """End a measured step.

        Args:
            sums: The unclipped sums, from all processes.
            unit: What they still are to be multiplied by.
            counts: What `counts` returned, summed over all processes.
            size: Number of samples in all.
        """
        squares, count = counts
        of_sum = [row_squares(sums[n].unsqueeze(0))[0] if n in sums else squares.new_zeros(()) for n in self._names]
        noise, gradient = unbiased(squares, torch.stack(of_sum).to(squares) * unit**2, count.to(squares))
        x, y = (torch.cat([values.sum(0, keepdim=True), values]) for values in (noise, gradient))
        one = torch.ones_like(x)
        found = torch.stack([one, one, one, x, y, x * x, x * y, y * y], 1)
        moments = torch.zeros_like(found) if self._moments is None else self._moments.to(found)
        usable = found.isfinite().all() & (count >= 2).all()
        self._moments = torch.where(usable, moments * moments.new_tensor(_DECAY) + found, moments)
        self.latest = NoiseScale(self._names, self._moments, size, size - count.to(squares)[0])

    def end_step(self) -> None:
        """Count a step."""
        self._step += 1
        self.drop()


def unbiased(squares: Tensor, sum_squared: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return unbiased estimates of the noise S and of the squared gradient :math:`|G|^2`.

    Args:
        squares: :math:`\sum_i |g_i|^2`.
        sum_squared: :math:`|\sum_i g_i|^2`.
        count: Number of samples; below 2 the estimates are not finite.
    """
    noise = (squares - sum_squared / count) / (count - 1)
    return noise, (sum_squared - squares) / (count * (count - 1))


def _binding(factors: Mapping[str, Tensor], bad: Tensor | None) -> set[str]:
    """The parameters of which any sample is scaled; the host looks once."""
    different = {id(f): f for f in factors.values()}
    flags = [((f != 1) if bad is None else (f != 1) & ~bad).any() for f in different.values()]
    scaled = dict(zip(different, torch.stack(flags).tolist(), strict=True)) if flags else {}
    return {name for name, f in factors.items() if scaled[id(f)]}


def _estimate(w: float, w2: float, steps: float, x: float, y: float, xx: float, xy: float, yy: float) -> NoiseEstimate:
    """Read weighted sums over steps."""
    if w == 0:
        return NoiseEstimate(math.nan, math.nan, math.nan, math.nan, (0.0, math.inf))
    x, y = x / w, y / w
    if xx == 0 and yy == 0:  # no gradient came
        return NoiseEstimate(x, y, math.nan, math.nan, (0.0, math.inf))
    if steps < FEWEST:
        return NoiseEstimate(x, y, max(x, 0.0) / y if y > 0 else math.inf, math.nan, (0.0, math.inf))
    part = w2 / w**2  # 1 / part is the number of equally weighted steps that would scatter as much
    of_mean = part / (1 - part)
    var_x, cov, var_y = (xx / w - x * x) * of_mean, (xy / w - x * y) * of_mean, (yy / w - y * y) * of_mean
    var_x, var_y = max(var_x, 0.0), max(var_y, 0.0)
    t = _students_t(1 / part - 1)
    a, b, c = y * y - t * t * var_y, x * y - t * t * cov, x * x - t * t * var_x
    if y <= 0 or a <= 0:
        most = y + t * math.sqrt(var_y)
        low = max(x - t * math.sqrt(var_x), 0.0) / most if most > 0 else 0.0
        return NoiseEstimate(x, y, math.inf, math.inf, (low, math.inf))
    root = math.sqrt(max(b * b - a * c, 0.0))
    scale = max(x, 0.0) / y
    error = math.sqrt(max(var_x - 2 * scale * cov + scale**2 * var_y, 0.0)) / y
    return NoiseEstimate(x, y, scale, error, (max((b - root) / a, 0.0), max((b + root) / a, 0.0)))


def _students_t(freedom: float) -> float:
    """The two-sided 95 % quantile of Student's t, by the expansion of Cornish and Fisher: 2 % low at 4, then better."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
