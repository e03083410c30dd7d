"""Single parameters over time: the matrix behind the heat map, and who makes the norm."""

import base64
import math
import statistics
import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gradguard.monitoring.judge.numbers import median
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.show.report.series import Number, buckets

MOST_COLUMNS = 600
MOST_ROWS = 1500
MOST_CELLS = 90_000
NONFINITE, ZERO, GAP = -32768, -32767, -32766
"""Codes of a packed matrix for cells without a logarithm; a gap was not measured."""
_MOST_LINES = 1000


@dataclass(frozen=True)
class LayerMatrix:
    """One number for each parameter over time, thinned; rows are parameters, columns are ranges of steps.

    Attributes:
        names: The row names.
        steps: The first step of each column.
        cells: Rows of the largest value in each cell: None where one was not finite, NaN where none was measured.
        left_out: How many rows there were too many; those whose norm moved least.
        rows: The places of the rows in the names of the record.
    """

    names: list[str]
    steps: list[int]
    cells: list[list[Number]]
    left_out: int = 0
    rows: Sequence[int] = ()

    def medians(self) -> list[Number]:
        """The median of the positive cells of each row, None for a row without one."""
        positive = [[cell for cell in row if cell is not None and cell > 0] for row in self.cells]
        return [median(row) for row in positive]

    def packed(self) -> str:
        """All cells as hundredths of log10 in 16 bits, in base64: two digits in a third of the text."""
        numbers = array("h", (_hundredths(cell) for row in self.cells for cell in row))
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode("ascii")


def layer_norms(record: Record, most_cells: int = MOST_CELLS, rows: Sequence[int] | None = None) -> LayerMatrix | None:
    """The norm of every parameter's gradient over time.

    Args:
        record: The record of a run.
        most_cells: How many cells a page can carry; the columns are as wide as they must be, and fewer rows are shown
            where there are few.
        rows: The parameters to show; all of them if None.

    Returns:
        The matrix, or None where nothing was recorded per parameter.
    """
    lines = record.tensors
    gaps = lines.column("absent")
    norms = (
        [_norms(*each) for each in zip(lines.column("norm"), gaps, strict=True)] if any(gaps) else lines.column("norm")
    )
    return _matrix(record, lines.column("i"), norms, most_cells, rows)


def update_ratios(
    record: Record, most_cells: int = MOST_CELLS, rows: Sequence[int] | None = None
) -> LayerMatrix | None:
    """How much each step changed every parameter, as a share of its norm, where that was recorded.

    Args:
        record: The record of a run.
        most_cells: How many cells a page can carry.
        rows: The parameters to show; all of them if None.

    Returns:
        The matrix, or None where weights and updates were not recorded.
    """
    pairs = zip(record.tensors.column("update"), record.tensors.column("weight"), strict=True)
    lines = record.tensors.where([bool(update and weight) for update, weight in pairs])
    ratios = list(map(_ratios, lines.column("update"), lines.column("weight")))
    return _matrix(record, lines.column("i"), ratios, most_cells, rows)


def rows_of(part: Record, whole: Record) -> list[int] | None:
    """The parameters that one optimizer steps, read from which of them ever had a gradient on its steps.

    Args:
        part: The steps of one optimizer.
        whole: The record that they come from.

    Returns:
        Places in the names; None for all, where the record has one optimizer.
    """
    if part is whole or not part.tensors:
        return None
    mine, all_ = _touched(part), _touched(whole)
    return [row for row in range(len(whole.names)) if row in mine or row not in all_]


