"""Compute the series that figures draw from a record: bands and windows, as plain lists."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from gradguard.monitoring.judge.numbers import buckets, median
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.record_lines import without_none
from gradguard.monitoring.record.step_rows import bound_on, taken_steps

MOST_POINTS = 1200
_WINDOWS = 60

Number = float | None


@dataclass(frozen=True)
class Band:
    """One quantity in buckets of neighbouring steps; each bucket has at least one step.

    Attributes:
        steps: The middle step of each bucket.
        low: The smallest finite value of each bucket; None for a bucket without one.
        middle: The median of the finite values of each bucket.
        high: The largest finite value of each bucket.
        thinned: Whether some bucket has more than one step.
    """

    steps: list[int]
    low: list[Number]
    middle: list[Number]
    high: list[Number]
    thinned: bool


def band(record: Record, key: str, most: int = MOST_POINTS, *, positive: bool = False) -> Band:
    """Return the smallest, median and largest value of a quantity in each of at most ``most`` buckets of steps.

    Extremes survive even at a million steps: a spike of one step is the largest value of its bucket.

    Args:
        record: The record of a run.
        key: A field of a step, such as ``"norm"``; steps without this field are left out.
        most: The largest number of buckets.
        positive: Whether to leave out values that are not above 0, which a logarithmic axis cannot show.

    Returns:
        The band.
    """
    has = record.steps.has(key)
    numbers = list(compress(record.steps.column("i"), has))
    values = list(compress(record.steps.column(key), has))
    places = buckets(len(numbers), most)
    found = [
        [value for value in values[place.start : place.stop] if value is not None and (value > 0 or not positive)]
        for place in places
    ]
    return Band(
        steps=[numbers[place[len(place) // 2]] for place in places],
        low=[rounded(min(values, default=None)) for values in found],
        middle=[rounded(median(values)) for values in found],
        high=[rounded(max(values, default=None)) for values in found],
        thinned=len(numbers) > len(places),
    )


def outline(drawn: Band) -> tuple[list[Number], list[Number]]:
    """Return the outlines of a band between its lows and highs: one polygon for each stretch without a gap.

    Args:
        drawn: A band.

    Returns:
        The positions and values, with None after each polygon.

    Example:
        >>> outline(Band([0, 1, 2], [1.0, 2.0, None], [1.5, 2.5, None], [2.0, 3.0, None], True))
        ([0, 1, 1, 0, None], [2.0, 3.0, 2.0, 1.0, None])
    """
    x: list[Number] = []
    y: list[Number] = []
    for known, stretch in itertools.groupby(range(len(drawn.steps)), lambda index: drawn.low[index] is not None):
        if known:
            forth = list(stretch)
            back = forth[::-1]
            x += [*(drawn.steps[index] for index in forth), *(drawn.steps[index] for index in back), None]
            y += [*(drawn.high[index] for index in forth), *(drawn.low[index] for index in back), None]
    return x, y


def loss_range(records: Sequence[Record]) -> tuple[float, float] | None:
    """Return the range of a loss axis that cuts off a few explosions, which would otherwise flatten the curve.

    Args:
        records: The records drawn on this axis.

    Returns:
        The range of the axis; None if all losses fit. They fit if the largest loss is at most three times as far above
        the smallest as the 98th percentile.
    """
    losses = sorted(loss for record in records for loss in without_none(record.steps.column("loss")))
    if not losses:
        return None
    low, most, high = losses[0], losses[int(0.98 * (len(losses) - 1))], losses[-1]
    if high - low <= 3 * (most - low) or most == low:
        return None
    return low - 0.05 * (most - low), most + 0.25 * (most - low)


@dataclass(frozen=True)
class BindingWindow:
    """The share of steps on which clipping bound, in a range of steps.

    Attributes:
        first: The first step.
        last: The last step.
        count: The number of steps with finite gradients that the optimizer took.
        share: The share of these steps on which clipping bound.
    """

    first: int
    last: int
    count: int
    share: float


def clip_windows(record: Record) -> list[BindingWindow]:
    """Return the share of steps on which clipping bound in each window.

    Args:
        record: The record of a run.

    Returns:
        At most 60 windows, none of them empty; each has at least ten steps if the run has that many.
    """
    steps = taken_steps(record)
    acted, numbers = bound_on(steps), steps.column("i")
    places = buckets(len(steps), min(_WINDOWS, max(len(steps) // 10, 1)))
    return [
        BindingWindow(
            numbers[place[0]], numbers[place[-1]], len(place), sum(acted[place.start : place.stop]) / len(place)
        )
        for place in places
    ]


def rounded(value: Number) -> Number:
    """Return ``value`` rounded to four digits, which draw the same picture as sixteen in a third of the page size."""
    return None if value is None else float(f"{value:.4g}")
