"""What is wrong with a run, in words that a person can act on, from the plain numbers of its record."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from gradguard.monitoring.judge.findings import (
    ALWAYS_ON_SHARE,
    ALWAYS_ON_STEPS,
    INACTIVE_STEPS,
    RECOVERED_STEPS,
    SEVERITIES,
    Episode,
    Finding,
)
from gradguard.monitoring.judge.live import HealthMonitor
from gradguard.monitoring.judge.numbers import percent, plain_threshold
from gradguard.monitoring.judge.recommend import drift_ends, is_scale_free
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import (
    BINDS_BELOW,
    Part,
    binds,
    by_optimizer,
    taken_steps,
    threshold_of,
    usable_norms,
)
from gradguard.threshold_rules import LockInAlarm

__all__ = ["Finding", "HealthMonitor", "findings", "lock_in_share"]


def findings(record: Record) -> list[Finding]:
    """Judge the health of a run.

    ==================  ========  ======================================================================================
    kind                severity  found where
    ==================  ========  ======================================================================================
    nonfinite           error     gradients held NaN or infinity (warning: all such steps were skipped)
    exploding           error     10 norms in a row above 10 times the usual (100 times in the first 200 steps)
    exploding           warning   a single norm above 1,000 times the usual that no clip bound on
    vanishing           warning   20 norms in a row below a ten-thousandth of the usual, without convergence; error: 0
    vanishing           warning   a weight's gradient is a millionth of the usual weight's, element by element
    dead_layer          warning   exact zeros on 10 per-tensor lines in a row (info: from the first one on)
    dominating_layer    warning   one of at least 8 tensors has 95 % of the squared norm on 80 of 100 steps
    amp_scale_collapse  error     the loss scale is below 1, or 12 steps in a row were skipped
    lock_in             warning   bound on more than half of 100 steps at one threshold, by a rule that moves it; or
                                  still so at the end
    clipping_always_on  warning   bound on more than half of the steps (info with an optimizer that cancels a scale)
    clipping_inactive   info      a fixed threshold never bound in at least 200 steps
    norm_drift          info      the windowed median moved by more than 2x under one fixed threshold
    clipped_twice       warning   two clips acted on the same steps
    ==================  ========  ======================================================================================

    And what `setup_findings` says of how the loop is set up: ``gradient_without_optimizer``,
    ``optimizer_without_gradient``, ``clip_before_unscale``, ``missing_zero_grad``, ``clip_below_eps`` and
    ``unused_parameter``.

    **Guarantees**: a calm, a decaying or a short run, and one with a few spikes, has none, unless it clips: then the
    last four kinds may be told. The same record always gives the same findings. Each kind is told once for each
    optimizer, however often it came.

    **Edge cases**: what was not measured is not judged; steps that a loss scaler skipped are its ordinary search.

    Args:
        record: The record of a run.

    Returns:
        The findings, errors first, then in the order of steps.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 0.5, "threshold": 5.0, "coefficient": 1.0} for i in range(300)]
        >>> for found in findings(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False)):
        ...     print(found.kind, found.severity, found.message, sep=": ")
        clipping_inactive: info: clipping at 5.0 never bound in 300 steps: the largest norm was 0.500
    """
    monitor = HealthMonitor(record.meta)
    for line in _in_order(record):
        monitor.see(line)
    parts = by_optimizer(record)
    if len(parts) == 1:  # however many the script has: one stepped
        for episode in monitor.episodes:
            episode.optimizer = parts[0].index
    judged = [episode for part in parts for episode in _of_whole(part)]
    always_on = {episode.optimizer for episode in judged if episode.kind == "clipping_always_on"}
    ends = {part.index: part.record.steps[-1]["i"] for part in parts if part.record.steps}
    exploded = {episode.optimizer for episode in monitor.episodes if _is_level(episode)}
    lasting = [episode for episode in monitor.episodes if _counts(episode, always_on, ends, exploded)]
    found = [*(episode.finding() for episode in judged), *_merged(lasting)]
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.first_step, one.kind))


def lock_in_share(record: Record) -> float | None:
    """On which share of the steps the clip had bound on more than half of the last 100 at one threshold.

    Args:
        record: The record of a run, of one optimizer.

    Returns:
        A share in [0, 1]; None where no step was taken.
    """
    taken = taken_steps(record)
    if not taken:
        return None
    alarm = LockInAlarm()
    clipped = [(binds(step), threshold) for step in taken if (threshold := threshold_of(step)) is not None]
    return sum(alarm.follow(*each) for each in clipped) / len(taken)


def _in_order(record: Record) -> Iterator[dict[str, Any]]:
    """The lines as they were written: each step, then what belongs to it."""
    following: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in (*record.tensors, *record.events):
        following[line.get("i", 0)].append(line)
    for step in record.steps:
        yield step
        yield from following.pop(step["i"], ())
    for lines in following.values():  # skips before the step that never came
        yield from lines


def _is_level(episode: Episode) -> bool:
    return episode.kind == "exploding" and "once" not in episode.numbers


def _counts(
    episode: Episode, always_on: set[int | None], ends: dict[int | None, int], exploded: set[int | None]
) -> bool:
    """Whether an episode stands, seen from the end: a fixed threshold that bound for a while and no longer does not."""
    if episode.kind == "clipping_always_on":
        return False  # judged anew, with the whole run
    if "once" in episode.numbers:
        return episode.optimizer not in exploded  # the jump was how it began
    if episode.kind != "lock_in" or not episode.numbers["fixed"]:
        return True
    goes_on = episode.last >= ends.get(episode.optimizer, 0) - RECOVERED_STEPS
    return goes_on and episode.optimizer not in always_on


def _merged(episodes: list[Episode]) -> list[Finding]:
    """One finding for all episodes of a kind, apart from those that say something else."""
    groups: dict[tuple, list[Episode]] = defaultdict(list)
    for episode in episodes:
        about = tuple(episode.params) if episode.kind == "dominating_layer" else bool(episode.params)
        if episode.kind == "nonfinite":
            about = ()
        other = episode.harmless and episode.kind == "dead_layer", "once" in episode.numbers
        groups[episode.kind, episode.optimizer, about, other].append(episode)
    found = []
    for first, *later in groups.values():
        for episode in later:
            first.join(episode)
        several = 1 if first.kind in ("dead_layer", "vanishing") and first.params else 1 + len(later)
        found.append(first.finding(several))
    return found


def _of_whole(part: Part) -> list[Episode]:
    """What can only be said of a run as a whole."""
    taken = taken_steps(part.record)
    clipped = [step for step in taken if "threshold" in step or "coefficient" in step]
    if not clipped:
        return []
    bound = [step["coefficient"] for step in clipped if binds(step)]
    first, last, count = clipped[0]["i"], clipped[-1]["i"], len(clipped)
    found = []
    if len(bound) > ALWAYS_ON_SHARE * count and count >= ALWAYS_ON_STEPS:
        numbers = {"share": len(bound) / count, "coefficient": statistics.median(bound)}
        harmless = bool(is_scale_free(part.record))
        found.append(Episode("clipping_always_on", part.index, first, last, count, numbers=numbers, harmless=harmless))
    thresholds = {step.get("threshold") for step in clipped}
    if not bound and count >= INACTIVE_STEPS and len(thresholds) == 1 and None not in thresholds:
        numbers = {"threshold": clipped[-1]["threshold"]}
        norms = [step["norm"] for step in clipped if step.get("norm") and step.get("rule", "norm") == "norm"]
        if norms:  # a threshold of another kind compares with something else
            numbers["largest"] = max(norms)
        found.append(Episode("clipping_inactive", part.index, first, last, count, numbers=numbers))
    return found + _clipped_twice(part, taken) + _drifted(part, clipped)


def _clipped_twice(part: Part, taken: list[dict[str, Any]]) -> list[Episode]:
    """Which of several clips bound how often, where more than one acted."""
    twice = [step for step in taken if step.get("clips")]
    if not twice:
        return []
    bound: dict[str, list[bool]] = defaultdict(list)
    for step in twice:
        for place, (rule, threshold, coefficient) in enumerate(step["clips"]):
            fixed = rule in ("norm", "value", "adaptive") and threshold is not None
            at = f" at {plain_threshold(threshold or 0.0)}" if fixed else ""
            clip = f"{_ORDINALS[min(place, 2)]} ({rule}{at})"
            bound[clip].append(coefficient is not None and coefficient < BINDS_BELOW)
    said = [f"the {clip} bound on {percent(sum(each) / len(twice))}" for clip, each in bound.items()]
    first, last = twice[0]["i"], twice[-1]["i"]
    return [Episode("clipped_twice", part.index, first, last, len(twice), words=", ".join(said[:4]))]


_ORDINALS = ("first", "second", "third")


def _drifted(part: Part, clipped: list[dict[str, Any]]) -> list[Episode]:
    """Drift matters where a fixed number is in use; a recommendation tells of it in any run."""
    norms = usable_norms(part.record)
    moved = drift_ends(norms)
    rules = {(step.get("rule", "norm"), step.get("threshold")) for step in clipped}
    if moved is None or len(rules) > 1 or clipped[-1].get("rule", "norm") != "norm":
        return []
    first, last = moved
    numbers = {"first": first, "last": last, "times": max(moved) / min(moved)}
    return [Episode("norm_drift", part.index, clipped[0]["i"], clipped[-1]["i"], len(clipped), numbers=numbers)]
