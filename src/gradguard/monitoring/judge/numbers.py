"""Formats numbers as people write them, and computes medians and window means."""

import math
import statistics
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from operator import methodcaller
from typing import TypeVar

from gradguard.monitoring.record.record_lines import Numbers

_T = TypeVar("_T")


def percent(share: float) -> str:
    """Format a share as a percentage.

    Args:
        share: A share, usually in [0, 1].

    Returns:
        For example ``"1.3 %"``.

    Example:
        >>> [percent(share) for share in (0, 0.0004, 0.0133, 0.257, 0.9996, 1)]
        ['0 %', '0.04 %', '1.3 %', '26 %', '99.9 %', '100 %']
    """
    value = 100 * share
    if 99 < value < 100:
        return f"{math.floor(10 * value) / 10:g} %"
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def number(value: float | None) -> str:
    """Format a number with three significant digits.

    Args:
        value: Any number; None, which becomes a dash, for one that was not measured.

    Returns:
        For example ``"2.00"``, ``"12,300"`` or ``"1.2e+09"``.

    Example:
        >>> [number(value) for value in (None, 0.0, 2.0, 310.2, 12345.0, 1.234e9)]
        ['–', '0', '2.00', '310', '12,300', '1.23e+09']
    """
    if value is None:
        return "–"
    rounded = float(f"{value:.3g}")
    if 100 <= abs(rounded) < 1e6:
        return f"{rounded:,.0f}"
    return f"{rounded:#.3g}" if 0.001 <= abs(rounded) < 100 else f"{rounded:.3g}"


def capital(text: str) -> str:
    """Return a text with its first letter capitalised.

    Args:
        text: Any text.
    """
    return text[:1].upper() + text[1:]


def plain_threshold(threshold: float) -> str:
    """Format a threshold as a person would type it.

    Args:
        threshold: Any number.

    Returns:
        For example ``"1.0"`` or ``"34"``.

    Example:
        >>> [plain_threshold(value) for value in (1, 0.25, 2.2000000001, 34.0)]
        ['1.0', '0.25', '2.2', '34']
    """
    return repr(float(f"{threshold:.6g}")) if threshold < 10 else f"{threshold:g}"


def from_to(thresholds: Collection[float]) -> str:
    """Return the range of some thresholds as text, or the single threshold where all are equal.

    Args:
        thresholds: At least one number.

    Example:
        >>> from_to([2.0, 0.5, 1.0]), from_to([2.0])
        ('0.5 to 2.0', '2.0')
    """
    return " to ".join(dict.fromkeys(map(plain_threshold, (min(thresholds), max(thresholds)))))


def median(values: Sequence[float]) -> float | None:
    """Return the median; None for no values.

    Args:
        values: Numbers.
    """
    return statistics.median(values) if values else None


def medians(values: Sequence[float], size: int) -> list[float]:
    """Return the median of each full block of ``size`` values; an incomplete last block is dropped.

    Args:
        values: Numbers.
        size: The number of values in a block, at least 1.
    """
    return [statistics.median(values[k : k + size]) for k in range(0, len(values) - size + 1, size)]


def buckets(count: int, most: int) -> list[range]:
    """Cut ``count`` indices into at most ``most`` neighbouring ranges of nearly the same size.

    Args:
        count: How many indices.
        most: How many ranges at most.

    Returns:
        The ranges, none of them empty.

    Example:
        >>> buckets(5, 2)
        [range(0, 2), range(2, 5)]
    """
    pieces = min(count, most)
    edges = [count * piece // pieces for piece in range(pieces + 1)] if pieces else []
    return [range(start, stop) for start, stop in pairwise(edges)]


def only(values: Collection[_T]) -> _T | None:
    """Return the single element of a collection; None where it has none or several.

    Args:
        values: The values.
    """
    return next(iter(values)) if len(values) == 1 else None


def last_window(losses: Sequence[float | None]) -> int:
    """Return how many of the last losses `Verdict.final_loss` averages: 5 %, at least 10.

    Args:
        losses: All losses of a run.
    """
    return max(10, len(losses) // 20)


def window_means(values: Numbers, width: int) -> list[float | None]:
    """Return the mean of every window of ``width`` values; None where a window holds None.

    Args:
        values: Numbers; None for a value that was not finite.
        width: The length of a window. A shorter sequence is one window.

    Returns:
        One mean per full window.

    Example:
        >>> window_means([1.0, 3.0, None, 5.0, 7.0], 2)
        [2.0, None, None, 6.0]
    """
    width = min(width, len(values))
    if not width:
        return []
    # Running sums of floats would keep the rounding error of an outlier that has left the window. Integer multiples of
    # one power of two have exact sums.
    filled = [value or 0.0 for value in values]
    _, unit = math.ulp(min(map(abs, filter(None, filled)), default=0.0)).as_integer_ratio()
    ratios = map(methodcaller("as_integer_ratio"), filled)
    totals = list(accumulate((numerator * (unit // denominator) for numerator, denominator in ratios), initial=0))
    gaps = list(accumulate((value is None for value in values), initial=0))
    unit *= _LARGER
    windows = zip(totals, totals[width:], gaps, gaps[width:], strict=False)
    return [
        None if lost > lost_before else (end - begin) / unit / width * _LARGER
        for begin, end, lost_before, lost in windows
    ]


_LARGER = 2**20
"""The sum of a window of the largest floats would overflow, so it is divided by this factor first. A power of two adds
no rounding error."""
