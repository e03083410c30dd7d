"""Chooses a threshold that leaves a healthy run unchanged and limits its next spike."""

import statistics
from collections.abc import Sequence

from gradguard.monitoring.judge.norm_statistics import drift_of, local_spread
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.judge.signals import signals_of
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.step_rows import taken_steps, usable_norms

CONVERGED = 0.2
"""Last over first median norm: below it, a threshold that leaves the first steps alone would not limit the last."""

OUTLIER_TIMES = 12.0
"""Times the median of its tenth of the run: a larger norm is an outlier, even among norms too wild to have spikes."""

HEAVY_SPREAD = 0.4
"""Local spread of the logarithms above which norms are heavy-tailed: one norm in 40 is twice the median."""

UNEVEN_SPREAD = 0.25
"""Local spread above which single steps weigh too much in Adam's moments."""

UNEVEN_START = 3.0
"""First norms this many times the median weigh too much as well: they stay in the second moments for hundreds of steps.
If the first norms are this many times smaller, the moments contain only usual norms. A low clip would then make steps
longer than any that went well."""

EVEN, WILD = 0.1, 0.25
"""Quantiles of the norms that make better thresholds than insurance: the first for uneven norms under an optimizer that
cancels a scale, the second for heavy tails with outliers under one that does not."""

CAME_BACK = 5.0
"""Times its best level: a loss that rises to it again follows something that moves, such as targets or returns."""

LEFT = 0.1
"""Share of its start: with less of the loss left, norms are small because the task is learned, and the steps on the way
there were longer than a low clip allows."""

_FIRST = 5  # norms that show how a run began


def insurance(record: Record) -> float | None:
    """Return the norm at which a clip limits the next spike of a healthy run without binding on a calm step.

    *Outliers* are spikes, and norms above 12 times the median of their tenth of the run.

    ===============================================================  ===================================================
    the norms                                                        threshold
    ===============================================================  ===================================================
    they converge: their median falls below a fifth                  None: a constant would bind at the beginning of the
                                                                     run, or limit nothing at its end
    the loss falls, and the optimizer cancels a scale; and there     the 10th percentile: it binds on most steps, and
    are outliers, or the first norms are above 3 times the median,   keeps large norms out of the moments
    or the local spread is above 0.25 (under norms that do not
    rise and were not below a third of the median at first)
    the loss falls, the optimizer cancels no scale, and there are    the 25th percentile, or a lower threshold that can
    outliers and a local spread above 0.4                            still take the weights twice as far as they went
    they rise, and have no outliers                                  None: a constant would bind at the end of the run
    any other                                                        the largest norm that is no outlier, including
                                                                     the warm-up's
    ===============================================================  ===================================================

    The last row is insurance. The second and the third row train better on the tasks of `benchmarks/recommendation.py`
    whose loss falls, stays near its best and has a tenth left: an LSTM under Adam whose first norms are ten times the
    later ones ends at half the loss.

    **Guarantees**: the threshold is never above the largest norm of a step that was taken, except for rounding up to
    two digits. Multiplying every norm by a constant multiplies the threshold by it, to two digits.

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
    if ends is not None and ends[1] < CONVERGED * ends[0]:  # the norms converge
        return None
    rises = ends is not None and not out and ends[1] > ends[0]
    taken = [norm for norm in taken_steps(record).column("norm") if norm]
    warm_up = taken[: len(taken) - len(norms)]  # the usable norms leave it out
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
    # It must not bind in the warm-up either: a single shorter step changes the run, possibly for the worse.
    transient = _outliers(warm_up)
    ordinary += [norm for place, norm in enumerate(warm_up) if place not in transient]
    return _rounded_up(max(ordinary))


def _outliers(norms: Sequence[float]) -> set[int]:
    """Return the places of the norms far above the median of their tenth of the run."""
    size, found = max(len(norms) // 10, 1), set[int]()
    for begin in range(0, len(norms), size):
        part = norms[begin : begin + size]
        limit = OUTLIER_TIMES * statistics.median(part)
        found.update(begin + place for place, norm in enumerate(part) if norm > limit)
    return found


def _learns(record: Record) -> bool:
    """Return whether the loss falls, stays near its best, and is still above a tenth of its start."""
    curve = signals_of(record).curve
    if not (curve.has_fallen or curve.has_fallen_by_thirds):
        return False
    since = curve.levels[curve.levels.index(curve.best) :]
    return not curve.is_positive or (max(since) < CAME_BACK * curve.best and curve.final >= LEFT * curve.start)


def _rounded_up(value: float) -> float:
    """Return ``value`` rounded up to two significant digits."""
    text = f"{value:.1e}"
    if float(text) >= value:
        return float(text)
    digits, _, exponent = text.partition("e")
    return float(f"{float(digits) + 0.1:.1f}e{exponent}")
