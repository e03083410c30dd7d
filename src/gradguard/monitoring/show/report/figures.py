"""Figures over time: the norms with the loss beneath, of one run and of several."""

import html
import math
import statistics
from collections.abc import Sequence
from itertools import compress
from typing import Any

from gradguard.monitoring.judge.numbers import number, plain_threshold
from gradguard.monitoring.judge.recommend import Recommendation
from gradguard.monitoring.judge.verdict import Verdict
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.lines import Lines, without_none
from gradguard.monitoring.record.steps import nonfinite_on, rules_on
from gradguard.monitoring.show.report import series
from gradguard.monitoring.show.report.figure import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RUN_LINES,
    VERMILION,
    Chart,
    Figure,
    Table,
    steps_between,
    subplots,
)

_MOST_MARKERS = 200
_TABLE_ROWS = 12
_WHOLE = 3  # so many steps for each point are still drawn one by one: a lone spike is easier to see in a line
_SEVERITIES = (
    ("error", "error", "triangle-down", VERMILION),
    ("warning", "warning", "diamond", ORANGE),
    ("info", "event", "circle-open", PURPLE),
)


def norms_over_time(record: Record, verdict: Verdict, advice: Recommendation, most: int) -> Chart | None:
    """Pre-clip and post-clip norms on a log axis with thresholds and events, and the loss beneath.

    Args:
        record: The record of a run.
        verdict: Its verdict.
        advice: Its recommended threshold.
        most: How many points a line may have.

    Returns:
        The chart, or None where neither a finite norm nor a loss was recorded.
    """
    rows = _known_rows([record])
    if not rows:
        return None
    figure = subplots([0.66, 0.34] if len(rows) == 2 else [1.0], height=540 if len(rows) == 2 else 340)
    if "norm" in rows:
        _add_norms(figure, record, verdict, advice, most)
    if "loss" in rows:
        _add_band(figure, record, "loss", "loss", PURPLE, most, row=len(rows))
    _finish_axes(figure, [record], rows)
    summary = (
        f"Gradient norm before clipping over {steps_between(record.steps[0]['i'], record.steps[-1]['i'])}: "
        f"median {number(verdict.median_norm)}, largest {number(verdict.max_norm)}; final loss "
        f"{number(verdict.final_loss)}."
    )
    return Chart("norms", "Norms over time", _NORMS, figure.to_json(), summary, _windows_table(record), over_steps=True)


def updates_over_time(record: Record, most: int) -> Chart | None:
    """The change by each step over the norm of the weights, on a log axis, with the largest attention logit beneath.

    Args:
        record: The record of a run.
        most: How many points a line may have.

    Returns:
        The chart, or None where neither was measured.
    """
    rows = [key for key in ("update", "logit") if any(_known(record.steps, key))]
    if not rows:
        return None
    figure = subplots([1 / len(rows)] * len(rows), height=60 + 200 * len(rows))
    for row, (key, label) in enumerate(compress(_UPDATES, [key in rows for key, _ in _UPDATES]), start=1):
        _add_band(figure, record, key, label, BLUE if key == "update" else PURPLE, most, row=row)
        figure.update_yaxes(row, title={"text": label})
    if "update" in rows:
        figure.log_axis("update / weight", [value for value in _known(record.steps, "update") if value > 0])
    figure.over_steps([record])
    words = [f"{label}: median {number(_median(record.steps, key))}" for key, label in _UPDATES if key in rows]
    head = ("steps", *(f"{label}, median" for _, label in _UPDATES))
    windows = [record.steps[place.start : place.stop] for place in series.buckets(len(record.steps), _TABLE_ROWS)]
    table = [
        (f"{steps[0]['i']:,} to {steps[-1]['i']:,}", *(number(_median(steps, key)) for key, _ in _UPDATES))
        for steps in windows
    ]
    return Chart(
        "updates", "What steps do to the weights", _UPDATES_CAPTION, figure.to_json(), f"{'; '.join(words)}.",
        Table(head, table), over_steps=True,
    )  # fmt: skip


