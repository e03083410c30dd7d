"""Weights from before a row of spikes: which snapshots are kept, and the trials in which they may come back."""

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
        """Take the numbers of a step apart: five flags, the number of spikes in a row, and the scores."""
        spike, stands_out, adopted, nonfinite, changed, in_a_row, *scores = (
            numbers.tolist() if isinstance(numbers, Tensor) else numbers
        )
        flags = bool(spike), bool(stands_out), bool(adopted), bool(nonfinite), bool(changed)
        return cls(step, *flags, int(in_a_row), scores)

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
        """Put the snapshot back, but for generators and schedules, which go on."""
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
        """Tell whether to take a snapshot after ``step``: one in ``every``, and none while spikes are near."""
        if not self.kept:
            return True
        return step - calm_since > self._delay and step - self.kept[-1].step >= max(every, self._delay)

    def take(self, step: int, now: int) -> None:
        """Keep the state as it is at step ``now``, which is that after ``step``."""
        if len(self.kept) < 2:
            snapshot = self._make()
        else:  # the older one goes, unless the newer is too young to be alone: it may hold what is not detected yet
            snapshot = self.kept.pop(0 if step - self.kept[1].step >= self._delay else 1).snapshot
        snapshot.take()
        self.kept = sorted([*self.kept, KeptSnapshot(step, now, snapshot)], key=lambda kept: kept.step)

    def hold(self, step: int, now: int) -> None:
        """Keep the state as that after ``step``, which it is if all steps since then turn out to be spikes."""
        self.take(step, now)
        self.held_at = now

    def settle(self, step: int) -> None:
        """Note that ``step`` was taken: then what was held as from before it is from after it."""
        if step <= self.held_at:
            del self.kept[-1:]
        self.held_at = 0

    def before(self, step: int) -> KeptSnapshot | None:
        """Return the newest from before ``step``."""
        return next((kept for kept in reversed(self.kept) if kept.step < step), None)

    def taken_before(self, step: int) -> KeptSnapshot | None:
        """Return the newest that was taken before ``step`` began."""
        return next((kept for kept in reversed(self.kept) if kept.taken < step), None)

    def spare(self, step: int) -> KeptSnapshot:
        """Return a snapshot of the state as it is now."""
        self._spare = self._spare or self._make()
        self._spare.take()
        return KeptSnapshot(step, step, self._spare)


@dataclass(frozen=True, slots=True)
class Trial:
    """Older weights that were taken at the step ``began``, and the newer ones, which may come back."""

    base: KeptSnapshot
    newer: KeptSnapshot
    began: int


@dataclass(slots=True)
class Burst:
    """Spikes in a row that were adopted, and what is still to be tried.

    Attributes:
        first: The step of the first spike.
        seen: The step on which they were adopted.
        changed: Whether something else had changed the weights before.
        trials: The steps at which to try older weights, each with these.
        lost: Steps whose work is lost: spikes that were skipped, and the steps of trials that failed.
        trial: The one that runs; None between them.
        good: Steps in a row that its weights have taken without a spike.
    """

    first: int
    seen: MeasuredStep
    changed: bool
    trials: list[tuple[int, KeptSnapshot]]
    lost: int
    trial: Trial | None = None
    good: int = 0

    def begin_trial(self, shelf: SnapshotShelf, step: int) -> None:
        """Take the next older weights, and keep the newer ones."""
        newer, (_, base) = shelf.spare(step), self.trials.pop(0)
        base.go_back()
        self.trial, self.good = Trial(base, newer, step), 0

    def end_trial(self, trial: Trial, step: int) -> None:
        """Give the newer weights back."""
        self.lost += step - trial.began
        trial.newer.go_back()
        self.trial = None
