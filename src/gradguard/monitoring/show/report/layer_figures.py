"""Figures about single parameters: the heat map, and who dominates the norm."""

import html
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from gradguard.monitoring.judge.numbers import number, percent
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.show.report import layers
from gradguard.monitoring.show.report.figure import (
    BLACK,
    DEVIATION_SCALE,
    GREY,
    NARROW_LABEL,
    VERMILION,
    Chart,
    Figure,
    Table,
    short,
    steps_between,
    subplots,
)

_MOST_TABLE_ROWS = 40
_LABEL_PIXELS = 12


def layer_heat_map(record: Record, whole: Record, most_cells: int = layers.MOST_CELLS) -> Chart | None:
    """Every parameter's norm over time: against its own median, as it is, and the change of the weights.

    The page draws the cells itself, because a packed matrix is a third of what plotly would store.

    Args:
        record: The record of a run, or of one optimizer of it.
        whole: The record of the run.
        most_cells: How many cells the page can carry.

    Returns:
        The chart, or None where nothing was recorded per parameter.
    """
    rows = layers.rows_of(record, whole)
    matrix = layers.layer_norms(record, most_cells, rows)
    if matrix is None:
        return None
    ratios = layers.update_ratios(record, most_cells, matrix.rows)
    pixels = max(2.5, min(26, 1000 / len(matrix.names)))
    figure = subplots([1.0], height=round(120 + pixels * len(matrix.names)))
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, ticks="")
    figure.over_steps([record])
    figure.update_xaxes(showgrid=False)
    figure.update_layout(margin={"r": 10})
    heat = {
        "norm": _payload(matrix),
        "ratio": ratios and _payload(ratios, matrix.names),
        "colours": {"scale": DEVIATION_SCALE, "zero": GREY, "nonfinite": BLACK},
        "limit": _limit(matrix),
        "bar": max(80, min(280, round(pixels * len(matrix.names)))),
        "every": math.ceil(_LABEL_PIXELS / pixels),
        "font": min(13, max(9, round(pixels * math.ceil(_LABEL_PIXELS / pixels)) - 1)),
    }
    caption = _LAYERS + (f" {matrix.left_out:,} parameters that moved less are left out." if matrix.left_out else "")
    shown = figure.to_json() | {"heat": heat}
    return Chart("layers", "Layers", caption, shown, _summary(matrix), _rows_table(matrix), over_steps=True)


def dominance(record: Record, whole: Record, spikes: Collection[int]) -> Chart | None:
    """The ten parameters that make the norm, at ordinary and at spike steps.

    Args:
        record: The record of a run, or of one optimizer of it.
        whole: The record of the run.
        spikes: The steps that are spikes.

    Returns:
        The chart, or None where nothing was recorded per parameter.
    """
    shares = layers.dominance(record, spikes, layers.rows_of(record, whole))
    if shares is None:
        return None
    figure = subplots([1.0], height=110 + 42 * len(shares["names"]))
    at_spikes = f"{shares['label']} ({shares['count']:,} recorded)"
    for key, label, colour in (("spikes", at_spikes, VERMILION), ("ordinary", "median steps", GREY)):
        _add_share_bars(figure, shares["names"], shares[key], label, colour)
    top = max(shares["spikes"] + shares["ordinary"])
    figure.update_xaxes(
        title={"text": "share of the squared norm"},
        tickformat=".0%" if top > 0.05 else ".1%",
        range=[0, 1.15 * top],
        nticks=6,
    )
    figure.set_rows(shares["names"])
    figure.update_yaxes(showgrid=False, ticks="")
    figure.set_columns("parameter", "steps", "share of the squared norm")
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.05, legend={"traceorder": "reversed"})
    triples = list(zip(shares["names"], shares["ordinary"], shares["spikes"], strict=True))[::-1]
    table = Table(
        ("parameter", "median steps", at_spikes),
        [(name, percent(ordinary), percent(spike)) for name, ordinary, spike in triples],
    )
    name, ordinary, spike = triples[0]
    shown = f"{percent(spike)} of the squared norm at the {shares['label']}, {percent(ordinary)} at median steps"
    summary = f"{name} makes {shown}."
    return Chart("dominance", "Who dominates", _DOMINANCE, figure.to_json(), summary, table)


