"""The spike rules of other projects, for comparison: to the letter where they say, and right where they have bugs."""

from abc import abstractmethod

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_whole
from gradguard.spikes.base import Detector, SpikeVerdict


class WindowRule(Detector):
    """A rule that compares with the last values of each signal. One that is not finite is not judged and not kept.

    Args:
        window: How many values of each signal are kept.
    """

    keeps_spikes = True
    """Whether values that were rejected are kept as well; nothing is ever adopted."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = check_whole("window", window, 2)

    def _empty(self, signals: int) -> dict[str, Tensor]:
        history = torch.full((signals, self.window), torch.nan, dtype=torch.float64, device="cpu")
        return {
            "history": history,  # a ring; the next value of a signal goes to `count` modulo its length
            "count": torch.zeros(signals, dtype=torch.int64, device="cpu"),
            "in_a_row": torch.zeros((), dtype=torch.int64, device="cpu"),
        }

    @abstractmethod
    def _scores(self, values: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each signal a score in multiples of the bound, and whether it is a spike.

        Args:
            values: The values of this step, ``[signals]``.
            stored: How many each signal has in its history.
        """

    def _judge(self, values: Tensor) -> SpikeVerdict:
        history, count, in_a_row = self.state["history"], self.state["count"], self.state["in_a_row"]
        known = values.isfinite()
        scores, over = self._scores(values, count.clamp(max=self.window))
        scores, spike = torch.where(known, scores, torch.nan), (over & known).any()
        enters = known if self.keeps_spikes else known & ~spike
        places = (count % self.window)[:, None]
        history.scatter_(1, places, torch.where(enters[:, None], values[:, None], history.gather(1, places)))
        count.add_(enters)
        in_a_row.copy_(torch.where(known.any(), (in_a_row + 1) * spike, in_a_row))
        return SpikeVerdict(spike, scores, in_a_row.clone(), torch.zeros_like(spike))


class OlmoRule(WindowRule):
    r"""OLMo-core's rule: a loss or a norm above mean + ``sigmas`` standard deviations of the last ``window`` ones.

    .. math:: v > \bar x + \text{sigmas} \cdot s

    with the sample deviation s, silent until half the window is filled. What is rejected enters the history, so that a
    lasting rise of any size costs at most :math:`\lceil \text{window} / (\text{sigmas}^2 + 1) \rceil` steps in a row
    (4 of 128 at 6), a longer burst gets in, and an outlier hides smaller ones for ``window`` steps.

    **Differences.** There, one NaN makes the next 128 steps spikes, and the history is not in the state dict: here a
    value that is not finite is not kept, and the history is. As there, values that are all alike have no deviation, so
    that the smallest rise is a spike.

    Args:
        window: How many values are kept.
        sigmas: How many deviations above the mean.

    Example:
        >>> import torch
        >>> rule = OlmoRule(window=8)
        >>> [bool(rule.observe(torch.tensor([x]))) for x in (1.0, 1.2, 0.8, 1.0, 9.0, 5.0)]
        [False, False, False, False, True, False]

    Reference:
        allenai/OLMo-core, ``src/olmo_core/optim/skip_step_optimizer.py`` (2025).
    """

    def __init__(self, window: int = 128, sigmas: float = 6.0) -> None:
        super().__init__(window)
        self.sigmas = check_number("sigmas", sigmas, "a finite number > 0")

    def __repr__(self) -> str:
        """Return the call that makes such a rule."""
        return f"OlmoRule(window={self.window}, sigmas={self.sigmas})"

    def _scores(self, values: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
        history = self.state["history"]
        mean = history.nansum(1) / stored
        squares = torch.where(history.isnan(), 0.0, (history - mean[:, None]).square()).sum(1)
        bound = self.sigmas * (squares / (stored - 1)).sqrt()
        judged = stored >= max(2, self.window // 2)
        return torch.where(judged, (values - mean) / bound, torch.nan), judged & (values > mean + bound)


class LightningRule(WindowRule):
    r"""Lightning's `SpikeDetection`: a signal above the last one, and far from the mean of the last ``window``.

    .. math:: |v - \bar x| \ge \text{rtol} \cdot |\bar x| \quad\text{and}\quad v > x_{t-1}

    of the values that were no spikes. There it looks at the loss of one batch, on each rank by its own history,
    **after** the step, writes down the batch and the one before, and ends the run. A detector sees what a guard gives
    it, before the step, and nothing ends: **a lasting rise is rejected for ever.** It is here for comparison.

    **Differences.** There, its state cannot be loaded (`AttributeError`, 2.6.6); ``finite_only=True`` does the opposite
    of what it says, and calls what is not finite a spike. Here the state loads, and what is not finite is not judged.

    Args:
        window: How many values the mean is of.
        rtol: How far from the mean, in means.
        warmup: How many values are accepted unseen, at least 1.

    Example:
        >>> import torch
        >>> rule = LightningRule()
        >>> [bool(rule.observe(torch.tensor([x]))) for x in (1.0, 1.0, 2.9, 9.0)]
        [False, False, False, True]

    Reference:
        Lightning-AI/pytorch-lightning, ``src/lightning/fabric/utilities/spike.py`` (2.6).
    """

    keeps_spikes = False

    def __init__(self, window: int = 10, rtol: float = 2.0, warmup: int = 1) -> None:
        super().__init__(window)
        self.rtol, self.warmup = check_number("rtol", rtol, "a finite number > 0"), check_whole("warmup", warmup)

    def __repr__(self) -> str:
        """Return the call that makes such a rule."""
        return f"LightningRule(window={self.window}, rtol={self.rtol}, warmup={self.warmup})"

    def _scores(self, values: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
        history, count = self.state["history"], self.state["count"]
        mean = history.nansum(1) / stored
        last = history.gather(1, ((count - 1) % self.window)[:, None]).squeeze(1)
        far, bound = (values - mean).abs(), self.rtol * mean.abs()
        judged = count >= self.warmup
        return torch.where(judged, far / bound, torch.nan), judged & (far >= bound) & (values > last)
