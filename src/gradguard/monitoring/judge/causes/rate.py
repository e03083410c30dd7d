"""A learning rate that is too high, too low, or gone before the run was done; steps that no rule makes."""

import math
import statistics
from itertools import pairwise

from gradguard.monitoring.judge.cause import Cause, Evidence
from gradguard.monitoring.judge.detectors.tensors import LARGE_UPDATE
from gradguard.monitoring.judge.numbers import capital, number
from gradguard.monitoring.judge.rates import lower_rate
from gradguard.monitoring.judge.signals import Curve, RunSignals, usual_step
from gradguard.monitoring.record.lines import without_none

GROWN = 2.0
"""Times its first norm: a weight that is mostly noise by now."""

THROWN, THROWN_WITHIN, THROWN_GAIN = 4.0, 60, 1.5
"""Times its first norm, within so many steps, to a gain above any initialisation's: a weight that was thrown away."""

TINY_MOVE = 0.05
"""By which share of themselves weights can have moved in all steps together: with less a run has hardly begun."""

SMALL_MOVE = 0.2
"""The share where the loss falls at the end as fast as in the beginning: below it the run has hardly begun."""

NO_MOVE = 0.005
"""The smallest share of themselves that weights move in a run that has begun, if the loss does not measure it."""

RULE_OF_THUMB, LEAST_RATE, MOST_RATE = 1e-3, 10.0, 1e4
"""Of its weight: a usual step; and the smallest and largest factor to multiply a rate by that makes shorter ones."""

GONE = 0.02
"""Of its largest value: a learning rate below that moves little any more."""

_OVERSHOT = 1.5  # times its start: a loss that the first steps raised so far
_ABOVE_CHANCE = 3.0  # times the usual step between two logarithms of losses: further than batches lie apart


def rate_too_high(signals: RunSignals) -> Cause | None:
    """Return whether steps are too long: the loss jumped, stays above its best, goes to and fro, or is stuck."""
    curve = signals.curve
    if signals.ends_lost or signals.rate == 0:
        return None
    thrown, looked = _thrown(signals), []
    if curve is not None:
        every = (_jumped, _to_and_fro, _large_updates, _moved_for_nothing, _risen)
        looked = [look(signals, curve) for look in (every if curve.is_positive else every[1:3])]
    signs = tuple(filter(None, [thrown, *looked]))
    if not signs:
        return None
    signs += tuple(Evidence.of(found) for found in signals.found if found.kind in ("update_spike", "logits_grow"))
    fix = lower_rate(signals)
    return Cause(
        "rate_too_high",
        "certain" if thrown or (len(signs) >= 3 and len(signals.outbursts) < 3) else "likely",
        _headline(signals, curve),
        fix.advice,
        signs,
        ("It is no bad batch: the loss does not come back by itself to where it was.",),
        rate_factor=fix.factor,
        threshold=fix.threshold,
    )


def _headline(signals: RunSignals, curve: Curve | None) -> str:
    rate = f", {signals.rate:g}," if signals.rate else ""
    if curve is None:
        end = "the first steps threw the weights far from where they began"
    elif curve.final > curve.start * 1.05:
        end = f"the loss ends at {number(curve.final)}, above its start of {number(curve.start)}"
    elif curve.fallen < 0.1:
        end = f"the loss is stuck at {number(curve.final)}"
    else:
        end = f"steps are too long, and the loss ends at {number(curve.final)}"
    return f"The learning rate{rate} is too high: {end}."


def _thrown(signals: RunSignals) -> Evidence | None:
    """Whether the first steps of an optimizer that makes them as long as its rate lost what the weights began with."""
    count, first = len(signals.measured), signals.span[0]
    layers = [layer for layer in signals.sized_layers if len(layer.weights) == count]
    early = [k for k, line in enumerate(signals.measured) if 0 < line["i"] - first <= THROWN_WITHIN]
    learns = signals.fallen > 0.9 and any(signals.norms[-10:])
    if not layers or not early or not signals.cancels_scale or learns:
        return None
    last, step = early[-1], signals.measured[early[-1]]["i"]
    times = statistics.median(layer.weights[last] / layer.weights[0] for layer in layers)
    gains = [gain for layer in layers if (gain := signals.gain(layer, last)) is not None]
    if times < THROWN or (gains and statistics.median(gains) < THROWN_GAIN):
        return None
    words = f"By step {step} the usual weight had {number(times)} times its first size: what it began with is lost."
    return Evidence((signals.span[0], step), words)


