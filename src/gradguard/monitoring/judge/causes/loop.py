"""Searches for faults of the training loop and the autograd graph: gradients that are kept, missing or always zero."""

import math
import statistics
from collections.abc import Callable

from gradguard.monitoring.judge.cause import Evidence, Sign
from gradguard.monitoring.judge.causes.rate import too_long
from gradguard.monitoring.judge.findings import named
from gradguard.monitoring.judge.numbers import capital, number
from gradguard.monitoring.judge.signals import RunSignals
from gradguard.monitoring.record.record_lines import without_none

MISSING_SHARE = 0.2
"""Share of all elements below which frozen parameters do not explain a run that does not learn."""

MOVED = 1.0
"""Share of itself that the usual weight can have moved in all steps together. Below it, the model may have been trained
before, so a loss that stands still may be no fault."""

GUESS = 0.01
"""Relative distance of the final loss from the logarithm of the number of outputs below which the model guesses."""

READS = 1.1
"""Growth of the first weight's norm above which the model reads something in the data. Shuffled labels give nothing to
read."""

STILL = 0.02
"""Share of the first loss that the loss must lose before it has begun to fall."""

UNUSED_SHARE = 0.05
"""Share of all elements below which parameters without a gradient may be an unused head."""


def found(kind: str, signals: RunSignals) -> Sign | None:
    """Return the health finding of a kind as a sign, or None; an info becomes a sign that is only possible."""
    one = signals.finding(kind)
    if one is None:
        return None
    words = {
        "params": named(one.params) if one.params else "",
        "step": one.first_step,
        "message": one.message,
        "advice": capital(one.advice),
    }
    return Sign((Evidence.of(one),), words, "possible" if one.severity == "info" else "")


def summed_micro_batches(signals: RunSignals) -> Sign | None:
    """Return a sign if backward() is called several times per step on losses that were not divided."""
    several, curve = list(filter(None, signals.record.steps.column("backwards"))), signals.curve
    if len(several) < 0.5 * signals.count or signals.cancels_scale or not (curve.is_known or signals.ends_lost):
        return None
    usual = round(statistics.median(several))
    if signals.record.meta.get("loss_factor", 1.0) <= 1.5 / usual:
        return None
    sick = signals.ends_lost or curve.final - curve.best > 3 * curve.error or too_long(signals)
    seen = signals.seen(f"In each step backward() was called {usual} times, and the loss was not divided by {usual}.")
    return Sign((seen,), {"count": usual}, "certain" if sick else "possible", rate_factor=1 / usual)


def norms_follow_scale(signals: RunSignals) -> Sign | None:
    """Return a sign if a clip binds on nearly every step, and the norms are as large as the loss scale or follow it."""
    if not signals.taken or len(signals.bound) / signals.taken < 0.9 or not signals.record.steps.has_any("amp_scale"):
        return None
    of_scale: dict[float, list[float]] = {}
    for scale, norm in zip(signals.record.steps.column("amp_scale"), signals.norms, strict=True):
        if scale and norm:
            of_scale.setdefault(scale, []).append(norm)
    levels = {scale: statistics.median(norms) for scale, norms in of_scale.items() if len(norms) >= 10}
    if not levels or min(levels) < 64:
        return None
    low, high = min(levels), max(levels)
    follows = high > low and 0.6 < (levels[high] / levels[low]) / (high / low) < 1.7
    if not follows and (high > low or statistics.median(signals.bound) > 10 / high or levels[high] < 0.01 * high):
        return None
    rises = f"{number(levels[low])} at a scale of {low:,g}, {number(levels[high])} at {high:,g}"
    return Sign((signals.seen(f"The norms that the clip compares grow with the loss scale: {rises}."),))


def idle(why: str, holds: Callable[[RunSignals], bool], signals: RunSignals) -> Sign | None:
    """Return a sign if the optimizer stepped, never had a gradient, and the given reason applies.

    Args:
        why: The reason, as a sentence with placeholders.
        holds: Returns whether this reason applies to a run.
        signals: The signals of the run.
    """
    one = signals.finding("optimizer_without_gradient")
    if one is None or signals.count or not holds(signals):
        return None
    steps = round(signals.record.closing.get("idle_steps") or one.value or 0)
    words = {
        "steps": f"{steps:,}",
        "leaves": signals.leaves,
        "message": capital(one.message),
        "advice": capital(one.advice),
    }
    seen = Evidence((one.first_step, max(one.last_step, steps - 1)), why.format(**words), one.params)
    return Sign((seen,), words)


