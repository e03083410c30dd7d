"""How every figure looks: colours, type, axes."""

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#A0528C",
    "#1f2933",
)
GREY, GRID = "#9aa5b1", "#e9edf1"
_FONT = {"family": "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif", "size": 13, "color": "#3e4c59"}


def subplots(heights: list[float], height: int) -> "Figure":
    """Rows of plots that share their time axis.

    Args:
        heights: Relative heights, top first.
        height: Pixels of the whole figure.

    Returns:
        The empty figure.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(len(heights), 1, shared_xaxes=True, vertical_spacing=0.06, row_heights=heights)
    figure.update_layout(
        template="none", height=height, font=_FONT, margin={"l": 70, "r": 24, "t": 34, "b": 52},
        paper_bgcolor="white", plot_bgcolor="white", hovermode="closest",
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "xanchor": "left", "font": {"size": 12}},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=GRID, zeroline=False, ticks="outside", tickcolor=GRID, automargin=True)
    figure.update_yaxes(
        ticklabelstandoff=4, gridcolor=GRID, zeroline=False, ticks="outside", tickcolor=GRID, automargin=True
    )
    figure.update_xaxes(title_font_size=13)
    figure.update_yaxes(title_font_size=13, title_standoff=12)
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