def _jumped(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Whether the first steps threw the loss far above its start, and it ended no better than it began."""
    early = [(loss, place) for place, loss in enumerate(signals.losses[:30]) if loss is not None and place]
    loss, place = max(early, default=(0.0, 0))
    usual_peak, start = max(without_none(signals.losses[30:]), default=0.0), curve.start
    least = 5 * start if curve.final < 0.5 * start else _OVERSHOT * start
    highest = max(1.2 * (signals.losses[0] or 0.0), usual_peak, least, start + 6 * min(curve.noise, start))
    if loss < highest or curve.final < 0.15 * start:
        return None
    logs = [math.log(one) if one is not None and one > 0 else None for one in signals.losses]
    around = without_none(logs[max(1, place - 2) : place + 3])
    if statistics.median(around) - math.log(curve.start) < _ABOVE_CHANCE * usual_step(logs, 1):
        return None  # batches of very unequal losses, of which the first was small
    step = signals.named(place)
    return Evidence(
        (signals.span[0], step),
        f"The first steps raised the loss from {number(curve.start)} to {number(loss)}, at step {step}.",
    )


def _to_and_fro(signals: RunSignals, curve: Curve) -> Evidence | None:
    found = signals.finding("oscillation")
    if found is None or curve.fallen > 0.5:
        return None
    return Evidence.of(found)


def _large_updates(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Whether each step changes weights by a large share of themselves, while the loss does not fall."""
    usual = signals.ratio or 0.0
    if usual < LARGE_UPDATE or curve.is_falling or curve.fallen > 0.9 or signals.follows_noise:
        return None
    words = f"A step changes the usual weight by {100 * usual:.2g} % of itself; 0.1 % is the rule of thumb."
    return signals.seen(words)


def _moved_for_nothing(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Whether weights have become others, and the loss has not fallen for it."""
    grown = signals.growth
    if curve.fallen > 0.1 or grown < GROWN:
        return None
    return signals.seen(f"Weights grew {number(grown)} times, and the loss has not fallen for it.")


def _risen(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Whether the loss ends far above the best it was, or has risen from the start."""
    rise = curve.final - curve.best
    if rise <= max(4 * curve.error, 0.5 * abs(curve.best), 0.02 * abs(curve.start)) or curve.fallen > 0.5:
        return None
    at = curve.levels.index(curve.best) * max(1, curve.count // len(curve.levels))
    words = (
        f"The loss was {number(curve.best)} at its best, near step {signals.named(at)}, and ends at "
        f"{number(curve.final)}."
    )
    return signals.seen(words, since=signals.named(at))


def update_rule(signals: RunSignals) -> Cause | None:
    """Return whether steps are not what a rule makes of gradients: bounded the wrong way, or mostly weight decay."""
    found = signals.finding("update_rule")
    if found is None:
        return None
    return Cause(
        "update_rule",
        "likely",
        f"The optimizer's steps are not what its rule should make of the gradients: {found.message}.",
        f"{capital(found.advice)}.",
        (Evidence.of(found),),
        ("The learning rate and the data need not be the cause: a step is wrong whatever they are.",),
    )


def rate_too_low(signals: RunSignals) -> Cause | None:
    """Return whether all steps together can hardly have moved the weights, while the loss creeps down or says nothing.

    The factor takes the usual step to `RULE_OF_THUMB` of its weight.
    """
    curve, rate, ratio, travel = signals.curve, signals.rate, signals.ratio, signals.travel
    if not rate or signals.ends_lost or signals.is_warming_up or travel is None:
        return None
    if curve is None:
        if travel > NO_MOVE:
            return None
        end = f"after {signals.count:,} steps the weights are where they began"
    else:
        creeps = _creeps(curve)
        stays = travel <= (SMALL_MOVE if creeps else TINY_MOVE) or (creeps and _stays(signals, curve))
        if curve.fallen > 0.3 or not stays:
            return None
        end = f"the loss creeps from {number(curve.start)} to {number(curve.final)}"
    moved = f"all {signals.count:,} steps can have moved it by {100 * travel:.2g} % at most"
    words = f"A step changes the usual weight by {ratio:.1g} of itself, so that {moved}; 0.1 % is the rule of thumb."
    factor = float(f"{min(MOST_RATE, max(LEAST_RATE, RULE_OF_THUMB / ratio if ratio else 0.0)):.0e}")
    return Cause(
        "rate_too_low",
        "likely",
        f"The learning rate, {rate:g}, is too low: {end}.",
        f"Multiply the learning rate by {factor:g}, to {float(f'{factor * rate:.2g}'):g}, and look again.",
        (signals.seen(words),),
        ("Gradients are there and steady: they do not vanish.",),
        rate_factor=factor,
    )


def _creeps(curve: Curve) -> bool:
    """Whether the loss falls all through the run, at the end about as fast as in the beginning."""
    third = len(curve.levels) // 3
    first, last = curve.levels[0] - curve.levels[third], curve.levels[-third - 1] - curve.levels[-1]
    return last > max(curve.error, 0.4 * first)


def _stays(signals: RunSignals, curve: Curve) -> bool:
    """Whether gradients at the end are what they were in the beginning, so that the run is still where it began."""
    norms = [norm for norm in signals.norms if norm]
    size = max(1, len(norms) // 5)
    first, last = statistics.median(norms[:size]), statistics.median(norms[-size:])
    is_smooth = curve.noise < 0.005 * abs(curve.start) and all(
        after < before for before, after in pairwise(curve.levels)
    )
    return is_smooth and curve.fallen < 0.2 and 0.9 * first < last < 1.1 * first


def rate_decayed(signals: RunSignals) -> Cause | None:
    """Return whether the rate was taken away while there was still to learn, or leapt up."""
    curve = signals.curve
    rates = [rate or 0.0 for rate in signals.rates]
    if curve is None or signals.ends_lost:
        return None
    largest = max(rates)
    gone = 1 + max(place for place, rate in enumerate(rates) if rate >= GONE * largest)
    if signals.count - gone < 0.3 * signals.count:
        return _rate_leapt(signals, curve, rates)
    before = signals.curve_until(max(gone, 12))
    if before is None:
        return None
    step, left = signals.named(gone), signals.count - gone
    words = (
        f"The learning rate fell from {largest:g} to {rates[gone]:.2g} by step {step}, and {left:,} of "
        f"{signals.count:,} steps came after."
    )
    third = len(before.levels) // 3
    lately = before.levels[-third] - before.levels[-1]
    still = before.is_falling and lately > 0.05 * (before.start - before.best)
    if not still and gone > 0.25 * signals.count:
        return None
    return Cause(
        "rate_decayed",
        "likely",
        f"The learning rate was nearly 0 from step {step} on, while the loss was still falling: it stays at "
        f"{number(curve.final)}.",
        f"Let the schedule end with the run: make its length {signals.count:,} steps, so that the rate falls to a "
        "tenth at about two thirds of them. Check whether scheduler.step() is called once for each step where once for "
        "each epoch is meant.",
        (signals.seen(words, since=step),),
        ("The model and the data are not the cause: the loss fell as long as there was a rate.",),
    )


def _rate_leapt(signals: RunSignals, curve: Curve, rates: list[float]) -> Cause | None:
    """Whether the loss broke where the learning rate leapt up."""
    leaps = [place for place, (a, b) in enumerate(pairwise(rates), start=1) if a and b > 5 * a and place > 20]
    for place in leaps:
        before = without_none(signals.losses[max(0, place - 20) : place])
        after = without_none(signals.losses[place + 1 : place + 40])
        broke = before and after and statistics.median(after) > 1.3 * statistics.median(before)
        if broke and curve.final > 1.1 * statistics.median(before) + curve.error:  # else a warm restart
            step = signals.named(place)
            leapt = f"from {rates[place - 1]:g} to {rates[place]:g} at step {step}"
            words = f"The learning rate leapt {leapt}, and the loss with it."
            return Cause(
                "rate_decayed",
                "likely",
                f"The loss broke where the learning rate leapt up, at step {step}.",
                f"Look at the schedule at step {step}: a restart, a warm-up that ends too high, or a resumed "
                "scheduler.",
                (signals.seen(words, since=step),),
                ("The data are not the cause: the loss follows the learning rate.",),
            )
    return None
