"""Draw single parameters: a heat map of their norms over time, and their shares of the norm."""

import base64
import html
import math
import statistics
import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gradguard.monitoring.judge.numbers import buckets, median, number, percent
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.show.report.figure import (
    BLACK,
    DEVIATION_SCALE,
    GREY,
    NARROW_LABEL,
    VERMILION,
    Chart,
    Keys,
    Subplot,
    Table,
    drawing,
    names_of_bars,
    short,
    titled,
)
from gradguard.monitoring.show.report.figures import steps_axis
from gradguard.monitoring.show.report.series import Number

MOST_COLUMNS = 600
MOST_ROWS = 1500
MOST_CELLS = 90_000
NONFINITE, ZERO, GAP = -32768, -32767, -32766
"""The codes in a packed matrix of cells without a logarithm; a gap is a cell that was not measured."""
_MOST_LINES = 1000
_MOST_TABLE_ROWS = 40
_LABEL_PIXELS = 12
_LAYERS = (
    "Each row is one parameter, in the order of the model. Against its own median: red is larger than usual for that "
    "parameter, blue is smaller. Each cell shows the largest value in its range of steps."
)
_DOMINANCE = (
    "The parameters with the largest shares of the global norm. Spikes start at a parameter that leads only at spikes."
)


@dataclass(frozen=True)
class LayerMatrix:
    """The norms of parameters over time: each row is a parameter, each column a range of steps.

    Attributes:
        names: The names of the rows.
        steps: The first step of each column.
        cells: The largest value of each cell: None if a value was not finite, NaN if none was measured.
        left_out: The number of rows left out, whose norms moved least.
    """

    names: list[str]
    steps: list[int]
    cells: list[list[Number]]
    left_out: int = 0

    def medians(self) -> list[Number]:
        """Return the median of the positive cells of each row; None for a row without positive cells."""
        return [median(_above(0.0, row)) for row in self.cells]

    def packed(self) -> str:
        """Return all cells as base64 of 16-bit hundredths of log10: two digits in a third of the text's length."""
        numbers = array("h", (_hundredths(cell) for row in self.cells for cell in row))
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode("ascii")


def heat_map(record: Record, optimizer: int | None, most_cells: int = MOST_CELLS) -> Chart | None:
    """Draw every parameter's norm over time, relative to its own median or in absolute numbers.

    The page draws the cells itself from a packed matrix, which is a third of the size of plotly's own format.

    Args:
        record: The record of a run, or of one optimizer in it.
        optimizer: The optimizer's index; None for all parameters.
        most_cells: The largest number of cells that the page can hold.

    Returns:
        The chart; None if no norms per parameter were recorded.
    """
    matrix = layer_norms(record, rows_of(record, optimizer), most_cells)
    if matrix is None:
        return None
    names = matrix.names
    pixels = max(2.5, min(26, 1000 / len(names)))
    every = math.ceil(_LABEL_PIXELS / pixels)
    yaxis = {"type": "category", "autorange": "reversed", "showgrid": False, "ticks": ""}
    figure = drawing([Subplot([], yaxis)], round(120 + pixels * len(names)), steps_axis([record]))
    heat = {
        # plotly would draw rows with equal names on top of each other
        "rows": [
            html.escape(name if names.index(name) == row else f"{name} ({row})") for row, name in enumerate(names)
        ],
        "narrow": [short(name, NARROW_LABEL) for name in names],
        "labels": list(map(short, names)),
        "steps": matrix.steps,
        "medians": [None if usual is None else round(100 * math.log10(usual)) for usual in matrix.medians()],
        "cells": matrix.packed(),
        "colours": {"scale": DEVIATION_SCALE, "zero": GREY, "nonfinite": BLACK},
        "bar": max(80, min(280, round(pixels * len(names)))),
        "every": every,
        "font": min(13, max(9, round(pixels * every) - 1)),
    }
    caption = _LAYERS + (f" {matrix.left_out:,} parameters that moved less are left out." if matrix.left_out else "")
    return Chart("layers", "Layers", caption, figure | {"heat": heat}, _numbers(matrix), over_steps=True)


