"""A table in a terminal, wide or narrow: no heading and no number in it is cut off."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradguard.monitoring.record.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNBOUNDED = 10_000
_LEAST_TEXT = 8


def print_table(
    console: "Console", headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1, title: str = ""
) -> None:
    """Print a table; where it would be wider than the terminal, without a frame and with headings of several lines.

    Args:
        console: Where to print.
        headings: One for each column.
        rows: The cells of each row.
        texts: How many columns, from the first one, hold text, which goes on in the next line where there is no room.
            The others hold numbers, and stay whole.
        title: What to print above it.
    """
    from rich.text import Text

    if title:
        console.print(Text(printable(title), style="italic"))
    cells = [[printable(cell) for cell in row] for row in rows]
    table = _framed(headings, cells, texts)
    if console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum > console.width:
        table = _bare(headings, cells, texts, console.width)
    console.print(table, crop=False)


def _framed(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _bare(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int, room: int) -> "Table":
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    broken = ["\n".join(heading.split()) for heading in headings]
    widths = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(broken, *rows, strict=True)
    ]
    least = [min(width, _LEAST_TEXT) for width in widths[:texts]]
    while sum(widths) + len(widths) - 1 > room and widths[:texts] != least:
        widest = max(range(texts), key=lambda place: widths[place] - least[place])
        widths[widest] -= 1
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, width=sum(widths) + len(widths) - 1)
    for place, (heading, width) in enumerate(zip(broken, widths, strict=True)):
        side = "left" if place < texts else "right"
        table.add_column(heading, justify=side, vertical="bottom", overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
