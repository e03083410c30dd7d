"""How the magnitudes of single gradient elements are spread, over the steps on which that was recorded."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.show.report import series
from gradguard.monitoring.show.report.figure import BLUE, FAINT, Chart, Table, steps_between, subplots

_BINS_A_DECADE = 2  # as they are recorded
_LOWEST_SHARE = 1e-5
_MOST_COLUMNS = 200
_TABLE_ROWS = 12
_QUANTILES = (("5 % are below", 0.05), ("half are below", 0.5), ("95 % are below", 0.95))


def element_magnitudes(record: Record, most: int = _MOST_COLUMNS) -> Chart | None:
    """The histograms of the magnitudes of all gradient elements, one column for each stretch of steps.

    Args:
        record: The record of a run.
        most: How many columns at most.

    Returns:
        The chart, or None where fewer than two histograms were recorded.
    """
    columns = _columns(record, most)
    if len(columns) < 2:
        return None
    places = [place for column in columns for place in column.shares]
    bins = range(min(places), max(places) + 1)
    figure = subplots([1.0], height=340)
    ends = [columns[-1].last, *record.steps.column("i")[-1:]]
    end = min(2 * columns[-1].last - columns[-2].last, max(ends) + 1)
    shown = [[column.shares.get(place, 0.0) for column in columns] for place in bins]
    figure.add_trace(
        "heatmap",
        x=[*(column.first for column in columns), end],
        y=[place / _BINS_A_DECADE for place in (*bins, bins.stop)],
        z=[[round(math.log10(share), 2) if share > _LOWEST_SHARE else None for share in row] for row in shown],
        text=[[f"{share:.2%}" for share in row] for row in shown],
        colorscale=[[0, FAINT], [1, BLUE]], zmin=math.log10(_LOWEST_SHARE), zmax=0, hoverongaps=False,
        colorbar=_BAR, hovertemplate="from step %{x:,}: %{text} of the elements<extra></extra>",
    )  # fmt: skip
    decades = range(math.floor(bins.start / _BINS_A_DECADE), math.ceil(bins.stop / _BINS_A_DECADE) + 1)
    ticks = list(decades)[:: max(1, len(decades) // 8)]
    figure.update_yaxes(
        title={"text": "magnitude of an element"}, tickvals=ticks, ticktext=[f"{10.0**tick:g}" for tick in ticks]
    )
    figure.over_steps([record])
    middle = [_quantile(column.shares, 0.5) for column in (columns[0], columns[-1])]
    summary = (
        f"Half of the gradient elements were below {number(middle[0])} in {_steps(columns[0])}, and below "
        f"{number(middle[1])} in {_steps(columns[-1])}."
    )
    table = _table(_columns(record, _TABLE_ROWS))
    return Chart("elements", "Sizes of gradient elements", _ELEMENTS, figure.to_json(), summary, table, over_steps=True)


@dataclass(frozen=True)
class _Column:
    """The steps of some histograms, and the share of the elements in each bin, by its place on a common grid."""

    first: int
    last: int
    shares: dict[int, float]


def _columns(record: Record, most: int) -> list[_Column]:
    histograms = record.tensors.column("histogram")
    lines = list(record.tensors.where([bool(found and sum(found["counts"])) for found in histograms]))
    return [_column(lines[place.start : place.stop]) for place in series.buckets(len(lines), most)]


def _column(lines: Sequence[dict[str, Any]]) -> _Column:
    counts: Counter[int] = Counter()
    for line in lines:
        edges = line["histogram"]["edges"]
        for (low, high), count in zip(itertools.pairwise(edges), line["histogram"]["counts"], strict=True):
            counts[math.floor(_BINS_A_DECADE * (low + high) / 2)] += count  # a loss scale has moved the edges
    total = sum(counts.values())
    return _Column(lines[0]["i"], lines[-1]["i"], {place: count / total for place, count in counts.items() if count})


def _quantile(shares: dict[int, float], wanted: float) -> float:
    """The magnitude below which that share of the elements lies; within a bin they are taken to be spread evenly."""
    below = 0.0
    for place, share in sorted(shares.items()):
        if below + share >= wanted:
            return 10 ** ((place + (wanted - below) / share) / _BINS_A_DECADE)
        below += share
    return 10 ** ((max(shares) + 1) / _BINS_A_DECADE)


def _steps(column: _Column) -> str:
    return steps_between(column.first, column.last)


def _table(columns: Sequence[_Column]) -> Table:
    rows = [
        (f"{column.first:,} to {column.last:,}", *(number(_quantile(column.shares, share)) for _, share in _QUANTILES))
        for column in columns
    ]
    return Table(("steps", *(name for name, _ in _QUANTILES)), rows, "to about a third of a decade")


_BAR = {
    "title": {"text": "share", "side": "top"},
    "tickvals": [-5, -4, -3, -2, -1, 0],
    "ticktext": ["0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
    "thickness": 12,
    "outlinewidth": 0,
}
_ELEMENTS = (
    "How large the single numbers in the gradients are, as the optimizer gets them; exact zeros are left out. A band "
    "that sinks below 6e-8 is lost in float16, which holds nothing smaller; one that spreads upwards comes before an "
    "explosion."
)
