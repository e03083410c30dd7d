"""The recommended automatic rule: a threshold a few robust deviations above the median of recent log-norms."""

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_threshold
from gradguard.clip.thresholds.base import (
    TENSORS,
    ThresholdClipper,
    check,
    counter,
    empty_history,
    median_of_history,
    push_norm,
    whole,
)
from gradguard.threshold_formulas import MEDIAN_START, median_start, median_threshold


class ClipByMedian(ThresholdClipper):
    r"""Clip what stands out from the norms of the last steps, and nothing else.

    With x the logarithms of the last ``window`` norms, this step's not among them,

    .. math:: m = \operatorname{median}(x), \qquad
              d = \max\bigl(1.4826 \operatorname{median}|x - m|,\; \text{floor}\bigr), \qquad
              c = \min\bigl(e^{m + k d},\; \text{ceiling}\bigr), \qquad g \leftarrow g \min(1, c / n)

    The **raw** norm enters the window, not the clipped one: after a lasting rise the rule follows. Single spikes move
    a median hardly at all. With ordinary noise nothing is clipped; with the defaults a norm must be at least
    :math:`e^{0.3} = 1.35` times the median, with log-normal noise of 0.15 about 2.5 times.

    **The start** is gentle, because nothing is usual yet and runs that diverge mostly do it there. For the first
    ``warmup`` norms, with s the share of them that is over,

    .. math:: c = 1.5 \, e^m \, \text{start}^{\,1 - s}

    and of the first norm ``start``, a tenth, passes. A norm enters the window as at most :math:`1.5 \, e^m`, so that
    neither a spike nor an explosion becomes usual. To an optimizer that does not cancel a scale this is a warm-up of
    the learning rate, to one that does it is hardly anything.

    **Guarantees.** Those of `ThresholdClipper`. Without a ceiling, multiplying the loss by a constant changes no
    coefficient. After a lasting rise of any size, the start behind it, the whole gradient passes again within
    ``window`` + 2 steps.

    **Edge cases.** Those of `ThresholdClipper`, and

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    a spike inside the start          is clipped, and does no harm later
    norms that rise in the start      are clipped; the rule has followed at the latest ``warmup`` steps after it
    constant norms                    the floor on d holds: c = exp(k·floor) times the norm
    a steady fall of the norm         d includes the trend, so that a spike passes as 3.4 rather than 2.5 times
    ================================  ==========================================================================

    Args:
        k: How many deviations above the median, at least 0.
        window: How many norms are remembered; 128 to 256 fits.
        warmup: For how many norms it starts gently, from 1 to ``window``.
        floor: The least d, at least 0, in units of the logarithm.
        ceiling: A threshold that always holds; None for none.
        norm_type: Order of the norm, above 0 or infinite.
        start: The share of the first norm that passes, above 0 and at most 1; 1 for no warm-up of the step.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If one is no number.

    Example:
        >>> import torch
        >>> p, clipper = torch.nn.Parameter(torch.zeros(1)), ClipByMedian(warmup=8)
        >>> for size in [1.0] * 10 + [200.0, 1.0]:
        ...     p.grad = torch.tensor([size])
        ...     result = clipper([p])
        ...     if size > 1:
        ...         print(f"{float(result.norm):.0f} became {p.grad.item():.2f}")
        200 became 1.35

    Reference:
        Median and MAD: Hampel (1974), The influence curve and its role in robust estimation. A median of raw norms as
        the threshold: the optimizer ScaledAdam in icefall, of Yao et al. (2023), Zipformer, arXiv 2310.11230.
    """

    def __init__(
        self,
        k: float = 6.0,
        window: int = 128,
        warmup: int = 32,
        floor: float = 0.05,
        ceiling: float | None = None,
        norm_type: float = 2.0,
        start: float = MEDIAN_START,
    ) -> None:
        self.k, self.floor = _at_least_0("k", k), _at_least_0("floor", floor)
        self.start = check_number("start", start)
        check(0 < self.start <= 1, "a number above 0 and at most 1", lambda: f"start={start}")
        self.window, self.warmup = whole("window", window), whole("warmup", warmup)
        check(warmup <= window, "warmup <= window", lambda: f"warmup={warmup}, window={window}")
        self.ceiling = torch.inf if ceiling is None else float(check_threshold("ceiling", ceiling))
        super().__init__(norm_type, logarithms=empty_history(self.window), count=counter())

    def choose(self, norm: Tensor, enters: Tensor) -> Tensor:
        """Return c of the norms so far, and remember this one."""
        logarithms, count = self.state["logarithms"], self.state["count"]
        middle = median_of_history(logarithms.sort().values, count)
        deviations = (logarithms - middle).abs().sort().values
        deviation = median_of_history(deviations, count)
        progress = (count / self.warmup).clamp(max=1).to(norm.dtype)
        early, remembered = median_start(TENSORS, norm, middle, progress, self.start)
        later = median_threshold(TENSORS, middle, deviation, self.k, self.floor)
        threshold = torch.where(progress < 1, early, later)
        threshold = torch.where((count > 0) | enters, threshold, torch.inf)
        push_norm(logarithms, count, torch.where(progress < 1, remembered, norm).log(), enters)
        return threshold.clamp(max=self.ceiling)


def _at_least_0(name: str, value: float) -> float:
    number = check_number(name, value)
    check(0 <= number < torch.inf, "a finite number >= 0", lambda: f"{name}={value}")
    return number
