"""How every figure looks: colours in both themes, type, axes."""

import html

from gradguard.monitoring.show.report.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#A0528C",
    "#1F2933",
)
GREY, GRID, INK = "#8D99A6", "#E9EDF1", "#3E4C59"
REGIMES = {
    "never": ("#F1F3F5", GREY),
    "guard": ("#E3F4EE", GREEN),
    "shaping": ("#FDF3DC", ORANGE),
    "normalising": ("#FBE6DC", VERMILION),
}
"""Shade and bar of each regime."""
DEVIATION_SCALE = ("#2166AC", "#92C5DE", "#F7F7F7", "#F4A582", "#B2182B")
RUN_COLOURS = (VERMILION, BLUE, GREEN, PURPLE, ORANGE, BLACK)

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
    "#F1F3F5": "#1C242C",
    "#E3F4EE": "#10302A",
    "#FDF3DC": "#352C13",
    "#FBE6DC": "#3B2117",
    "#2166AC": "#8FD0FF",
    "#92C5DE": "#2D6A99",
    "#F7F7F7": "#1C242C",
    "#F4A582": "#A34A2C",
    "#B2182B": "#FF9E80",
}
"""What stands for each colour on a dark page. Colours of the page that are no key here look right on both."""

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
    """Keep the end of a long name, which tells layers apart, and escape it: plotly draws some HTML tags in labels.

    Args:
        name: A parameter name.
        width: Characters to keep.

    Returns:
        Text for a tick label.

    Example:
        >>> short("transformer.encoder.layers.8.self_attention.in_proj_weight")
        '…8.self_attention.in_proj_weight'
        >>> short("<b>")
        '&lt;b&gt;'
    """
    if len(name) > width:
        end = name[-width:]
        name = f"…{end[end.find('.') + 1 :]}"
    return html.escape(name)


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
    """What the page exchanges when it turns dark: every colour, and the same as the colour of a band.

    Returns:
        Colours of the light page as keys.
    """
    return DARK | {see_through(light): see_through(dark) for light, dark in DARK.items()}
