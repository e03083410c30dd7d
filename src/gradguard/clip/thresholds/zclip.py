"""ZClip: scale down norms that stand out by their z-score."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_whole
from gradguard.clip.thresholds.threshold_rule import (
    RingHistory,
    ThresholdClipper,
    ceiling_of,
    check,
    counter,
    empty_history,
    scalar,
)
from gradguard.tensors.number_operations import TENSORS
from gradguard.threshold_formulas import ZScoreRule, pytorch_coefficient

Mode = Literal["adaptive_scaling", "mean", "percentile"]

_EPSILON = 1e-6


class ZClip(ZScoreRule, ThresholdClipper):
    r"""Scale a norm down when its z-score exceeds a limit, with moving averages of mean and variance.

    The first ``warmup`` norms give the mean μ and the (population) variance σ². From then on

    .. math:: z = \frac{n - \mu}{\sigma + 10^{-6}}, \qquad
              c = f \Bigl(\mu + \frac{z_t \sigma}{z / z_t}\Bigr) \text{ if } z > z_t, \qquad
              g \leftarrow g \min\Bigl(1, \frac{\min(c, \text{ceiling})}{n}\Bigr)

    and then, with y = c where :math:`z > z_t` and y = n elsewhere,

    .. math:: \mu \leftarrow \alpha \mu + (1 - \alpha) y, \qquad
              \sigma^2 \leftarrow \alpha \sigma^2 + (1 - \alpha) (y - \mu)^2 \text{ with the new } \mu.

    Two things to know. ``ceiling=1.0`` is an additional fixed threshold, on by default as published; None turns it off.
    And the rule remembers the *clipped* norm: after a lasting threefold rise it passes 36 % of the gradient from then
    on (`ClipByMedian` does not); ``result.locked_in`` shows it.

    **Guarantees.** Those of `ThresholdClipper`. With ``strict_paper=True`` mean, variance, thresholds and
    coefficients are, on the CPU, to the last digit those of the published update. If ``ceiling`` is None, multiplying
    the loss by a constant changes a coefficient only through the 1e-6 beside σ.

    **Edge cases.** Those of `ThresholdClipper`, and

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    a spike inside the warm-up        σ is ruined: spikes as large pass for some hundred steps
    constant norms                    σ is 0, so the next larger norm is scaled down to μ
    NaN, ``strict_paper=True``        μ and σ stay NaN: from then on only ``ceiling`` clips
    ================================  ==========================================================================

    Args:
        alpha: α, from 0 to 1.
        z_threshold: :math:`z_t`, above 0.
        warmup: How many norms are collected first, at least 1.
        ceiling: An upper limit of every threshold, in the warm-up too; None for no limit.
        clip_factor: f, above 0; 0.5 to 0.9 clips harder. The published code multiplies all of c by it, in this mode
            only, and this class does the same.
        mode: ``"adaptive_scaling"`` is the above; ``"mean"`` has c = μ; ``"percentile"`` has :math:`c = \mu + z_t
            \sigma` whenever n exceeds that.
        skip_update_on_spike: Whether a spike leaves μ and σ unchanged.
        strict_paper: Reproduce the published update, its failures included.

    Raises:
        InvalidValueError: If a number is outside its range, or the mode is unknown.
        InvalidTypeError: If an argument is not a number.

    Example:
        >>> import torch
        >>> p, clipper = torch.nn.Parameter(torch.zeros(1)), ZClip(warmup=4, ceiling=None)
        >>> for size in (1.0, 1.2, 0.8, 1.0, 50.0):
        ...     p.grad = torch.tensor([size])
        ...     result = clipper([p])
        >>> p.grad.round(decimals=2)
        tensor([1.])

    Reference:
        Kumar, Owen, Roy Chowdhury, Güra (2025), ZClip: adaptive spike mitigation for LLM pre-training,
        arXiv 2504.02507.
    """

    def __init__(
        self,
        alpha: float = 0.97,
        z_threshold: float = 2.5,
        warmup: int = 25,
        ceiling: float | None = 1.0,
        clip_factor: float = 1.0,
        mode: Mode = "adaptive_scaling",
        skip_update_on_spike: bool = False,
        strict_paper: bool = False,
    ) -> None:
        self.alpha = check_number("alpha", alpha, "a number from 0 to 1")
        self.z_threshold = check_number("z_threshold", z_threshold, "a finite number > 0")
        self.clip_factor = check_number("clip_factor", clip_factor, "a finite number > 0")
        check(mode in get_args(Mode), "one of " + ", ".join(map(repr, get_args(Mode))), lambda: f"mode={mode!r}")
        self.ceiling = ceiling_of(ceiling)
        self.warmup, self.mode = check_whole("warmup", warmup), mode
        self.skip_update_on_spike, self.strict_paper = skip_update_on_spike, strict_paper
        ThresholdClipper.__init__(
            self, first=empty_history(self.warmup), count=counter(), mean=scalar(torch.nan), variance=scalar(torch.nan)
        )

    def choose(self, norm: Tensor, enters: Tensor) -> Tensor:
        """Return the threshold, and update mean and variance.

        The threshold is the smaller of ``ceiling`` and c; if n is not clipped, c is the smallest norm that would be.
        """
        return self._advance(self.next_threshold, norm, enters, first=RingHistory(self.state["first"]))

    def coefficient(self, norm: Tensor, threshold: Tensor) -> Tensor:
        """Return ``c / n``; with ``strict_paper`` the factor of the published code."""
        if not self.strict_paper:
            return super().coefficient(norm, threshold)
        warm = self.state["count"] > self.warmup  # the count includes this step's norm
        first, later = torch.ones_like(norm), torch.where(norm > threshold, threshold / (norm + _EPSILON), 1.0)
        if not math.isinf(self.ceiling):  # a Python number over a tensor would be rounded twice
            first = pytorch_coefficient(TENSORS, norm, torch.full_like(norm, self.ceiling))
        return torch.where(warm, later, first)
