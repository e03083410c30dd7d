"""Signs of a learning rate that is too high, too low, or gone before the run was done."""

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise

from gradguard.monitoring.judge.cause import Evidence, Sign
from gradguard.monitoring.judge.numbers import median, number, plain_threshold
from gradguard.monitoring.judge.signals import OF_EPS, Curve, RunSignals, middle, usual_step
from gradguard.monitoring.record.record_lines import without_none

GROWN = 2.0
"""Times its first norm: a weight that is mostly noise by now."""

THROWN, THROWN_FAR, THROWN_WITHIN, THROWN_GAIN = 4.0, 16.0, 60, 1.5
"""Times its first norm, and so many that a loss which falls from there is no excuse, within so many steps, to a gain
above any initialisation's: a weight that was thrown away."""

HARDLY = 0.3
"""Of its start: a loss that has lost more has fallen, and weights that grew all the while had to grow."""

TINY_MOVE = 0.05
"""By which share of themselves weights can have moved in all steps together: with less a run has hardly begun."""

NO_MOVE = 0.005
"""The smallest share of themselves that weights move in a run that has begun, if the loss does not measure it."""

RULE_OF_THUMB, LEAST_RATE, MOST_RATE = 1e-3, 10.0, 1e4
"""Of its weight: a usual step; and the smallest and largest factor to multiply a rate by that makes shorter ones."""

GONE = 0.02
"""Of its largest value: a learning rate below that moves little any more."""

LESS_RATE, LESS_NORM = 0.3, 0.1
"""Of the learning rate, and of the first norms as a threshold. Their product bounds a step; small gradients move more
by a higher rate and a lower threshold."""

LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE = 0.1, 0.3
"""With an optimizer that cancels a scale only the rate makes steps shorter."""

CALM_STEPS, FAR_FROM_CALM = 20, 3.0
"""A run whose norms were below so many times the first ones for so many steps has shown what an ordinary norm is."""

_FIRST_NORMS = 5
_OVERSHOT, _FAR_OVERSHOT = 1.5, 5.0  # times its start: a loss that the first steps raised so far
_WITH_NORMS = 2.0  # times the first ones: norms where a loss was raised less far than the second
_ABOVE_CHANCE = 3.0  # times the usual step between two logarithms of losses: further than batches lie apart


@dataclass(frozen=True)
class LowerRate:
    """The first remedy of a run whose learning rate was too high.

    Attributes:
        factor: The number to multiply the rate by.
        threshold: The norm to clip at; None where no norm is known.
        advice: Both in whole sentences.
    """

    factor: float
    threshold: float | None
    advice: str


def lower_rate(signals: RunSignals, place: int | None = None) -> LowerRate:
    """Return what to try first in a run whose rate was too high.

    The threshold is a share of the first norms, which the rate had not moved yet; of a run that broke out of many calm
    steps it is their median. None is read from norms that were huge from the start, or that eps swallows.

    Args:
        signals: The signals of the run.
        place: Where it broke; None for a run that was wrong from the start.
    """
    norms = signals.positive_norms(place or _FIRST_NORMS)
    cancels = signals.cancels_scale
    factor, share = (LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE) if cancels else (LESS_RATE, LESS_NORM)
    rate = signals.rate
    to = "" if not rate else f", from {rate:g} to {float(f'{factor * rate:.2g}'):g}"
    advice = f"Multiply the learning rate by {factor:g}{to}."
    if not norms or signals.begins_exploded(signals.layers):
        return LowerRate(factor, None, advice)
    first = min(norms[0], statistics.median(norms[:_FIRST_NORMS]))
    calm = norms[: next((k for k, norm in enumerate(norms) if norm > FAR_FROM_CALM * first), len(norms))]
    usual = statistics.median(calm) if place and len(calm) >= CALM_STEPS else share * first
    threshold = float(f"{usual:.1e}")
    if threshold <= OF_EPS * (signals.eps or 0.0) * math.sqrt(signals.elements(signals.own)):
        return LowerRate(factor, None, advice)
    return LowerRate(factor, threshold, f"{advice} Clip at {plain_threshold(threshold)} as well.")


