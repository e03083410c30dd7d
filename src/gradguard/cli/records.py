"""What the commands that read records say of them first."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradguard.monitoring.record.text import on_stderr

if TYPE_CHECKING:
    from gradguard.monitoring.record.file import Record


def tell_notes(records: Sequence["Record"]) -> None:
    """Say on stderr what is to be known before the numbers of a record are believed."""
    from gradguard.monitoring.show.report.summary import notes

    for record in records:
        for note in notes(record):
            on_stderr(f"{record.path}: {note}")