def overlay(records: Sequence[Record], labels: Sequence[str], most: int) -> Chart | None:
    """The norms and the losses of several runs in one plot.

    Args:
        records: The records.
        labels: What to call them.
        most: How many points a line may have.

    Returns:
        The chart, or None where no run has a norm or a loss.
    """
    rows = _known_rows(records)
    if not rows:
        return None
    figure = subplots([1 / len(rows)] * len(rows), height=300 * len(rows))
    for row, key in enumerate(rows, start=1):
        for index, (record, label) in enumerate(zip(records, labels, strict=True)):
            look = RUN_LINES[index % len(RUN_LINES)]
            _add_line(figure, record, key, label, look, most, row=row, in_legend=row == 1)
    _finish_axes(figure, records, rows)
    figure.update_layout(legend={"groupclick": "togglegroup"})
    summary = f"Gradient norms before clipping and losses of {', '.join(labels)}, on one time axis."
    table = _overlay_table(records, labels)
    return Chart("overlay", "Norms and losses", _OVERLAY, figure.to_json(), summary, table, over_steps=True)


def clips_norms(record: Record) -> bool:
    """Whether the thresholds of a record are thresholds of global norms, which belong on an axis of norms.

    Args:
        record: The record of a run.

    Returns:
        True where every threshold is one.
    """
    thresholds = [threshold is not None for threshold in record.steps.column("threshold")]
    return any(thresholds) and all(rule == "norm" for rule in compress(rules_on(record.steps), thresholds))


def _add_norms(figure: Figure, record: Record, verdict: Verdict, advice: Recommendation, most: int) -> None:
    label = "norm before clipping" if verdict.clipping else "gradient norm"
    if verdict.clipping:  # drawn first and wider, because the two lines coincide wherever clipping does not bind
        _add_band(figure, record, "post_norm", "norm after clipping", ORANGE, most, width=2.8)
    _add_band(figure, record, "norm", label, BLUE, most)
    if clips_norms(record):
        figure.add_line(
            *series.line(record, "threshold", most), "threshold in use", BLACK, "step %{x:,}: threshold %{y:.3g}",
            dash="dash", shape="hv",
        )  # fmt: skip
    if advice.threshold:
        figure.add_level(
            [record.steps[0]["i"], record.steps[-1]["i"]], advice.threshold,
            f"recommended: {plain_threshold(advice.threshold)}", line={"color": GREEN, "width": 2, "dash": "dot"},
        )  # fmt: skip
    _add_marks(figure, record, verdict)


def _add_band(
    figure: Figure, record: Record, key: str, label: str, colour: str, most: int, *, row: int = 1, width: float = 1.3
) -> None:
    """The median of each bucket as a line, and from the smallest to the largest as a band where it was thinned."""
    count = sum(record.steps.has(key))
    band = series.band(record, key, count if count <= _WHOLE * most else most, positive=key != "loss")
    if not any(value is not None for value in band.middle):
        return
    ends, customdata = "", None
    if band.thinned:
        figure.add_area(*series.outline(band), colour, key, row)
        ends = "<br>%{customdata[0]:.3g} to %{customdata[1]:.3g} around it"
        customdata = list(zip(band.low, band.high, strict=True))
    figure.add_line(
        band.steps, band.middle, label, colour, f"step %{{x:,}}: {label} %{{y:.3g}}{ends}", row=row, width=width,
        customdata=customdata, legendgroup=key,
    )  # fmt: skip


def _add_line(
    figure: Figure, record: Record, key: str, label: str, look: tuple[str, str], most: int, *, row: int, in_legend: bool
) -> None:
    x, y = series.line(record, key, most)
    if not any(value is not None for value in y):
        x, y = [None], [None]  # the run keeps its place in the legend
    name, (colour, dash) = html.escape(label), look
    figure.add_line(
        x, y, name, colour, f"{name}<br>step %{{x:,}}: {key} %{{y:.4g}}", row=row, dash=dash, legendgroup=label,
        showlegend=in_legend,
    )  # fmt: skip


