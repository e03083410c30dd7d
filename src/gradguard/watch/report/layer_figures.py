"""Plotly figures about single parameters: the heat map, and who dominates the norm."""

import html
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradguard.watch.record import Record
from gradguard.watch.report import series
from gradguard.watch.report.style import GREY, VERMILION, short, subplots
from gradguard.watch.verdict import percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


_LABEL_PIXELS = 12


def layer_heat_map(record: Record) -> "Figure | None":
    """Every parameter's norm against its own median, over time.

    Args:
        record: The record of a run.

    Returns:
        The figure, or None where nothing was recorded per parameter.
    """
    matrix = series.layer_matrix(record)
    if matrix is None:
        return None
    known = [abs(cell) for row in matrix.deviations for cell in row if cell is not None]
    limit, pixels = max(0.5, min(2.0, max(known, default=0.5))), max(5, min(26, 1000 // len(matrix.names)))
    figure, rows = subplots([1.0], height=120 + pixels * len(matrix.names)), _unique(matrix.names)
    figure.add_heatmap(
        x=matrix.steps, y=rows, z=matrix.deviations, customdata=matrix.norms, zmin=-limit, zmax=limit,
        hoverongaps=False, colorscale="RdBu", reversescale=True,
        colorbar=_colour_bar(limit, min(280, pixels * len(rows))),
        hovertemplate="%{y}<br>step %{x}: norm %{customdata:.3g}<extra></extra>",
    )  # fmt: skip
    _mark_cells(figure, matrix, rows, "zero", GREY, lambda norm: norm == 0)
    _mark_cells(figure, matrix, rows, "non-finite", "black", lambda norm: norm is None)
    every = -(-_LABEL_PIXELS // pixels)
    labels = [short(name) for name in matrix.names[::every]]
    font = {"size": min(13, pixels * every - 1)}
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, ticks="", tickfont=font)
    figure.update_yaxes(tickvals=rows[::every], ticktext=labels)
    figure.update_xaxes(title_text="optimizer step", showgrid=False)
    figure.update_layout(margin={"r": 10})
    return figure


def dominance(record: Record, spike_above: float | None) -> "Figure | None":
    """The ten parameters that make the norm, at ordinary and at spike steps.

    Args:
        record: The record of a run.
        spike_above: The norm above which a step counts as a spike.

    Returns:
        The figure, or None where nothing was recorded per parameter.
    """
    shares = series.dominance(record, spike_above)
    if shares is None:
        return None
    figure = subplots([1.0], height=110 + 42 * len(shares["names"]))
    for key, label, colour in (
        ("spikes", f"{shares['label']} ({shares['count']} recorded)", VERMILION),
        ("ordinary", "median steps", GREY),
    ):
        _add_share_bars(figure, shares["names"], shares[key], label, colour)
    top = max(shares["spikes"] + shares["ordinary"])
    figure.update_xaxes(title_text="share of the squared norm", tickformat=".0%", range=[0, 1.12 * top])
    ticks = list(range(len(shares["names"])))
    labels = [short(name) for name in shares["names"]]
    figure.update_yaxes(tickvals=ticks, ticktext=labels, showgrid=False, ticks="")
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.05, legend_traceorder="reversed")
    return figure


def _colour_bar(limit: float, length: int) -> dict[str, Any]:
    powers = [power for power in (-2, -1, -0.5, 0, 0.5, 1, 2) if abs(power) <= limit]
    names = {0: "median", -0.5: "÷3", 0.5: "×3", -1: "÷10", 1: "×10", -2: "÷100", 2: "×100"}
    ticks = {"tickvals": powers, "ticktext": [names[power] for power in powers]}
    place = {"len": max(length, 80), "lenmode": "pixels", "y": 1, "yanchor": "top", "thickness": 12, "outlinewidth": 0}
    return ticks | place


def _unique(names: list[str]) -> list[str]:
    # Rows of one name would be drawn on top of each other.
    seen: Counter[str] = Counter()
    rows = []
    for name in names:
        seen[name] += 1
        rows.append(html.escape(name if seen[name] == 1 else f"{name} ({seen[name]})"))
    return rows


def _mark_cells(
    figure: "Figure",
    matrix: series.LayerMatrix,
    rows: list[str],
    label: str,
    colour: str,
    marked: Callable[[series.Number], bool],
) -> None:
    cells = [[1 if marked(norm) else None for norm in row] for row in matrix.norms]
    if not any(cell for row in cells for cell in row):
        return
    figure.add_heatmap(
        x=matrix.steps, y=rows, z=cells, colorscale=[[0, colour], [1, colour]], showscale=False,
        hoverongaps=False, hovertemplate=f"%{{y}}<br>step %{{x}}: {label}<extra></extra>",
    )  # fmt: skip
    marker = {"symbol": "square", "color": colour, "size": 11}
    figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=label, showlegend=True)


def _add_share_bars(figure: "Figure", names: list[str], shares: list[float], label: str, colour: str) -> None:
    hover = f"%{{customdata}}<br>{label}: %{{x:.1%}}<extra></extra>"
    figure.add_bar(
        x=shares, y=list(range(len(names))), orientation="h", name=label, marker={"color": colour},
        text=[percent(share) for share in shares], textposition="outside", cliponaxis=False,
        customdata=[html.escape(name) for name in names], hovertemplate=hover,
    )  # fmt: skip
