"""A controller that keeps the share of clipped steps at a target."""

import torch
from torch import Tensor

from gradguard.arguments import check_number
from gradguard.clip.thresholds.threshold_rule import ThresholdClipper, ceiling_of, check, scalar
from gradguard.threshold_formulas import FractionRule


class ClipFraction(FractionRule, ThresholdClipper):
    r"""Move the threshold so that a given share of the steps is clipped.

    .. math:: c \leftarrow c \, \exp\bigl(-\eta\, (u - (1 - \text{target}))\bigr), \qquad
              u = 1 \text{ if } n \le c \text{ else } 0

    after each step, within ``[floor, ceiling]``: the threshold follows the (1 - target) quantile of the norms, by at
    most :math:`e^{\eta (1 - \text{target})}` up and :math:`e^{\eta\,\text{target}}` down a step, whatever the norm.

    **Guarantees.** Those of `ThresholdClipper`. Without floor, ceiling and initial value, multiplying the loss by a
    constant changes no coefficient.

    **Edge cases.** Those of `ThresholdClipper`, and

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    first norm, no initial value      passes up to the ceiling, and is the first threshold
    constant norms                    c swings about the norm; the share is kept
    a lasting threefold rise          c follows in about ln(3) / (η (1 - target)) steps
    ================================  ==========================================================================

    Args:
        target: The share of steps to clip, above 0 and below 1.
        learning_rate: η, above 0.
        initial: The first threshold, above 0; None takes the first norm.
        floor: The smallest threshold, at least 0.
        ceiling: The largest threshold; None for no limit.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If an argument is not a number.

    Example:
        >>> import torch
        >>> p, clipper = torch.nn.Parameter(torch.zeros(1)), ClipFraction(target=0.25)
        >>> sizes, clipped = torch.rand(500, generator=torch.Generator().manual_seed(0)), 0
        >>> for size in sizes:
        ...     p.grad = size.view(1)
        ...     clipped += int(clipper([p]).clipped)
        >>> round(clipped / 500, 2)
        0.26

    Reference:
        Andrew, Thakkar, McMahan, Ramaswamy (2021), Differentially private learning with adaptive clipping,
        arXiv 1905.03871; without its noise, and with steps in the place of samples.
    """

    def __init__(
        self,
        target: float,
        learning_rate: float = 0.2,
        initial: float | None = None,
        floor: float = 0.0,
        ceiling: float | None = None,
    ) -> None:
        self.target = check_number("target", target, "a share above 0 and below 1")
        self.learning_rate = check_number("learning_rate", learning_rate, "a finite number > 0")
        self.floor = check_number("floor", floor)
        self.ceiling = ceiling_of(ceiling)
        check(0 <= self.floor <= self.ceiling, "0 <= floor <= ceiling", lambda: f"floor={floor}, ceiling={ceiling}")
        self.initial = torch.inf if initial is None else check_number("initial", initial, "a number > 0, or None")
        ThresholdClipper.__init__(self, threshold=scalar(self.initial))

    def choose(self, norm: Tensor, enters: Tensor) -> Tensor:
        """Return c, and move it for the next step."""
        return self._advance(self.next_threshold, norm, enters)
