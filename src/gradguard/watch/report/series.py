"""From a record to what a figure draws: thinned lines, windows, and the layer matrix, as plain lists."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradguard.watch.record import Record
from gradguard.watch.verdict import binds, is_nonfinite

MOST_POINTS = 2000
MOST_COLUMNS = 600
_WINDOWS = 60

Number = float | None


def decimate(x: Sequence[int], y: Sequence[Number], most: int = MOST_POINTS) -> tuple[list[int], list[Number]]:
    """Thin a line to at most ``most`` points and keep the smallest and the largest of every bucket.

    Args:
        x: Positions, ascending.
        y: Values; None is a gap, and a bucket of gaps stays one.
        most: The number of points to stay below.

    Returns:
        The thinned positions and values.

    Example:
        >>> decimate(range(8), [1, 1, 90, 1, 1, 0, 1, 1], most=4)
        ([0, 2, 5, 7], [1, 90, 0, 1])
    """
    if len(x) <= most:
        return list(x), list(y)
    kept = [index for bucket in buckets(len(x), most // 2) for index in _extremes(y, bucket)]
    return [x[index] for index in kept], [y[index] for index in kept]


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
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def line(record: Record, key: str) -> tuple[list[int], list[Number]]:
    """One quantity over the steps, thinned; steps without it are left out.

    Args:
        record: The record of a run.
        key: A field of a step, such as ``"norm"``.

    Returns:
        Step numbers and values.
    """
    steps = [step for step in record.steps if key in step]
    return decimate([step["i"] for step in steps], [step[key] for step in steps])


def loss_range(records: Sequence[Record]) -> tuple[float, float] | None:
    """Where to cut an axis of losses that a few explosions would otherwise flatten.

    Args:
        records: The records drawn on that axis.

    Returns:
        The ends of the axis, or None where all losses fit: the largest is no more than three times as far above
        the smallest as 98 % of them are.
    """
    losses = sorted(loss for record in records for step in record.steps if (loss := step.get("loss")) is not None)
    if not losses:
        return None
    low, most, high = losses[0], losses[int(0.98 * (len(losses) - 1))], losses[-1]
    if high - low <= 3 * (most - low) or most == low:
        return None
    return low - 0.05 * (most - low), most + 0.25 * (most - low)


def clip_windows(record: Record, threshold: Number) -> tuple[list[int], list[float], list[int]]:
    """Share of steps on which clipping bound in each window, or would have bound at ``threshold``.

    Args:
        record: The record of a run.
        threshold: A norm to compare with; None takes what happened.

    Returns:
        First step, share and number of steps of each window.
    """
    steps = [step for step in record.steps if not is_nonfinite(step) and not step.get("skipped")]
    acted = [binds(step) if threshold is None else (step.get("norm") or 0.0) > threshold for step in steps]
    windows = buckets(len(steps), min(_WINDOWS, max(len(steps) // 10, 1)))
    shares = [sum(acted[index] for index in window) / len(window) for window in windows]
    return [steps[window[0]]["i"] for window in windows], shares, [len(window) for window in windows]


@dataclass(frozen=True)
class LayerMatrix:
    """Per-parameter norms over time, thinned; rows are parameters, columns are ranges of steps.

    Attributes:
        names: The row names.
        steps: The first step of each column.
        norms: The largest norm in each cell; None where a norm was not finite.
        deviations: log10 of norm over the row's median; None where the norm is zero or not finite.
    """

    names: list[str]
    steps: list[int]
    norms: list[list[Number]]
    deviations: list[list[Number]]


def layer_matrix(record: Record) -> LayerMatrix | None:
    """Build the matrix behind the heat map.

    Args:
        record: The record of a run.

    Returns:
        The matrix, or None where nothing was recorded per parameter.
    """
    rows = min([len(record.names), *(len(line["norm"]) for line in record.tensors)])
    if not record.tensors or not rows:
        return None
    columns = buckets(len(record.tensors), MOST_COLUMNS)
    norms = [[_largest(record, row, column) for column in columns] for row in range(rows)]
    first_steps = [record.tensors[column[0]].get("i", column[0]) for column in columns]
    return LayerMatrix(record.names[:rows], first_steps, norms, [_deviations(row) for row in norms])


def dominance(record: Record, threshold: Number) -> dict[str, Any] | None:
    """Who makes the norm: mean share of the squared norm per parameter, at ordinary and at spike steps.

    Ordinary steps are the middle half by norm. Spike steps are those above ``threshold``, or the largest 5 % where
    none is.

    Args:
        record: The record of a run.
        threshold: The norm above which a step is a spike.

    Returns:
        ``names``, ``ordinary``, ``spikes`` (both shares), ``label`` and ``count`` of the spike steps, ten rows at
        most; None where nothing was recorded per parameter.
    """
    squares = [row for row in (_squares(line["norm"], len(record.names)) for line in record.tensors) if row]
    if not squares:
        return None
    squares.sort(key=sum)
    spikes = [row for row in squares if threshold is not None and math.sqrt(sum(row)) > threshold]
    label = "spike steps" if spikes else "largest 5 % of steps"
    spikes = spikes or squares[-max(1, len(squares) // 20) :]
    ordinary = squares[len(squares) // 4 : -(-3 * len(squares) // 4)] or squares
    shares = list(zip(record.names, _mean_shares(ordinary), _mean_shares(spikes), strict=False))
    top = sorted(shares, key=lambda share: -max(share[1:]))[:10]
    names, at_ordinary, at_spikes = map(list, zip(*sorted(top, key=lambda share: share[2]), strict=True))
    return {
        "names": names,
        "ordinary": at_ordinary,
        "spikes": at_spikes,
        "label": label,
        "count": len(spikes),
    }


def _extremes(y: Sequence[Number], bucket: range) -> list[int]:
    known = [(value, index) for index in bucket if (value := y[index]) is not None]
    return sorted({min(known)[1], max(known)[1]}) if known else [bucket[0]]


def _largest(record: Record, row: int, column: range) -> Number:
    cells = [record.tensors[index]["norm"][row] for index in column]
    return None if None in cells else max(cells)


def _deviations(norms: list[Number]) -> list[Number]:
    positive = [norm for norm in norms if norm]
    if not positive:
        return [None] * len(norms)
    centre = math.log10(statistics.median(positive))
    return [round(math.log10(norm) - centre, 3) if norm else None for norm in norms]


def _squares(norms: list[Number], count: int) -> list[float] | None:
    # A row with a hole in it has no shares; a product overflows to infinity where a power would raise.
    known = [norm * norm for norm in norms if norm is not None]
    return known if len(known) == len(norms) == count and 0 < sum(known) < math.inf else None


def _mean_shares(rows: list[list[float]]) -> list[float]:
    totals = [sum(row) for row in rows]
    return [
        statistics.fmean(square / total for square, total in zip(column, totals, strict=True))
        for column in zip(*rows, strict=True)
    ]
