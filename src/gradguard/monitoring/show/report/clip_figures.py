"""Figures about clipping: how often it binds, how hard, and where candidate thresholds lie."""

import itertools
import math
import statistics
from typing import Any

from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.judge.recommend import Recommendation
from gradguard.monitoring.judge.verdict import Verdict
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import regime_of
from gradguard.monitoring.show.report import series
from gradguard.monitoring.show.report.figure import (
    BLACK,
    BLUE,
    GREEN,
    REGIMES,
    Chart,
    Figure,
    Table,
    subplots,
)
from gradguard.monitoring.show.report.figures import clips_norms

_TABLE_ROWS = 20
_BANDS = ((0, 0.05, "guard"), (0.05, 0.5, "shaping"), (0.5, 1, "normalising"))
_QUANTILES = (("smallest", 0.0), ("1 %", 0.01), ("10 %", 0.1), ("median", 0.5), ("90 %", 0.9), ("99 %", 0.99))


def clip_share(record: Record, verdict: Verdict, advice: Recommendation) -> Chart | None:
    """How often clipping bound, window by window, with the regimes shaded.

    Args:
        record: The record of a run.
        verdict: Its verdict.
        advice: Its threshold, used for a run that did not clip.

    Returns:
        The chart, or None where there is neither a clip nor a threshold to try.
    """
    threshold = None if verdict.clipping else advice.threshold
    if not verdict.clipping and threshold is None:
        return None
    windows = series.clip_windows(record, threshold)
    if not windows:
        return None
    figure, top = subplots([1.0], height=270), min(1.0, max(0.08, 1.25 * max(window.share for window in windows)))
    for regime, (_, colour) in REGIMES.items():
        _add_windows(figure, [window for window in windows if regime_of(window.share) == regime], regime, colour, top)
    _shade_regimes(figure, top)
    verb = "share that binds" if verdict.clipping else "would have bound"
    figure.update_yaxes(title={"text": verb}, tickformat=".0%", range=[0, top], nticks=6)
    figure.over_steps([record])
    figure.update_layout(barmode="overlay", showlegend=False, margin={"t": 12})
    figure.set_columns("first step", "last step", "steps", "share", "regime")
    words = ", ".join(f"{count} {regime}" for regime, count in _counts(windows).items() if count)
    title = (
        "How often clipping binds" if threshold is None else f"How often {plain_threshold(threshold)} would have bound"
    )
    rows = series.clip_windows(record, threshold, _TABLE_ROWS)
    table = Table(
        ("steps", "share", "regime"),
        [(f"{row.first:,} to {row.last:,}", percent(row.share), regime_of(row.share)) for row in rows],
    )
    caption = _BINDS if threshold is None else _WOULD_HAVE
    summary = f"{len(windows)} windows of the run by regime: {words}."
    return Chart("clip-share", title, caption, figure.to_json(), summary, table, over_steps=True)


def norm_histogram(record: Record, verdict: Verdict, advice: Recommendation) -> Chart | None:
    """The distribution of the pre-clip norms, with the candidate thresholds drawn in.

    Args:
        record: The record of a run.
        verdict: Its verdict.
        advice: Its candidate thresholds.

    Returns:
        The chart, or None without a positive norm.
    """
    norms = sorted(norm for norm in record.steps.column("norm") if (norm or 0.0) > 0)
    spread = series.log_histogram(norms)
    if spread is None:
        return None
    figure, width = subplots([1.0], height=330), spread.edges[1] - spread.edges[0]
    _add_bins(figure, spread, BLUE, "norm")
    marks = _histogram_marks(record, verdict, advice)
    _draw_marks(figure, marks)
    span = [spread.edges[0], spread.edges[-1], *(math.log10(mark[1]) for mark in marks)]
    figure.update_xaxes(
        title={"text": "gradient norm before clipping"}, **_log_ticks(min(span) - width, max(span) + 2 * width)
    )
    top = math.log10(max(spread.counts)) + 0.5
    figure.update_yaxes(title={"text": "steps (log scale)"}, type="log", range=[-0.3, top], dtick=1, tickformat=",d")
    figure.update_layout(bargap=0, margin={"t": 48})
    words = ", ".join(f"{name} {plain_threshold(threshold)}" for name, threshold, _ in marks)
    summary = (
        f"The median of {len(norms):,} norms is {number(statistics.median(norms))}. Thresholds: {words or 'none'}."
    )
    return Chart("distribution", "Distribution of norms", _HISTOGRAM, figure.to_json(), summary, _quantiles(norms))


def _counts(windows: list[series.BindingWindow]) -> dict[str, int]:
    found = [regime_of(window.share) for window in windows]
    return {regime: found.count(regime) for regime in REGIMES}


