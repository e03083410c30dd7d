"""Numbers as people write them."""

import math
import statistics
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from operator import methodcaller
from typing import TypeVar

from gradguard.monitoring.record.record_lines import Numbers

_T = TypeVar("_T")


def percent(share: float) -> str:
    """A share as a person would write it.

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
    """Three significant digits, with a dash for what was not measured.

    Args:
        value: Any number.

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
    """Return a text with a capital letter in front.

    Args:
        text: Any text.
    """
    return text[:1].upper() + text[1:]


def plain_threshold(threshold: float) -> str:
    """A threshold as a person would type it.

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
    """Return the smallest and the largest of some thresholds as a person would type them, once where they are equal.

    Args:
        thresholds: At least one number.

    Example:
        >>> from_to([2.0, 0.5, 1.0]), from_to([2.0])
        ('0.5 to 2.0', '2.0')
    """
    return " to ".join(dict.fromkeys(map(plain_threshold, (min(thresholds), max(thresholds)))))


def median(values: Sequence[float]) -> float | None:
    """Return the median; None where there are no values.

    Args:
        values: Numbers.
    """
    return statistics.median(values) if values else None


def medians(values: Sequence[float], size: int) -> list[float]:
    """Return the median of each block of so many values; what is left at the end is in none.

    Args:
        values: Numbers.
        size: How many, at least 1.
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
    """Return the only one of some values; None where there are none or several.

    Args:
        values: The values.
    """
    return next(iter(values)) if len(values) == 1 else None


def last_window(losses: Sequence[float | None]) -> int:
    """Return over how many losses the final one is a mean: the last 5 %, at least 10.

    Args:
        losses: All losses of a run.
    """
    return max(10, len(losses) // 20)


def window_means(values: Numbers, width: int) -> list[float | None]:
    """Mean of every window of ``width`` values; None where a window holds None.

    Args:
        values: Numbers, None for a value that was not finite.
        width: The window; a shorter sequence is one window.

    Returns:
        One mean per full window.

    Example:
        >>> window_means([1.0, 3.0, None, 5.0, 7.0], 2)
        [2.0, None, None, 6.0]
    """
    width = min(width, len(values))
    if not width:
        return []
    # As whole multiples of one power of two the values have exact sums: an outlier that has left leaves nothing behind.
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
"""A window of the largest floats has a sum that is divided by it; powers of two round nothing."""
