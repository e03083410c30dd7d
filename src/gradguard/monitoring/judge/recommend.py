"""What a record says to do about clipping: keep, a constant, a rule that follows, nothing, or fix something first.

The thresholds below were chosen on the tasks of `benchmarks/recommendation.py`, which follows each decision blindly and
compares it with the constants that people try.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from operator import not_, or_
from typing import Any

from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.norm_statistics import drift_of, local_spread, spread_of
from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.lines import Lines
from gradguard.monitoring.record.steps import (
    bound_on,
    by_optimizer,
    is_nonfinite,
    nonfinite_on,
    regime_of,
    skipped_on,
    taken_steps,
    usable_norms,
    usable_steps,
)

ENOUGH_STEPS = 200
"""Fewer usable steps say nothing about rare spikes."""

GUARD_SHARE = 0.05
"""A clip that binds on no more steps is a guard, and right as it is."""

OUTLIER_TIMES = 12.0
"""A norm so many times the median of its tenth of the run: log-normal noise of 0.8 gets there once in a thousand."""

NORMALISING_SHARE = 0.5
"""Above it a clip sets the size of the steps, unless the optimizer cancels it."""

FIX_FIRST = ("clip_before_unscale", "missing_zero_grad", "optimizer_without_gradient")
"""Findings that make norms and losses say nothing about a threshold."""

HEAVY_SPREAD = 0.4
"""Norms with a larger local spread, in units of the logarithm, are heavy-tailed: one in 40 is twice the median."""

CONVERGED = 0.2
"""A median norm that fell below this share: training converges, and a constant would bind at one end only."""

JUMPED_LOSS = 1.2
"""A loss above so many times its first value has jumped."""

JUMPED_NORM = 3.0
"""So has a norm; both on one step, and nothing learned in the end: the learning rate was too high."""

NORMALISING, GUARDING, HEAVY, WILD = 0.1, 0.9, 0.75, 0.25
"""The quantile of the norms that a constant is: where a scale cancels; where it does not, of light and heavy tails, and
of heavy tails with outliers besides, whose steps make ordinary norms larger than they need be."""

GROWN_LOSS = 2.0
"""So has a loss before numbers stopped being finite; with less, what came was no growth."""

LEARNED_LOSS = 0.8
"""A loss that came below this share of its first value has learned something."""

NOISY_LOSS = 0.4
"""Losses with a larger local spread tell little: lost is a run whose loss and norm both end above where they began."""

OVERSHOT_LOSS = 5.0
"""A loss so many times the first one within the first 10 steps: the first steps themselves were too large. Noisy losses
that end so high are no noise."""

OVERCOME_LOSS = 0.15
"""Below this share of the first loss that was overcome."""

SPOILED_LOSS = 10.0
"""Single losses so many times the first one, late in a run, are of bad batches: that comes from the data."""

LESS_RATE, LESS_NORM = 0.3, 0.1
"""Of the learning rate, and of the first norms as a threshold: what to try first in a run that blew up. Their product
bounds a step; small gradients move more by a higher rate and a lower threshold."""

LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE = 0.1, 0.3
"""With an optimizer that cancels a scale only the rate makes steps shorter."""

_FIRST = 5  # losses and norms that say how a run began
_NEAR_JUMP = 10  # a second jump within so many steps: a single one is a batch
_RECENT = 100  # steps that say what was usual when a run stopped being finite
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
        experiment: Whether the record cannot say which clip is best, and ``gradguard tune`` can.
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
    experiment: bool = False
    clip_share: float | None = None
    usable_steps: int = 0
    drift: tuple[float, float] | None = None
    parts: tuple[tuple[str, "Recommendation"], ...] = ()


@once
def recommend(record: Record) -> Recommendation:
    r"""Decide what to do about clipping, from the pre-clip norms and the losses of a run.

    The first row that holds decides; *usable* are the finite norms of taken steps without the warm-up, and the *local
    spread* s is the robust standard deviation of their logarithms within a tenth of the run.

    ========================================================= ========  ================================================
    the record                                                kind      threshold or rule
    ========================================================= ========  ================================================
    gradients clipped before ``unscale_``, never cleared, or  fix       none
    an optimizer of another model (see `findings`)
    several optimizers                                        unknown   none, and a decision for each
    no pre-clip norm                                          unknown   none
    it ends not finite, and within 10 steps before neither    fix       none
    norms (3 times) nor losses (2 times) had grown
    it ends not finite; or loss and norm jumped (1.2 and 3    fix       0.3 times the learning rate, and as a threshold
    times the first, and not just on single steps up to the             0.1 times the smallest of the first norms; 0.1
    end) and the last losses are above 0.8 times the first              and 0.3 with an optimizer that cancels a scale
    (where losses are noisy: both stay so high)
    fewer than 200 usable steps                               unknown   none
    a norm clip bound on more than half of the steps, with    fix       that one; the learning rate is what it sets
    an optimizer that does not cancel a scale
    a clip bound all along                                    keep      that one
    outliers, and the median norm drifts by more than 2x (5x  rule      ``median=1``
    down, with an optimizer that cancels a scale)
    it falls by 2x to 5x, and s is above 0.4                  constant  90th percentile of the usable norms
    it drifts otherwise; or there are no outliers, and s is   nothing   none
    at most 0.4 with another optimizer
    an optimizer that cancels a scale                         constant  10th percentile of the usable norms
    any other                                                 constant  90th percentile, 75th where s is above 0.4, 25th
                                                                        with outliers besides
    ========================================================= ========  ================================================

    Outliers are spikes (`find_spikes`), or norms of more than 12 times the median of their tenth of the run. With an
    optimizer that cancels a scale (Adam), a low threshold costs nothing, and neither a spike nor the first norms can
    fill its second moment: only where training converges it would keep the last steps large, and a rule that follows
    is better.

    **Guarantees**: a constant is never above the largest norm of the run, nor given where the norms rise or converge,
    but to an optimizer that cancels a scale; multiplying every norm by a constant multiplies it by that (to two
    digits); the same record always gives the same answer.

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
    urgent = next((one for one in findings(record) if one.kind in FIX_FIRST and one.severity == "error"), None)
    if urgent is not None:
        first = f"Fix this first: {urgent.advice.partition(';')[0].partition(' (')[0]}."
        return Recommendation("fix", first, f"{urgent.message[:1].upper()}{urgent.message[1:]}.")
    parts = by_optimizer(record)
    if len(parts) == 1:
        return _decide(parts[0].record, several=_is_part(record))
    made = [(part.label, _decide(part.record, several=True)) for part in parts]
    return _for_each(record, made, _have_own_losses([part.record for part in parts]))