def too_long(signals: RunSignals) -> Sign | None:
    """Return whether steps are too long: the loss jumped, stays above its best, goes to and fro, or is stuck."""
    if signals.ends_lost or signals.rate == 0:
        return None
    thrown, curve = _thrown(signals), signals.curve
    signs = [thrown, *(look(signals, curve) for look in _OF_RATIOS if curve.is_positive)]
    known = tuple(without_none(signs))
    if not known:
        return None
    sure = thrown or (len(known) >= 3 and len(signals.outbursts) < 3)
    fix = lower_rate(signals)
    end = "the first steps threw the weights far from where they began"
    if curve.is_known:
        end = f"steps are too long, and the loss went from {number(curve.start)} to {signals.ends_at}"
    words = {"rate": f", {signals.rate:g}," if signals.rate else "", "end": end, "advice": fix.advice}
    return Sign(known, words, "certain" if sure else "likely", fix.factor, fix.threshold)


def _thrown(signals: RunSignals) -> Evidence | None:
    """Whether the first steps of an optimizer that makes them as long as its rate lost what the weights began with."""
    first = signals.span[0]
    early = [k for k, line in enumerate(signals.measured) if 0 < line["i"] - first <= THROWN_WITHIN]
    times = _times_thrown(signals, early[-1]) if early else 0.0
    learns = 0.9 < signals.curve.fallen < 1 and any(signals.norms[-10:]) and times < THROWN_FAR
    if not times or learns:
        return None
    step = signals.measured[early[-1]]["i"]
    words = f"By step {step} the usual weight had {number(times)} times its first size: what it began with is lost."
    return Evidence((first, step), words)


def _times_thrown(signals: RunSignals, line: int) -> float:
    """How many times its first size the usual weight has on a measured line; 0 where that may be no loss."""
    layers = [layer for layer in signals.sized_layers if len(layer.weights) == len(signals.measured)]
    had_to_grow = len(signals.layers) == 1 and signals.curve.fallen > 0.1  # a lone one begins with nothing to lose
    if not layers or had_to_grow or not signals.cancels_scale:
        return 0.0
    times = statistics.median(layer.weights[line] / layer.weights[0] for layer in layers)
    gains = [gain for layer in layers if (gain := layer.gain(line)) is not None]
    return 0.0 if times < THROWN or (gains and statistics.median(gains) < THROWN_GAIN) else times


