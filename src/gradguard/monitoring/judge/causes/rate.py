"""Searches for a learning rate that is too high, too low, leaps, or decays to 0 before the run is done."""

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise

from gradguard.monitoring.judge.cause import Evidence, Sign
from gradguard.monitoring.judge.numbers import median, number, plain_threshold
from gradguard.monitoring.judge.signals import OF_EPS, Curve, RunSignals, middle, usual_step
from gradguard.monitoring.record.record_lines import without_none

GROWN = 2.0
"""Growth of a weight's norm above which the weight is mostly noise."""

THROWN, THROWN_FAR, THROWN_WITHIN, THROWN_GAIN = 4.0, 16.0, 60, 1.5
"""A weight was thrown away if its norm grew `THROWN` times within `THROWN_WITHIN` steps, to a gain above `THROWN_GAIN`,
which no initialisation has. From `THROWN_FAR` times on this holds even if the loss falls afterwards."""

HARDLY = 0.3
"""Share of its start: a loss that lost more than this has fallen, and weights that grew meanwhile had to grow."""

TINY_MOVE = 0.05
"""Share of themselves that weights can have moved in all steps together. Below it, training has hardly begun."""

NO_MOVE = 0.005
"""Share of themselves that weights can have moved, for a run whose loss does not measure progress."""

RULE_OF_THUMB, LEAST_RATE, MOST_RATE = 1e-3, 10.0, 1e4
"""The length of a usual step over the norm of its weight; and the smallest and the largest factor that is advised for a
rate whose steps are shorter."""

GONE = 0.02
"""Share of its largest value below which a learning rate hardly moves a weight."""

LESS_RATE, LESS_NORM = 0.3, 0.1
"""The advised share of the learning rate, and the share of the first norms to clip at. Their product bounds a step. A
higher rate with a lower threshold would move small gradients further."""

LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE = 0.1, 0.3
"""Both shares for an optimizer that cancels the scale of gradients, where only the rate shortens steps."""

CALM_STEPS, FAR_FROM_CALM = 20, 3.0
"""A run whose norms stayed below `FAR_FROM_CALM` times the first ones for `CALM_STEPS` steps has shown what an ordinary
norm is."""

_FIRST_NORMS = 5
_OVERSHOT, _FAR_OVERSHOT = 1.5, 5.0  # times the loss at the start: what counts as raised, and as raised far
_WITH_NORMS = 2.0  # times the first norms: a loss that was raised, but not far, counts only with such a norm
_ABOVE_CHANCE = 3.0  # times the usual difference of two logarithms of losses: more than chance between batches


@dataclass(frozen=True)
class LowerRate:
    """The first remedy for a run whose learning rate is too high.

    Attributes:
        factor: The factor to multiply the rate by.
        threshold: The norm to clip at; None where no threshold can be derived.
        advice: Factor and threshold in whole sentences.
    """

    factor: float
    threshold: float | None
    advice: str


def lower_rate(signals: RunSignals, place: int | None = None) -> LowerRate:
    """Return the first remedy for a run whose rate is too high.

    The threshold is a share of the first norms, which the rate had not affected yet. For a run that broke down after
    many calm steps, it is the median of those. There is no threshold where the first gradients were huge, or where eps
    exceeds the clipped gradients.

    Args:
        signals: The signals of the run.
        place: The index of the step on which the run broke down; None for a run that was sick from the start.
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
    """Return a sign if steps are too long: the weights were thrown away, or the loss jumped, rose or got stuck."""
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
    """Return evidence if the first steps of an Adam-like optimizer, as long as its rate, erased the initial weights."""
    first = signals.span[0]
    early = [k for k, line in enumerate(signals.measured) if 0 < line["i"] - first <= THROWN_WITHIN]
    times = _times_thrown(signals, early[-1]) if early else 0.0
    learns = 0.9 < signals.curve.fallen < 1 and any(signals.norms[-10:]) and times < THROWN_FAR
    if not times or learns:
        return None
    step = signals.measured[early[-1]]["i"]
    words = f"By step {step} the usual weight had {number(times)} times its first size: its initial value is lost."
    return Evidence((first, step), words)


def _times_thrown(signals: RunSignals, line: int) -> float:
    """Return the growth of the usual weight's norm up to a measured line; 0 where the growth may do no harm."""
    layers = [layer for layer in signals.sized_layers if len(layer.weights) == len(signals.measured)]
    had_to_grow = len(signals.layers) == 1 and signals.curve.fallen > 0.1  # a single weight has no features to lose
    if not layers or had_to_grow or not signals.cancels_scale:
        return 0.0
    times = statistics.median(layer.weights[line] / layer.weights[0] for layer in layers)
    gains = [gain for layer in layers if (gain := layer.gain(line)) is not None]
    return 0.0 if times < THROWN or (gains and statistics.median(gains) < THROWN_GAIN) else times


