"""Whether a clip binds on most steps, at a threshold that its rule has stopped moving, or twice."""

import math
import statistics
from collections import deque
from itertools import compress
from operator import or_

from gradguard.monitoring.judge.acting_clips import clipped_twice, clips_on, shares_in_words
from gradguard.monitoring.judge.findings import Episode, Kind, Log, named, said
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.record.record_lines import Lines
from gradguard.monitoring.record.step_rows import BINDS_BELOW, OptimizerSteps, bound_on, taken_steps
from gradguard.threshold_formulas import LOCK_IN_TOLERANCE, LOCK_IN_WINDOW
from gradguard.threshold_rules import LockInAlarm

ALWAYS_ON_SHARE = 0.5
"""Above half of the steps a clip is part of the ordinary update: the regime "normalising"."""

ALWAYS_ON_STEPS = 50
"""Fewer steps are a warm-up, in which a clip may well bind."""


class MovingThreshold:
    """Whether a rule that moves its threshold keeps it where the clip binds on more than half of 100 steps.

    A fixed threshold that binds so often is judged over the whole run: many healthy warm-ups bind for some hundred
    steps.

    Args:
        log: Where faults go.
    """

    def __init__(self, log: Log) -> None:
        self._log, self._alarm = log, LockInAlarm()
        self._least, self._largest = math.inf, -math.inf
        self._coefficients: deque[float] = deque(maxlen=LOCK_IN_WINDOW)

    def follow(self, i: int, threshold: float, coefficient: float | None) -> None:
        """Follow a step with finite gradients.

        Args:
            i: The step.
            threshold: The clip's threshold on this step.
            coefficient: The clip's coefficient, if known.
        """
        coefficient = 1.0 if coefficient is None else coefficient
        bound = coefficient < BINDS_BELOW
        if bound:
            self._coefficients.append(coefficient)
        self._least, self._largest = min(threshold, self._least), max(threshold, self._largest)
        moves = self._largest > self._least * (1 + LOCK_IN_TOLERANCE)
        if self._alarm.follow(bound, threshold) and moves and not self._log.goes_on(LOCK_IN.name, i):
            numbers = {"threshold": threshold, "coefficient": statistics.median(self._coefficients)}
            self._log.begin(LOCK_IN.name, LOCK_IN, i, i, numbers=numbers)


def clipping_of_whole(part: OptimizerSteps) -> list[Episode]:
    """Return what can only be said of the clips of a run as a whole.

    Args:
        part: The steps of one optimizer.
    """
    taken = taken_steps(part.record)
    clipped = taken.where(list(map(or_, taken.has("threshold"), taken.has("coefficient"))))
    if not clipped:
        return []
    bound = list(compress(clipped.column("coefficient"), bound_on(clipped)))
    found, share = _clipped_twice(part, taken), len(bound) / len(clipped)
    if share > ALWAYS_ON_SHARE and len(clipped) >= ALWAYS_ON_STEPS:
        numbers, harmless = {"share": share, "coefficient": statistics.median(bound)}, bool(is_scale_free(part.record))
        found.append(Episode.over(ALWAYS_ON, part, clipped, numbers=numbers, harmless=harmless))
    return found


def _clipped_twice(part: OptimizerSteps, taken: Lines) -> list[Episode]:
    """Which of several clips bound how often, where more than one acted."""
    twice = clipped_twice(taken)
    if not twice:
        return []
    clips = clips_on(part.record, twice)
    words, *before, last_clip = shares_in_words(clips, len(twice)), *clips
    idle = named([clip.name for clip in clips if clip.bound == 0])
    words += f"; {idle} had no effect" if idle else ""
    if any(clip.bound for clip in before) and all(twice.has("threshold")):  # one behind the other
        words += f"; {last_clip.name} only saw what {named([clip.name for clip in before])} had left"
    return [Episode.over(TWICE, part, twice, text=words, harmless=all(clip.bound == 0 for clip in clips))]


LOCK_IN = Kind(
    "lock_in",
    said(
        "warning",
        "clipping bound on more than half of the last 100 steps at one threshold, {threshold}, from step {found.first} "
        "to {found.last} (it usually multiplies gradients by {coefficient:.2g})",
        "the threshold no longer follows the norms: raise it, or let gg.ClipByMedian() choose it",
    ),
    value="coefficient",
)
_ALWAYS_ON = "clipping bound on {share:%} of {steps}"
ALWAYS_ON = Kind(
    "clipping_always_on",
    said(
        "warning",
        f"{_ALWAYS_ON}: it acts as a learning rate {{coefficient:.2g}} times as large",
        "lower the learning rate by that factor and raise the threshold above an ordinary norm, so that it guards",
        harmless=(  # an optimizer that cancels a constant factor
            "info",
            f"{_ALWAYS_ON}, and usually multiplied gradients by {{coefficient:.2g}}",
            "with an Adam-like optimizer a constant scaling nearly cancels, so this mostly evens out one step against "
            "the next; for a guard against spikes raise the threshold above an ordinary norm",
        ),
    ),
    value="coefficient",
)
TWICE = Kind(
    "clipped_twice",
    said(
        "warning",
        "gradients were clipped more than once on {steps}: {found.text}",
        "keep one of them: a second clip compares what the first has left, and its threshold has no meaning",
        harmless=(
            "info",
            "two clips or more looked at the gradients of {steps}, and none of them ever bound",
            "keep one of them, so that the threshold of the other need not be known",
        ),
    ),
)
KINDS = (LOCK_IN, ALWAYS_ON, TWICE)