def _is_part(record: Record) -> bool:
    """Whether these are the steps of one of several optimizers: they say which, and the record names no other."""
    return len(record.meta.get("optimizers") or []) <= 1 and record.steps.has_any("optimizer")


def _for_each(record: Record, parts: list[tuple[str, Recommendation]], own_losses: bool) -> Recommendation:
    said = [f"{label[:1].upper()}{label[1:]}: {one.headline} {one.reason}".strip() for label, one in parts]
    usable, experiment = sum(one.usable_steps for _, one in parts), any(one.experiment for _, one in parts)
    if own_losses and not experiment:
        experiment = True
        said.append(f"Their losses differ and tell little of what comes out; {_tune(record)} --metric REGEX does.")
    return Recommendation(
        "unknown", _SEVERAL, " ".join(said), experiment=experiment, usable_steps=usable, parts=tuple(parts)
    )


_SEVERAL = "Several optimizers step in this run, and each has a decision of its own."


def _have_own_losses(parts: Sequence[Record]) -> bool:
    """Whether the optimizers step on losses of their own, as those of networks that work against each other do."""
    losses = [set(part.steps.column("loss")) - {None} for part in parts]
    return any(one and other and len(one & other) < 0.5 * min(len(one), len(other)) for one, other in pairwise(losses))


def _decide(record: Record, several: bool = False) -> Recommendation:
    if not record.steps.has_any("norm"):
        return Recommendation("unknown", "The record has no norms to judge by.", _no_norms(record))
    blown = _blown_up(record, several)
    if blown is not None:
        return blown
    norms = usable_norms(record)
    if len(norms) < ENOUGH_STEPS:
        missing = f"There are {len(norms)} usable steps, and {ENOUGH_STEPS} are needed to know how rare spikes are."
        return Recommendation("unknown", "Record a longer run.", missing, usable_steps=len(norms))
    found = _of_clip_in_use(record) or _choose(record, norms)
    found = replace(found, experiment=found.kind != "keep" and (found.experiment or _is_unclear(record, norms)))
    said = [found.reason, _drift_words(record), _harm(record), _EXPERIMENT.format(_tune(record)) * found.experiment]
    return replace(found, reason=" ".join(filter(None, said)), usable_steps=len(norms), drift=drift_of(record))


