"""Print the effect of other rules on recorded norms as a table in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.judge.rule_replay import COUNTERFACTUAL, WhatIf
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.step_rows import label_of
from gradguard.monitoring.show.text_table import print_table

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = ("rule", "binds on", "coefficient", "spikes cut", "largest", "locked in")


def print_replay(record: Record, rows: Sequence[WhatIf], console: "Console | None" = None) -> None:
    """Print rows of `what_if`, with one table per optimizer, and a note that they are counterfactual.

    Args:
        record: The record that the rows were computed from.
        rows: The rows that `what_if` returned.
        console: The console to print to; standard output if None.
    """
    from rich.console import Console

    console = console or Console()
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        own = [row for row in rows if row.optimizer == optimizer]
        of = f"{label_of(record, optimizer)}: " if optimizer is not None else ""
        title = f"{of}{max(row.steps for row in own):,} usable steps of {record.path}"
        print_table(console, _HEADINGS, [[row.rule, *_cells(row)] for row in own], title=title)
        for row in own:
            if row.note:
                console.print(f"{row.rule}: {row.note}.", markup=False, highlight=False)
    console.print(COUNTERFACTUAL, markup=False, highlight=False)


def _cells(row: WhatIf) -> list[str]:
    if row.clip_share is None or row.lock_in is None:
        return ["–"] * 5
    coefficient = "–" if row.median_coefficient is None else plain_threshold(float(f"{row.median_coefficient:.2g}"))
    caught = f"{row.caught:,} of {row.spikes:,}" if row.spikes else "no spikes"
    return [percent(row.clip_share), coefficient, caught, number(row.largest_passed), percent(row.lock_in)]