def all_zero(signals: RunSignals) -> Sign | None:
    """Return a sign if every gradient is exactly 0, though neither weights of 0 nor lost values explain it."""
    measured = signals.measured
    starts_at_zero = measured and not any(any(line["weight"]) for line in measured)  # zeros pass on no gradient
    if 0.0 not in signals.norms or any(signals.norms) or any(signals.lost) or starts_at_zero:
        return None
    return Sign((signals.seen(f"The gradient norm was exactly 0 on all {signals.count:,} steps."),))


def frozen(signals: RunSignals) -> Sign | None:
    """Return a sign if a parameter group stays frozen, or much is frozen and the other parameters hardly learn."""
    own, curve = signals.own, signals.curve
    frozen = [place for place in own if signals.params[place].get("frozen")]
    still = [place for place in frozen if not any(signals.norms_of(place))]  # the others were unfrozen later
    share = signals.elements(still) / max(1, signals.elements(own))
    groups = {signals.params[place].get("group", 0) for place in own}
    idle_groups = groups - {signals.params[place].get("group", 0) for place in own if place not in still}
    hardly = curve.fallen <= 0.3
    if not idle_groups and (share < MISSING_SHARE or not hardly):
        return None
    names = [signals.names[place] for place in still]
    words = f"{len(still)} of {len(own)} parameters of the optimizer have requires_grad=False: {named(names)}."
    evidence = [signals.seen(words, names)]
    if idle_groups:  # a group with its own learning rate is not set up in order to train nothing
        whole = ", ".join(map(str, sorted(idle_groups)))
        evidence.append(signals.seen(f"Nothing is trained in the optimizer's parameter groups {whole}."))
    certainty = "likely" if share > 0.5 or idle_groups else "possible"
    rest = "and the others hardly learn" if hardly and not curve.has_fallen else "and keep their initial values"
    return Sign(tuple(evidence), {"count": len(still), "all": len(own), "rest": rest}, certainty)


def cut_off(signals: RunSignals) -> Sign | None:
    """Return a sign if parameters that require a gradient never had one."""
    if not signals.lines:
        return None
    gone = set.intersection(*(set(line.get("absent", ())) for line in signals.lines))
    gone.update(_never_reached(signals))
    missing = [place for place in signals.own if place in gone and not signals.params[place].get("frozen")]
    if not missing:
        return None
    names = [signals.names[place] for place in missing]
    share = signals.elements(missing) / max(1, signals.elements(range(len(signals.params))))
    lowest = min(missing) == 0  # the first parameter is missing, so the graph is cut above the last missing one
    words = f"{len(names)} of {len(signals.params)} parameters never had a gradient: {named(names)}."
    gaps = {
        "count": len(names),
        "all": len(signals.params),
        "last": names[-1],
        "where": f" up to {names[-1]}" if lowest else "",
    }
    return Sign((signals.seen(words, names),), gaps, "likely" if lowest or share >= UNUSED_SHARE else "possible")


def replaced(signals: RunSignals) -> Sign | None:
    """Return a sign if the optimizer holds unused parameters, while others get gradients and are in no optimizer."""
    new, old = found("gradient_without_optimizer", signals), cut_off(signals)
    if new is None or old is None or "possible" in (new.certainty, old.certainty) or not new.words["params"]:
        return None  # the parameters that are in no optimizer may be meant to stay fixed
    evidence = (*new.evidence, *old.evidence)
    return Sign(evidence, {"new": new.words["params"], "old": named(old.evidence[0].params)})


def _never_reached(signals: RunSignals) -> list[int]:
    """Return the parameters that start nonzero and whose gradients are exactly 0 on every line, by whole modules."""
    zero = [not any(of_one) for of_one in zip(*(line["norm"] for line in signals.lines), strict=True)]
    begins = signals.measured[0]["weight"] if signals.measured else [0.0] * len(zero)
    matrices = signals.matrices
    if len(matrices) > 1 and all(zero[place] and begins[place] for place in matrices) and zero.count(False) > 1:
        # several vectors learn but no weight does: an operation on the weights passes no gradient on
        return matrices
    modules: dict[str, list[int]] = {}
    for place in signals.own:
        modules.setdefault(signals.names[place].rpartition(".")[0], []).append(place)
    if any(zero[places[0]] and not all(zero[place] for place in places) for places in modules.values()):
        return []  # a weight is dead beside a bias that learns: its input is 0, from a dead activation below
    cut = [its for its in modules.values() if len(its) > 1 and all(zero[place] and begins[place] for place in its)]
    return [place for places in cut for place in places]


