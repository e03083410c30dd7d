"""Ranks rules by the losses or metrics of their runs, with error bars over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradguard.monitoring.record.record_lines import Numbers, without_none

Losses = Numbers
"""The training loss of each step; None where it was not finite."""

LAST = 0.1
"""The share of a run's steps, at its end, whose mean loss judges the run."""

FAR_ABOVE = 3.0
"""A run has diverged if its loss is this many times the others' loss, and `ABOVE_START` times its first losses."""

ABOVE_START = 2.0
"""Without this bound, a run that learns slowly would count as diverged as soon as the others are good."""

_SMOOTH = 10  # steps whose median is compared, so that a single batch decides nothing


@dataclass(frozen=True, slots=True)
class TrialRun:
    """One run of the script.

    Attributes:
        rule: The rule, in the syntax of ``--clip``; ``"none"`` for the unchanged script.
        seed: The seed.
        losses: The training losses.
        failed: Whether the run ended with an error.
        clip_share: The share of the steps that were clipped.
        stopped: Whether the run was ended early because it had diverged.
        metric: The number that judges the run, NaN if the script printed none; None if its last losses judge it.
    """

    rule: str
    seed: int
    losses: Losses
    failed: bool = False
    clip_share: float = 0.0
    stopped: bool = False
    metric: float | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds.

    Attributes:
        value: The mean.
        margin: Half the width of the 95 % interval (Student's t); None for a single seed.
        count: The number of seeds.
    """

    value: float
    margin: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one rule over its seeds.

    Attributes:
        rule: The rule.
        loss: The mean of the last losses or metrics of the runs that were not lost; None if all were.
        losses: The last loss or the metric of each seed; None for a seed whose run diverged or failed.
        diverged: The number of runs that diverged.
        failed: The number of runs that ended with an error, or without a finite metric, and had not diverged.
        clip_share: The mean share of steps that were clipped.
        difference: The loss minus the loss of the best rule, over the seeds that both finished; None for the best rule
            itself, and without such a seed.
        worse: Whether the rule is known to be worse than the best: it lost a larger share of its runs, or the interval
            of the difference is entirely on the worse side of 0.
    """

    rule: str
    loss: Mean | None
    losses: dict[int, float | None]
    diverged: int
    failed: int
    clip_share: float
    difference: Mean | None = None
    worse: bool = False


def scores(runs: Sequence[TrialRun], maximize: bool = False) -> list[Score]:
    """Rank the rules by the share of runs lost, then by the mean loss or metric.

    **Edge cases**: rules whose runs were all lost come last, with ``loss`` None. With one seed only lost runs separate
    rules. Rules with identical losses are never separated.

    Args:
        runs: The runs; at most one for each rule and seed.
        maximize: Whether the highest metric is the best.

    Returns:
        One score for each rule, the best first.

    Example:
        >>> def run(rule, seed, loss):
        ...     return TrialRun(rule, seed, [2.0] * 18 + [loss] * 2)
        >>> runs = [run(rule, seed, 0.5 + seed / 10) for rule in ("none", "median") for seed in range(3)]
        >>> runs[0] = TrialRun("none", 0, [2.0] * 3 + [None] * 17)
        >>> [(score.rule, score.diverged, score.worse) for score in scores(runs)]
        [('median', 0, False), ('none', 1, True)]
    """
    lost = {(run.rule, run.seed): _diverged(run, runs) for run in runs}
    rules = list(dict.fromkeys(run.rule for run in runs))
    sign = -1 if maximize else 1
    ranked = sorted((_score(rule, runs, lost) for rule in rules), key=lambda score: _rank(score, sign))
    return [_against(ranked[0], score, sign) for score in ranked]


def diverged_at(losses: Losses, others: Sequence[Losses], since: int = 0) -> int | None:
    """Return the step at which a run had diverged; None if it has not.

    A run has diverged if ten losses in a row are not finite. It has also diverged if the median of its last ten losses
    is at least three times the median of the ``others`` at the same step, and twice that of its own first ten.

    Args:
        losses: The losses so far.
        others: The losses of runs that have not diverged.
        since: The number of steps that earlier calls have checked.

    Example:
        >>> diverged_at([1.0] * 10 + [None] * 30, []), diverged_at([1.0] * 20 + [4.0] * 20, [[1.0] * 40])
        (19, 25)
    """
    for i in range(max(since, _SMOOTH - 1), len(losses)):
        nothing_known = not without_none(losses[i + 1 - _SMOOTH : i + 1])
        if nothing_known or (i >= 2 * _SMOOTH - 1 and _is_far_above(losses, i, others)):
            return i
    return None


def sound(runs: Sequence[TrialRun]) -> list[Losses]:
    """Return the losses of the runs that serve as comparison: those that finished and did not get worse.

    Args:
        runs: Any runs. If most of them explode, a median over all of them would itself be that of an explosion.

    Returns:
        The losses of each.
    """
    return [run.losses for run in runs if not run.stopped and not got_worse(run.losses)]


def got_worse(losses: Losses) -> bool:
    """Return whether a run ended with losses that are not finite, or at least twice its first ones.

    Args:
        losses: The losses of a run.
    """
    last = last_loss(losses)
    return last is None or (last > 0 and last >= ABOVE_START * _middle(losses, _SMOOTH - 1))


def last_loss(losses: Losses) -> float | None:
    """Return the mean of the last tenth of the losses; None if there are no losses, or one of these is not finite.

    Args:
        losses: The losses of a run.

    Example:
        >>> last_loss([9.0] * 18 + [1.0, 2.0]), last_loss([1.0, None])
        (1.5, None)
    """
    last = losses[-max(1, round(LAST * len(losses))) :] if losses else []
    finite = without_none(last)
    return math.fsum(loss / len(finite) for loss in finite) if finite and len(finite) == len(last) else None


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of some values with its 95 % interval.

    Args:
        values: One value for each seed; at least one.

    Example:
        >>> found = mean_of([1.0, 2.0, 3.0])
        >>> found.value, round(found.margin, 3)
        (2.0, 2.484)
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Mean(mean, None, len(values))
    margin = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Mean(mean, margin, len(values))


def student_t(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution.

    Args:
        freedom: Degrees of freedom, at least 1.

    Example:
        >>> [round(student_t(freedom), 3) for freedom in (1, 2, 9, 100)]
        [12.706, 4.303, 2.262, 1.984]

    Reference:
        Abramowitz and Stegun (1964), Handbook of mathematical functions, 26.7.3 and 26.7.4: a finite sum.
    """
    low, high = 0.0, math.pi / 2  # the angle whose tangent is t over the root of the degrees of freedom
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, freedom) < 0.95 else (low, angle)
    return math.tan(low) * math.sqrt(freedom)


def same_start(first: Losses, second: Losses) -> bool:
    """Return whether two runs began with the same losses, as happens if a script sets its seed itself.

    The first ten losses are compared, up to rounding.

    Args:
        first: The losses of one seed.
        second: The losses of another seed.

    Example:
        >>> same_start([0.5, 0.4, 0.3], [0.5, 0.4]), same_start([0.5, 0.4], [0.5, 0.3]), same_start([None], [None])
        (True, False, False)
    """
    pairs = list(zip(first[:_SMOOTH], second[:_SMOOTH], strict=False))
    alike = (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)
    return bool(pairs) and all(alike)


def _within(angle: float, freedom: int) -> float:
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _middle(losses: Losses, i: int) -> float:
    """Return the median of the ten losses up to step ``i``; infinite if most are not finite."""
    recent = losses[max(0, i + 1 - _SMOOTH) : i + 1]
    return statistics.median([math.inf if loss is None else loss for loss in recent]) if recent else math.inf


def _is_far_above(losses: Losses, i: int, others: Sequence[Losses]) -> bool:
    usual = [_middle(other, i) for other in others if len(other) > i]
    middle, now = statistics.median(usual) if usual else math.inf, _middle(losses, i)
    return 0 < middle < math.inf and now >= FAR_ABOVE * middle and now >= ABOVE_START * _middle(losses, _SMOOTH - 1)


def _diverged(run: TrialRun, runs: Sequence[TrialRun]) -> bool:
    if run.stopped or (run.losses and last_loss(run.losses) is None):
        return True
    before = runs[: runs.index(run)]  # the runs it was compared with while it ran; it may have ended before a check
    others = [other for other in runs if other is not run]
    return any(diverged_at(run.losses, sound(compared)) is not None for compared in (before, others))


def _score(rule: str, runs: Sequence[TrialRun], lost: dict[tuple[str, int], bool]) -> Score:
    own = [run for run in runs if run.rule == rule]
    diverged = [run.seed for run in own if lost[rule, run.seed]]
    losses = {run.seed: None if run.failed or run.seed in diverged else _value(run) for run in own}
    finite = without_none(losses.values())
    mean = mean_of(finite) if finite else None
    share = math.fsum(run.clip_share for run in own) / len(own)
    return Score(rule, mean, losses, len(diverged), len(own) - len(diverged) - len(finite), share)


def _value(run: TrialRun) -> float | None:
    if run.metric is None:
        return last_loss(run.losses)
    return None if math.isnan(run.metric) else run.metric


def _rank(score: Score, sign: int) -> tuple[float, float]:
    lost = (score.diverged + score.failed) / len(score.losses)
    return lost, math.inf if score.loss is None else sign * score.loss.value


def _against(best: Score, score: Score, sign: int) -> Score:
    if score.rule == best.rule:
        return score
    both = [(score.losses[seed], best.losses.get(seed)) for seed in score.losses]
    differences = [ours - theirs for ours, theirs in both if ours is not None and theirs is not None]
    difference = mean_of(differences) if differences else None
    lost_more = _rank(score, sign)[0] > _rank(best, sign)[0]
    is_clear = difference is not None and difference.margin is not None and sign * difference.value > difference.margin
    return replace(score, difference=difference, worse=lost_more or is_clear)
