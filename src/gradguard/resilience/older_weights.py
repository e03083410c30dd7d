"""Weights from before a row of spikes: the snapshots that are kept, and the trials in which they are tested."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gradguard.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step as the detector and the guard measured it, in Python numbers."""

    step: int
    spike: bool
    stands_out: bool  # also a single step, which is no spike
    adopted: bool
    nonfinite: bool
    changed: bool  # whether weights were changed outside of the optimizer before the step
    in_a_row: int
    scores: list[float]

    @classmethod
    def of(cls, step: int, numbers: Tensor | list[float]) -> "MeasuredStep":
        """Unpack the numbers of a step: five flags, the number of spikes in a row, and the scores."""
        values = numbers.tolist() if isinstance(numbers, Tensor) else numbers
        spike, stands_out, adopted, nonfinite, changed = map(bool, values[:5])
        return cls(step, spike, stands_out, adopted, nonfinite, changed, int(values[5]), values[6:])

    @property
    def is_bad(self) -> bool:
        """Whether the step stood out or was not finite."""
        return self.stands_out or self.nonfinite


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A snapshot of the weights after ``step``, taken at the step ``taken``."""

    step: int
    taken: int
    snapshot: Snapshot

    def go_back(self) -> None:
        """Restore the snapshot, except generators and schedules, which continue."""
        self.snapshot.restore(rewind_generators=False, rewind_schedule=False)


class SnapshotShelf:
    """Keeps two snapshots, one of them older than the detection delay, and a spare one."""

    def __init__(self, make: Callable[[], Snapshot], delay: int) -> None:
        self._make, self._delay = make, delay
        self.clear()

    def clear(self) -> None:
        """Drop all snapshots."""
        self.kept: list[KeptSnapshot] = []
        self.held_at = 0  # step at which weights from before a possible row of spikes were saved; 0 if none were
        self._spare: Snapshot | None = None

    def is_due(self, step: int, every: int, calm_since: int) -> bool:
        """Tell whether a snapshot is due after ``step``: one every ``every`` steps, none while spikes are near."""
        if not self.kept:
            return True
        return step - calm_since > self._delay and step - self.kept[-1].step >= max(every, self._delay)

    def take(self, step: int, now: int) -> None:
        """Take a snapshot at step ``now``; it holds the state after ``step``."""
        if len(self.kept) < 2:
            snapshot = self._make()
        else:  # drop the older one, unless the newer is so young that it may contain an undetected spike
            snapshot = self.kept.pop(0 if step - self.kept[1].step >= self._delay else 1).snapshot
        snapshot.take()
        self.kept = sorted([*self.kept, KeptSnapshot(step, now, snapshot)], key=lambda kept: kept.step)

    def settle(self, step: int) -> None:
        """Note that ``step`` was taken: a snapshot that was taken for an earlier state is wrong, and is dropped."""
        if step <= self.held_at:
            del self.kept[-1:]
        self.held_at = 0

    def before(self, step: float, taken: float = math.inf) -> KeptSnapshot | None:
        """Return the newest snapshot of a state before ``step``, taken before the step ``taken``; None if none is."""
        return next((kept for kept in reversed(self.kept) if kept.step < step and kept.taken < taken), None)

    def spare(self, step: int) -> KeptSnapshot:
        """Return a snapshot of the current state."""
        self._spare = self._spare or self._make()
        self._spare.take()
        return KeptSnapshot(step, step, self._spare)


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of the older weights ``base``, begun at the step ``began``; ``newer`` are restored if it fails."""

    base: KeptSnapshot
    newer: KeptSnapshot
    began: int


@dataclass(slots=True)
class Burst:
    """A row of spikes that the detector adopted, and the older weights that are still to be tried.

    Attributes:
        first: The step of the first spike.
        seen: The step on which the row was adopted.
        changed: Whether weights were changed outside of the optimizer before the burst.
        trials: The trials to come: the step at which each begins, and its older weights.
        lost: Number of steps whose work is lost: spikes that were skipped, and the steps of failed trials.
        trial: The running trial; None between trials.
        good: Consecutive steps without a spike in the running trial.
    """

    first: int
    seen: MeasuredStep
    changed: bool
    trials: list[tuple[int, KeptSnapshot]]
    lost: int
    trial: Trial | None = None
    good: int = 0