def dominance(record: Record, optimizer: int | None, spikes: Collection[int]) -> Chart | None:
    """Draw the ten parameters with the largest shares of the squared norm, at ordinary steps and at spikes.

    Args:
        record: The record of a run, or of one optimizer in it.
        optimizer: The optimizer's index; None for all parameters.
        spikes: The numbers of the steps that are spikes.

    Returns:
        The chart; None if no norms per parameter were recorded.
    """
    found = shares(record, spikes, rows_of(record, optimizer))
    if found is None:
        return None
    rows, at_spikes = found
    names, *columns = map(list, zip(*rows, strict=True))
    labels = ("median steps", at_spikes)
    bars = [_bars(names, *each) for each in zip(columns, labels, (GREY, VERMILION), strict=True)]
    top = max(map(max, columns))
    form = ".0%" if top > 0.05 else ".1%"
    xaxis = titled("share of the squared norm", tickformat=form, range=[0, 1.15 * top], nticks=6)
    yaxis, meta = names_of_bars(names)
    figure = drawing(
        [Subplot(bars[::-1], yaxis)],
        110 + 42 * len(names),
        xaxis,
        meta=meta,
        barmode="group",
        bargap=0.3,
        bargroupgap=0.05,
    )
    table = Table(("parameter", *labels), [(name, percent(a), percent(b)) for name, a, b in rows[::-1]])
    return Chart("dominance", "Who dominates", _DOMINANCE, figure, table)


