"""Print tables in a terminal of any width without cutting off headings or numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradguard.monitoring.record.text import printable

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 1
_LEAST_TEXT = 8


def print_table(
    console: "Console", headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1, title: str = ""
) -> None:
    """Print a table without a frame, with one word per line in its headings.

    Args:
        console: The console to print to.
        headings: The heading of each column.
        rows: The cells of each row.
        texts: The number of columns, from the first one, that hold text; their cells are wrapped in a narrow terminal.
            The other columns hold numbers, which are never wrapped.
        title: A line above the table.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    if title:
        console.print(Text(printable(title), style="italic"))
    cells = [[printable(cell) for cell in row] for row in rows]
    broken = ["\n".join(heading.split()) for heading in headings]
    widths = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(broken, *cells, strict=True)
    ]
    least = [min(width, _LEAST_TEXT) for width in widths[:texts]]
    while sum(widths) + _GAP * (len(widths) - 1) > console.width and widths[:texts] != least:
        widest = max(range(texts), key=lambda place: widths[place] - least[place])
        widths[widest] -= 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False)
    for place, (heading, width) in enumerate(zip(broken, widths, strict=True)):
        side = "left" if place < texts else "right"
        table.add_column(heading, justify=side, vertical="bottom", overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    table.width = sum(widths) + _GAP * (len(widths) - 1)
    console.print(table, crop=False)
