"""Summarises the work of `SpikeRecovery` in a run, from the events of its record."""

from dataclasses import dataclass

from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.record_lines import without_none
from gradguard.words import counted


@dataclass(frozen=True)
class Recoveries:
    """The number of recoveries from spikes, and the steps that they cost.

    Attributes:
        roll_backs: How often the run went back to older weights.
        slow_downs: How many roll-backs were followed by a lower learning rate for a while.
        data_shifts: How many bursts of spikes were treated as a change of the data.
        lost_steps: Steps whose work was undone or skipped by recoveries that have ended, without single skipped spikes.
        longest_recovery: The most steps from a first spike to the end of its recovery; None if no recovery has ended.
    """

    roll_backs: int
    slow_downs: int
    data_shifts: int
    lost_steps: int
    longest_recovery: int | None

    def __str__(self) -> str:
        """Return the counts in one or two sentences."""
        times = counted(self.roll_backs, "time")
        slowed = f" (after {self.slow_downs:,} of them with a lower learning rate)" if self.slow_downs else ""
        bursts = f"{counted(self.data_shifts, 'burst')} of spikes"
        done = [f"went back to older weights {times}{slowed}"] if self.roll_backs else []
        done += [f"treated {bursts} as a change of the data"] if self.data_shifts else []
        cost = f"cost {counted(self.lost_steps, 'step')}"
        if not done:
            then = f"which {cost}" if self.lost_steps else "and the record ends before it was over"
            return f"A burst of spikes was accepted as the new level of norms, {then}."
        longest = self.longest_recovery
        time = "" if longest is None else f"; the longest recovery took {counted(longest, 'step')}"
        return f"The run {' and '.join(done)}. That {cost}{time}."


def recoveries(record: Record) -> Recoveries | None:
    """Count the recoveries from spikes in a record.

    Args:
        record: The record of a run. Its events have ``lost`` where they lost steps.

    Returns:
        The counts; None where the record has no such event.

    Example:
        >>> from pathlib import Path
        >>> event = {"t": "event", "i": 40, "kind": "rolled_back", "lost": 14, "recovery": 16}
        >>> print(recoveries(Record(Path("run.jsonl"), {"t": "meta"}, [], [], [event], None, False)))
        The run went back to older weights 1 time. That cost 14 steps; the longest recovery took 16 steps.
    """
    events = [event for event in record.events if event.get("kind") in _KINDS]
    if not events:
        return None
    backs = [event for event in events if event["kind"] == "rolled_back"]
    ended = without_none(event.get("recovery") for event in events)
    return Recoveries(
        roll_backs=len(backs),
        slow_downs=sum(bool(event.get("slowed_down")) for event in backs),
        data_shifts=sum(event["kind"] == "data_shift" for event in events),
        lost_steps=sum(event.get("lost", 0) for event in events),
        longest_recovery=max(ended, default=None),
    )


_KINDS = frozenset(["burst", "rolled_back", "data_shift"])