def _jumped(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Whether the first steps threw the loss far above its start, and it ended no better than it began."""
    early = [(loss, place) for place, loss in enumerate(signals.losses[:30]) if loss is not None and place]
    loss, place = max(early, default=(0.0, 0))
    usual_peak, start = max(signals.loss.known(30), default=0.0), curve.start
    least = _FAR_OVERSHOT * start if curve.final < 0.5 * start else _OVERSHOT * start
    highest = max(1.2 * (signals.losses[0] or 0.0), usual_peak, least, start + 6 * min(curve.noise, start))
    recovered = curve.has_fallen and curve.final - curve.best < curve.error
    if loss < highest or curve.final < 0.15 * start or recovered:
        return None
    norm = max(signals.norm.known(place - 2, place + 2), default=math.nan)
    if loss < _FAR_OVERSHOT * start and norm < _WITH_NORMS * middle(signals.norm.known(0, 5)):
        return None  # targets that were set anew, as by an older copy
    logs = [math.log(one) if one > 0 else None for one in signals.loss.values]
    around = without_none(logs[max(1, place - 2) : place + 3])
    if statistics.median(around) - math.log(curve.start) < _ABOVE_CHANCE * usual_step(logs, 1):
        return None  # batches of very unequal losses, of which the first was small
    step = signals.named(place)
    words = f"The first steps raised the loss from {number(curve.start)} to {number(loss)}, at step {step}."
    return Evidence((signals.span[0], step), words)


def _moved_for_nothing(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Whether weights have become others, and the loss has not fallen for it or stands still half-way."""
    grown = median(signals.growths()) or 1.0
    stuck = curve.fallen < HARDLY and signals.is_stuck and not curve.is_falling and _times_thrown(signals, -1) > 0
    if grown < GROWN or (curve.fallen > 0.1 and not stuck):
        return None
    return signals.seen(f"Weights grew {number(grown)} times, and the loss has hardly fallen for it.")


def _risen(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Whether the loss ends far above the best it was, or has risen from the start."""
    rise = curve.final - curve.best
    enough = max(4 * curve.error, 0.5 * abs(curve.best), 0.02 * abs(curve.start))
    if rise <= enough or curve.fallen > 0.5:
        return None
    at = signals.named(curve.levels.index(curve.best) * max(1, curve.count // len(curve.levels)))
    words = f"The usual loss was {number(curve.best)} at its best, near step {at}, and ends at {signals.ends_at}."
    return signals.seen(words, since=at)


_OF_RATIOS = (_jumped, _moved_for_nothing, _risen)


def too_short(signals: RunSignals) -> Sign | None:
    """Return whether all steps together can hardly have moved the weights, while the loss creeps down or says nothing.

    The factor takes the usual step to `RULE_OF_THUMB` of its weight.
    """
    curve, rate, ratio, travel = signals.curve, signals.rate, signals.ratio, signals.travel
    if not rate or signals.ends_lost or signals.is_warming_up or travel is None:
        return None
    if curve.fallen > 0.3 or travel > (TINY_MOVE if curve.is_known else NO_MOVE) or signals.only_vectors_learn:
        return None
    end = f"the loss went from {number(curve.start)} to {signals.ends_at}"
    if not curve.is_known:
        end = f"after {signals.count:,} steps the weights are where they began"
    moved = f"all {signals.count:,} steps can have moved it by {100 * travel:.2g} % at most"
    seen = f"A step changes the usual weight by {ratio:.1g} of itself, so that {moved}; 0.1 % is the rule of thumb."
    factor = float(f"{min(MOST_RATE, max(LEAST_RATE, RULE_OF_THUMB / ratio if ratio else 0.0)):.0e}")
    words = {
        "rate": f"{rate:g}",
        "end": end,
        "factor": f"{factor:g}",
        "better": f"{float(f'{factor * rate:.2g}'):g}",
    }
    return Sign((signals.seen(seen),), words, rate_factor=factor)


def gone(signals: RunSignals) -> Sign | None:
    """Return whether the rate was taken away while there was still to learn."""
    largest = signals.rate or 0.0
    place = 1 + max((place for place, rate in enumerate(signals.rates) if (rate or 0.0) >= GONE * largest), default=-1)
    if signals.ends_lost or not signals.curve.is_known or signals.count - place < 0.3 * signals.count:
        return None
    before = signals.curve_until(max(place, 12))
    if not before.is_known:
        return None
    if not before.is_falling and place > 0.25 * signals.count:
        return None
    step = signals.named(place)
    seen = (
        f"The learning rate fell from {largest:g} to {signals.rates[place] or 0.0:.2g} by step {step}, and "
        f"{signals.count - place:,} of {signals.count:,} steps came after."
    )
    words = {"step": step, "loss": signals.ends_at, "count": f"{signals.count:,}"}
    return Sign((signals.seen(seen, since=step),), words)


def leapt(signals: RunSignals) -> Sign | None:
    """Return whether the loss broke where the learning rate leapt up."""
    rates = [rate or 0.0 for rate in signals.rates]
    leaps = [place for place, (a, b) in enumerate(pairwise(rates), start=1) if a and b > 5 * a and place > 20]
    for place in leaps:
        before, chance = middle(signals.loss.known(place - 20, place)), signals.curve_until(place).error
        broke = middle(signals.loss.known(place + 1, place + 40)) > 1.3 * before
        if broke and (signals.ends_lost or signals.curve.final > 1.1 * before + chance):  # else a warm restart
            step = signals.named(place)
            words = f"The learning rate leapt from {rates[place - 1]:g} to {rates[place]:g} at step {step}"
            return Sign((signals.seen(f"{words}, and the loss with it.", since=step),), {"step": step})
    return None