def dominance(record: Record, spikes: Collection[int], rows: Sequence[int] | None = None) -> dict[str, Any] | None:
    """Who makes the norm: mean share of the squared norm per parameter, at ordinary and at spike steps.

    Ordinary steps are the middle half by norm. Where no spike was recorded per parameter, the largest 5 % stand for
    them.

    Args:
        record: The record of a run.
        spikes: The steps that are spikes.
        rows: The parameters that can be named; all of them if None.

    Returns:
        ``names``, ``ordinary``, ``spikes`` (both shares), ``label`` and ``count`` of the spike steps, ten rows at
        most; None where nothing was recorded per parameter.
    """
    norms, count = record.tensors.column("norm"), len(record.names)
    totals = _totals(norms, count)
    known = [place for place, total in enumerate(totals) if 0 < total < math.inf]
    if not known:
        return None
    numbers, order = record.tensors.column("i"), sorted(known, key=totals.__getitem__)
    at = [place for place in known if numbers[place] in spikes]
    label, count = ("spike steps", len(at)) if at else ("largest 5 % of steps", max(1, len(order) // 20))
    at = at or order[-count:]
    ordinary = order[len(order) // 4 : -(-3 * len(order) // 4)] or order
    shares = list(zip(record.names, _mean_shares(norms, ordinary), _mean_shares(norms, at), strict=False))
    shares = [share for row, share in enumerate(shares) if rows is None or row in rows] or shares
    top = sorted(shares, key=lambda share: -max(share[1:]))[:10]
    names, at_ordinary, at_spikes = map(list, zip(*sorted(top, key=lambda share: share[2]), strict=True))
    return {"names": names, "ordinary": at_ordinary, "spikes": at_spikes, "label": label, "count": count}


def _matrix(
    record: Record,
    numbers: Sequence[int],
    values: Sequence[list[Number]],
    most_cells: int,
    rows: Sequence[int] | None,
) -> LayerMatrix | None:
    count = min([len(record.names), *map(len, values)])
    kept = [row for row in (range(count) if rows is None else rows) if row < count]
    if not len(values) or not kept:
        return None
    most_rows = MOST_ROWS * most_cells // MOST_CELLS
    places = buckets(len(values), max(40, min(MOST_COLUMNS, most_cells // min(len(kept), most_rows))))
    columns = [_largest(values[place.start : place.stop], count) for place in places]
    kept, left_out = _most_telling(columns, kept, most_rows)
    return LayerMatrix(
        names=[record.names[row] for row in kept],
        steps=[numbers[place[0]] for place in places],
        cells=[[column[row] for column in columns] for row in kept],
        left_out=left_out,
        rows=kept,
    )


def _largest(rows: Sequence[list[Number]], count: int) -> list[Number]:
    # One column of the matrix: the largest value of each parameter in a bucket of lines.
    if len(rows) == 1:
        return rows[0][:count]
    short = [row[:count] for row in rows]
    columns: list[Any] = list(zip(*short, strict=True))
    return [
        None if None in cells else max((cell for cell in cells if cell == cell), default=math.nan) for cells in columns
    ]


def _most_telling(columns: list[list[Number]], kept: list[int], most: int) -> tuple[list[int], int]:
    # Where a page cannot hold all rows, those whose values move most tell most.
    if len(kept) <= most:
        return kept, 0

    def movement(row: int) -> float:
        known = [cell for column in columns if (cell := column[row]) is not None and cell > 0]
        return math.log10(max(known)) - math.log10(min(known)) if len(known) == len(columns) else math.inf

    chosen = sorted(sorted(kept, key=movement)[-most:])
    return chosen, len(kept) - len(chosen)


def _norms(norms: list[Number], absent: Sequence[int] | None) -> list[Number]:
    gaps = set(absent or ())  # no gradient is not a gradient of 0
    return [math.nan if place in gaps else norm for place, norm in enumerate(norms)]


def _ratios(updates: list[Number], weights: list[Number]) -> list[Number]:
    return [
        None if update is None or weight is None else update / weight if weight else math.nan
        for update, weight in zip(updates, weights, strict=False)
    ]


def _touched(record: Record) -> set[int]:
    return {row for norms in record.tensors.column("norm") for row, norm in enumerate(norms) if norm != 0}


def _hundredths(cell: Number) -> int:
    if cell is None:
        return NONFINITE
    if not math.isfinite(cell):
        return GAP if math.isnan(cell) else NONFINITE
    return max(GAP + 1, min(32767, round(100 * math.log10(cell)))) if cell > 0 else ZERO


def _totals(norms: Sequence[list[Number]], count: int) -> Sequence[float]:
    # The sum of the squares of each row; 0 for one with a hole in it, which has no shares. A product overflows to
    # infinity where a power would raise.
    whole = [row if len(row) == count and None not in row else [] for row in norms]
    return [float(sum([norm * norm for norm in row if norm is not None])) for row in whole]


def _mean_shares(norms: Sequence[list[Any]], places: Sequence[int]) -> list[float]:
    # An even selection of many rows has the same mean to the digits that are shown.
    rows = [[norm * norm for norm in norms[place]] for place in places[:: -(-len(places) // _MOST_LINES)]]
    totals = [sum(row) for row in rows]
    return [
        statistics.fmean(square / total for square, total in zip(column, totals, strict=True))
        for column in zip(*rows, strict=True)
    ]