_EXPERIMENT = "What is best for such a run no record can tell, and an experiment can: {}."


def _is_unclear(record: Record, norms: Sequence[float]) -> bool:
    """Whether norms like these were followed by this and that: they are wild, or drift, or nothing was learned."""
    if _unusual(record, norms) or (drift_of(record) is not None and not is_scale_free(record)):
        return True
    losses = [loss for loss in record.steps.column("loss") if loss is not None]
    return len(losses) >= _FIRST and 0 < _beginning(losses) * LEARNED_LOSS < _ending(losses)


# A run that is lost.


def _blown_up(record: Record, several: bool) -> Recommendation | None:
    """The decision on a run that ended not finite, or whose loss jumped and then learned nothing any more."""
    steps = record.steps.where(list(map(not_, skipped_on(record.steps))))
    place = _end_of_numbers(steps)
    if place is None and not several:  # networks that work against each other have losses that rise
        place = _end_of_learning(steps)
    if place is None:
        return None
    at, finite = steps[place]["i"], not (is_nonfinite(steps[place]) or _has_no_loss(steps[place]))
    if not finite and place != 1 and not _grew_before(steps, place):  # a first update alone may blow up
        return Recommendation(
            "fix", f"Find what was not finite at step {at} first: nothing had grown before.", _NAN[place == 0]
        )
    norms = [norm for norm in steps.column("norm")[: min(max(place, 1), _FIRST)] if norm]
    cancels = is_scale_free(record)
    rate, share = (LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE) if cancels else (LESS_RATE, LESS_NORM)
    what = "rose and did not come back" if finite else "or the gradients were not finite"
    where = f"; the first norms were {number(min(norms))} and more" if norms else ""
    reason = (
        f"The loss {what} from step {at} on{where}. No rule that follows such norms can help, because none of them was "
        f"ever usual. {rate:g} times the rate, and {share:g} times the smallest of them as a threshold, are "
        f"where to begin. {_EXPERIMENT.format(_tune(record))}"
    )
    headline = f"Multiply the learning rate by {rate:g}: the run blew up at step {at}."
    fix = Recommendation("fix", headline, reason, rate_factor=rate, experiment=True, usable_steps=len(norms))
    if not norms:
        return fix
    threshold = _two_digits(share * min(norms))  # the others may have exploded already
    text = plain_threshold(threshold)
    return replace(fix, headline=f"{headline} Clip at {text} as well.", threshold=threshold, rule=f"norm={text}")


_LOOK = (
    " Look for an empty or corrupt sample, a division by 0, a logarithm or a root of 0, a mask that leaves nothing: "
    "docs/nan.md finds the batch, the operation and its line."
)
_NAN = (
    "Norms and losses were as they had been, so that neither a lower rate nor a clip would have kept it away." + _LOOK,
    "No update had been made, so that neither the rate nor a clip had a part in it." + _LOOK,
)


def _grew_before(steps: Lines, place: int) -> bool:
    """Whether norms or losses had grown when a run stopped being finite."""
    for key, times in (("norm", JUMPED_NORM), ("loss", GROWN_LOSS)):
        before = [value for value in steps.column(key)[:place] if value is not None and value > 0]
        if before and max(before[-_NEAR:]) > times * min(_beginning(before), statistics.median(before[-_RECENT:])):
            return True
    return False


