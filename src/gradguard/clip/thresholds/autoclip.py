"""AutoClip: the threshold is a percentile of all norms so far."""

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_whole
from gradguard.clip.thresholds.threshold_rule import (
    RingHistory,
    ThresholdClipper,
    WholeHistory,
    counter,
    empty_history,
)
from gradguard.errors import InvalidValueError
from gradguard.tensors.number_operations import TENSORS
from gradguard.threshold_formulas import PercentileRule, pytorch_coefficient

_FIRST_ROOM = 1024


class AutoClip(PercentileRule, ThresholdClipper):
    r"""Bound the norm by a percentile of all norms so far, including that of this step.

    .. math:: c_t = \operatorname{percentile}_p(n_1, \dots, n_t), \qquad g \leftarrow g \min(1, c_t / n_t)

    The recommended p = 10 clips nine steps in ten by design, so ``result.locked_in`` is true in an ordinary run: the
    rule nearly normalises the gradient. With the whole history the threshold cannot follow a lasting rise: after a
    threefold one a third of the gradient passes. With a window it can.

    **Guarantees.** Those of `ThresholdClipper`. With ``strict_paper=True`` thresholds and coefficients are, on the
    CPU, to the last digit those of the published update.

    **Edge cases.** Those of `ThresholdClipper`; the percentile is interpolated linearly. With ``strict_paper=True``:

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    one NaN norm                      the threshold is NaN as long as the NaN is in the history: every gradient
                                      becomes NaN
    zero norm                         enters; above p % of zeros the threshold is 0
    any norm                          the divisor is n + 1e-6
    ================================  ==========================================================================

    Args:
        percentile: p, from 0 (the smallest so far) to 100 (off). The paper recommends 10; its authors say "maybe 80"
            for short histories.
        window: How many norms are remembered. None remembers all, as in the paper: memory and time then grow with
            the run, 8 bytes a step, and a CUDA graph cannot hold it.
        strict_paper: Reproduce the paper, its failures included.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If an argument is not a number.

    Example:
        >>> import torch
        >>> p, clipper = torch.nn.Parameter(torch.zeros(1)), AutoClip(percentile=50)
        >>> for size in (1.0, 3.0, 8.0):
        ...     p.grad = torch.tensor([size])
        ...     result = clipper([p])
        >>> p.grad  # the median of 1, 3 and 8
        tensor([3.])

    Reference:
        Seetharaman, Wichern, Pardo, Le Roux (2020), AutoClip: adaptive gradient clipping for source separation
        networks, arXiv 2007.14469.
    """

    def __init__(self, percentile: float = 10.0, window: int | None = None, strict_paper: bool = False) -> None:
        self.percentile = check_number("percentile", percentile, "a number from 0 to 100")
        self.window, self.strict_paper = None if window is None else check_whole("window", window), strict_paper
        self._most = 0  # an upper bound of the count, which the host knows without a host sync
        ThresholdClipper.__init__(self, history=empty_history(self.window or _FIRST_ROOM), count=counter())

    def choose(self, norm: Tensor, enters: Tensor) -> Tensor:
        """Remember ``norm`` and return the percentile."""
        if self.window is None:
            self._make_room()
        history = (WholeHistory if self.window is None else RingHistory)(self.state["history"])
        threshold = self._advance(self.next_threshold, norm, enters, history=history)
        return torch.where(history.values.isnan().any(), torch.nan, threshold)

    def coefficient(self, norm: Tensor, threshold: Tensor) -> Tensor:
        """Return ``c / n``; with ``strict_paper`` the factor of `torch.nn.utils.clip_grad_norm_`."""
        if not self.strict_paper:
            return super().coefficient(norm, threshold)
        return pytorch_coefficient(TENSORS, norm, threshold)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state that `state_dict` returned; training continues as if it had not been interrupted."""
        saved = state_dict.get("history")
        if self.window is None and isinstance(saved, Tensor) and saved.dim() == 1:
            self._take(state_dict, history=len(saved))
        else:
            self._take(state_dict)
        self._most = int(state_dict["count"])

    def _make_room(self) -> None:
        """Double the history before it is full; the host counts the steps, so there is no host sync."""
        before = self.state["history"]
        if before.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InvalidValueError(
                "AutoClip(window=None) remembers every norm, so its memory grows, which a CUDA graph cannot hold. "
                "Pass a window, for example AutoClip(window=10_000)."
            )
        self._most += 1
        if self._most > len(before):
            self.state["history"] = torch.cat([before, torch.full_like(before, torch.inf)])