def layer_norms(record: Record, rows: Sequence[int], most_cells: int = MOST_CELLS) -> LayerMatrix | None:
    """Return the norm of every parameter's gradient over time.

    Args:
        record: The record of a run.
        rows: The indices of the parameters to show.
        most_cells: The largest number of cells that the page can hold. Columns become wider to fit, and with a smaller
            limit fewer rows are shown.

    Returns:
        The matrix; None if no norms per parameter were recorded.
    """
    lines = record.tensors
    values = list(map(_norms, lines.column("norm"), lines.column("absent")))
    count = min([len(record.names), *map(len, values)])
    kept = [row for row in rows if row < count]
    if not values or not kept:
        return None
    most_rows = MOST_ROWS * most_cells // MOST_CELLS
    places = buckets(len(values), max(40, min(MOST_COLUMNS, most_cells // min(len(kept), most_rows))))
    columns = [
        [_largest(cells) for cells in zip(*(row[:count] for row in values[place.start : place.stop]), strict=True)]
        for place in places
    ]
    cells = {row: [column[row] for column in columns] for row in kept}
    shown = sorted(sorted(kept, key=lambda row: _movement(cells[row]))[-most_rows:])
    numbers = lines.column("i")
    return LayerMatrix(
        names=[record.names[row] for row in shown],
        steps=[numbers[place[0]] for place in places],
        cells=[cells[row] for row in shown],
        left_out=len(kept) - len(shown),
    )


def rows_of(record: Record, optimizer: int | None) -> list[int]:
    """Return the indices of one optimizer's parameters; parameters without an optimizer in the record are included.

    Args:
        record: The record of a run, or of one optimizer in it.
        optimizer: The optimizer's index; None for all parameters.
    """
    params = record.meta.get("params", ())
    return [row for row, one in enumerate(params) if optimizer is None or one.get("optimizer", optimizer) == optimizer]


def shares(
    record: Record, spikes: Collection[int], rows: Sequence[int]
) -> tuple[list[tuple[str, float, float]], str] | None:
    """Return the mean share of the squared norm of each parameter.

    Ordinary steps are the middle half by norm. If no spike has norms per parameter, the 5 % of steps with the largest
    norms replace the spikes.

    Args:
        record: The record of a run.
        spikes: The numbers of the steps that are spikes.
        rows: The indices of the parameters to include.

    Returns:
        At most ten names with their shares at ordinary steps and at spikes, in ascending order of the latter; and the
        label of the latter. None if no norms per parameter were recorded.
    """
    lines = record.tensors.where(
        [len(row) == len(record.names) and None not in row for row in record.tensors.column("norm")]
    )
    norms = lines.column("norm")
    totals = [sum([norm * norm for norm in row]) for row in norms]  # `norm**2` would raise OverflowError, not be inf
    order = sorted((place for place, total in enumerate(totals) if 0 < total < math.inf), key=totals.__getitem__)
    if not order or not rows:
        return None
    numbers = lines.column("i")
    at, label = [place for place in order if numbers[place] in spikes], "spike steps"
    if not at:
        at, label = order[-max(1, len(order) // 20) :], "largest 5 % of steps"
    middle = order[len(order) // 4 : -(-3 * len(order) // 4)]
    found = list(zip(record.names, _mean_shares(norms, middle), _mean_shares(norms, at), strict=True))
    top = sorted((found[row] for row in rows), key=lambda share: max(share[1:]))[-10:]
    return sorted(top, key=lambda share: share[2]), f"{label} ({len(at):,} recorded)"


def _largest(cells: Sequence[Number]) -> Number:
    """Return the largest of some values; None if one was not finite, NaN if none was measured."""
    return None if None in cells else max(_above(_LEAST, cells), default=math.nan)


_LEAST = -1.0  # below every norm; comparisons with NaN are false


def _above(low: float, cells: Sequence[Number]) -> list[float]:
    return [cell for cell in cells if cell is not None and cell > low]


def _movement(cells: Sequence[Number]) -> float:
    """Return the ratio of the largest to the smallest cell of a row; infinity if a cell is not above 0."""
    known = _above(0.0, cells)
    return max(known) / min(known) if len(known) == len(cells) else math.inf


def _norms(norms: list[Number], absent: Sequence[int] | None) -> list[Number]:
    if not absent:
        return norms
    return [math.nan if place in absent else norm for place, norm in enumerate(norms)]  # a missing gradient is not 0


def _hundredths(cell: Number) -> int:
    if cell is None or cell == math.inf:
        return NONFINITE
    if cell != cell:
        return GAP
    return max(GAP + 1, min(32767, round(100 * math.log10(cell)))) if cell > 0 else ZERO


def _mean_shares(norms: Sequence[list[Any]], places: Sequence[int]) -> list[float]:
    # With many rows, an evenly spaced selection has the same mean to the shown digits.
    rows = [[norm * norm for norm in norms[place]] for place in places[:: -(-len(places) // _MOST_LINES)]]
    totals = [sum(row) for row in rows]
    return [
        statistics.fmean(square / total for square, total in zip(column, totals, strict=True))
        for column in zip(*rows, strict=True)
    ]


def _numbers(matrix: LayerMatrix) -> Table:
    found = []
    for name, cells, usual in zip(matrix.names, matrix.cells, matrix.medians(), strict=True):
        largest = max(_above(_LEAST, cells), default=None)
        shown = (name, number(usual), number(largest), f"{cells.count(0):,}", f"{cells.count(None):,}")
        found.append((_movement(cells), shown))
    most = sorted(range(len(found)), key=lambda row: -found[row][0])[:_MOST_TABLE_ROWS]
    note = f"the {_MOST_TABLE_ROWS} of {len(found):,} that moved most" if len(found) > _MOST_TABLE_ROWS else ""
    head = ("parameter", "median norm", "largest", "zero cells", "non-finite cells")
    return Table(head, [found[row][1] for row in sorted(most)], note)


def _bars(names: list[str], sizes: list[float], label: str, colour: str) -> Keys:
    return {
        "type": "bar", "orientation": "h", "name": label, "marker": {"color": colour}, "cliponaxis": False,
        "x": [round(share, 4) for share in sizes], "y": list(range(len(names))),
        "text": [percent(share) for share in sizes], "textposition": "outside",
        "customdata": [html.escape(name) for name in names],
        "hovertemplate": f"%{{customdata}}<br>{label}: %{{x:.1%}}<extra></extra>",
    }  # fmt: skip