def rate_zero(signals: RunSignals) -> Sign | None:
    """Return a sign if the learning rate is 0 on nearly all steps."""
    known = without_none(signals.rates)
    zero = sum(rate == 0 for rate in known)
    moves = zero == len(known) and any(any(layer.ratios[1:]) for layer in signals.layers)
    if not known or zero < 0.9 * len(known) or any(known[: len(known) // 20]) or moves:
        return None
    return Sign((signals.seen(f"The learning rate was 0 on {zero:,} of {len(known):,} steps."),))


def doubled(signals: RunSignals) -> Sign | None:
    """Return a sign if the loss gets probabilities for logits: a softmax of a softmax hardly separates classes."""
    doubled = signals.record.meta.get("doubled") or ()
    optimizers = {one.get("optimizer") for one in signals.record.meta.get("params") or ()}
    if len(doubled) != 2 or len(optimizers) > 1:  # with several optimizers the record does not say whose loss it is
        return None
    loss, inner = doubled
    seen = signals.seen(f"In the first forward pass the loss applied {loss} to the output of {inner}.")
    curve = signals.curve
    if curve.is_known and curve.fallen > _MOST_OF_DOUBLED:
        certainty = "possible"
    else:
        certainty = "likely" if curve.has_fallen else "certain"
    return Sign((seen,), {"inner": inner}, certainty)


_MOST_OF_DOUBLED = 0.55
"""The largest share of its start that a cross entropy of probabilities can lose: with two classes it falls from log 2
to log(1 + e) - 1."""


def zero_from_start(signals: RunSignals) -> Sign | None:
    """Return a sign if gradients of weights are exactly 0 from the first step on, though they are in the graph."""
    lines, zeros = signals.lines, []
    if len(lines) < 3 or not signals.curve.is_known:
        return None
    if signals.learns:
        return _saddle(signals)
    for place in signals.matrices:
        zero = sum(line["norm"][place] == 0 and place not in line.get("absent", ()) for line in lines)
        if zero >= 0.95 * len(lines) and not any(signals.norms_of(place)[:2]):
            zeros.append(signals.names[place])
    words = f"The gradient of {named(zeros)} was exactly 0 on every recorded step, from the first one on."
    return Sign((signals.seen(words, zeros),), {"params": named(zeros)}) if zeros else None


def _saddle(signals: RunSignals) -> Sign | None:
    """Return a sign if weights that begin at 0 had zero gradients at first, and the loss stood still for a while."""
    lines, measured, levels = signals.lines, signals.measured[:1], signals.curve.levels
    still = sum(level > levels[0] - max(signals.curve.error, STILL * abs(levels[0])) for level in levels)
    if not measured or still < 0.25 * len(levels):
        return None
    first = measured[0]["weight"]
    zeros = [
        signals.names[place]
        for place in signals.matrices
        if first[place] == 0 and place not in lines[0].get("absent", ()) and not any(signals.norms_of(place)[:3])
    ]
    words = f"The gradient of {named(zeros)}, which begins at 0, was exactly 0 in the first steps."
    return Sign((signals.seen(words, zeros),), {"params": named(zeros)}) if zeros else None


def warming_up(signals: RunSignals) -> Sign | None:
    """Return a sign if the learning rate rises to the end of a run that does not learn."""
    if signals.learns or not signals.curve.is_known or not signals.is_warming_up:
        return None
    first, *_, last = without_none(signals.rates)
    seen = signals.seen(f"The learning rate rises throughout the run, from {first:.2g} to {last:.2g}.")
    return Sign((seen,), {"count": f"{signals.count:,}", "rate": f"{last:.2g}", "tenth": max(1, signals.count // 10)})


def stands_still(signals: RunSignals) -> Sign | None:
    """Return a sign if the loss stays where it began, though there are gradients."""
    curve = signals.curve
    if signals.learns or not curve.stands_still or signals.count < 100:
        return None
    # Only possible: a run that had little left to learn also stays where it was, and a first weight that grows reads
    # something in the data.
    stays = signals.travel is not None and signals.travel < MOVED and not signals.only_vectors_learn
    stays = stays or signals.first_growth > READS
    blurred = 3 * curve.error > 0.5 * abs(curve.levels[0])  # in such noise a loss that halves looks flat, too
    words = f"The loss was {number(curve.levels[0])} in the first steps and is {signals.ends_at} at the end"
    choices = max([2, *(size for place in signals.own[-1:] for size in signals.shape(place)[:1])])
    if abs(curve.final - math.log(choices)) < GUESS * curve.final:
        words, stays = f"{words}, the loss of a guess among {choices}", False
    seen = signals.seen(f"{words}, although there are gradients.")
    return Sign((seen,), {"count": f"{signals.count:,}"}, "possible" if stays or blurred else "likely")
