"""Whether the gradient norm explodes, vanishes, or is not a number."""

import math
import statistics
from bisect import insort
from collections.abc import Sequence

from gradguard.monitoring.judge.findings import Episode, Finding, Kind, Log, Words, named, steps
from gradguard.monitoring.judge.numbers import number

EXPLODING_TIMES = 10.0
"""A norm that stays above 10 times the usual: log-normal noise as wild as 1.5 gets there on 6 % of the steps."""

EXPLODING_STEPS = 10
"""So many in a row: with that noise once in 10^12 steps, so that spikes are not taken for an explosion."""

EXPLODING_EARLY_TIMES = 100.0
"""In the first 200 steps the norm may rise tenfold without harm: warm-ups and layers initialised at zero do that."""

EXPLODING_ONCE_TIMES = 1000.0
"""A single norm so far above the usual that nothing clipped undoes a thousand steps; noise does not get there."""

VANISHING_SHARE = 1e-4
"""A norm below a ten-thousandth of the usual moves nothing; training that converges seldom falls that far."""

VANISHING_STEPS = 20
"""So many in a row: a single batch of zeros, such as one that is all padding, is not it."""

CONVERGED_LOSS = 0.1
"""A loss below a tenth of what it was explains a small norm: that is convergence."""

BLOCK = 20
"""Norms whose median is one sample of what is usual."""

BLOCKS_NEEDED = 3
_EARLY_BLOCKS = 10


