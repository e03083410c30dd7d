"""Figures: the drawing, its caption, its numbers as a table, and their style.

A drawing is what plotly.js takes, in plain dictionaries: plotly's Python package is 65 MB and slow to import.
"""

import html
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.lines import known_fields


@dataclass(frozen=True)
class Table:
    """The numbers behind a drawing, for who cannot or does not want to see it.

    Attributes:
        head: Column names; the first column names the row.
        rows: Text, as long as the head.
        note: What the table leaves out.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        name: What links and downloads call it, such as ``"norms"``.
        title: Its heading.
        caption: How to read it.
        figure: ``data`` and ``layout`` of plotly.js; ``heat`` for the heat map, which the page draws itself.
        summary: What it shows, in one sentence with numbers; a screen reader says it in place of the drawing.
        table: The same in numbers.
        over_steps: Whether its horizontal axis is the optimizer step; the page zooms all these together.
    """

    name: str
    title: str
    caption: str
    figure: dict[str, Any]
    summary: str
    table: Table
    over_steps: bool = field(default=False)


def steps_between(first: int, last: int) -> str:
    """Name a range of steps.

    Args:
        first: The first.
        last: The last.

    Returns:
        For example ``"steps 0 to 2,499"``.

    Example:
        >>> steps_between(0, 2499), steps_between(7, 7)
        ('steps 0 to 2,499', 'step 7')
    """
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