def _end_of_numbers(steps: Lines) -> int | None:
    """Where the gradients or losses stopped being finite, if most of the last ones are not."""
    lost = (there and loss is None for loss, there in zip(steps.column("loss"), steps.has("loss"), strict=True))
    broken = list(compress(range(len(steps)), map(or_, nonfinite_on(steps), lost)))
    last = len(steps) - max(1, len(steps) // 20)
    return broken[0] if 2 * sum(place >= last for place in broken) > len(steps) - last else None


def _end_of_learning(steps: Lines) -> int | None:
    """Where the loss first jumped together with the norm, if the run learned nothing in the end."""
    known = [loss for loss in steps.column("loss") if loss is not None]
    norms = [norm for norm in steps.column("norm") if norm]
    if len(steps) < ENOUGH_STEPS or len(known) < _FIRST or not norms:
        return None
    if min(known[:_FIRST]) <= 0:  # "times as much" has no meaning
        return None
    first, usual = _beginning(known), _beginning(norms)
    jumps = [
        place
        for place, (loss, norm) in enumerate(zip(steps.column("loss"), steps.column("norm"), strict=True))
        if place and (loss or 0) > JUMPED_LOSS * first and (norm or 0) > JUMPED_NORM * usual
    ]
    late, end = known[len(known) // 2 :], _ending(known)
    if local_spread([loss for loss in known if loss > 0]) > NOISY_LOSS:
        higher = end > OVERSHOT_LOSS * first or _ending(norms) > JUMPED_NORM * usual
        lost = end > JUMPED_LOSS * first and higher
        return jumps[0] if jumps and lost else None
    if jumps and jumps[0] < _NEAR_JUMP and max(known[: jumps[0] + 1]) > OVERSHOT_LOSS * first:
        after = statistics.median(known[jumps[0] + 1 : jumps[0] + 4] or known)
        if after > JUMPED_LOSS * first and end > OVERCOME_LOSS * first:  # else it was a batch, or did not matter
            return jumps[0]
    if end <= LEARNED_LOSS * first:
        return None
    if 0 < sum(loss > SPOILED_LOSS * first for loss in late) <= len(late) // 20:
        return None  # batches that spoil the run, and not its learning rate
    if jumps and jumps[-1] < len(steps) // 2:  # and then nothing was learned any more
        return jumps[0]
    return next((place for place, other in pairwise(jumps) if other - place <= _NEAR_JUMP), None)


def _beginning(values: Sequence[float]) -> float:
    """What a run began with: a run may explode within the first steps, and a first batch may be an odd one."""
    return min(values[0], statistics.median(values[:_FIRST]))


def _ending(values: Sequence[float]) -> float:
    return statistics.median(values[-max(_FIRST, len(values) // 10) :])


def _has_no_loss(step: dict[str, Any]) -> bool:
    return "loss" in step and step["loss"] is None


def _tune(record: Record) -> str:
    return f"gradguard tune {record.script}"


# A run that can be judged.


def _of_clip_in_use(record: Record) -> Recommendation | None:
    """The decision on a clip that was in force all along and bound on some steps."""
    rules, share = set(record.steps.column("rule")), _bound_share(record)
    rule = rules.pop() if len(rules) == 1 else None
    if rule is None or share == 0:
        return None
    threshold, text = _fixed_threshold(record, rule)
    bound = f"It bound on {percent(share)} of {len(taken_steps(record)):,} steps"
    if share <= GUARD_SHARE:
        why = f"{bound} and left the others alone."
    elif is_scale_free(record):
        why = f"{bound}; {_NO_COST}"
    elif share <= NORMALISING_SHARE or rule != "norm":
        why = f"{bound}, and the run came through."
    else:
        taken = taken_steps(record)
        coefficient = statistics.median(compress(taken.column("coefficient"), bound_on(taken)))
        headline = f"Choose the learning rate first: the clip at {text} multiplies it by {number(coefficient)}."
        reason = (
            f"{bound}, so that it sets the size of the steps and guards against nothing. A learning rate so many times "
            "as large, and a threshold that binds seldom, is the same training."
        )
        return Recommendation("fix", headline, reason, threshold, experiment=True, clip_share=share)
    spelled = f"norm={text}" if threshold is not None else None
    return Recommendation("keep", f"Keep {text}.", why, threshold, spelled, clip_share=share)


def _fixed_threshold(record: Record, rule: str) -> tuple[float | None, str]:
    """The threshold of a norm clip that never changed, and what to call the clip."""
    used = set(record.steps.column("threshold"))
    threshold = used.pop() if len(used) == 1 else None
    if rule == "norm" and threshold is not None:
        return threshold, plain_threshold(threshold)
    return None, rule if threshold is None else f"{rule}={plain_threshold(threshold)}"


_NO_COST = "with an optimizer that cancels a constant scale this costs nothing."


def _choose(record: Record, norms: Sequence[float]) -> Recommendation:
    ends, unusual = drift_of(record), _unusual(record, norms)
    cancels, heavy = bool(is_scale_free(record)), spread_of(record) > HEAVY_SPREAD
    converges = ends is not None and ends[1] < CONVERGED * ends[0]
    follows = converges or (ends is not None and not cancels)
    outliers = bool(spikes_of(record)) or _has_outliers(norms)
    if follows and outliers:
        headline = "Clip by a rule that follows the norms: gg.ClipByMedian(k=1)."
        reason = f"{unusual}, and the norms drift: a constant would bind at one end of the run only."
        return Recommendation("rule", headline, reason, rule="median=1")
    if follows and heavy and not converges and ends is not None and ends[1] < ends[0]:
        why = ", mostly while the norms were largest, and heavy tails do most harm."
        return _constant(record, norms, GUARDING, unusual, why)
    if follows or not (unusual or cancels):
        times = number(max(norms) / statistics.median(norms))
        largest = f"; the largest was {times} times the median" if ends is None else ""
        return Recommendation("nothing", "Nothing to clip.", f"No norm stood out from those around it{largest}.")
    if cancels:
        why = f", so that all steps weigh the same; {_NO_COST} Neither spikes nor first norms fill its moments."
        return _constant(record, norms, NORMALISING, unusual, why)
    if heavy and outliers:
        why = ", since few steps are ordinary here."
        return _constant(record, norms, WILD, unusual, why)
    why = ": it cuts what is large and leaves the size of ordinary steps alone."
    return _constant(record, norms, HEAVY if heavy else GUARDING, unusual, why)


def _constant(record: Record, norms: Sequence[float], share: float, unusual: str, why: str) -> Recommendation:
    """The decision on a quantile of the norms; ``why`` goes on after how often it would have bound."""
    threshold = min(_two_digits(_quantile(norms, share)), max(norms))
    clipped, text = sum(norm > threshold for norm in norms) / len(norms), plain_threshold(threshold)
    bound = f"It would have bound on {percent(clipped)} of {len(norms):,} usable steps{why}"
    reason = " ".join(
        filter(None, [f"{unusual or 'No norm stood out from those around it'}.", bound, _present(record)])
    )
    return Recommendation("constant", f"Clip at {text}.", reason, threshold, f"norm={text}", clip_share=clipped)


def _has_outliers(norms: Sequence[float]) -> bool:
    """Whether there are norms far above their neighbourhood, where it is too wild for single ones to be spikes."""
    size = max(len(norms) // 10, 1)
    parts = (norms[begin : begin + size] for begin in range(0, len(norms), size))
    return any(max(part) > OUTLIER_TIMES * statistics.median(part) for part in parts)


def _unusual(record: Record, norms: Sequence[float]) -> str:
    """What there is to clip, in words without a full stop; empty if nothing."""
    spikes, spread, said = spikes_of(record), spread_of(record), []
    if spikes:
        times = number(max(norms[place] for place in spikes) / statistics.median(norms))
        said.append(f"{len(spikes):,} of {len(norms):,} norms are spikes, up to {times} times the median")
    elif _has_outliers(norms):
        said.append(f"single norms are more than {OUTLIER_TIMES:g} times those around them")
    if spread > HEAVY_SPREAD:
        said.append(f"the norms are heavy-tailed (robust spread {spread:.2g} of their logarithms)")
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}"


def _drift_words(record: Record) -> str:
    ends = drift_of(record)
    return "" if ends is None else f"The median norm moved from {number(ends[0])} to {number(ends[1])}."


def _harm(record: Record) -> str:
    """Whether the loss was higher after spikes than before them, and for how long."""
    losses = usable_steps(record).column("loss")
    harmed, judged, recovery = 0, 0, []
    for place in spikes_of(record):
        before = [loss for loss in losses[max(0, place - _NEAR) : place] if loss is not None]
        after = [loss for loss in losses[place + 1 : place + 1 + _NEAR] if loss is not None]
        if len(before) < _FIRST or len(after) < _FIRST:
            continue
        judged += 1
        usual = statistics.median(before)
        if statistics.median(after) > max(before):
            harmed += 1
            later = (losses[at] for at in range(place + 1, len(losses)))
            back = (n for n, loss in enumerate(later) if loss is not None and loss <= usual)
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


def _bound_share(record: Record) -> float:
    taken = taken_steps(record)
    return sum(bound_on(taken)) / len(taken) if taken else 0.0


def _present(record: Record) -> str:
    # What clipping does now, so that a reader can tell whether the number changes anything.
    if not record.steps.has_any("coefficient"):
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
    if record.steps.has_any("post_norm"):
        return (
            "Only norms after clipping were recorded; a threshold read from those would repeat the old one; "
            "record the run again with gradguard run, which sees the norms before clipping."
        )
    return "The record holds no gradient norms; record the run again with gradguard run."
