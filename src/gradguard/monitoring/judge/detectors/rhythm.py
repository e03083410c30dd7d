"""Losses and norms that come in a rhythm: up and down with every step, or the same ones again and again."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from gradguard.monitoring.judge.findings import Episode, Kind, Log, said
from gradguard.monitoring.record.steps import OptimizerSteps, taken_steps

OSCILLATING_STEPS = 64
"""Losses looked back upon: noise turns on two of three of them."""

OSCILLATING_TURNS = 61
"""Of these: noise gets there once in 3 x 10^7 steps."""

OSCILLATING_BY = 0.1
"""Of the loss: a smaller up and down does no harm."""

STOPPED_FALLING = 0.98
"""A loss whose later half is at least so much of the earlier one is going nowhere."""

RECURRING_AT_MOST = 600
"""Of the last steps, among which a recurrence is looked for."""

RECURRING_TIMES = 3
"""Rounds, for a recurrence to be one."""

RECURRING_NEARNESS = 0.3
"""How near a loss and a norm must be to those one round before, as a share of what lies between neighbours."""

RECURRING_VARIATION = 0.02
"""Logarithms that differ less from step to step show nothing."""

_LEAST_PERIOD = 3


class Oscillation:
    """Whether the loss goes up and down with every step and gets nowhere.

    Args:
        log: Where faults go.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._losses: deque[tuple[int, float]] = deque(maxlen=OSCILLATING_STEPS)
        self._turns, self._loss, self._rise = 0, 0.0, 0.0
        self._clipped = 0

    def follow(self, i: int, loss: float, clipped: bool) -> None:
        """Follow a step with a finite loss.

        Args:
            i: The step.
            loss: Its loss.
            clipped: Whether a clip bound on it.
        """
        rise, before = loss - self._loss, self._rise
        self._loss, self._rise = loss, rise
        self._losses.append((i, loss))
        self._turns = (self._turns << 1 | (rise * before < 0)) & _ALL
        self._clipped = (self._clipped << 1 | clipped) & _ALL
        if self._turns.bit_count() >= OSCILLATING_TURNS and len(self._losses) == OSCILLATING_STEPS:
            self._oscillating(i)

    def _oscillating(self, i: int) -> None:
        losses, middle = [loss for _, loss in self._losses], OSCILLATING_STEPS // 2
        level = statistics.fmean(losses)
        by = statistics.median([abs(a - b) for a, b in pairwise(losses)])
        earlier, later = statistics.fmean(losses[:middle]), statistics.fmean(losses[middle:])
        if min(losses) <= 0 or by < OSCILLATING_BY * level or later < STOPPED_FALLING * earlier:
            return
        harmless = 2 * self._clipped.bit_count() < OSCILLATING_STEPS
        about = {"count": OSCILLATING_STEPS, "numbers": {"largest": by / level}, "harmless": harmless}
        if not self._log.goes_on("oscillation", i, by / level):
            self._log.begin("oscillation", OSCILLATION, self._losses[0][0], i, **about)


_ALL = (1 << OSCILLATING_STEPS) - 1


def rhythm_of_whole(part: OptimizerSteps) -> list[Episode]:
    """Return whether the last losses and norms of a run recur.

    Args:
        part: The steps of one optimizer.
    """
    taken = taken_steps(part.record)[-RECURRING_AT_MOST:]
    pairs = zip(taken.column("norm"), taken.column("loss"), strict=True)
    taken = taken.where([0 < (norm or 0) < math.inf and 0 < (loss or 0) < math.inf for norm, loss in pairs])
    period = _recurrence(*(list(map(math.log, taken.column(key))) for key in ("norm", "loss")))
    return [] if period is None else [Episode.over(REPEATED, part, taken, numbers={"period": float(period)})]


def _recurrence(norms: Sequence[float], losses: Sequence[float]) -> int | None:
    """The number of steps after which both come back, to the next steps' exclusion; None where they do not."""
    longest = len(norms) // RECURRING_TIMES
    if longest < _LEAST_PERIOD:
        return None
    far = [_distances(series, longest + 1) for series in (norms, losses)]
    usual = [statistics.median(distances[1:]) for distances in far]
    rough = [
        distances[1] > max(RECURRING_VARIATION, RECURRING_NEARNESS * d) for distances, d in zip(far, usual, strict=True)
    ]
    if not all(rough):  # what changes slowly is near to itself after any few steps
        return None
    for period in range(_LEAST_PERIOD, longest + 1):
        around = [min(d, distances[period - 1], distances[period + 1]) for distances, d in zip(far, usual, strict=True)]
        if all(distances[period] < RECURRING_NEARNESS * near for distances, near in zip(far, around, strict=True)):
            return period
    return None


def _distances(series: Sequence[float], longest: int) -> list[float]:
    """For each lag, the median of how far values lie apart."""
    return [
        statistics.median([abs(a - b) for a, b in zip(series, series[lag:], strict=False)])
        for lag in range(longest + 1)
    ]


_UP_AND_DOWN = (
    "the loss goes up and down with every step, by {largest:%} of itself, and has stopped falling, for {steps} from "
    "step {found.first} on"
)
OSCILLATION = Kind(
    "oscillation",
    said(
        "warning",
        f"{_UP_AND_DOWN}, while a clip binds",
        "the learning rate is too high, and the clip only bounds the steps to and fro: lower it",
        harmless=(
            "info",
            _UP_AND_DOWN,
            "two kinds of batches in turn do that; else the learning rate is too high: lower it",
        ),
    ),
    value="largest",
    confidence="medium",
)
REPEATED = Kind(
    "repeated_batches",
    said(
        "info",
        "losses and norms recur every {period:g} steps: the same batches in the same order",
        "if that is an epoch: shuffle=True, or sampler.set_epoch(epoch) of a DistributedSampler; if an epoch is "
        "longer, the loader begins anew too early",
    ),
    value="period",
    confidence="medium",
)
KINDS = (OSCILLATION, REPEATED)