def _jumped(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Return evidence if the first steps raised the loss far above its start, and it did not recover."""
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
        return None  # the targets were renewed, as by a target network
    logs = [math.log(one) if one > 0 else None for one in signals.loss.values]
    around = without_none(logs[max(1, place - 2) : place + 3])
    if statistics.median(around) - math.log(curve.start) < _ABOVE_CHANCE * usual_step(logs, 1):
        return None  # the losses of batches differ widely, and the first one was small
    step = signals.named(place)
    words = f"The first steps raised the loss from {number(curve.start)} to {number(loss)}, at step {step}."
    return Evidence((signals.span[0], step), words)


def _moved_for_nothing(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Return evidence if weights grew far, but the loss did not fall or is stuck half-way."""
    grown = median(signals.growths()) or 1.0
    stuck = curve.fallen < HARDLY and signals.is_stuck and not curve.is_falling and _times_thrown(signals, -1) > 0
    if grown < GROWN or ((curve.fallen > 0.1 or curve.has_fallen_by_thirds) and not stuck):
        return None
    return signals.seen(
        f"Weights grew to {number(grown)} times their initial size, but the loss has hardly fallen for it."
    )


def _risen(signals: RunSignals, curve: Curve) -> Evidence | None:
    """Return evidence if the loss ends far above its best level, or rose from the start."""
    rise = curve.final - curve.best
    enough = max(4 * curve.error, 0.5 * abs(curve.best), 0.02 * abs(curve.start))
    if rise <= enough or curve.fallen > 0.5:
        return None
    at = signals.named(curve.levels.index(curve.best) * max(1, curve.count // len(curve.levels)))
    words = f"The median loss was {number(curve.best)} at its best, near step {at}, and ends at {signals.ends_at}."
    return signals.seen(words, since=at)


_OF_RATIOS = (_jumped, _moved_for_nothing, _risen)


def too_short(signals: RunSignals) -> Sign | None:
    """Return a sign if all steps together can hardly have moved the weights, and the loss creeps or is not known.

    The advised factor brings the usual step to `RULE_OF_THUMB` times the norm of its weight.
    """
    curve, rate, ratio, travel = signals.curve, signals.rate, signals.ratio, signals.travel
    if not rate or signals.ends_lost or signals.is_warming_up or travel is None:
        return None
    if curve.fallen > 0.3 or travel > (TINY_MOVE if curve.is_known else NO_MOVE) or signals.only_vectors_learn:
        return None
    end = f"the loss went from {number(curve.start)} to {signals.ends_at}"
    if not curve.is_known:
        end = f"after {signals.count:,} steps the weights are where they began"
    moved = f"all {signals.count:,} steps together can have moved it by {100 * travel:.2g} % at most"
    seen = f"A step changes the usual weight by {ratio:.1g} of itself, so {moved}; the rule of thumb is 0.1 % per step."
    factor = float(f"{min(MOST_RATE, max(LEAST_RATE, RULE_OF_THUMB / ratio if ratio else 0.0)):.0e}")
    words = {
        "rate": f"{rate:g}",
        "end": end,
        "factor": f"{factor:g}",
        "better": f"{float(f'{factor * rate:.2g}'):g}",
    }
    return Sign((signals.seen(seen),), words, rate_factor=factor)


def gone(signals: RunSignals) -> Sign | None:
    """Return a sign if the rate decayed to nearly 0 while the loss was still falling."""
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
        f"{signals.count - place:,} of {signals.count:,} steps came after that."
    )
    words = {"step": step, "loss": signals.ends_at, "count": f"{signals.count:,}"}
    return Sign((signals.seen(seen, since=step),), words)


def leapt(signals: RunSignals) -> Sign | None:
    """Return a sign if the loss broke down where the learning rate leapt up."""
    rates = [rate or 0.0 for rate in signals.rates]
    leaps = [place for place, (a, b) in enumerate(pairwise(rates), start=1) if a and b > 5 * a and place > 20]
    for place in leaps:
        before, chance = middle(signals.loss.known(place - 20, place)), signals.curve_until(place).error
        broke = middle(signals.loss.known(place + 1, place + 40)) > 1.3 * before
        # a loss that recovers from the leap had a warm restart
        if broke and (signals.ends_lost or signals.curve.final > 1.1 * before + chance):
            step = signals.named(place)
            words = f"The learning rate leapt from {rates[place - 1]:g} to {rates[place]:g} at step {step}"
            return Sign((signals.seen(f"{words}, and the loss with it.", since=step),), {"step": step})
    return None
