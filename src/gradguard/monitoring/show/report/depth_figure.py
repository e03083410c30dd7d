"""Gradients along depth: how large an element of each weight's gradient is, in the order of the forward."""

import html
import statistics
from collections.abc import Sequence

from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.judge.signals import Layer, signals_of
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.show.report import series
from gradguard.monitoring.show.report.figure import BLACK, BLUE, GREY, Chart, Table, short, subplots

_FEWEST_LAYERS = 3
_MOST_TABLE_ROWS = 400
_NEAR_EPS = 1e3
"""The line of the optimizer's ``eps`` is drawn where gradients come so near."""

Levels = list[float | None]


def along_depth(record: Record) -> Chart | None:
    """Draw the usual gradient of an element of each weight, from the input to the output.

    Two lines: the first tenth of the run and the last. An element is compared, and not the norm of the tensor, so that
    large weights and small ones are seen alike.

    Args:
        record: The record of one optimizer's steps.

    Returns:
        The chart, or None where fewer than three weights were recorded.
    """
    signals = signals_of(record)
    layers = signals.layers
    if len(layers) < _FEWEST_LAYERS:
        return None
    first, last = [_level(layer, 0) for layer in layers], [_level(layer, -1) for layer in layers]
    figure = subplots([1.0], height=360)
    names = [html.escape(layer.name) for layer in layers]
    for label, levels, colour, dash, custom in (
        ("first tenth of the run", first, GREY, "dot", names),
        ("last tenth", last, BLUE, "solid", "of the first"),
    ):
        figure.add_trace(
            "scatter", y=list(map(series.rounded, levels)), name=label, mode="lines+markers", marker={"size": 6},
            line={"color": colour, "width": 1.8, "dash": dash},
            customdata=custom, hovertemplate="%{customdata}: %{y:,.3g}<extra></extra>",
        )  # fmt: skip
    known = [level for level in (*first, *last) if level]
    eps = signals.eps
    if eps and known and min(known) < _NEAR_EPS * eps:
        line = {"color": BLACK, "width": 1.3, "dash": "dash"}
        figure.add_level([0, len(layers) - 1], eps, f"the optimizer's eps, {eps:g}", line=line, meta=[])
        known.append(eps)
    figure.log_axis("gradient of an element", known)
    every = max(1, len(layers) // 12)
    figure.update_xaxes(
        title={"text": "weights, from the input to the output"}, range=[-0.5, len(layers) - 0.5],
        tickvals=list(range(0, len(layers), every)), tickangle=-30,
        ticktext=[short(layer.name, 20) for layer in layers[::every]],
    )  # fmt: skip
    figure.set_columns("parameter", "when", "gradient of an element")
    head = ("parameter", "first tenth", "last tenth")
    rows = [(layer.name, number(a), number(b)) for layer, a, b in zip(layers, first, last, strict=True)]
    apart = -(-len(rows) // _MOST_TABLE_ROWS)
    note = f"one in {apart} of {len(rows):,} weights" if apart > 1 else ""
    table = Table(head, rows[::apart], note)
    return Chart("depth", "Along depth", _CAPTION, figure.to_json(), _summary(layers, last), table)


def _level(layer: Layer, end: int) -> float | None:
    """The median gradient of an element in the first tenth (0) or the last (-1); None where it is 0."""
    count = max(1, len(layer.gradients) // 10)
    part = layer.gradients[:count] if end == 0 else layer.gradients[-count:]
    return statistics.median(part) or None if part else None


def _summary(layers: Sequence[Layer], levels: Levels) -> str:
    known = [(level, layer.name) for level, layer in zip(levels, layers, strict=True) if level]
    if not known:
        return "No weight had a gradient in the last tenth of the run."
    (low, smallest), (high, largest) = min(known), max(known)
    return (
        f"In the last tenth of the run an element's gradient is {number(low)} in {smallest} and {number(high)} in "
        f"{largest}, {number(high / low)} times as much."
    )


_CAPTION = (
    "The root mean square of an element of each weight's gradient, in the order in which the forward uses them. A line "
    "that falls steeply towards the input is a gradient that vanishes on its way down; one that rises towards it "
    "explodes."
)
