"""What a record says to do about clipping: keep, a constant, a rule that follows, nothing, or fix something first.

The thresholds below were chosen on the tasks of `benchmarks/recommendation.py`, which follows each decision blindly and
compares it with the constants that people try.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradguard.monitoring.judge.norm_statistics import drift_ends, local_spread
from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.judge.spikes import find_spikes
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import (
    binds,
    by_optimizer,
    is_nonfinite,
    regime_of,
    taken_steps,
    usable_norms,
    usable_steps,
)

ENOUGH_STEPS = 200
"""Fewer usable steps say nothing about rare spikes."""

GUARD_SHARE = 0.05
"""A clip that binds on no more steps is a guard, and right as it is."""

HEAVY_SPREAD = 0.4
"""Norms with a larger local spread, in units of the logarithm, are heavy-tailed: one in 40 is twice the median."""

START_TIMES = 3.0
"""First norms so many times above the usual fill the second moment of an Adam for hundreds of steps."""

CONVERGED = 1 / 3
"""A median norm that fell below this share: training converges, and a constant would bind at one end only."""

BLOWN_UP_LOSS = 1.5
"""A loss that rose to so many times its first value, and stayed: the weights are lost, not a batch."""

LEARNED_LOSS = 0.9
"""A loss that came below this share of its first value has learned something."""

TRY_LESS = 0.1
"""Of the learning rate, and of the norms before: what to try first in a run that blew up."""

_FIRST = 5  # losses and norms that say how a run began
_BEFORE = 10  # norms before it blew up
_NEAR = 10  # losses before and after a spike


@dataclass(frozen=True)
class Recommendation:
    """A decision about clipping with its reason.

    Attributes:
        kind: ``"keep"`` the clip as it is, ``"constant"`` threshold, ``"rule"`` that follows the norms, ``"nothing"``
            to clip, ``"fix"`` something else first, or ``"unknown"`` where the record cannot say.
        headline: The decision in one sentence.
        reason: Plain sentences that a person can act on.
        threshold: The constant of ``"keep"``, ``"constant"`` and ``"fix"``, or None.
        rule: What ``gradguard run --clip`` takes, such as ``"norm=1.3"`` or ``"median"``; None where there is no rule
            to try.
        rate_factor: What to multiply the learning rate by, of ``"fix"``.
        clip_share: On which share of the usable steps the threshold would have bound.
        usable_steps: How many steps the numbers rest on.
        drift: The median norms between which the run drifted, in the order of time, if it did.
        parts: The recommendation for each optimizer with its label, where the record has several.
    """

    kind: str
    headline: str
    reason: str
    threshold: float | None = None
    rule: str | None = None
    rate_factor: float | None = None
    clip_share: float | None = None
    usable_steps: int = 0
    drift: tuple[float, float] | None = None
    parts: tuple[tuple[str, "Recommendation"], ...] = ()


def recommend(record: Record) -> Recommendation:
    r"""Decide what to do about clipping, from the pre-clip norms and the losses of a run.

    The first row that holds decides; *usable* are the finite norms of taken steps without the warm-up, and the *local
    spread* s is the robust standard deviation of their logarithms within a tenth of the run.

    ========================================================= ==========  ==============================================
    the record                                                kind        threshold or rule
    ========================================================= ==========  ==============================================
    several optimizers                                        unknown     none, and a recommendation for each
    no pre-clip norm                                          unknown     none
    the loss rose 1.5x, and it ends not finite or unlearned   fix         a tenth of the learning rate, and of the norms
                                                                          before as a threshold
    fewer than 200 usable steps                               unknown     none
    a fixed norm clip bound on at most 5 %; or on more, with  keep        that one
    an optimizer that cancels a scale
    no spikes, s at most 0.4, no large first norms            nothing     none
    the median norm drifts by more than 2x                    rule        ``median``
    an optimizer that cancels a scale                         constant    10th percentile of the usable norms
    any other                                                 constant    90th percentile, 75th where s is above 0.4
    ========================================================= ==========  ==============================================

    Spikes are found against their neighbourhood (`find_spikes`). With an optimizer that cancels a scale (Adam), a low
    threshold costs nothing, and neither a spike nor the first norms can fill its second moment: only where training
    converges it would keep the last steps large, and a rule that follows is better.

    **Guarantees**: a constant is never above the largest norm of the run, nor printed where the norms drift;
    multiplying every norm by a constant multiplies it by that (to two digits); the same record always gives the same
    answer.

    Args:
        record: The record of a run, clipped or not.

    Returns:
        The decision.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 50.0 if i % 90 == 60 else 1.0 + i % 7 / 10} for i in range(500)]
        >>> found = recommend(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False))
        >>> found.kind, found.rule, found.headline
        ('constant', 'norm=1.6', 'Clip at 1.6.')
    """
    parts = by_optimizer(record)
    if len(parts) > 1:
        return _for_each([(part.label, _decide(part.record)) for part in parts])
    return _decide(record)


def _for_each(parts: list[tuple[str, Recommendation]]) -> Recommendation:
    said = [f"{label[:1].upper()}{label[1:]}: {one.headline} {one.reason}".strip() for label, one in parts]
    usable = sum(one.usable_steps for _, one in parts)
    return Recommendation("unknown", _SEVERAL, " ".join(said), usable_steps=usable, parts=tuple(parts))


_SEVERAL = "Several optimizers step in this run, and each has a decision of its own."


def _decide(record: Record) -> Recommendation:
    if not any("norm" in step for step in record.steps):
        return Recommendation("unknown", "The record has no norms to judge by.", _no_norms(record))
    blown = _blown_up(record)
    if blown is not None:
        return blown
    norms = usable_norms(record)
    if len(norms) < ENOUGH_STEPS:
        missing = f"There are {len(norms)} usable steps, and {ENOUGH_STEPS} are needed to know how rare spikes are."
        return Recommendation("unknown", "Record a longer run.", missing, usable_steps=len(norms))
    found = _keep(record) or _choose(record, norms)
    reason = " ".join(filter(None, [found.reason, _drift_words(norms), _harm(record)]))
    return replace(found, reason=reason, usable_steps=len(norms), drift=drift_ends(norms))


# A run that is lost.


def _blown_up(record: Record) -> Recommendation | None:
    """The decision on a run whose loss rose and that ended not finite, or without having learned anything."""
    steps = [step for step in record.steps if not step.get("skipped")]
    place = _first_loss_of_control(steps)
    if place is None:
        return None
    at, finite = steps[place]["i"], not _is_broken(steps[place])
    norms = [step["norm"] for step in steps[: max(place, 1)] if step.get("norm")][-_BEFORE:]
    what = "rose and did not come back" if finite else "or the gradients were not finite"
    where = f", where the norms had been about {number(statistics.median(norms))}" if norms else ""
    reason = (
        f"The loss {what} from step {at} on{where}. No rule that follows such norms can help, because none of them was "
        f"ever usual. A tenth is where to begin; what is best, an experiment tells: {_tune(record)}."
    )
    headline = f"Lower the learning rate to a tenth: the run blew up at step {at}."
    fix = Recommendation("fix", headline, reason, rate_factor=TRY_LESS, usable_steps=len(norms))
    if not norms:
        return fix
    threshold = _two_digits(TRY_LESS * statistics.median(norms))
    text = plain_threshold(threshold)
    return replace(fix, headline=f"{headline} Clip at {text} as well.", threshold=threshold, rule=f"norm={text}")


def _first_loss_of_control(steps: list[dict[str, Any]]) -> int | None:
    broken = [place for place, step in enumerate(steps) if _is_broken(step)]
    last = len(steps) - max(1, len(steps) // 20)
    losses = [step["loss"] for step in steps if step.get("loss") is not None]
    rose = None
    if losses and min(losses[:_FIRST]) > 0:  # else "times as much" has no meaning
        first = statistics.median(losses[:_FIRST])
        above = (place for place, step in enumerate(steps) if (step.get("loss") or 0.0) > BLOWN_UP_LOSS * first)
        rose = next(above, None)
        learned = statistics.fmean(losses[-max(_FIRST, len(losses) // 10) :]) <= LEARNED_LOSS * first
        if rose is not None and not learned:
            return min([rose, *broken])
    if 2 * sum(place >= last for place in broken) <= len(steps) - last:
        return None
    return min([place for place in (rose, broken[0]) if place is not None])


def _is_broken(step: dict[str, Any]) -> bool:
    return is_nonfinite(step) or ("loss" in step and step["loss"] is None)


def _tune(record: Record) -> str:
    return f"gradguard tune {_script(record)}"


def _script(record: Record) -> str:
    argv = record.meta.get("argv") or ["train.py"]
    return " ".join(map(str, argv))


# A run that can be judged.


def _keep(record: Record) -> Recommendation | None:
    """The decision to keep the norm clip that was in force all along, if it is one to keep."""
    used = {step.get("threshold") if step.get("rule") == "norm" else None for step in record.steps}
    threshold, share = used.pop() if len(used) == 1 else None, _bound_share(record)
    normalises = bool(is_scale_free(record)) and share > GUARD_SHARE
    if threshold is None or not (0 < share <= GUARD_SHARE or normalises):
        return None
    bound = f"It bound on {percent(share)} of {len(taken_steps(record)):,} steps"
    why = " and left the others alone." if not normalises else f"; {_NO_COST}"
    text = plain_threshold(threshold)
    return Recommendation("keep", f"Keep {text}.", bound + why, threshold, f"norm={text}", clip_share=share)


_NO_COST = "with an optimizer that cancels a constant scale this costs nothing."


def _choose(record: Record, norms: list[float]) -> Recommendation:
    spikes, spread = find_spikes(norms), local_spread(norms)
    first = _middle([step["norm"] for step in taken_steps(record) if step.get("norm")][:_FIRST]) or 0.0
    large_start = bool(is_scale_free(record)) and first > START_TIMES * statistics.median(norms)
    unusual = _unusual(norms, spikes, spread, first if large_start else None)
    if not unusual:
        largest = f"the largest norm was {number(max(norms) / statistics.median(norms))} times the median"
        return Recommendation("nothing", "Nothing to clip.", f"No norm stood out from those around it: {largest}.")
    ends = drift_ends(norms)
    if ends is not None and (not is_scale_free(record) or ends[1] < CONVERGED * ends[0]):
        follows = "a constant would bind at one end of the run only; this rule follows the norms."
        headline = "Clip by a rule that follows the norms: gg.ClipByMedian()."
        return Recommendation("rule", headline, f"{unusual}, and the norms drift: {follows}", rule="median")
    if is_scale_free(record):
        share, why = 0.1, f"It normalises most steps; {_NO_COST} Neither a spike nor the first norms fill its moments."
    else:
        share = 0.75 if spread > HEAVY_SPREAD else 0.9
        why = "It cuts what is large and leaves the size of ordinary steps alone."
    threshold = min(_two_digits(_quantile(norms, share)), max(norms))
    clipped = sum(norm > threshold for norm in norms) / len(norms)
    text = plain_threshold(threshold)
    reason = f"{unusual}. It would have bound on {percent(clipped)} of {len(norms):,} usable steps. {why}"
    return Recommendation(
        "constant",
        f"Clip at {text}.",
        f"{reason} {_present(record)}".strip(),
        threshold,
        f"norm={text}",
        clip_share=clipped,
    )


def _unusual(norms: list[float], spikes: Sequence[int], spread: float, first: float | None) -> str:
    """What there is to clip, in words without a full stop; empty if nothing."""
    median = statistics.median(norms)
    said = []
    if spikes:
        largest = max(norms[place] for place in spikes)
        said.append(
            f"{len(spikes):,} of {len(norms):,} norms are spikes, up to {number(largest / median)} times the median"
        )
    if spread > HEAVY_SPREAD:
        said.append(f"the norms are heavy-tailed (robust spread {spread:.2g} of their logarithms)")
    if first is not None:
        said.append(f"the first norms are {number(first / median)} times the later ones")
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}"


def _drift_words(norms: list[float]) -> str:
    ends = drift_ends(norms)
    return "" if ends is None else f"The median norm moved from {number(ends[0])} to {number(ends[1])}."


def _harm(record: Record) -> str:
    """Whether the loss was higher after spikes than before them, and for how long."""
    steps = usable_steps(record)
    losses = [step.get("loss") for step in steps]
    harmed, judged, recovery = 0, 0, []
    for place in find_spikes([step["norm"] for step in steps]):
        before = [loss for loss in losses[max(0, place - _NEAR) : place] if loss is not None]
        after = [loss for loss in losses[place + 1 : place + 1 + _NEAR] if loss is not None]
        if len(before) < _FIRST or len(after) < _FIRST:
            continue
        judged += 1
        usual = statistics.median(before)
        if statistics.median(after) > max(before):
            harmed += 1
            back = (n for n, loss in enumerate(losses[place + 1 :]) if loss is not None and loss <= usual)
            recovery.append(next(back, math.inf))
    if not judged:
        return ""
    if not harmed:
        return f"After none of {judged:,} spikes the loss was higher than before."
    lasted = statistics.median(recovery)
    back = "and mostly did not come back" if math.isinf(lasted) else f"and came back within {lasted:,.0f} steps"
    return f"After {harmed:,} of {judged:,} spikes the loss was higher than before, {back}."


def _quantile(norms: Sequence[float], share: float) -> float:
    ordered = sorted(norms)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _bound_share(record: Record) -> float:
    taken = taken_steps(record)
    return sum(map(binds, taken)) / len(taken) if taken else 0.0


def _present(record: Record) -> str:
    # What clipping does now, so that a reader can tell whether the number changes anything.
    if not any("coefficient" in step for step in record.steps):
        return ""
    share = _bound_share(record)
    return f"At present clipping binds on {percent(share)} of the steps (regime: {regime_of(share)})."


def _no_norms(record: Record) -> str:
    if not record.steps and record.end is not None:
        clips = record.end.get("clips")
        seen = f"Clip calls were seen ({clips:,}), but no step" if clips else "No step"
        return (
            f"{seen} of a torch.optim optimizer{'' if clips else ' was seen'}, so no norm was recorded: gradguard "
            "measures at optimizer.step(), which a script that changes its weights by hand does not call."
        )
    if any("post_norm" in step for step in record.steps):
        return (
            "Only norms after clipping were recorded; a threshold read from those would repeat the old one; "
            "record the run again with gradguard run, which sees the norms before clipping."
        )
    return "The record holds no gradient norms; record the run again with gradguard run."
