"""Plotly figures, one function each; a function returns None where the record holds nothing to draw."""

import html
import itertools
import math
from typing import TYPE_CHECKING, Any

from gradguard.watch.recommend import Recommendation
from gradguard.watch.record import Record
from gradguard.watch.report import series
from gradguard.watch.report.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION, subplots
from gradguard.watch.verdict import Verdict, is_nonfinite, number, plain_threshold

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_MOST_MARKERS = 200
_RUN_COLOURS = (VERMILION, BLUE, GREEN, PURPLE, ORANGE, BLACK)


def norms_over_time(record: Record, verdict: Verdict, recommendation: Recommendation) -> "Figure | None":
    """Pre-clip and post-clip norms on a log axis with thresholds and faults, and the loss beneath.

    Args:
        record: The record of a run.
        verdict: Its verdict.
        recommendation: Its recommended threshold.

    Returns:
        The figure, or None where neither a finite norm nor a loss was recorded.
    """
    rows = [key for key in ("norm", "loss") if any(step.get(key) is not None for step in record.steps)]
    if not rows:
        return None
    heights = [0.66, 0.34] if len(rows) == 2 else [1.0]
    figure = subplots(heights, height=520 if len(rows) == 2 else 340)
    if "norm" in rows:
        _add_norms(figure, record, verdict, recommendation)
    if "loss" in rows:
        _add_loss(figure, record, row=len(rows))
        _cut_loss_axis(figure, [record], row=len(rows))
    figure.update_xaxes(range=_step_range([record]))
    figure.update_xaxes(title_text="optimizer step", row=len(rows), col=1)
    return figure


def losses(records: list[Record], labels: list[str]) -> "Figure | None":
    """The losses of several runs in one plot.

    Args:
        records: The records.
        labels: What to call them.

    Returns:
        The figure, or None where no run has a loss.
    """
    if not any(step.get("loss") is not None for record in records for step in record.steps):
        return None
    figure = subplots([1.0], height=340)
    for index, (record, label) in enumerate(zip(records, labels, strict=True)):
        _add_loss(figure, record, row=1, label=html.escape(label), colour=_RUN_COLOURS[index % len(_RUN_COLOURS)])
    figure.update_xaxes(title_text="optimizer step", range=_step_range(records))
    _cut_loss_axis(figure, records, row=1)
    return figure


def clip_share(record: Record, verdict: Verdict, recommendation: Recommendation) -> "Figure | None":
    """How often clipping bound, window by window, with the regimes shaded.

    Args:
        record: The record of a run.
        verdict: Its verdict.
        recommendation: Its threshold, used for a run that did not clip.

    Returns:
        The figure, or None where there is neither a clip nor a threshold to try.
    """
    if not verdict.clipping and recommendation.threshold is None:
        return None
    steps, shares, sizes = series.clip_windows(record, None if verdict.clipping else recommendation.threshold)
    if not steps:
        return None
    figure = subplots([1.0], height=260)
    top = min(1.0, max(0.08, 1.25 * max(shares)))
    colour = {"color": BLUE} if verdict.clipping else {"color": "white", "line": {"color": GREEN, "width": 1.5}}
    hover = "steps from %{x}: %{y:.1%} of %{customdata} steps<extra></extra>"
    width = [stop - start for start, stop in zip(steps, [*steps[1:], record.steps[-1]["i"] + 1], strict=True)]
    figure.add_bar(
        x=steps, y=shares, customdata=sizes, width=width, offset=0, marker=colour, hovertemplate=hover, showlegend=False
    )  # fmt: skip
    _shade_regimes(figure, top)
    verb = "share that binds" if verdict.clipping else "would have bound"
    figure.update_yaxes(title_text=verb, tickformat=".0%", range=[0, top])
    figure.update_xaxes(title_text="optimizer step", range=_step_range([record]))
    return figure


