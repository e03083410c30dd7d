"""Draw the page's figures over time and along depth, for one run or several."""

import html
import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from gradguard.monitoring.judge.judgement import Verdict
from gradguard.monitoring.judge.numbers import buckets, median, number, percent, plain_threshold
from gradguard.monitoring.judge.recommend import Recommendation
from gradguard.monitoring.judge.signals import signals_of
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.record_lines import without_none
from gradguard.monitoring.record.step_rows import nonfinite_on, regime_of
from gradguard.monitoring.show.report import series
from gradguard.monitoring.show.report.figure import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    REGIMES,
    RUN_LINES,
    VERMILION,
    Chart,
    Keys,
    Subplot,
    Table,
    area,
    drawing,
    line,
    log_axis,
    short,
    titled,
)

_MOST_MARKERS = 200
_TABLE_ROWS = 12
_MOST_WEIGHTS = 400  # in a table
_WHOLE = 3  # up to this many steps per point, each step is drawn: a single spike is easier to see in a line


class _Series(NamedTuple):
    key: str
    """The name of a step's field."""
    label: str
    colour: str
    width: float = 1.3


class _Plot(NamedTuple):
    title: str
    is_log: bool
    series: tuple[_Series, ...]


_SHARES = (0.6, 0.4)
"""The shares of the height of two rows."""
_NORM = _Plot("gradient norm", True, (_Series("norm", "gradient norm", BLUE),))
_CLIPPED_NORM = _Plot(
    "gradient norm", True,
    # The norm after clipping is drawn first and wider, because the lines coincide if clipping does not bind.
    (_Series("post_norm", "norm after clipping", ORANGE, 2.8), _Series("norm", "norm before clipping", BLUE)),
)  # fmt: skip
_LOSS = _Plot("loss", False, (_Series("loss", "loss", PURPLE),))
_UPDATES = (
    _Plot("update / weight", True, (_Series("update", "update / weight", BLUE),)),
    _Plot("largest attention logit", False, (_Series("logit", "largest attention logit", PURPLE),)),
)
_NORMS_CAPTION = "A spike is a norm far above its neighbours. The loss has the same time axis: does it jump after one?"
_UPDATES_CAPTION = (
    "An optimizer that divides by the size of the gradients makes steps of one length at one learning rate. If the "
    "steps become longer, the loss often rises soon after."
)
_OVERLAY_CAPTION = "All runs on one time axis; norms are before any clip."


def norms_over_time(record: Record, verdict: Verdict, advice: Recommendation, most: int) -> Chart | None:
    """Draw the norms before and after clipping on a log axis with thresholds and events, and the loss below.

    Args:
        record: The record of a run.
        verdict: The verdict on the run.
        advice: The recommendation, which may have a threshold.
        most: The largest number of points in a line.

    Returns:
        The chart; None if neither a finite norm nor a loss was recorded.
    """
    plots = (_CLIPPED_NORM if verdict.clipping else _NORM, _LOSS)
    marks = [*_thresholds(record, advice, most), *_marks(record, 1.7 * (verdict.max_norm or 1.0))]
    return _over_steps("norms", "Norms over time", _NORMS_CAPTION, plots, [record], [""], most, marks)


def updates_over_time(record: Record, most: int) -> Chart | None:
    """Draw the change by each step relative to the norm of the weights, and the largest attention logit below.

    Args:
        record: The record of a run.
        most: The largest number of points in a line.

    Returns:
        The chart; None if neither was measured.
    """
    return _over_steps("updates", "What steps do to the weights", _UPDATES_CAPTION, _UPDATES, [record], [""], most)


def overlay(records: Sequence[Record], labels: Sequence[str], most: int) -> Chart | None:
    """Draw the norms and the losses of several runs in one figure.

    Args:
        records: The records.
        labels: The distinct names of the runs.
        most: The largest number of points in a line.

    Returns:
        The chart; None if no run has a norm or a loss.
    """
    return _over_steps("overlay", "Norms and losses", _OVERLAY_CAPTION, (_NORM, _LOSS), records, labels, most)


def _over_steps(
    name: str, title: str, caption: str, plots: Sequence[_Plot], records: Sequence[Record], labels: Sequence[str],
    most: int, marks: Sequence[Keys] = (),
) -> Chart | None:  # fmt: skip
    """Draw a row for each plot that any record has numbers for; add ``marks`` to the row of norms."""
    rows, drawn = [], []
    for plot in plots:
        traces = [trace for one in plot.series for trace in _lines(one, records, labels, most, is_first=not rows)]
        if traces:
            traces += marks if plot.title == _NORM.title else ()
            rows.append(Subplot(traces, _axis(plot, records), _SHARES[len(rows)]))
            drawn += plot.series
    if not rows:
        return None
    figure = drawing(rows, 60 + 240 * len(rows), steps_axis(records))
    return Chart(name, title, caption, figure, _numbers(records, labels, drawn), over_steps=True)


