"""What a figure is on the page: the drawing, the words about it, and the same in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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
        title: Its heading.
        caption: How to read it.
        figure: ``data`` and ``layout`` of plotly.js; ``heat`` for the heat map, which the page draws itself.
        summary: What it shows, in one sentence with numbers; a screen reader says it in place of the drawing.
        table: The same in numbers.
        over_steps: Whether its horizontal axis is the optimizer step; the page zooms all these together.
    """

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