def norm_histogram(record: Record, verdict: Verdict, recommendation: Recommendation) -> "Figure | None":
    """The distribution of the pre-clip norms, with the candidate thresholds drawn in.

    Args:
        record: The record of a run.
        verdict: Its verdict.
        recommendation: Its candidate thresholds.

    Returns:
        The figure, or None without a positive norm.
    """
    logs = [math.log10(step["norm"]) for step in record.steps if step.get("norm")]
    if not logs:
        return None
    figure = subplots([1.0], height=320)
    low, width, counts = _bins(logs)
    edges = [10 ** (low + width * index) for index in range(len(counts) + 1)]
    ranges = [f"{number(a)} to {number(b)}" for a, b in itertools.pairwise(edges)]
    centres = [low + width * (index + 0.5) for index in range(len(counts))]
    hover = "norm %{customdata}: %{y} steps<extra></extra>"
    bars = {"color": BLUE, "opacity": 0.75, "line": {"color": "white", "width": 1}}
    figure.add_bar(
        x=centres, y=counts, width=width, marker=bars, customdata=ranges, hovertemplate=hover, showlegend=False
    )  # fmt: skip
    marks = _histogram_marks(record, verdict, recommendation)
    _draw_marks(figure, marks)
    span = [*logs, *(math.log10(mark[1]) for mark in marks)]
    figure.update_xaxes(title_text="pre-clip gradient norm", **_log_ticks(min(span) - width, max(span) + 2 * width))
    figure.update_yaxes(
        title_text="steps (log scale)", type="log", range=[-0.3, math.log10(max(counts)) + 0.5], dtick=1
    )
    figure.update_layout(bargap=0)
    return figure


def _add_norms(figure: "Figure", record: Record, verdict: Verdict, recommendation: Recommendation) -> None:
    label = "norm before clipping" if verdict.clipping else "gradient norm"
    if verdict.clipping:  # drawn first and wider, because the two lines coincide wherever clipping does not bind
        _add_line(figure, record, "post_norm", "norm after clipping", ORANGE, width=3.5)
    _add_line(figure, record, "norm", label, BLUE)
    if _clips_norms(record):
        _add_line(figure, record, "threshold", "threshold in use", BLACK, dash="dash", shape="hv")
    if recommendation.threshold:
        _add_recommended(figure, record, recommendation.threshold)
    _add_faults(figure, record, verdict)
    decades = [math.log10(step["norm"]) for step in record.steps if step.get("norm")]
    dtick = 1 if decades and max(decades) - min(decades) >= 2 else None
    figure.update_yaxes(title_text="gradient norm", type="log", tickformat="~g", dtick=dtick, row=1, col=1)


def _add_line(figure: "Figure", record: Record, key: str, label: str, colour: str, **style: Any) -> None:
    x, y = series.line(record, key)
    if x:
        hover = f"step %{{x}}: {label} %{{y:.3g}}<extra></extra>"
        marker = {"mode": "lines" if len(x) > 1 else "markers", "marker": {"color": colour, "size": 7}}
        figure.add_scatter(
            x=x, y=y, name=label, line={"color": colour, "width": 1.3} | style, hovertemplate=hover,
            row=1, col=1, **marker,
        )  # fmt: skip


def _add_recommended(figure: "Figure", record: Record, threshold: float) -> None:
    figure.add_scatter(
        x=[record.steps[0]["i"], record.steps[-1]["i"]], y=[threshold] * 2, mode="lines", row=1, col=1,
        name=f"recommended: {plain_threshold(threshold)}", hoverinfo="skip",
        line={"color": GREEN, "width": 2, "dash": "dot"},
    )  # fmt: skip


