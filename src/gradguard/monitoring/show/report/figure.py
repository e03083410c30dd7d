"""A drawing as plotly.js takes it, in plain dictionaries: plotly's Python package is 65 MB and slow to import."""

from typing import Any


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
        self.data.append(axes | {key: value for key, value in trace.items() if value is not None})

    def add_shape(self, **shape: Any) -> None:
        """Draw a line or a rectangle."""
        self.layout.setdefault("shapes", []).append({"xref": "x", "yref": "y", **shape})

    def add_annotation(self, **annotation: Any) -> None:
        """Write a text without an arrow."""
        self.layout.setdefault("annotations", []).append({"showarrow": False, **annotation})

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
