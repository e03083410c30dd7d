"""Define the parts of a figure: the drawing, the caption, the table of numbers, and their style.

A drawing is the input of plotly.js as plain dictionaries; plotly's Python package is 65 MB and slow to import.
"""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradguard.monitoring.record.record_lines import known_fields

Keys = dict[str, Any]
"""A trace, an axis or a layout, with the names of plotly.js's reference."""


@dataclass(frozen=True)
class Table:
    """The numbers of a drawing, for readers who cannot see it or prefer numbers.

    Attributes:
        head: The column names; the first column names the row.
        rows: The texts of each row, as many as column names.
        note: A remark on rows that are left out.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        name: The name in links and downloads, such as ``"norms"``.
        title: The heading.
        caption: A text on how to read the figure; a screen reader reads it instead of the drawing.
        figure: ``data`` and ``layout`` of plotly.js; ``heat`` for the heat map, which the page draws itself.
        table: The numbers of the figure.
        over_steps: Whether the horizontal axis is the optimizer step; the page zooms all such figures together.
    """

    name: str
    title: str
    caption: str
    figure: Keys
    table: Table
    over_steps: bool = False


@dataclass(frozen=True)
class Subplot:
    """One of several plots above each other that share their horizontal axis.

    Attributes:
        traces: The lines, bars and marks of the plot.
        yaxis: The keys of the vertical axis.
        share: The height of the plot relative to the other rows.
    """

    traces: Sequence[Keys]
    yaxis: Keys = field(default_factory=dict)
    share: float = 1.0


def steps_between(first: int, last: int) -> str:
    """Return the text for a range of steps.

    Example:
        >>> steps_between(0, 2499), steps_between(7, 7)
        ('steps 0 to 2,499', 'step 7')
    """
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def drawing(rows: Sequence[Subplot], height: int, xaxis: Keys, **layout: Any) -> Keys:
    """Return a figure with several rows of plots, the top row first.

    Args:
        rows: The rows, at least one.
        height: The height of the whole figure in pixels.
        xaxis: The keys of the horizontal axis.
        **layout: Further keys of the layout.

    Example:
        >>> figure = drawing([Subplot([{"type": "bar"}], share=0.6), Subplot([{"type": "bar"}], share=0.4)], 300, {})
        >>> [trace["yaxis"] for trace in figure["data"]], figure["layout"]["xaxis"]["anchor"]
        (['y', 'y2'], 'y2')
        >>> figure["layout"]["yaxis"]["domain"], figure["layout"]["yaxis2"]["domain"]
        ([0.436, 1.0], [0.0, 0.376])
    """
    gap, top, data, axes, mark = 0.06, 1.0, [], {}, ""
    free = (1 - gap * (len(rows) - 1)) / math.fsum(row.share for row in rows)
    for number, row in enumerate(rows, start=1):
        mark = "" if number == 1 else str(number)
        bottom = abs(round(top - free * row.share, 6))  # abs, because the last result may be -0.0
        axes[f"yaxis{mark}"] = _AXIS | {"domain": [bottom, round(top, 6)], "ticklabelstandoff": 4} | row.yaxis
        data += [trace | {"yaxis": f"y{mark}"} for trace in row.traces]
        top = bottom - gap
    axes["xaxis"] = _AXIS | {"anchor": f"y{mark}", "separatethousands": True, "exponentformat": "none"} | xaxis
    return {"data": data, "layout": _LAYOUT | {"height": height} | axes | layout}


