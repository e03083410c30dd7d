"""Weights from before a row of spikes: which snapshots are kept, and the trials in which they may come back."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gradguard.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step as the detector and the guard measured it, in plain numbers."""

    step: int
    spike: bool
    stands_out: bool  # be it alone, which is no spike
    adopted: bool
    nonfinite: bool
    changed: bool  # weights, outside of the optimizer, before it
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
        """Whether it stood out or was not finite."""
        return self.stands_out or self.nonfinite


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A snapshot of the weights after ``step``, which was taken at the step ``taken``."""

    step: int
    taken: int
    snapshot: Snapshot

    def go_back(self) -> None:
        """Restore the snapshot, except generators and schedules, which go on."""
        self.snapshot.restore(rewind_generators=False, rewind_schedule=False)


class SnapshotShelf:
    """Two snapshots, of which one is older than the detection delay, and a spare one."""

    def __init__(self, make: Callable[[], Snapshot], delay: int) -> None:
        self._make, self._delay = make, delay
        self.clear()

    def clear(self) -> None:
        """Let all snapshots go."""
        self.kept: list[KeptSnapshot] = []
        self.held_at = 0  # the step at which weights from before a row of spikes were taken, while it may be none
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
        else:  # the older one goes, unless the newer is too young to be alone: it may hold what is not detected yet
            snapshot = self.kept.pop(0 if step - self.kept[1].step >= self._delay else 1).snapshot
        snapshot.take()
        self.kept = sorted([*self.kept, KeptSnapshot(step, now, snapshot)], key=lambda kept: kept.step)

    def settle(self, step: int) -> None:
        """Note that ``step`` was taken: a snapshot held for an earlier state is of a later one, and is dropped."""
        if step <= self.held_at:
            del self.kept[-1:]
        self.held_at = 0

    def before(self, step: float, taken: float = math.inf) -> KeptSnapshot | None:
        """Return the newest snapshot of a state before ``step``, taken before the step ``taken``; None if none is."""
        return next((kept for kept in reversed(self.kept) if kept.step < step and kept.taken < taken), None)

    def spare(self, step: int) -> KeptSnapshot:
        """Return a snapshot of the state as it is now."""
        self._spare = self._spare or self._make()
        self._spare.take()
        return KeptSnapshot(step, step, self._spare)


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of the older weights ``base``, begun at the step ``began``; the ``newer`` ones may come back."""

    base: KeptSnapshot
    newer: KeptSnapshot
    began: int


@dataclass(slots=True)
class Burst:
    """A row of spikes that was adopted, and the older weights that are still to be tried.

    Attributes:
        first: The step of the first spike.
        seen: The step on which the row was adopted.
        changed: Whether something else had changed the weights before.
        trials: The trials to come: the step at which each begins, and its older weights.
        lost: Steps whose work is lost: spikes that were skipped, and the steps of trials that failed.
        trial: The trial that is running; None between trials.
        good: Steps in a row without a spike in that trial.
    """

    first: int
    seen: MeasuredStep
    changed: bool
    trials: list[tuple[int, KeptSnapshot]]
    lost: int
    trial: Trial | None = None
    good: int = 0