def _add_windows(figure: Figure, windows: list[series.BindingWindow], regime: str, colour: str, top: float) -> None:
    # A window without a single clip is a line on the axis: it was measured, and is not a gap.
    hover = "steps from %{x:,}: %{customdata[1]} of %{customdata[0]:,} steps<extra>" + regime + "</extra>"
    figure.add_trace(
        "bar",
        x=[window.first for window in windows],
        y=[max(window.share, 0.006 * top) for window in windows],
        width=[window.last - window.first + 1 for window in windows],
        customdata=[[window.count, percent(window.share)] for window in windows],
        meta=[[window.first, window.last, window.count, round(window.share, 4), regime] for window in windows],
        offset=0, marker={"color": colour, "line": {"width": 0}}, hovertemplate=hover, name=regime,
    )  # fmt: skip


def _shade_regimes(figure: Figure, top: float) -> None:
    for low, high, name in _BANDS:
        if low < top:
            shade = REGIMES[name][0]
            figure.add_shape(
                type="rect", xref="x domain", x0=0, x1=1, y0=low, y1=min(high, top), fillcolor=shade,
                line={"width": 0}, layer="below",
            )  # fmt: skip
            _label_regime(figure, name, (low + min(high, top)) / 2)
    _label_regime(figure, "never", 0.0, down=9)
    figure.update_layout(margin={"r": 90})


def _label_regime(figure: Figure, name: str, height: float, down: int = 0) -> None:
    figure.add_annotation(
        x=1,
        xref="paper",
        xanchor="left",
        y=height,
        yshift=-down,
        text=f"\u00a0\u00a0\u00a0{name}",
        font={"size": 11},
    )


def _add_bins(figure: Figure, spread: series.Histogram, colour: str, what: str) -> None:
    figure.set_columns(f"{what} from", "to", "steps")
    pairs = list(itertools.pairwise(spread.edges))
    figure.add_trace(
        "bar",
        x=[round((low + high) / 2, 5) for low, high in pairs], y=spread.counts, width=pairs[0][1] - pairs[0][0],
        meta=[[*map(_four, pair), count] for pair, count in zip(pairs, spread.counts, strict=True)],
        marker={"color": colour, "line": {"width": 0}}, showlegend=False,
        customdata=[f"{number(10**low)} to {number(10**high)}" for low, high in pairs],
        hovertemplate=what + " %{customdata}: %{y:,} steps<extra></extra>",
    )  # fmt: skip


def _four(logarithm: float) -> float:
    return float(f"{10**logarithm:.4g}")


def _quantiles(values: list[float]) -> Table:
    found = {name: values[int(share * (len(values) - 1))] for name, share in _QUANTILES}
    found |= {"median": statistics.median(values), "largest": values[-1]}
    rows = [(name, number(value)) for name, value in found.items()]
    return Table(("quantile", "value"), rows, f"{len(values):,} steps")


def _histogram_marks(record: Record, verdict: Verdict, advice: Recommendation) -> list[tuple[str, float, str]]:
    marks = [] if advice.threshold is None else [("recommended", advice.threshold, GREEN)]
    if (verdict.threshold or 0) > 0 and clips_norms(record):
        marks.append(("in use", verdict.threshold or 0.0, BLACK))
    return sorted((mark for mark in marks if 0 < mark[1] < math.inf), key=lambda mark: mark[1])


def _draw_marks(figure: Figure, marks: list[tuple[str, float, str]]) -> None:
    for index, (name, threshold, colour) in enumerate(marks):
        x = math.log10(threshold)
        line = {"color": colour, "width": 2, "dash": "dash" if name == "in use" else "solid"}
        figure.add_shape(type="line", x0=x, x1=x, yref="y domain", y0=0, y1=1, line=line)
        figure.add_annotation(
            x=x, y=1, yref="paper", yanchor="bottom", yshift=16 * (index % 2),
            text=f"{name} {plain_threshold(float(f'{threshold:.3g}'))}",
            font={"color": colour, "size": 12},
        )  # fmt: skip


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    digits = (1,) if high - low > 4 else (1, 3) if high - low > 1.5 else (1, 2, 3, 5, 7)
    decades = range(max(math.floor(low), -307), min(math.ceil(high), 308), max(1, round((high - low) / 12)))
    values = [digit * 10.0**decade for decade in decades for digit in digits]
    ticks = {"tickvals": [math.log10(v) for v in values], "ticktext": [f"{v:g}" for v in values]}
    return {"range": [low, high]} | ticks


_BINDS = (
    "Each bar is a window of steps. At 0 the clip never acts; below 5 % it is a guard, up to 50 % it shapes training, "
    "above that it normalises most steps."
)
_WOULD_HAVE = (
    "This run was not clipped. The bars count the steps whose norm lies above the recommended threshold; "
    "a clipped run would have gone differently after the first of them."
)
_HISTOGRAM = "Both axes are logarithmic, so that single spikes stay visible. Vertical lines are thresholds."