def _payload(matrix: layers.LayerMatrix, known: list[str] | None = None) -> dict[str, Any]:
    names = {"rows": _unique(matrix.names), "narrow": [short(name, NARROW_LABEL) for name in matrix.names]}
    return ({} if matrix.names == known else names) | {
        "labels": [short(name) + _note(row) for name, row in zip(matrix.names, matrix.cells, strict=True)],
        "steps": matrix.steps,
        "medians": [None if median is None else round(100 * math.log10(median)) for median in matrix.medians()],
        "cells": matrix.packed(),
    }


def _note(row: Sequence[float | None]) -> str:
    if all(cell == 0 for cell in row):
        return " (all zero)"
    return " (no gradient)" if _is_empty(row) else ""


def _is_empty(row: Sequence[float | None]) -> bool:
    return all(cell is not None and math.isnan(cell) for cell in row)


def _limit(matrix: layers.LayerMatrix) -> float:
    # Half a decade at least, so that noise stays pale; two at most, so that one spike does not hide the others.
    widest = 0.5
    for row, median in zip(matrix.cells, matrix.medians(), strict=True):
        known = [cell for cell in row if cell is not None and cell > 0]
        if median and known:
            widest = max(
                widest, math.log10(max(known)) - math.log10(median), math.log10(median) - math.log10(min(known))
            )
    return round(min(2.0, widest), 2)


def _summary(matrix: layers.LayerMatrix) -> str:
    faults = [
        (sum(all(cell == 0 for cell in row) for row in matrix.cells), "zero throughout"),
        (sum(map(_is_empty, matrix.cells)), "without a gradient throughout"),
        (sum(None in row for row in matrix.cells), "with non-finite gradients"),
    ]
    words = ", ".join(f"{count} {what}" for count, what in faults if count)
    return f"{len(matrix.names):,} parameters over {steps_between(matrix.steps[0], matrix.steps[-1])}" + (
        f"; {words}." if words else "."
    )


def _rows_table(matrix: layers.LayerMatrix) -> Table:
    found = [_row(matrix, index, median) for index, median in enumerate(matrix.medians())]
    most = sorted(range(len(found)), key=lambda index: -found[index][0])[:_MOST_TABLE_ROWS]
    head = ("parameter", "median norm", "largest", "at step", "zero cells", "non-finite cells")
    note = f"the {_MOST_TABLE_ROWS} of {len(found):,} that moved most" if len(found) > _MOST_TABLE_ROWS else ""
    return Table(head, [found[index][1] for index in sorted(most)], note)


def _row(matrix: layers.LayerMatrix, index: int, median: float | None) -> tuple[float, tuple[str, ...]]:
    cells = matrix.cells[index]
    known = [(cell, place) for place, cell in enumerate(cells) if cell is not None and cell == cell]
    largest, place = max(known, default=(None, 0))
    lost, zero = cells.count(None), sum(cell == 0 for cell in cells)
    moved = math.inf if lost or zero else math.log10(largest) - math.log10(median) if largest and median else 0.0
    shown = (matrix.names[index], number(median), number(largest), f"{matrix.steps[place]:,}", f"{zero:,}", f"{lost:,}")
    return moved, shown


def _unique(names: list[str]) -> list[str]:
    # Rows of one name would be drawn on top of each other.
    seen: Counter[str] = Counter()
    rows = []
    for name in names:
        seen[name] += 1
        rows.append(html.escape(name if seen[name] == 1 else f"{name} ({seen[name]})"))
    return rows


def _add_share_bars(figure: Figure, names: list[str], shares: list[float], label: str, colour: str) -> None:
    hover = f"%{{customdata}}<br>{label}: %{{x:.1%}}<extra></extra>"
    figure.add_trace(
        "bar",
        x=[round(share, 4) for share in shares], y=list(range(len(names))), orientation="h", name=label,
        marker={"color": colour}, text=[percent(share) for share in shares], textposition="outside", cliponaxis=False,
        customdata=[html.escape(name) for name in names], hovertemplate=hover,
        meta=[[html.escape(name), label, round(share, 4)] for name, share in zip(names, shares, strict=True)],
    )  # fmt: skip


_LAYERS = (
    "Each row is one parameter, in the order of the model. Against its own median: red is larger than usual for that "
    "parameter, blue smaller. Cells show the largest value in their range of steps."
)
_DOMINANCE = "Which parameters make the global norm. A parameter that leads only at spikes is where they start."
