"""Statistics of the norms of a run: centre, spread and drift, all in logarithms.

Norms of healthy training are close to log-normal, so medians and median distances of logarithms say what is usual, and
spikes hardly move them.
"""

import math
import statistics
from collections.abc import Sequence

from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.step_rows import usable_norms

SPREAD_FLOOR = 0.05
DRIFT = 2.0
_MAD_TO_SIGMA = 1.4826
_WINDOWS = 10
_SHORTEST_WINDOW = 10
_NOISE = 6.0 * 1.2533  # deviations of a window's median; of a median over those of a mean


def drift_ratio(norms: Sequence[float]) -> float | None:
    """By how much the windowed median norm moves: the largest over the smallest median of ten windows.

    Args:
        norms: Positive norms in the order of the steps.

    Returns:
        A number of at least 1, or None for fewer than 100 norms, whose windows are too short for a median.

    Example:
        >>> drift_ratio([1.0] * 500 + [3.0] * 500)
        3.0
    """
    levels = _levels(norms)
    return max(levels) / min(levels) if levels else None


def drift_ends(norms: Sequence[float]) -> tuple[float, float] | None:
    """The median norms between which a run drifted, in the order of time.

    A run drifts where the windowed median moves by more than 2x, and by more than the noise of medians alone would
    explain: one fixed threshold would be wrong at one end.

    Args:
        norms: Positive norms in the order of the steps.

    Returns:
        Those of the first and the last tenth, or of the two extreme tenths where the ends are alike; None without
        drift.
    """
    levels, size = _levels(norms), len(norms) // _WINDOWS
    ratio = max(levels, default=1.0) / min(levels, default=1.0)
    # Ten medians of noise span some three of their standard deviations, and six in one run of a thousand. The spread
    # is taken within windows, because the drift is none of it.
    if ratio <= DRIFT or math.log(ratio) <= _NOISE * local_spread(norms) / math.sqrt(size):
        return None
    first, last = 0, -1
    if max(levels[0], levels[-1]) <= DRIFT * min(levels[0], levels[-1]):
        first, last = sorted((levels.index(min(levels)), levels.index(max(levels))))
    return levels[first], levels[last]


@once
def drift_of(record: Record) -> tuple[float, float] | None:
    """The `drift_ends` of the usable norms of a record.

    Args:
        record: The record of a run.

    Returns:
        Two norms, or None.
    """
    return drift_ends(usable_norms(record))


def are_scaled(record: Record) -> bool:
    """Return whether most norms are equal to three digits, as behind a clip by hand that nobody told of."""
    norms = usable_norms(record)
    return len(norms) >= _WINDOWS * _SHORTEST_WINDOW and statistics.median(norms) > 0.999 * max(norms)


def local_spread(norms: Sequence[float]) -> float:
    """The robust standard deviation of the logarithms within a tenth of the run: what is noise, and not drift.

    Args:
        norms: Positive norms in the order of the steps, at least one.

    Returns:
        The median of those of ten windows; of a short run, that of the whole; at least 0.05.
    """
    return statistics.median(map(_spread, _tenths(norms) or [norms]))


def _spread(norms: Sequence[float]) -> float:
    logs = [math.log(norm) for norm in norms]
    centre = statistics.median(logs)
    return max(_MAD_TO_SIGMA * statistics.median(abs(value - centre) for value in logs), SPREAD_FLOOR)


def _levels(norms: Sequence[float]) -> list[float]:
    return list(map(statistics.median, _tenths(norms)))


def _tenths(norms: Sequence[float]) -> list[Sequence[float]]:
    """The windows of a run; none where they would be too short for a median."""
    size = len(norms) // _WINDOWS
    windows = range(_WINDOWS if size >= _SHORTEST_WINDOW else 0)
    return [norms[place * size : (place + 1) * size] for place in windows]
