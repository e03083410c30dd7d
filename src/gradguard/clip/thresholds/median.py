"""The recommended automatic rule: a threshold a few robust deviations above the median of recent log-norms."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_whole
from gradguard.clip.gradients import Gradients
from gradguard.clip.thresholds.threshold_rule import (
    RingHistory,
    ThresholdClipper,
    ceiling_of,
    check,
    counter,
    empty_history,
    scalar,
)
from gradguard.distributed.settings import Settings
from gradguard.tensors.layout import move
from gradguard.threshold_formulas import MEDIAN_START, MEDIAN_UPDATE, MedianRule


class ClipByMedian(MedianRule, ThresholdClipper):
    r"""Clip norms that stand out from recent ones, and no others.

    With x the logarithms of the last ``window`` norms, without that of this step,

    .. math:: m = \operatorname{median}(x), \qquad
              d = \max\bigl(1.4826 \operatorname{median}|x - m|,\; \text{floor}\bigr), \qquad
              c = \min\bigl(e^{m + k d},\; \text{ceiling}\bigr), \qquad g \leftarrow g \min(1, c / n)

    The **raw** norm enters the window, not the clipped one: after a lasting rise the rule follows. Single spikes hardly
    move a median. Ordinary noise is not clipped: with the defaults a norm must be at least
    :math:`e^{0.3} = 1.35` times the median, with log-normal noise of 0.15 about 2.5 times.

    Norms alone do not show that the first of them is unusual, nor that a learning rate is too high. A `Guard` (and
    ``gradguard run --clip median``) has the weights w, the rate :math:`\eta` and the momentum :math:`\beta`. From these
    the rule computes **how far a step moves the weights**, and bounds it:

    .. math:: c \le \frac{\text{update}}{1 + h / 16} \, \frac{\lVert w \rVert}{r}, \qquad
              r = \max \frac{\eta}{\sqrt{1 - \beta^2}}

    for SGD, with the largest of several rates: no plain step moves the weights by more than ``update``, a tenth, of
    their norm. Weight decay comes on top, and momentum counts as for gradients that do not depend on each other.
    h counts the steps on which this bound acts; every other step lowers h by one. If the rate is too high, the steps
    become shorter and the run continues. If the rate is right, the bound hardly ever acts.
    In the first ``warmup`` steps a norm passes, and enters the window, as at most :math:`3 \, e^m`.

    **Without a guard, and with other optimizers,** the start is gentle. For the first ``warmup``
    norms, with s the share of them that is over,

    .. math:: c = 1.5 \, e^m \, \text{start}^{\,1 - s}

    and of the first norm ``start``, a tenth, passes. A norm enters the window as at most :math:`1.5 \, e^m`, so
    neither a spike nor an explosion becomes usual. For an optimizer whose steps depend on the gradient's scale, this is
    a warm-up of the learning rate. An optimizer that cancels the scale, such as Adam, learns as fast, and first norms
    far above later ones fill its moments less. After the start, a rate that is too high is not bounded.

    **Guarantees.** Those of `ThresholdClipper`. Without a ceiling and a bound on the update, multiplying the loss by a
    constant changes no coefficient. After a lasting rise of any size that follows the start, the median lets the whole
    gradient pass again within ``window`` + 2 steps. If several processes hold parts of the weights, all of them have
    the same threshold, bit by bit.

    **Edge cases.** Those of `ThresholdClipper`, and

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    a spike inside the start          is clipped, and has no later effect
    norms that rise in the start      are clipped; the rule has followed at the latest ``warmup`` steps after it
    constant norms                    the floor on d applies: c = exp(k·floor) times the norm
    a steady fall of the norm         d includes the trend, so that a spike passes as 3.4 rather than 2.5 times
    all weights are 0, or lr is 0     no bound on the update in that step
    ================================  ==========================================================================

    Args:
        k: How many deviations above the median, at least 0.
        window: How many norms are remembered; 128 to 256 works well.
        warmup: How many norms the start lasts, from 1 to ``window``.
        floor: The smallest d, at least 0, in units of the logarithm.
        ceiling: An upper limit of every threshold; None for no limit.
        norm_type: Order of the norm, above 0 or infinite.
        start: The share of the first norm that passes, above 0 and at most 1, if no bound on the update is known; 1 for
            no warm-up of the step.
        update: The share of the weights' norm by which a step may move them, above 0, under a guard. None for no such
            bound: a guard then changes nothing.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If an argument is not a number.

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
        A bound on the update relative to the weights: You, Gitman, Ginsburg (2017), Large batch training of
        convolutional networks, arXiv 1708.03888, which sets it for each layer and always.
        Median and MAD: Hampel (1974), The influence curve and its role in robust estimation. A median of raw norms as
        the threshold: the optimizer ScaledAdam in icefall, of Yao et al. (2023), Zipformer, arXiv 2310.11230.
    """

    uses_reach = True

    def __init__(
        self,
        k: float = 6.0,
        window: int = 128,
        warmup: int = 32,
        floor: float = 0.05,
        ceiling: float | None = None,
        norm_type: float = 2.0,
        start: float = MEDIAN_START,
        update: float | None = MEDIAN_UPDATE,
    ) -> None:
        self.k = check_number("k", k, "a finite number >= 0")
        self.floor = check_number("floor", floor, "a finite number >= 0")
        self.start = check_number("start", start, "a number above 0 and at most 1")
        self.window, self.warmup = check_whole("window", window), check_whole("warmup", warmup)
        check(warmup <= window, "warmup <= window", lambda: f"warmup={warmup}, window={window}")
        self.ceiling = ceiling_of(ceiling)
        self.update = torch.inf if update is None else check_number("update", update, "a number above 0")
        ThresholdClipper.__init__(
            self, norm_type, logarithms=empty_history(self.window), count=counter(), held=scalar(0.0)
        )

    def choose(self, norm: Tensor, enters: Tensor) -> Tensor:
        """Return c from the norms so far, and remember this one."""
        return self._choose(norm, enters, None)

    def choose_for(self, grads: Gradients, norm: Tensor, enters: Tensor) -> Tensor:
        """Return c from the norms so far and, if known, from how far the step would move the weights."""
        if grads.reach is None or self.update == torch.inf:
            return self.choose(norm, enters)
        longest = grads.reach.longest_gradient(grads, self.norm_type)
        return self._choose(norm, enters, move(longest, norm.device, norm.dtype))

    def _choose(self, norm: Tensor, enters: Tensor, longest: Tensor | None) -> Tensor:
        rule = partial(self.next_threshold, longest=longest)
        return self._advance(rule, norm, enters, logarithms=RingHistory(self.state["logarithms"]))

    def choices(self, grads: Gradients) -> Settings:
        """Return whether the optimizer's rates are known: a rank without them would clip differently."""
        return ("norms alone" if grads.reach is None else "norms and the update",)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, also in a version without a bound on the update."""
        super().load_state_dict({"held": scalar(0.0), **state_dict})