def _add_faults(figure: "Figure", record: Record, verdict: Verdict) -> None:
    above = 1.6 * (verdict.max_norm or 1.0)
    nonfinite = [(step["i"], f"step {step['i']}: non-finite") for step in record.steps if is_nonfinite(step)]
    events = [(event["i"], f"step {event['i']}: {_event_text(event)}") for event in record.events]
    for marks, label, symbol, colour, height in (
        (nonfinite, "non-finite step", "x", VERMILION, above),
        (events, "event", "triangle-down-open", PURPLE, 1.8 * above),
    ):
        marks = marks[:: max(1, -(-len(marks) // _MOST_MARKERS))]
        if marks:
            x, text = map(list, zip(*marks, strict=True))
            marker = {"symbol": symbol, "color": colour, "size": 8, "line": {"width": 1.5, "color": colour}}
            figure.add_scatter(
                x=x, y=[height] * len(x), text=text, mode="markers", name=label, hovertemplate="%{text}<extra></extra>",
                marker=marker, row=1, col=1,
            )  # fmt: skip


def _event_text(event: dict[str, Any]) -> str:
    return html.escape(str(event.get("message") or event.get("kind") or "event"))


def _add_loss(figure: "Figure", record: Record, row: int, label: str = "loss", colour: str = PURPLE) -> None:
    x, y = series.line(record, "loss")
    if not any(value is not None for value in y):
        return
    hover = f"step %{{x}}: {label} %{{y:.4g}}<extra></extra>"
    figure.add_scatter(
        x=x, y=y, name=label, mode="lines" if len(x) > 1 else "markers", row=row, col=1, hovertemplate=hover,
        line={"color": colour, "width": 1.3}, marker={"color": colour, "size": 7},
    )  # fmt: skip
    figure.update_yaxes(title_text="loss", row=row, col=1)


def _cut_loss_axis(figure: "Figure", records: list[Record], row: int) -> None:
    """Cut the axis where a few huge losses would flatten all others, and say so."""
    ends = series.loss_range(records)
    if ends is not None:
        figure.update_yaxes(range=ends, title_text="loss (peaks cut)", row=row, col=1)


def _shade_regimes(figure: "Figure", top: float) -> None:
    bands = (
        (0, 0.05, "guard", "#e3f4ee"),
        (0.05, 0.5, "shaping", "#fdf3dc"),
        (0.5, 1, "normalising", "#fbe6dc"),
    )
    for low, high, name, colour in bands:
        if low < top:
            figure.add_hrect(y0=low, y1=min(high, top), fillcolor=colour, line_width=0, layer="below")
            height = (low + min(high, top)) / 2
            figure.add_annotation(
                x=1,
                xref="paper",
                xanchor="left",
                y=height,
                text=f" {name}",
                showarrow=False,
                font={"size": 11},
            )
    figure.update_layout(margin={"r": 90})


def _bins(logs: list[float]) -> tuple[float, float, list[int]]:
    low, high = min(logs), max(logs)
    bins = max(1, min(80, round(2 * math.sqrt(len(logs))))) if high > low else 1
    width = (high - low) / bins or 0.1
    counts = [0] * bins
    for value in logs:
        counts[min(bins - 1, int((value - low) / width))] += 1
    return low, width, counts


def _histogram_marks(record: Record, verdict: Verdict, recommendation: Recommendation) -> list[tuple[str, float, str]]:
    colours = {"guard": GREEN, "shaping": ORANGE, "reference": PURPLE}
    marks = [(item.name, item.threshold, colours[item.name]) for item in recommendation.candidates]
    if verdict.threshold and _clips_norms(record):
        marks.append(("in use", verdict.threshold, BLACK))
    return sorted(marks, key=lambda mark: mark[1])


def _draw_marks(figure: "Figure", marks: list[tuple[str, float, str]]) -> None:
    for index, (name, threshold, colour) in enumerate(marks):
        x = math.log10(threshold)
        figure.add_vline(x=x, line={"color": colour, "width": 2, "dash": "dash" if name == "in use" else "solid"})
        figure.add_annotation(
            x=x, y=1, yref="paper", yanchor="bottom", yshift=16 * (index % 2),
            text=f"{name} {plain_threshold(threshold)}", showarrow=False, font={"color": colour, "size": 12},
        )  # fmt: skip


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    digits = (1,) if high - low > 4 else (1, 3) if high - low > 1.5 else (1, 2, 3, 5, 7)
    decades = range(math.floor(low), min(math.ceil(high), 308), max(1, round((high - low) / 12)))
    values = [digit * 10.0**decade for decade in decades for digit in digits]
    return {"range": [low, high], "tickvals": [math.log10(v) for v in values], "ticktext": [f"{v:g}" for v in values]}


def _clips_norms(record: Record) -> bool:
    # Only thresholds of global norms belong on an axis of norms.
    clipping = [step for step in record.steps if step.get("threshold") is not None]
    return bool(clipping) and all(step.get("rule", "norm") == "norm" for step in clipping)


def _step_range(records: list[Record]) -> list[float]:
    ends = [record.steps[place]["i"] for record in records if record.steps for place in (0, -1)]
    margin = 0.01 * (max(ends, default=0) - min(ends, default=0)) + 0.5
    return [min(ends, default=0) - margin, max(ends, default=0) + margin]
