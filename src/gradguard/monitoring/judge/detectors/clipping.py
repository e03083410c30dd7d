"""Whether a clip binds on most steps, on none, at one threshold that norms have left, or twice."""

import math
import statistics
from collections import deque
from itertools import compress
from operator import or_

from gradguard.monitoring.judge.acting_clips import acting_clips, clipped_twice, shares_in_words
from gradguard.monitoring.judge.findings import Episode, Kind, Log, Words, named, said, steps
from gradguard.monitoring.judge.norm_statistics import drift_of
from gradguard.monitoring.judge.numbers import number, only, plain_threshold
from gradguard.monitoring.judge.scale_free import cancels_scale, is_scale_free
from gradguard.monitoring.record.lines import Lines
from gradguard.monitoring.record.steps import BINDS_BELOW, OptimizerSteps, bound_on, rules_on, taken_steps
from gradguard.threshold_formulas import LOCK_IN_TOLERANCE, LOCK_IN_WINDOW
from gradguard.threshold_rules import LockInAlarm

FIXED_PATIENCE = 400
"""Further steps in lock-in before a *fixed* threshold is told of: many healthy warm-ups bind for some hundred."""

ALWAYS_ON_SHARE = 0.5
"""Above half of the steps a clip is part of the ordinary update: the regime "normalising"."""

ALWAYS_ON_STEPS = 50
"""Fewer steps are a warm-up, in which a clip may well bind."""

INACTIVE_STEPS = 200
"""Fewer steps say nothing about rare spikes; as many as a recommendation needs."""


class AlwaysClipped:
    """Whether a clip binds most of the time at one threshold.

    A threshold that a rule moves is told of at once; one that is fixed only when it goes on, because many healthy
    warm-ups bind for some hundred steps.

    Args:
        log: Where faults go.
        optimizer: The class of the optimizer.
    """

    def __init__(self, log: Log, optimizer: str = "") -> None:
        self._log, self._optimizer = log, optimizer
        self._alarm, self._held, self._since = LockInAlarm(), 0, 0
        self._steps, self._bound = 0, 0
        self._least, self._largest = math.inf, -math.inf
        self._coefficients: deque[float] = deque(maxlen=LOCK_IN_WINDOW)

    @property
    def fixed(self) -> bool:
        """Whether one threshold was in use since the start."""
        return self._largest <= self._least * (1 + LOCK_IN_TOLERANCE)

    def follow(self, i: int, threshold: float, coefficient: float | None) -> None:
        """Follow a step with finite gradients.

        Args:
            i: The step.
            threshold: What the clip compared with.
            coefficient: What it multiplied by, if known.
        """
        self._steps += 1
        bound = False
        if coefficient is not None and coefficient < BINDS_BELOW:
            bound = True
            self._bound += 1
            self._coefficients.append(coefficient)
        self._least, self._largest = min(threshold, self._least), max(threshold, self._largest)
        if not self._alarm.follow(bound, threshold):
            self._held = 0
            return
        self._held += 1
        if self._held == 1:
            self._since = i
        if not self.fixed or self._held > FIXED_PATIENCE:
            self._locked_in(i, threshold)

    def _locked_in(self, i: int, threshold: float) -> None:
        share = self._bound / self._steps
        kind = ALWAYS_ON if self.fixed and share > ALWAYS_ON_SHARE else LOCK_IN
        if self._log.goes_on(kind.name, i):
            return
        numbers = {
            "threshold": threshold,
            "coefficient": statistics.median(self._coefficients),
            "share": share,
            "fixed": float(self.fixed),
        }
        count = self._steps if kind is ALWAYS_ON else self._held
        harmless = cancels_scale(self._optimizer)
        self._log.begin(kind.name, kind, self._since, i, count=count, numbers=numbers, harmless=harmless)


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
    found, share, threshold = [], len(bound) / len(clipped), only(set(clipped.column("threshold")))
    if share > ALWAYS_ON_SHARE and len(clipped) >= ALWAYS_ON_STEPS:
        numbers, harmless = {"share": share, "coefficient": statistics.median(bound)}, bool(is_scale_free(part.record))
        found.append(Episode.over(ALWAYS_ON, part, clipped, numbers=numbers, harmless=harmless))
    if not bound and len(clipped) >= INACTIVE_STEPS and threshold is not None:
        numbers = {"threshold": threshold}
        of_norms = zip(clipped.column("norm"), rules_on(clipped), strict=True)
        norms = [norm for norm, rule in of_norms if norm and rule == "norm"]
        if norms:  # a threshold of another kind compares with something else
            numbers["largest"] = max(norms)
        found.append(Episode.over(INACTIVE, part, clipped, numbers=numbers))
    return found + _clipped_twice(part, taken) + _drifted(part, clipped)


def _clipped_twice(part: OptimizerSteps, taken: Lines) -> list[Episode]:
    """Which of several clips bound how often, where more than one acted."""
    twice = clipped_twice(taken)
    if not twice:
        return []
    clips = acting_clips(part.record, twice)
    words, *before, last_clip = shares_in_words(clips, len(twice)), *clips
    idle = named([clip.name for clip in clips if clip.bound == 0])
    words += f"; {idle} had no effect" if idle else ""
    if any(clip.bound for clip in before) and all(twice.has("threshold")):  # one behind the other
        words += f"; {last_clip.name} only saw what {named([clip.name for clip in before])} had left"
    return [Episode.over(TWICE, part, twice, text=words, harmless=all(clip.bound == 0 for clip in clips))]


def _drifted(part: OptimizerSteps, clipped: Lines) -> list[Episode]:
    """Drift matters where a fixed number is in use; a recommendation tells of it in any run."""
    moved = drift_of(part.record)
    rules = set(zip(rules_on(clipped), clipped.column("threshold"), strict=True))
    if moved is None or len(rules) > 1 or clipped[-1].get("rule", "norm") != "norm":
        return []
    numbers = {"first": moved[0], "last": moved[1], "times": max(moved) / min(moved)}
    return [Episode.over(DRIFT, part, clipped, numbers=numbers)]


def _inactive(found: Episode) -> Words:
    message = f"clipping at {plain_threshold(found.numbers['threshold'])} never bound in {steps(found.count)}"
    if "largest" in found.numbers:
        message += f": the largest norm was {number(found.numbers['largest'])}"
    return "info", message, "fine as insurance; what would catch spikes, the report's decision says"


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
        "lower the learning rate by that factor and raise the threshold to the recommended one, so that it guards",
        harmless=(  # an optimizer that cancels a constant factor
            "info",
            f"{_ALWAYS_ON}, and usually multiplied gradients by {{coefficient:.2g}}",
            "with an Adam-like optimizer a constant scaling nearly cancels, so this mostly evens out one step against "
            "the next; for a guard against spikes raise the threshold to the recommended one",
        ),
    ),
    value="coefficient",
)
INACTIVE = Kind("clipping_inactive", _inactive, value="threshold")
DRIFT = Kind(
    "norm_drift",
    said(
        "info",
        "the median norm moved by {times:.2g}x, from {first} to {last}, under one fixed threshold",
        "a fixed number will be wrong at one end: let gg.ClipByMedian() follow the norms",
    ),
    value="times",
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
KINDS = (LOCK_IN, ALWAYS_ON, INACTIVE, DRIFT, TWICE)