class Figure:
    """Traces and a layout: rows of plots, one above the other, that share their horizontal axis.

    Keys and values are those of plotly.js' reference; None leaves a key as it is.

    Args:
        heights: Relative heights of the rows, top first.
        gap: What is left free between two rows, as a share of the whole height.

    Example:
        >>> figure = Figure([0.6, 0.4], gap=0.1)
        >>> figure.add_trace("scatter", row=2, x=[0, 1], y=[3.0, None], text=None)
        >>> figure.update_xaxes(row=2, title={"text": "step"})
        >>> figure.data
        [{'type': 'scatter', 'xaxis': 'x2', 'yaxis': 'y2', 'x': [0, 1], 'y': [3.0, None]}]
        >>> figure.layout["xaxis"]
        {'anchor': 'y', 'domain': [0, 1], 'matches': 'x2', 'showticklabels': False}
        >>> figure.layout["xaxis2"]
        {'anchor': 'y2', 'domain': [0, 1], 'title': {'text': 'step'}}
        >>> figure.layout["yaxis"]["domain"], figure.layout["yaxis2"]["domain"]
        ([0.46, 1.0], [0.0, 0.36])
    """

    def __init__(self, heights: list[float], gap: float) -> None:
        self.data: list[dict[str, Any]] = []
        self.layout: dict[str, Any] = {}
        self._rows = len(heights)
        end, share = 1.0, (1 - gap * (len(heights) - 1)) / sum(heights)
        for row, height in enumerate(heights, start=1):
            mark, start = _mark(row), abs(round(end - share * height, 6))  # abs: the last one may come out as -0.0
            below = {} if row == self._rows else {"matches": f"x{self._rows}", "showticklabels": False}
            self.layout[f"xaxis{mark}"] = {"anchor": f"y{mark}", "domain": [0, 1], **below}
            self.layout[f"yaxis{mark}"] = {"anchor": f"x{mark}", "domain": [start, round(end, 6)]}
            end = start - gap

    def add_trace(self, kind: str, row: int = 1, **trace: Any) -> None:
        """Draw ``trace``, a ``"scatter"`` or a ``"bar"``, in one row."""
        axes = {"type": kind, "xaxis": f"x{_mark(row)}", "yaxis": f"y{_mark(row)}"}
        self.data.append(axes | known_fields(trace))

    def add_line(
        self, x: Sequence[Any], y: Sequence[Any], name: str, colour: str, hover: str, *, row: int = 1,
        width: float = 1.3, dash: str | None = None, shape: str | None = None, **trace: Any,
    ) -> None:  # fmt: skip
        """Draw a line through points, or a point where there is one position; ``hover`` is what a point says."""
        line = known_fields({"color": colour, "width": width, "dash": dash, "shape": shape})
        mode, marker = "lines" if len(x) > 1 else "markers", {"color": colour, "size": 7}
        words = {"name": name, "hovertemplate": f"{hover}<extra></extra>"}
        self.add_trace("scatter", row, x=x, y=y, line=line, mode=mode, marker=marker, **words, **trace)

    def add_level(self, ends: Sequence[float], level: float, name: str, **trace: Any) -> None:
        """Draw a horizontal line that says nothing."""
        self.add_trace("scatter", x=ends, y=[level] * 2, name=name, mode="lines", hoverinfo="skip", **trace)

    def add_area(self, x: Sequence[Any], y: Sequence[Any], colour: str, group: str, row: int = 1) -> None:
        """Fill an outline, the band of the line with this ``legendgroup``."""
        shade = see_through(colour)
        self.add_trace(
            "scatter", row, x=x, y=y, mode="lines", line={"width": 0.5, "color": shade}, fill="toself",
            fillcolor=shade, hoverinfo="skip", showlegend=False, legendgroup=group,
        )  # fmt: skip

    def log_axis(self, title: str, values: Sequence[float], row: int = 1) -> None:
        """Make the vertical axis of a row logarithmic, with ticks for ``values``, all above 0."""
        decades = math.log10(max(values)) - math.log10(min(values)) if values else 0
        # Plotly's own choice crowds the ticks: whole decades where there are many, else 1, 2 and 5 of each.
        step = max(1, round(decades / 6)) if decades >= 2 else "D2" if decades >= 0.4 else None
        self.update_yaxes(row, title={"text": title}, type="log", tickformat="~g", dtick=step)

    def over_steps(self, records: Sequence[Record]) -> None:
        """Let the horizontal axis show every optimizer step of ``records``, with a margin."""
        ends = [record.steps[place]["i"] for record in records if record.steps for place in (0, -1)]
        low, high = min(ends, default=0), max(ends, default=0)
        margin = 0.01 * (high - low) + 0.5
        self.update_xaxes(range=[low - margin, high + margin])
        self.update_xaxes(self._rows, title={"text": "optimizer step"})

    def add_shape(self, **shape: Any) -> None:
        """Draw a line or a rectangle."""
        self.layout.setdefault("shapes", []).append({"xref": "x", "yref": "y", **shape})

    def add_annotation(self, **annotation: Any) -> None:
        """Write a text without an arrow."""
        self.layout.setdefault("annotations", []).append({"showarrow": False, **annotation})

    def set_columns(self, *names: str) -> None:
        """Name the columns of the table that the page saves.

        Its rows are the ``meta`` of each trace; of a line without, the ``customdata`` of each point, the line's name
        and the point's height.
        """
        self.update_layout(meta={"columns": list(names)})

    def set_rows(self, names: Sequence[str]) -> None:
        """Label the rows of a bar chart, whose places are 0, 1, 2 ..., with shorter labels where the page is narrow."""
        self.update_yaxes(tickvals=list(range(len(names))), ticktext=[short(name) for name in names])
        self.update_layout(meta={"narrow": [short(name, NARROW_LABEL) for name in names]})

    def update_xaxes(self, row: int | None = None, **keys: Any) -> None:
        """Set keys of the horizontal axis of one row, or of all."""
        self._update_axes("xaxis", row, keys)

    def update_yaxes(self, row: int | None = None, **keys: Any) -> None:
        """Set keys of the vertical axis of one row, or of all."""
        self._update_axes("yaxis", row, keys)

    def update_layout(self, **keys: Any) -> None:
        """Set keys of the layout; a dictionary changes the keys that it names."""
        _merge(self.layout, keys)

    def to_json(self) -> dict[str, Any]:
        """Both parts, as plotly.js takes them."""
        return {"data": self.data, "layout": self.layout}

    def _update_axes(self, axis: str, row: int | None, keys: dict[str, Any]) -> None:
        for number in range(1, self._rows + 1) if row is None else (row,):
            _merge(self.layout[f"{axis}{_mark(number)}"], keys)


def _mark(row: int) -> str:
    return "" if row == 1 else str(row)


def _merge(into: dict[str, Any], keys: dict[str, Any]) -> None:
    for key, value in keys.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        elif value is not None:
            into[key] = value


NARROW_LABEL = 16
"""Characters of a label that a telephone has room for."""