def _lines(
    one: _Series, records: Sequence[Record], labels: Sequence[str], most: int, *, is_first: bool
) -> Iterator[Keys]:
    """Yield the lines and bands of each record; several records are labelled in the legend of the first row."""
    for record, label, (colour, dash) in zip(records, labels, itertools.cycle(RUN_LINES)):
        if label:
            look: Keys = {"dash": dash, "legendgroup": label, "showlegend": is_first}
            yield from _banded(record, one.key, html.escape(label), colour, most, look)
        else:
            look = {"width": one.width, "legendgroup": one.key}
            yield from _banded(record, one.key, one.label, one.colour, most, look)


def _axis(plot: _Plot, records: Sequence[Record]) -> Keys:
    if plot.is_log:
        columns = [record.steps.column(plot.series[-1].key) for record in records]
        return log_axis(plot.title, [value for column in columns for value in column if (value or 0.0) > 0])
    ends = series.loss_range(records) if plot is _LOSS else None
    return titled(plot.title) if ends is None else titled("loss (peaks cut)", range=ends)


def steps_axis(records: Sequence[Record]) -> Keys:
    """Return a horizontal axis that covers every optimizer step of ``records``, with a margin."""
    ends = [record.steps[place]["i"] for record in records if record.steps for place in (0, -1)]
    low, high = min(ends, default=0), max(ends, default=0)
    margin = 0.01 * (high - low) + 0.5
    return titled("optimizer step", range=[low - margin, high + margin])


def _banded(record: Record, key: str, label: str, colour: str, most: int, look: Keys) -> list[Keys]:
    """Return the medians of the buckets as a line, and their extremes as a band if the steps were thinned."""
    count = sum(record.steps.has(key))
    band = series.band(record, key, count if count <= _WHOLE * most else most, positive=key != "loss")
    if not any(value is not None for value in band.middle):
        return []
    hover = f"step %{{x:,}}: {label} %{{y:.3g}}"
    if not band.thinned:
        return [line(band.steps, band.middle, label, colour, hover, **look)]
    ends = list(zip(band.low, band.high, strict=True))
    hover += "<br>%{customdata[0]:.3g} to %{customdata[1]:.3g} around it"
    return [
        area(*series.outline(band), colour, look["legendgroup"]),
        line(band.steps, band.middle, label, colour, hover, customdata=ends, **look),
    ]


def _thresholds(record: Record, advice: Recommendation, most: int) -> list[Keys]:
    found = []
    known = [threshold is not None for threshold in record.steps.column("threshold")]
    rules = set(compress(record.steps.column("rule"), known))
    if rules and rules <= {"norm", None}:  # a step without a rule was clipped by the norm
        look: Keys = {"dash": "dash", "shape": "hv", "legendgroup": "threshold"}
        found += _banded(record, "threshold", "threshold in use", BLACK, most, look)
    if advice.threshold:
        name = f"recommended: {plain_threshold(advice.threshold)}"
        ends = [record.steps[0]["i"], record.steps[-1]["i"]]
        found.append(line(ends, [advice.threshold] * 2, name, GREEN, name, width=2, dash="dot"))
    return found


_MARKS = {
    "non-finite step": ("x", VERMILION),
    "error": ("triangle-down", VERMILION),
    "warning": ("diamond", ORANGE),
    "info": ("circle-open", PURPLE),
}


