"""By how much to lower a learning rate that was too high, and where to clip beside it."""

from dataclasses import dataclass

from gradguard.monitoring.judge.numbers import plain_threshold
from gradguard.monitoring.judge.signals import Signals

LESS_RATE, LESS_NORM = 0.3, 0.1
"""Of the learning rate, and of the first norms as a threshold. Their product bounds a step; small gradients move more
by a higher rate and a lower threshold."""

LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE = 0.1, 0.3
"""With an optimizer that cancels a scale only the rate makes steps shorter."""

_FIRST = 5


@dataclass(frozen=True)
class LowerRate:
    """What to try first in a run whose rate was too high.

    Attributes:
        factor: What to multiply the rate by.
        threshold: The norm to clip at; None where no norm is known.
        advice: Both in whole sentences.
    """

    factor: float
    threshold: float | None
    advice: str


def lower_rate(signals: Signals, place: int | None = None) -> LowerRate:
    """Return what to try first in a run whose rate was too high.

    Args:
        signals: What the run shows.
        place: Where it broke; None for a run that was wrong from the start.
    """
    norms = [norm for norm in signals.norms[: min(max(1, place or _FIRST), _FIRST)] if norm]
    cancels = signals.cancels_scale
    factor, share = (LESS_RATE_SCALE_FREE, LESS_NORM_SCALE_FREE) if cancels else (LESS_RATE, LESS_NORM)
    rate = signals.rate
    to = "" if not rate else f", from {rate:g} to {float(f'{factor * rate:.2g}'):g}"
    advice = f"Multiply the learning rate by {factor:g}{to}."
    if not norms:
        return LowerRate(factor, None, advice)
    threshold = float(f"{share * min(norms):.1e}")
    if not threshold:
        return LowerRate(factor, None, advice)
    return LowerRate(factor, threshold, f"{advice} Clip at {plain_threshold(threshold)} as well.")
