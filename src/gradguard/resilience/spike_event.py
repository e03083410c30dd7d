"""Events of `SpikeRecovery`, for its list of events and for listeners."""

import math
from dataclasses import dataclass

from torch.optim.optimizer import Optimizer

from gradguard.listeners import RecoveryEvent, RecoveryKind
from gradguard.words import listed


@dataclass(frozen=True, slots=True)
class SpikeEvent:
    """One action or observation of `SpikeRecovery`.

    Attributes:
        step: The step at which it began, counted from 1; steps that are undone count too.
        what: ``"spike"``, ``"burst"`` (consecutive spikes, as many as the detector's cap), ``"shift"`` (a burst that
            turned out to be a lasting change of the data) or ``"nonfinite"``.
        action: ``"skipped"``, ``"adopted"``, ``"rolled back"``, ``"rolled back, slowed down"`` or ``"went on"``.
        signal: The signal that was too high: ``"loss"``, ``"norm"`` or the name of a group.
        score: The distance of the signal from its usual value, in the detector's deviations.
        ids: The samples of the micro-batches that `find_culprit` blames, on any process; if none stands out, the
            samples of this process on these steps. Only samples that `SpikeRecovery.batch` recorded are known.
        rank: The process that had the blamed samples; None if no process is blamed, or several are.
        to_step: The step whose weights a roll-back restored.
        recovery: Number of steps from the first spike to the action that ended it; None if it continues.
        lost: Number of steps whose work is lost, skipped ones included; None if it is not known yet.
        changed: Whether weights were changed outside of the optimizer just before.
    """

    step: int
    what: str
    action: str
    signal: str = ""
    score: float = math.nan
    ids: tuple[int | str, ...] = ()
    to_step: int | None = None
    recovery: int | None = None
    lost: int | None = None
    rank: int | None = None
    changed: bool = False

    def __str__(self) -> str:
        """Return the event as one line of text."""
        back = "" if self.to_step is None else f" to the weights after step {self.to_step}"
        who = "" if self.rank is None or not self.ids else f"; samples {listed(self.ids, 8)} of rank {self.rank}"
        done = self.action.replace("rolled back", f"rolled back{back}")
        changed = ", after weights had changed outside of the optimizer" if self.changed else ""
        return f"step {self.step}: {self.what}{self._height()}{changed}, {done}{who}"

    def _height(self) -> str:
        return "" if math.isnan(self.score) else f" ({self.signal} {self.score:.1f} deviations above the median)"


def recovery_of(event: SpikeEvent, optimizer: Optimizer, slowed: str) -> RecoveryEvent:
    """Return ``event`` as listeners receive it; ``slowed`` is the text for a lower learning rate."""
    kind: RecoveryKind = "data_shift" if event.what == "shift" else "burst"
    spikes = f"spikes in a row{event._height()}"
    if event.changed:
        spikes += ", after weights had changed outside of the optimizer,"
    words = f"{spikes} were adopted as the new level; the weights from before are tried later"
    if event.to_step is not None:
        kind, cause = "rolled_back", "gradients that stayed non-finite" if event.what == "nonfinite" else spikes
        words = f"went back to the weights of {event.lost} steps before, because of {cause}"
    elif kind == "data_shift":
        words = f"{spikes} were a change of the data, which older weights do not fit either: training continues"
    elif event.action == "went on":
        words = f"{spikes} were adopted as the new level; there is no snapshot from before to go back to"
    slows = "slowed down" in event.action
    return RecoveryEvent(optimizer, kind, words + slowed * slows, event.lost, event.recovery, slows)
