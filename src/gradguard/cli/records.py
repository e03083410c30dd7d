"""Read records for a command: show the progress of a long one, and print each one's caveats."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gradguard.cli.program import option
from gradguard.monitoring.record.text import on_stderr, printable

if TYPE_CHECKING:
    from gradguard.monitoring.record.file import Record

RECORDS = option("records", "a record, or the folder it is in", nargs="+", type=Path, metavar="run.jsonl")


@contextmanager
def progress() -> Iterator[Callable[[str], object]]:
    """Show the current work on the records in one line of stderr, if stderr is a terminal.

    Print nothing inside the block: the line occupies the terminal.

    Yields:
        A function that sets the text of the line.
    """
    if not sys.stderr.isatty():
        yield lambda words: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("", spinner="line") as status:
        yield lambda words: status.update(Text(printable(words), overflow="ellipsis", no_wrap=True))


def read(paths: Sequence[Path], say: Callable[[str], object]) -> "list[Record]":
    """Read records, and report which one is being read.

    Args:
        paths: The records, or their folders.
        say: From `progress`.

    Returns:
        The records, in the order of their paths.
    """
    from gradguard.monitoring.record.file import read_record

    collects = gc.isenabled()
    gc.disable()  # parsed lines contain no cycles, and searching a million of them takes a quarter of the time
    try:
        records = []
        for path in paths:
            say(f"reading {path}")
            records.append(read_record(path))
        return records
    finally:
        gc.freeze()  # later searches need not look through them either
        if collects:
            gc.enable()


def tell_notes(records: "Sequence[Record]") -> None:
    """Print the caveats of each record to stderr."""
    from gradguard.monitoring.show.report.summary import notes

    for record in records:
        for note in notes(record):
            on_stderr(f"{record.path}: {note}")