# Okabe and Ito's colours, which colour-blind readers tell apart; orange and green are darker, to be seen on white.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, BLACK = (
    "#0072B2",
    "#A87400",
    "#007A58",
    "#D55E00",
    "#A0528C",
    "#1F2933",
)
GREY, GRID, INK = "#7A8794", "#E9EDF1", "#3E4C59"
PAGE, FAINT = "#FFFFFF", "#F7F7F7"
REGIMES = {
    "never": ("#F1F3F5", GREY),
    "guard": ("#E3F4EE", GREEN),
    "shaping": ("#FDF3DC", ORANGE),
    "normalising": ("#FBE6DC", VERMILION),
}
"""Shade and bar of each regime."""
DEVIATION_SCALE = ("#2166AC", "#92C5DE", FAINT, "#F4A582", "#B2182B")
_RUN_COLOURS = (VERMILION, BLUE, GREEN, PURPLE, BLACK)
RUN_LINES = tuple((colour, dash) for dash in ("solid", "dash", "dot") for colour in _RUN_COLOURS)
"""Colour and dash of each of several runs."""

DARK = {
    BLUE: "#5AB4E8",
    ORANGE: "#F0B23C",
    GREEN: "#3CC79F",
    VERMILION: "#FF8A50",
    PURPLE: "#D893C6",
    BLACK: "#E4E9EE",
    GREY: "#788592",
    GRID: "#2A343E",
    INK: "#B6C2CD",
    PAGE: "#12171C",
    "#F1F3F5": "#1C242C",
    "#E3F4EE": "#10302A",
    "#FDF3DC": "#352C13",
    "#FBE6DC": "#3B2117",
    "#2166AC": "#8FD0FF",
    "#92C5DE": "#2D6A99",
    FAINT: "#1C242C",
    "#F4A582": "#A34A2C",
    "#B2182B": "#FF9E80",
}
"""The replacement of each colour on a dark page. Colours that are no key here look right on both."""

_FONT = {"family": "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif", "size": 13, "color": INK}


def subplots(heights: list[float], height: int) -> Figure:
    """Rows of plots that share their time axis.

    Args:
        heights: Relative heights, top first.
        height: Pixels of the whole figure.

    Returns:
        The empty figure.
    """
    figure = Figure(heights, gap=0.06)
    figure.update_layout(
        height=height, font=_FONT, margin={"l": 70, "r": 24, "t": 34, "b": 52},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="closest", uirevision="kept",
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "xanchor": "left", "font": {"size": 12}},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=GRID, zeroline=False, ticks="outside", tickcolor=GRID, automargin=True)
    figure.update_yaxes(
        ticklabelstandoff=4, gridcolor=GRID, zeroline=False, ticks="outside", tickcolor=GRID, automargin=True
    )
    figure.update_xaxes(title={"font": {"size": 13}}, separatethousands=True, exponentformat="none")
    figure.update_yaxes(title={"font": {"size": 13}, "standoff": 12})
    return figure


def short(name: str, width: int = 38) -> str:
    """Leave out the middle of a long name, but no number, and not the layer, which tell rows apart.

    Args:
        name: A parameter name.
        width: Characters to keep.

    Returns:
        Text for a tick label, escaped: plotly draws some HTML tags in labels.

    Example:
        >>> short("transformer.encoder.layers.8.self_attention.in_proj.weight")
        'transformer…8…in_proj.weight'
        >>> short("transformer.encoder.layers.8.self_attention.in_projection.weight", width=16)
        '…8…in_pro…weight'
        >>> short("<b>")
        '&lt;b&gt;'
    """
    parts = name.split(".")
    left_out: set[int] = set()
    words = [place for place, part in enumerate(parts[:-2]) if not part.isdigit()]
    for place in (*words[1:], *words[:1]):  # the first word goes last
        if len(_joined(parts, left_out)) <= width:
            break
        left_out.add(place)
    text = _joined(parts, left_out)
    if len(text) > width:
        end = min(len(parts[-1]), width // 2)
        text = f"{text[: width - end - 1]}…{text[len(text) - end :]}"
    return html.escape(text)


def _joined(parts: Sequence[str], left_out: Collection[int]) -> str:
    kept = ".".join("…" if place in left_out else part for place, part in enumerate(parts))
    return re.sub(r"[.…]*…[.…]*", "…", kept)


def see_through(colour: str) -> str:
    """The colour of the band round a line.

    Args:
        colour: ``#RRGGBB``.

    Returns:
        The same with most of it taken away.

    Example:
        >>> see_through("#0072B2")
        'rgba(0,114,178,0.35)'
    """
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.35)"


def palette() -> dict[str, str]:
    """Return the colours that the page exchanges when it turns dark, as fills and as bands.

    Returns:
        Colours of the light page as keys.
    """
    return DARK | {see_through(light): see_through(dark) for light, dark in DARK.items()}
