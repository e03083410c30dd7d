"""A threshold that leaves a healthy run as it is and bounds its next spike."""

import statistics
from collections.abc import Sequence

from gradguard.monitoring.judge.norm_statistics import drift_of, local_spread
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.judge.signals import signals_of
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.step_rows import taken_steps, usable_norms

CONVERGED = 0.2
"""A median norm that fell below this share: what left the first steps alone would not bound the last."""

OUTLIER_TIMES = 12.0
"""A norm so many times the median of its tenth of the run stands out, also where it is too wild for single spikes."""

HEAVY_SPREAD = 0.4
"""Norms with a larger local spread, in units of the logarithm, are heavy-tailed: one in 40 is twice the median."""

UNEVEN_SPREAD = 0.25
"""Norms with a larger one let single steps weigh more in the moments of Adam than is good for them."""

UNEVEN_START = 3.0
"""So do first norms that are so many times the median: they stay in the second moments for hundreds of steps. Where
the first are so many times smaller, the moments hold no more than usual norms, and a low clip only makes steps longer
than any that went well."""

EVEN, WILD = 0.1, 0.25
"""The quantiles of the norms that train better where an optimizer that cancels a scale has uneven norms, and where one
that does not has heavy tails with outliers."""

CAME_BACK = 5.0
"""Times its best level: a loss that was back there afterwards follows something that moves (targets, returns)."""

LEFT = 0.1
"""Of its start: with less of the loss left, norms are small because of what has been learned, and no step on the way to
it was so short."""

_FIRST = 5  # norms that say how a run began


def insurance(record: Record) -> float | None:
    """Return the norm at which a clip bounds the next spike of a healthy run, and binds on no calm step.

    ===============================================================  ===================================================
    the norms, with *outliers*: spikes, and more than 12 times       threshold
    the median of their tenth of the run
    ===============================================================  ===================================================
    they converge: their median falls below a fifth                  None: a constant would bind at the beginning of the
                                                                     run, or bound nothing at its end
    the loss falls; the optimizer cancels a scale; and there are     the 10th percentile: it binds on most steps, and
    outliers, the local spread is above 0.25 under norms that do     no large one fills the moments
    not rise and were no third of the median at first, or they
    were above 3 times it
    the loss falls; it cancels none; outliers, a spread above 0.4    the 25th percentile, or what still takes weights
                                                                     twice as far as they went, if that is lower
    they rise, and have no outliers                                  None: a constant would bind at the end of the run
    any other                                                        the largest that is no outlier, the warm-up's
                                                                     among them
    ===============================================================  ===================================================

    The last row is insurance. The second and third are what trains better on the tasks of
    `benchmarks/recommendation.py` whose loss falls, stays near its best and has a tenth left: an LSTM under Adam whose
    first norms are ten times the later ones ends at half the loss.

    **Guarantees**: never above the largest norm of a step that was taken, but for rounding up to two digits;
    multiplying every norm by a constant multiplies it by that, to two digits.

    Args:
        record: The record of a healthy run.

    Returns:
        A threshold of two digits; None where there is nothing to insure, or no usable norm.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 50.0 if i == 260 else 1.0 + i % 7 / 10} for i in range(500)]
        >>> insurance(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False))
        1.6
    """
    norms = usable_norms(record)
    if not norms:
        return None
    ends, spread = drift_of(record), local_spread(norms)
    out = _outliers(norms) | set(spikes_of(record))
    if ends is not None and ends[1] < CONVERGED * ends[0]:  # they converge
        return None
    rises = ends is not None and not out and ends[1] > ends[0]
    taken = [norm for norm in taken_steps(record).column("norm") if norm]
    warm_up = taken[: len(taken) - len(norms)]  # which is not among the usable ones
    if is_scale_free(record):
        first, usual = statistics.median(taken[:_FIRST]), statistics.median(norms)
        spreads = spread > UNEVEN_SPREAD and first * UNEVEN_START >= usual and not rises
        uneven, share = (out or spreads or first > UNEVEN_START * usual), EVEN
    else:
        uneven, share = (out and spread > HEAVY_SPREAD), WILD
    if uneven and _learns(record):
        return _rounded_up(min(sorted(norms)[int(share * len(norms))], signals_of(record).low_threshold))
    if rises:
        return None
    ordinary = [norm for place, norm in enumerate(norms) if place not in out]
    # nor does it bind in the warm-up: one step that is shorter takes the run another way, by chance for worse
    transient = _outliers(warm_up)
    ordinary += [norm for place, norm in enumerate(warm_up) if place not in transient]
    return _rounded_up(max(ordinary))


def _outliers(norms: Sequence[float]) -> set[int]:
    """The places of norms far above the median of their tenth of the run."""
    size, found = max(len(norms) // 10, 1), set[int]()
    for begin in range(0, len(norms), size):
        part = norms[begin : begin + size]
        limit = OUTLIER_TIMES * statistics.median(part)
        found.update(begin + place for place, norm in enumerate(part) if norm > limit)
    return found


def _learns(record: Record) -> bool:
    """Whether the loss falls, stays near its best and has a tenth left: else low norms are of what has been learned."""
    curve = signals_of(record).curve
    if not curve.has_fallen:
        return False
    since = curve.levels[curve.levels.index(curve.best) :]
    return not curve.is_positive or (max(since) < CAME_BACK * curve.best and curve.final >= LEFT * curve.start)


def _rounded_up(value: float) -> float:
    """``value`` in two digits, never below it."""
    text = f"{value:.1e}"
    if float(text) >= value:
        return float(text)
    digits, _, exponent = text.partition("e")
    return float(f"{float(digits) + 0.1:.1f}e{exponent}")