def _marks(record: Record, height: float) -> list[Keys]:
    lost = compress(record.steps.column("i"), nonfinite_on(record.steps))
    marks: dict[str, list[tuple[int, str]]] = {name: [] for name in _MARKS}
    marks["non-finite step"] = [(i, "non-finite gradients") for i in lost]
    for event in record.events:
        if event.get("kind") != "nonfinite":  # already among the marks of non-finite steps
            text = str(event.get("message") or event.get("kind") or "event")
            text = html.escape(text if len(text) <= 120 else f"{text[:120]}…")
            marks[event.get("severity", "info")].append((event["i"], text))
    drawn = []
    for name, (symbol, colour) in _MARKS.items():
        shown = marks[name][:: max(1, -(-len(marks[name]) // _MOST_MARKERS))]
        look = {"symbol": symbol, "color": colour, "size": 8, "line": {"width": 1.5, "color": colour}}
        if shown and height < math.inf:
            drawn.append({
                "type": "scatter", "mode": "markers", "name": name, "marker": look, "x": [i for i, _ in shown],
                "y": [height] * len(shown), "text": [f"step {i:,}: {text}" for i, text in shown],
                "hovertemplate": "%{text}<extra></extra>",
            })  # fmt: skip
    return drawn


def _numbers(records: Sequence[Record], labels: Sequence[str], drawn: Sequence[_Series]) -> Table:
    """Return a table of each series' median and largest value in twelve ranges of each run's steps."""
    head = ["steps", *(f"{one.label}: {what}" for one in drawn for what in ("median", "largest"))]
    rows = []
    for record, label in zip(records, labels, strict=True):
        for place in buckets(len(record.steps), _TABLE_ROWS):
            steps = record.steps[place.start : place.stop]
            found = [without_none(steps.column(one.key)) for one in drawn]
            numbers = [number(value) for values in found for value in (median(values), max(values, default=None))]
            where = f"{steps[0]['i']:,} to {steps[-1]['i']:,}"
            rows.append([f"{label}: {where}" if label else where, *numbers])
    return Table(head, rows)


_BINDS = (
    "Each bar is a window of steps. At 0 the clip never acts. Below 5 % it is a guard, up to 50 % it shapes training, "
    "and above 50 % it normalises most steps."
)


def clip_share(record: Record) -> Chart | None:
    """Draw how often clipping bound in each window, in the colours of the regimes.

    Args:
        record: The record of a run that clipped.

    Returns:
        The chart; None if the optimizer took no step.
    """
    windows = series.clip_windows(record)
    if not windows:
        return None
    top = min(1.0, max(0.08, 1.25 * max(window.share for window in windows)))
    bars = []
    for regime, colour in REGIMES.items():
        own = [window for window in windows if regime_of(window.share) == regime]
        # A window in which no clip bound gets a thin bar, because it was measured and is not a gap.
        bars.append({
            "type": "bar", "name": regime, "offset": 0, "marker": {"color": colour, "line": {"width": 0}},
            "x": [window.first for window in own],
            "y": [max(window.share, 0.006 * top) for window in own],
            "width": [window.last - window.first + 1 for window in own],
            "customdata": [[window.count, percent(window.share)] for window in own],
            "hovertemplate": "steps from %{x:,}: %{customdata[1]} of %{customdata[0]:,} steps",
            "showlegend": bool(own),
        })  # fmt: skip
    axis = titled("share that binds", tickformat=".0%", range=[0, top], nticks=6)
    figure = drawing([Subplot(bars, axis)], 270, steps_axis([record]), barmode="overlay")
    rows = [(f"{one.first:,} to {one.last:,}", percent(one.share), regime_of(one.share)) for one in windows]
    table = Table(("steps", "share", "regime"), rows)
    return Chart("clip-share", "How often clipping binds", _BINDS, figure, table, over_steps=True)


_FEWEST_LAYERS = 3
_NEAR_EPS = 1e3
"""The line of the optimizer's ``eps`` is drawn if a gradient is below ``eps`` times this factor."""
_DEPTH = (
    "The root mean square of the elements of each weight's gradient. The weights are in the order in which the forward "
    "uses them. If the line falls steeply towards the input, the gradient vanishes on its way there. If it rises "
    "towards the input, the gradient explodes."
)


def along_depth(record: Record) -> Chart | None:
    """Draw the usual root mean square of each weight's gradient, from the input to the output.

    The chart has one line for the first tenth of the run and one for the last. It shows the root mean square of the
    elements, and not the norm of the tensor: the values of large and small weights are then comparable.

    Args:
        record: The record of one optimizer's steps.

    Returns:
        The chart; None if fewer than three weights were recorded.
    """
    signals = signals_of(record)
    layers, eps = signals.layers, signals.eps
    if len(layers) < _FEWEST_LAYERS:
        return None
    names = [html.escape(layer.name) for layer in layers]
    places, hover = list(range(len(layers))), "%{customdata}: %{y:,.3g}"
    tenths = [max(1, len(layer.gradients) // 10) for layer in layers]
    first = [_level(layer.gradients[:tenth]) for layer, tenth in zip(layers, tenths, strict=True)]
    last = [_level(layer.gradients[-tenth:]) for layer, tenth in zip(layers, tenths, strict=True)]
    traces = [
        line(places, first, "first tenth of the run", GREY, hover, dash="dot", customdata=names, mode="lines+markers"),
        line(places, last, "last tenth", BLUE, hover, customdata=names, mode="lines+markers"),
    ]
    known = [level for level in (*first, *last) if level]
    if eps and known and min(known) < _NEAR_EPS * eps:
        name = f"the optimizer's eps, {eps:g}"
        traces.append(line([0, len(layers) - 1], [eps] * 2, name, BLACK, name, dash="dash"))
        known.append(eps)
    every = max(1, len(layers) // 12)
    axis = titled(
        "weights, from the input to the output", tickvals=places[::every], tickangle=-30,
        ticktext=[short(layer.name, 20) for layer in layers[::every]], range=[-0.5, len(layers) - 0.5],
    )  # fmt: skip
    figure = drawing([Subplot(traces, log_axis("gradient of an element", known))], 360, axis)
    rows = [(layer.name, number(a), number(b)) for layer, a, b in zip(layers, first, last, strict=True)]
    apart = -(-len(rows) // _MOST_WEIGHTS)
    note = f"one in {apart} of {len(rows):,} weights" if apart > 1 else ""
    return Chart(
        "depth", "Along depth", _DEPTH, figure, Table(("parameter", "first tenth", "last tenth"), rows[::apart], note)
    )


def _level(gradients: Sequence[float]) -> float | None:
    """Return the median of some gradients, rounded; None if it is 0."""
    return series.rounded(median(gradients)) or None