def line(
    x: Sequence[Any], y: Sequence[Any], name: str, colour: str, hover: str,
    *, width: float = 1.3, dash: str = "solid", shape: str | None = None, **trace: Any,
) -> Keys:  # fmt: skip
    """Return a line through points, or a marker for a single point; ``hover`` is the text of a point's tooltip."""
    look = known_fields({"color": colour, "width": width, "dash": dash, "shape": shape})
    mode, marker = "lines" if len(x) > 1 else "markers", {"color": colour, "size": 7}
    words = {"name": name, "hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "scatter", "x": x, "y": y, "line": look, "mode": mode, "marker": marker} | words | trace


def area(x: Sequence[Any], y: Sequence[Any], colour: str, group: str) -> Keys:
    """Return a filled outline: the band around the line with the same ``legendgroup``."""
    shade = see_through(colour)
    return {
        "type": "scatter", "x": x, "y": y, "mode": "lines", "line": {"width": 0.5, "color": shade}, "fill": "toself",
        "fillcolor": shade, "hoverinfo": "skip", "showlegend": False, "legendgroup": group,
    }  # fmt: skip


def titled(title: str, **keys: Any) -> Keys:
    """Return an axis with a title."""
    return {"title": {"text": title, "font": {"size": 13}, "standoff": 12}, **keys}


def log_axis(title: str, values: Sequence[float]) -> Keys:
    """Return a logarithmic axis with ticks for ``values``, all above 0."""
    decades = math.log10(max(values)) - math.log10(min(values)) if values else 0
    # Plotly's default crowds the ticks: use whole decades for a wide range, else 1, 2 and 5 of each decade.
    step: int | str | None = None
    if decades >= 2:
        step = max(1, round(decades / 6))
    elif decades >= 0.4:
        step = "D2"
    return titled(title, type="log", tickformat="~g", dtick=step)


def names_of_bars(names: Sequence[str]) -> tuple[Keys, Keys]:
    """Return the axis of bars at 0, 1, 2 ... with their names, and ``meta`` with shorter names for a narrow page."""
    places = {"tickvals": list(range(len(names))), "ticktext": [short(name) for name in names]}
    return places | {"showgrid": False, "ticks": ""}, {"narrow": [short(name, NARROW_LABEL) for name in names]}


NARROW_LABEL = 16
"""The number of characters of a label that fit on a telephone."""

# Okabe and Ito's colours, which colour-blind readers can distinguish; orange and green are darkened for contrast.
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
REGIMES = {"never": GREY, "guard": GREEN, "shaping": ORANGE, "normalising": VERMILION}
"""The colour of each regime."""
DEVIATION_SCALE = ("#2166AC", "#92C5DE", FAINT, "#F4A582", "#B2182B")
_RUN_COLOURS = (VERMILION, BLUE, GREEN, PURPLE, BLACK)
RUN_LINES = tuple((colour, dash) for dash in ("solid", "dash", "dot") for colour in _RUN_COLOURS)
"""The colour and dash of each of several runs."""

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
    "#2166AC": "#8FD0FF",
    "#92C5DE": "#2D6A99",
    FAINT: "#1C242C",
    "#F4A582": "#A34A2C",
    "#B2182B": "#FF9E80",
}
"""The replacement of each colour on a dark page; other colours are suitable for both themes."""

_AXIS = {"gridcolor": GRID, "zeroline": False, "ticks": "outside", "tickcolor": GRID, "automargin": True}
_LAYOUT = {
    "font": {"family": "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif", "size": 13, "color": INK},
    "margin": {"l": 70, "r": 24, "t": 34, "b": 52}, "hovermode": "closest", "uirevision": "kept",
    "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
    "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "xanchor": "left", "font": {"size": 12}},
}  # fmt: skip


def short(name: str, width: int = 38) -> str:
    """Shorten the middle of a long name, but keep its numbers and its last parts, which distinguish rows.

    Args:
        name: A parameter name.
        width: The largest number of characters.

    Returns:
        The text for a tick label, escaped because plotly renders some HTML tags in labels.

    Example:
        >>> short("transformer.encoder.layers.8.self_attention.in_proj.weight")
        'transformer…8…in_proj.weight'
        >>> short("transformer.encoder.layers.8.self_attention.in_projection.weight", width=16)
        '…8…in_pro…weight'
        >>> short("<b>")
        '&lt;b&gt;'
    """
    parts = name.split(".")
    words = [place for place, part in enumerate(parts[:-2]) if not part.isdigit()]
    for place in (*words[1:], *words[:1]):  # the first word is removed last
        if len(name) <= width:
            break
        parts[place] = "…"
        name = re.sub(r"[.…]*…[.…]*", "…", ".".join(parts))
    if len(name) > width:
        end = min(len(parts[-1]), width // 2)
        name = f"{name[: width - end - 1]}…{name[len(name) - end :]}"
    return html.escape(name)


def see_through(colour: str) -> str:
    """Return ``#RRGGBB`` as a transparent colour, for the band around a line.

    Example:
        >>> see_through("#0072B2")
        'rgba(0,114,178,0.35)'
    """
    red, green, blue = bytes.fromhex(colour[1:])
    return f"rgba({red},{green},{blue},0.35)"


def palette() -> dict[str, str]:
    """Return the dark theme's replacement of each light colour, for lines and for transparent bands."""
    return DARK | {see_through(light): see_through(dark) for light, dark in DARK.items()}
