"""Statistics of the norms of a run: centre, spread and drift, all in logarithms.

Norms of healthy training are close to log-normal. Medians and median deviations of their logarithms therefore describe
what is usual, and spikes hardly change them.
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
_NOISE = 6.0 * 1.2533  # standard deviations of a window's median; 1.2533 is a median's over a mean's


def drift_ratio(norms: Sequence[float]) -> float | None:
    """Return the largest over the smallest median norm of ten windows.

    Args:
        norms: Positive norms in the order of the steps.

    Returns:
        A number of at least 1; None for fewer than 100 norms, whose windows are too short for a median.

    Example:
        >>> drift_ratio([1.0] * 500 + [3.0] * 500)
        3.0
    """
    levels = _levels(norms)
    return max(levels) / min(levels) if levels else None


def drift_ends(norms: Sequence[float]) -> tuple[float, float] | None:
    """Return the median norms between which a run drifted, in the order of time.

    A run drifts if its windowed median changes by more than a factor of 2, and by more than the noise of medians
    explains. One fixed threshold would be wrong at one end of such a run.

    Args:
        norms: Positive norms in the order of the steps.

    Returns:
        The medians of the first and the last tenth, or of the two extreme tenths where the ends are within a factor of
        2 of each other; None without drift.
    """
    levels, size = _levels(norms), len(norms) // _WINDOWS
    ratio = max(levels, default=1.0) / min(levels, default=1.0)
    # Ten medians of noise span about three of their standard deviations, and six in one run of a thousand. The spread
    # is measured within windows, which excludes the drift.
    if ratio <= DRIFT or math.log(ratio) <= _NOISE * local_spread(norms) / math.sqrt(size):
        return None
    first, last = 0, -1
    if max(levels[0], levels[-1]) <= DRIFT * min(levels[0], levels[-1]):
        first, last = sorted((levels.index(min(levels)), levels.index(max(levels))))
    return levels[first], levels[last]


@once
def drift_of(record: Record) -> tuple[float, float] | None:
    """Return the `drift_ends` of the usable norms of a record.

    Args:
        record: The record of a run.

    Returns:
        Two norms, or None.
    """
    return drift_ends(usable_norms(record))


def are_scaled(record: Record) -> bool:
    """Return whether most norms are equal to three digits, as after a hand-written clip that was not observed."""
    norms = usable_norms(record)
    return len(norms) >= _WINDOWS * _SHORTEST_WINDOW and statistics.median(norms) > 0.999 * max(norms)


def local_spread(norms: Sequence[float]) -> float:
    """Return the robust standard deviation of the logarithms within a tenth of the run: the noise without the drift.

    Args:
        norms: Positive norms in the order of the steps, at least one.

    Returns:
        The median of the deviations of ten windows; for a short run, the deviation of all norms; at least 0.05.
    """
    return statistics.median(map(_spread, _tenths(norms) or [norms]))


def _spread(norms: Sequence[float]) -> float:
    logs = [math.log(norm) for norm in norms]
    centre = statistics.median(logs)
    return max(_MAD_TO_SIGMA * statistics.median(abs(value - centre) for value in logs), SPREAD_FLOOR)


def _levels(norms: Sequence[float]) -> list[float]:
    return list(map(statistics.median, _tenths(norms)))


def _tenths(norms: Sequence[float]) -> list[Sequence[float]]:
    """Return ten windows of a run; none where they would be too short for a median."""
    size = len(norms) // _WINDOWS
    windows = range(_WINDOWS if size >= _SHORTEST_WINDOW else 0)
    return [norms[place * size : (place + 1) * size] for place in windows]