class Level:
    """Whether the norm stays far above or far below what is usual, or is not finite.

    What is usual is the median of the medians of each 20 finite norms, without the first 20: neither a spike nor the
    start moves it, and a lasting change not before it has lasted for half of the run.

    Args:
        log: Where faults go.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._block: list[float] = []
        self._blocks, self._levels, self._usual = 0, [], 0.0
        self._high, self._low = math.inf, 0.0  # until something is known to be usual
        self._run, self._since, self._peak = 0, 0, 0.0  # of norms above or below, signed
        self._norm, self._first_losses = 0.0, []

    def finite(self, i: int, norm: float, loss: float | None, clipped: bool = False) -> list[Finding]:
        """Return what is new after a step with a finite norm.

        Args:
            i: The step.
            norm: Its norm.
            loss: Its loss, if known and finite.
            clipped: Whether a clip bound on it.
        """
        self._norm = norm
        self._block.append(norm)
        if len(self._block) == BLOCK:
            self._close_block()
        if loss is not None and self._blocks <= BLOCKS_NEEDED:
            self._first_losses.append(loss)
        if self._low < norm <= self._high:
            self._run = 0
            return []
        return self._exploding(i, norm, clipped) if norm > self._high else self._vanishing(i, norm, loss)

    def nonfinite(self, i: int, skipped: bool, amp: bool) -> list[Finding]:
        """Return what is new after a step with gradients that are not finite.

        Args:
            i: The step.
            skipped: Whether the optimizer left it out.
            amp: Whether a loss scaler is at work, whose search for its scale is no fault.
        """
        if skipped and amp:
            return []
        episode = self._log.goes_on("nonfinite", i)
        if episode is not None:
            episode.harmless = episode.harmless and skipped
            return []
        numbers = {}
        if self._usual and self._norm > EXPLODING_TIMES * self._usual:
            numbers = {"before": self._norm, "times": self._norm / self._usual}
        return self._log.begin("nonfinite", NONFINITE, i, i, numbers=numbers, harmless=skipped)

    def blame(self, i: int, names: Sequence[str]) -> None:
        """Name the parameters whose gradients were not finite on step ``i``.

        Args:
            i: The step.
            names: Their names.
        """
        for episode in reversed(self._log.episodes):
            if episode.kind is NONFINITE and episode.last == i:
                episode.params += [name for name in names if name not in episode.params]
                return

    def _count(self, i: int, sign: int) -> int:
        """For how many steps in a row the norm has been on that side."""
        if self._run * sign <= 0:
            self._run, self._since = 0, i
        self._run += sign
        return abs(self._run)

    def _exploding(self, i: int, norm: float, clipped: bool) -> list[Finding]:
        count = self._count(i, +1)
        self._peak = norm if count == 1 else max(self._peak, norm)
        if count < EXPLODING_STEPS:
            return [] if clipped else self._jump(i, norm)
        if self._log.goes_on("exploding", i, norm):
            return []
        numbers = {"usual": self._usual, "times": self._high / self._usual, "largest": self._peak}
        return self._log.begin("exploding", EXPLODING, self._since, i, count=count, numbers=numbers)

    def _jump(self, i: int, norm: float) -> list[Finding]:
        if norm <= EXPLODING_ONCE_TIMES * self._usual or self._log.goes_on("jump", i, norm):
            return []
        numbers = {"usual": self._usual, "largest": norm}
        return self._log.begin("jump", JUMP, i, i, numbers=numbers)

    def _vanishing(self, i: int, norm: float, loss: float | None) -> list[Finding]:
        count = self._count(i, -1)
        if count < VANISHING_STEPS or self._has_converged(loss) or self._log.goes_on("vanishing", i, norm):
            return []
        numbers = {"below": self._low, "smallest": norm}
        return self._log.begin("vanishing", VANISHING, self._since, i, count=count, numbers=numbers)

    def _has_converged(self, loss: float | None) -> bool:
        if loss is None or not self._first_losses:
            return False
        return 0 <= loss < CONVERGED_LOSS * statistics.median(self._first_losses)

    def _close_block(self) -> None:
        level = statistics.median(self._block)
        self._block, self._blocks = [], self._blocks + 1
        if self._blocks > 1:
            insort(self._levels, level)
        if len(self._levels) >= BLOCKS_NEEDED:
            self._usual = self._levels[len(self._levels) // 2]
            times = EXPLODING_TIMES if self._blocks > _EARLY_BLOCKS else EXPLODING_EARLY_TIMES
            self._high = times * self._usual or math.inf
            self._low = VANISHING_SHARE * self._usual


def _nonfinite(found: Episode) -> Words:
    where = f" in {named(found.params)}" if found.params else ""
    before = found.numbers.get("before")
    grown = (
        f"; the norm before it was {number(before)}, {number(found.numbers['times'])} times the usual" if before else ""
    )
    message = f"gradients were not finite{where} on {steps(found.count)}, first on step {found.first}{grown}"
    if found.harmless:
        return "warning", f"{message}; all of these steps were skipped", (
            "the weights are safe; if it comes often, find the operation with torch.autograd.set_detect_anomaly(True)"
        )  # fmt: skip
    return "error", message, (
        "find the operation with torch.autograd.set_detect_anomaly(True), lower the learning rate, or leave such steps "
        'out with gg.Guard(optimizer, clipper, nonfinite="skip")'
    )  # fmt: skip


def _exploding(found: Episode) -> Words:
    usual, largest = found.numbers["usual"], found.numbers["largest"]
    message = (
        f"the gradient norm stayed more than {found.numbers['times']:g} times above its usual {number(usual)} for "
        f"{steps(found.count)} from step {found.first} on, up to {number(largest)}"
    )
    return (
        "error",
        message,
        "clip (gg.ClipByMedian() needs no number), or lower the learning rate; see the layers' norms",
    )


def _jump(found: Episode) -> Words:
    usual, largest = found.numbers["usual"], found.numbers["largest"]
    message = (
        f"the gradient norm jumped above {EXPLODING_ONCE_TIMES:,.0f} times its usual {number(usual)} on "
        f"{steps(found.count)}, first on step {found.first}, up to {number(largest)}, and nothing clipped it"
    )
    return "warning", message, "clip: the recommended threshold, or gg.ClipByMedian(), which needs no number"


def _vanishing(found: Episode) -> Words:
    smallest = found.numbers["smallest"]
    what = (
        "exactly 0" if smallest == 0 else f"below {number(found.numbers['below'])}, {VANISHING_SHARE:g} of the usual,"
    )
    message = f"the gradient norm was {what} for {steps(found.count)} from step {found.first} on"
    advice = "check that the loss depends on the parameters (no detach, no saturated activation, a learning rate not 0)"
    return ("error" if smallest == 0 else "warning"), message, advice


NONFINITE = Kind("nonfinite", _nonfinite)
EXPLODING = Kind("exploding", _exploding, value="largest")
JUMP = Kind("exploding", _jump, value="largest")
VANISHING = Kind("vanishing", _vanishing, value="smallest")
KINDS = (NONFINITE, EXPLODING, JUMP, VANISHING)