def _add_marks(figure: Figure, record: Record, verdict: Verdict) -> None:
    above = 1.6 * (verdict.max_norm or 1.0)
    lost = compress(record.steps.column("i"), nonfinite_on(record.steps))
    nonfinite = [(i, f"step {i:,}: non-finite gradients") for i in lost]
    _add_markers(figure, nonfinite, "non-finite step", "x", VERMILION, above)
    for severity, label, symbol, colour in _SEVERITIES:
        found = [
            (event["i"], f"step {event['i']:,}: {_event_text(event)}")
            for event in record.events
            if event.get("kind") != "nonfinite" and event.get("severity", "info") == severity  # marked already
        ]
        _add_markers(figure, found, label, symbol, colour, 1.8 * above)


def _add_markers(
    figure: Figure, marks: list[tuple[int, str]], label: str, symbol: str, colour: str, height: float
) -> None:
    marks = marks[:: max(1, -(-len(marks) // _MOST_MARKERS))]
    if marks and height < math.inf:
        x, text = map(list, zip(*marks, strict=True))
        marker = {"symbol": symbol, "color": colour, "size": 8, "line": {"width": 1.5, "color": colour}}
        figure.add_trace(
            "scatter", x=x, y=[height] * len(x), text=text, mode="markers", name=label, marker=marker,
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip


def _event_text(event: dict[str, Any]) -> str:
    text = str(event.get("message") or event.get("kind") or "event")
    return html.escape(text if len(text) <= 120 else f"{text[:120]}…")


def _finish_axes(figure: Figure, records: Sequence[Record], rows: Sequence[str]) -> None:
    if "norm" in rows:
        norms = [norm for record in records for norm in record.steps.column("norm") if (norm or 0.0) > 0]
        figure.log_axis("gradient norm", norms)
    if "loss" in rows:  # cut where a few huge losses would flatten all others
        ends = series.loss_range(records)
        title = {"text": "loss" if ends is None else "loss (peaks cut)"}
        figure.update_yaxes(len(rows), title=title, range=ends)
    figure.over_steps(records)


def _windows_table(record: Record) -> Table:
    head = ("steps", "norm: smallest", "median", "largest", "after clipping: largest", "loss: median", "non-finite")
    places = series.buckets(len(record.steps), _TABLE_ROWS)
    return Table(head, [_window_row(record.steps[place.start : place.stop]) for place in places])


def _window_row(steps: Lines) -> tuple[str, ...]:
    norms, after = _known(steps, "norm"), _known(steps, "post_norm")
    return (
        f"{steps[0]['i']:,} to {steps[-1]['i']:,}",
        number(min(norms, default=None)),
        number(_median(steps, "norm")),
        number(max(norms, default=None)),
        number(max(after, default=None)),
        number(_median(steps, "loss")),
        f"{sum(nonfinite_on(steps)):,}",
    )


def _overlay_table(records: Sequence[Record], labels: Sequence[str]) -> Table:
    head = ("run", *(f"{part} of the run: {what}" for part in ("first third", "last third") for what in _MEDIANS))
    rows = []
    for record, label in zip(records, labels, strict=True):
        third = max(1, len(record.steps) // 3)
        parts = (record.steps[:third], record.steps[-third:])
        rows.append((label, *(number(_median(part, key)) for part in parts for key in ("norm", "loss"))))
    return Table(head, rows)


def _known_rows(records: Sequence[Record]) -> list[str]:
    """The quantities that some record has, each of which gets a row."""
    return [key for key in ("norm", "loss") if any(_known(record.steps, key) for record in records)]


def _median(steps: Lines, key: str) -> float | None:
    known = _known(steps, key)
    return statistics.median_high(known) if known else None


def _known(steps: Lines, key: str) -> list[float]:
    return without_none(steps.column(key))


_UPDATES = (("update", "update / weight"), ("logit", "largest attention logit"))
_UPDATES_CAPTION = (
    "Of an optimizer that divides by the size of gradients, steps at one learning rate have one length: where they "
    "become longer, the loss often follows."
)
_MEDIANS = ("median norm", "median loss")
_NORMS = "A spike is a norm far above its neighbours. The loss shares the time axis: does it jump after one?"
_OVERLAY = "All runs on one time axis; norms are before any clip."
