"""By how much to lower a learning rate that was too high, and where to clip beside it."""

import math
import statistics
from dataclasses import dataclass

from gradguard.monitoring.judge.numbers import plain_threshold
from gradguard.monitoring.judge.signals import OF_EPS, RunSignals

LESS_RATE, LESS_NORM = 0.3, 0.1
"""Of the learning rate, and of the first norms as a threshold. Their product bounds a step; small gradients move more
by a higher rate and a lower threshold."""

LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE = 0.1, 0.3
"""With an optimizer that cancels a scale only the rate makes steps shorter."""

CALM_STEPS, FAR_FROM_CALM = 20, 3.0
"""A run whose norms were below so many times the first ones for so many steps has shown what an ordinary norm is."""

_FIRST = 5


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
    norms = signals.positive_norms(place or _FIRST)
    cancels = signals.cancels_scale
    factor, share = (LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE) if cancels else (LESS_RATE, LESS_NORM)
    rate = signals.rate
    to = "" if not rate else f", from {rate:g} to {float(f'{factor * rate:.2g}'):g}"
    advice = f"Multiply the learning rate by {factor:g}{to}."
    if not norms or signals.begins_exploded(signals.layers):
        return LowerRate(factor, None, advice)
    first = min(norms[0], statistics.median(norms[:_FIRST]))
    calm = norms[: next((k for k, norm in enumerate(norms) if norm > FAR_FROM_CALM * first), len(norms))]
    usual = statistics.median(calm) if place and len(calm) >= CALM_STEPS else share * first
    threshold = float(f"{usual:.1e}")
    if threshold <= OF_EPS * (signals.eps or 0.0) * math.sqrt(signals.elements(signals.own)):
        return LowerRate(factor, None, advice)
    return LowerRate(factor, threshold, f"{advice} Clip at {plain_threshold(threshold)} as well.")
