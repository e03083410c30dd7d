"""`SpikeRecovery`: skip spikes, and go back to older weights if they do not end by themselves."""

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.arguments import check_whole
from gradguard.clip.clipper import Clipper
from gradguard.clip.guard import Guard, check_attachable
from gradguard.clip.thresholds.median import ClipByMedian
from gradguard.errors import InvalidTypeError, InvalidValueError, SpikeError, UnsupportedGradientError
from gradguard.listeners import Listener, tell_of
from gradguard.optimizer_hooks import optimizers_in
from gradguard.resilience.bad_samples import BadSamples
from gradguard.resilience.batch_iterators import Batches, MicroBatch, SampleId
from gradguard.resilience.culprit import find_culprits, to_leave_out
from gradguard.resilience.evidence import EvidenceFolder
from gradguard.resilience.older_weights import Burst, KeptSnapshot, MeasuredStep, SnapshotShelf, Trial
from gradguard.resilience.slow_down import SlowDown
from gradguard.resilience.spike_event import SpikeEvent, recovery_of
from gradguard.spikes.detector import SpikeDetector
from gradguard.spikes.skip import SkipSpikes
from gradguard.spikes.spike_policy import Detector
from gradguard.state.snapshot import Snapshot
from gradguard.state.step_buffers import StepBuffers
from gradguard.state.weight_watch import WeightWatch
from gradguard.tensors.host_copy import DeviceEvent as CopyEvent
from gradguard.tensors.host_copy import copy_to_host, is_captured
from gradguard.tensors.layout import are_readable

LossT = TypeVar("LossT", Tensor, float)

_SLOW_STEPS = 64
"""Steps for which the learning rate stays low after a roll-back that is not the first."""

_TRIALS = (6, 16, 36)
"""Steps after an adoption at which the older weights are tried."""

_GOOD = 2
"""Steps in a row that older weights must take without a spike to be kept."""

_NONFINITE = 18
"""Consecutive non-finite steps after which to go back; a new GradScaler may need 17 to find its scale."""


@dataclass(slots=True)
class _Course:
    """The state of a run between two steps, which is reset when a run is resumed.

    Attributes:
        calm_since: The last step that stood out or was not finite.
        slow_until: The step up to which the learning rate is lower.
        missed: Number of optimizer steps between the last two calls, minus one.
        nonfinite: Number of consecutive steps that were not finite.
        changed_at: The last step that began with weights that were changed outside of the optimizer.
        burst: The adopted burst that has neither been rolled back nor recognised as a shift.
    """

    calm_since: int
    slow_until: int
    missed: int = 0
    nonfinite: int = 0
    changed_at: int = 0
    burst: Burst | None = None


class SpikeRecovery:
    r"""Guard an optimizer against spikes: skip them, slow down, go back to a snapshot, exclude the samples.

    Call `record_loss` for each micro-batch, and `step` once after each step of the optimizer. What happens:

    1. A step that is a **spike** is skipped (`SkipSpikes`).
    2. After ``detector.cap`` spikes in a row (a **burst**) the detector adopts the new level, and training continues:
       the data may have changed for good. The weights from before the burst stay in memory.
    3. 6, 16 and 36 steps later these older weights are **tried** on the data of that moment. If two consecutive steps
       are no spikes with them, the burst is over: they are kept, with their optimizer state, and everything learnt
       from the burst is undone (**rolled back**). The data are not rewound, nor are schedules and generators. At the
       first spike the trial ends: the newer weights are restored bit by bit, and training continues.
    4. If the last trial fails, the data have **shifted**: training continues as usual.
    5. After 18 consecutive steps with non-finite gradients, the run goes back at once.
    6. From the second roll-back within 1,000 steps on, the **learning rate** is multiplied by ``lr_factor`` for 64
       steps, because the weights may be at fault instead of the data. Schedulers do not see the factor.
    7. More than ``budget`` roll-backs within 1,000 steps end the run with an error that lists the events.

    A legitimate shift of the data therefore costs ``cap`` skipped steps, and ``detection_delay`` + 1 steps a trial.

    **Guarantees.**

    * All processes take the same action on the same step: they judge numbers that were reduced over all of them, and
      read the verdict on step t after step t + ``detection_delay``, never earlier. So the host waits only for a step
      that is ``detection_delay`` steps old.
    * A skipped step changes nothing; `step` undoes what its forward wrote to buffers (BatchNorm's statistics). A
      roll-back restores weights, buffers, optimizer state, scaler, ``extra_state``, clipper and detector bit by bit
      (`Snapshot`).
    * One snapshot is older than the detection delay, and none is taken near spikes.

    **Memory.** Two snapshots, three during a burst: 12 bytes a parameter each for AdamW in float32, on the host if the
    model is on an accelerator.

    **Edge cases.**

    ===================================  ======================================================================
    case                                 what happens
    ===================================  ======================================================================
    bursts below ``detector.cap``        all their steps are skipped; nothing to roll back
    bursts longer than the last trial    treated as a shift of the data, and learnt
    the loss is not recorded             gradient norms alone decide
    a scheduler                          pass it in ``extra_state``; its schedule continues and is not rewound
    a data loader in ``extra_state``     refused: going back must not repeat the same data
    several optimizers                   refused, unless one has the others as attributes, and steps them
    accumulation                         call `step` after the real steps, or after each micro-batch: no difference
    ``add_param_group``                  snapshots are dropped, and a new one is taken: an earlier burst is learnt,
                                         and weights that are being tried stay
    resumed from `state_dict`            no burst and new snapshots: snapshots are not saved
    ===================================  ======================================================================

    Args:
        model: The module that is trained.
        optimizer: Its optimizer.
        clipper: The clipper; None for ``ClipByMedian()``.
        detector: The spike detector; None for ``SpikeDetector(cap=5)``. If its verdicts have no ``adopted``, spikes are
            only skipped.
        extra_state: Further objects, as for `Snapshot`: a GradScaler or an averaged model, which a roll-back restores,
            and schedulers, which continue.
        bad_samples: The list to which the samples of bursts and spikes are added; None for no list.
        snapshot_every: Number of steps between two snapshots.
        detection_delay: Number of steps from a measurement to the action on it; None for 2 on an accelerator, so that
            the host does not wait, and 0 on the CPU. Below ``detector.cap`` - 2 a roll-back restores the weights from
            just before a burst; otherwise those of the last snapshot.
        lr_factor: The factor of the learning rate after a second roll-back; 1 keeps the rate.
        budget: The number of roll-backs within 1,000 steps that are no error.
        evidence: A folder for the files of ``gradguard replay-step``. One file, twice as large as the weights, is
            written at the first spike of a burst, at most once in ``snapshot_every`` steps. `batch` must then receive
            the batches, which are kept as long as their samples. A file that cannot be written causes a warning.
        process_group: The processes that train this model together, as for `SkipSpikes`.
        guard_options: Further arguments of `Guard`: ``nonfinite``, ``max_consecutive_skips``, ``mesh``, ...

    Attributes:
        guard: The `Guard` that it creates.
        events: The events, in order.
        steps: Number of steps so far, skipped and undone ones included.
        batches: The samples of the last steps.

    Raises:
        InvalidTypeError: If an argument is of another type.
        InvalidValueError: If a number is outside its range.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> resilience = gg.SpikeRecovery(model, optimizer, detector=gg.SpikeDetector(warmup=4))
        >>> for size in [1.0, 1.0, 1.0, 1.0, 50.0, 1.0, 1.0]:
        ...     optimizer.zero_grad()
        ...     resilience.record_loss(model(torch.full((1, 1), size)).square().mean()).backward()
        ...     optimizer.step()
        ...     _ = resilience.step()
        >>> [(event.what, event.action, event.step) for event in resilience.events]
        [('spike', 'skipped', 5)]

    Reference:
        Chowdhery et al. (2022), PaLM, arXiv 2204.02311 (going back some 100 steps and omitting batches).
    """

    _guard_type: type[Guard] = Guard  # a trainer's subclass refuses the trainer's own clip

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        clipper: Clipper | None = None,
        *,
        detector: Detector | None = None,
        extra_state: Iterable[Any] = (),
        bad_samples: BadSamples | None = None,
        snapshot_every: int = 50,
        detection_delay: int | None = None,
        lr_factor: float = 0.5,
        budget: int = 3,
        evidence: str | os.PathLike[str] | None = None,
        process_group: Any = None,
        guard_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_extra_state(extra_state := list(extra_state))
        if isinstance(optimizer, list | tuple):
            raise InvalidTypeError(_several(f"optimizer is a {type(optimizer).__name__}"))
        if detection_delay is None:
            detection_delay = 0 if all(p.is_cpu for p in model.parameters()) else 2
        self.snapshot_every = check_whole("snapshot_every", snapshot_every, 1)
        self.detection_delay = check_whole("detection_delay", detection_delay, 0)
        self.budget = check_whole("budget", budget, 0)
        if not 0 < lr_factor <= 1:
            raise InvalidValueError(f"lr_factor={lr_factor!r}: expected a number above 0 and at most 1, such as 0.5.")
        self.lr_factor = lr_factor
        clipper = ClipByMedian() if clipper is None else clipper
        check_attachable(optimizer, clipper)
        self._detector = SpikeDetector(cap=5) if detector is None else detector
        self._cap = getattr(self._detector, "cap", 0)
        self._group, self._optimizer, self._model = process_group, optimizer, model
        self._evidence = None if evidence is None else EvidenceFolder(evidence, self.snapshot_every)
        self._spikes = _HostSpikes(self._detector, WeightWatch(optimizer), process_group)
        self.guard = self._guard_type(optimizer, clipper, model=model, spikes=self._spikes, **(guard_options or {}))
        self._slow_down, self._buffers = SlowDown(optimizer), StepBuffers(model)
        everything = [self._detector, clipper, *extra_state]
        self._shelf = SnapshotShelf(
            lambda: Snapshot(model, optimizer, extra_state=everything), self._cap + self.detection_delay
        )
        self.batches = Batches(steps=_TRIALS[-1] + self._cap + self.detection_delay + 32, keep=evidence is not None)
        self.bad_samples, self.events = bad_samples, list[SpikeEvent]()
        self._pending: deque[tuple[int, Tensor | list[float], CopyEvent | None]] = deque()
        self._verdict: Any = None  # the last verdict that was read
        self._begin_at(0, 0)
        self._groups = self._group_sizes()

    def _begin_at(self, steps: int, slow_until: int) -> None:
        """Begin or resume after ``steps`` steps, without any snapshot or measurement."""
        self.steps, self._course = steps, _Course(steps, slow_until)
        self._spikes.followed = self.guard.steps
        self.batches.load_state_dict({"step": steps + 1})  # `batches` counts the current step
        self._pending.clear()
        self._shelf.clear()

    # -- called by the training loop ------------------------------------------------------------------------------

    def record_loss(self, loss: LossT, weight: float | Tensor = 1.0, kind: str | None = None) -> LossT:
        """Record the loss of one micro-batch before its step; return it unchanged. See `Guard.record_loss`."""
        if not self.guard.is_evaluation(loss):
            self.batches.record_loss(loss)
        return self.guard.record_loss(loss, weight, kind)

    def batch(self, ids: Any = None, batch: Any = None) -> None:
        """Record the next micro-batch's samples, and the batch itself if it is kept; call it before `record_loss`.

        Args:
            ids: Whole numbers or strings.
            batch: The batch, for ``evidence``.
        """
        self.batches.saw(ids, batch=batch)

    def step(self) -> SpikeEvent | None:
        """Act on the measurement of ``detection_delay`` steps ago; call it after each ``optimizer.step()``.

        Returns:
            The event; None if no action was taken.

        Raises:
            SpikeError: If there were more roll-backs than the budget allows.
            InvalidValueError: If the optimizer has taken several steps since the last call, or `batches` counts other
                steps.
        """
        taken = self.guard.steps - self._spikes.followed
        if taken == 0:  # a micro-batch that was only accumulated
            return None
        if self.batches.step != self.steps + 1:
            raise InvalidValueError(
                f"resilience.batches is at step {self.batches.step} and resilience has taken {self.steps} steps, so "
                "events would name the samples of other steps. Do not change the count of resilience.batches; "
                "resilience.load_state_dict() sets it."
            )
        if taken - 1 + self._course.missed > 1:  # a single one may be a step that raised an error
            raise InvalidValueError(_forgotten(taken))
        self._course.missed, self._spikes.followed = taken - 1, self.guard.steps
        self._buffers.put_back(self.guard.skipped)
        self.steps += 1
        self.batches.end_step()
        changed = self._follow_groups()
        self._pending.append((self.steps, *self._measured()))
        event = self._process(*self._pending.popleft()) if len(self._pending) > self.detection_delay else None
        self._go_on()
        self._buffers.keep()
        self._spikes.weights.keep()
        for one in filter(None, (changed, event)):
            self._note(one)
        return event or changed

    def _note(self, event: SpikeEvent) -> None:
        self.events.append(event)
        if event.action != "skipped":  # the clip's own event already reports a skip
            slowed = f"; the learning rate is {self.lr_factor:g} times as high for {_SLOW_STEPS} steps"
            tell_of(Listener.on_recover, recovery_of(event, self._optimizer, slowed))

    def _measured(self) -> tuple[Tensor | list[float], CopyEvent | None]:
        """Return the step's numbers, on the host or being copied there; empty if the step was not taken."""
        verdict, result = self._detector.last, self.guard.last
        if verdict is None or verdict is self._verdict or result is None:  # a GradScaler skipped the step
            return [], None
        self._verdict = verdict
        bad = result.nonfinite if self._spikes.nonfinite is None else self._spikes.nonfinite
        changed = self._spikes.changed
        stands_out = verdict.spike if verdict.stands_out is None else verdict.stands_out
        flags = [verdict.spike, stands_out, verdict.adopted, bad, changed, verdict.in_a_row]
        scores = verdict.scores
        if are_readable(scores, *(flag for flag in flags if isinstance(flag, Tensor))):
            return [*map(float, flags), *scores.tolist()], None
        numbers = [torch.as_tensor(flag, dtype=scores.dtype, device=scores.device) for flag in flags]
        return copy_to_host(torch.cat([torch.stack(numbers), scores]))

    # -- actions --------------------------------------------------------------------------------------------------

    def _process(self, step: int, numbers: Tensor | list[float], landed: CopyEvent | None) -> SpikeEvent | None:
        """Act on the numbers of a step; ``numbers`` is empty for a step that was not taken."""
        if landed is not None:
            landed.synchronize()
        if not len(numbers):
            return None
        now, course = MeasuredStep.of(step, numbers), self._course
        course.nonfinite = course.nonfinite + 1 if now.nonfinite else 0
        if now.is_bad:
            course.calm_since = self.steps
        if now.changed:
            course.changed_at = now.step
        burst = course.burst
        if burst is not None and burst.trial is not None:
            return self._judge_trial(burst, burst.trial, now)
        if course.nonfinite >= _NONFINITE:
            first, course.nonfinite = now.step - course.nonfinite + 1, 0
            if (base := self._shelf.before(first)) is None:
                return None
            base.go_back()
            self._pending.clear()
            passed, lost = self.steps - first + 1, self.steps - base.step
            return self._went_back(base, first, "nonfinite", recovery=passed, lost=lost)
        if not now.spike:
            if not now.nonfinite:
                self._shelf.settle(now.step)
            return None
        if burst is None and now.in_a_row == 2 and self.steps - now.step + 2 < self._cap:  # not adopted yet
            self._shelf.take(now.step - 2, self.steps)  # weights are unchanged since then, if all steps were spikes
            self._shelf.held_at = self.steps
        if burst is None and now.adopted:
            return self._suspect(now)
        return self._event(now.step, "spike", "skipped", now, lost=1)

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for one in optimizers_in(self._optimizer) for group in one.param_groups]

    def _follow_groups(self) -> SpikeEvent | None:
        """Drop the snapshots if parameters were added: a snapshot could not be restored."""
        before, self._groups = self._groups, self._group_sizes()
        if self._groups == before:
            return None
        self._shelf.clear()
        self._buffers.remove()
        self._buffers = StepBuffers(self._model)  # also of added layers
        self._spikes.weights = WeightWatch(self._optimizer)
        burst, self._course.burst = self._course.burst, None
        if burst is None:
            return None
        if burst.trial is not None:  # the newer weights can no longer be restored
            return self._roll_back(burst, burst.trial)
        return self._event(burst.first, "burst", "went on", burst.seen, lost=burst.lost)

    def _suspect(self, now: MeasuredStep) -> SpikeEvent:
        """Plan the trials of the weights from before a burst that was just adopted."""
        first, changed_at = now.step - now.in_a_row + 1, self._course.changed_at
        self._shelf.held_at, base = 0, self._shelf.before(first)
        if base is None:
            return self._event(first, "burst", "went on", now, lost=now.in_a_row)
        older = self._shelf.before(math.inf, changed_at) if base.taken >= changed_at > 0 else None
        bases = [base, older] if older is not None else [base]  # `older` is from before the weights were changed
        trials = [(self.steps + wait, one) for wait in _TRIALS for one in bases]
        burst = self._course.burst = Burst(first, now, older is not None, trials, now.in_a_row)
        return self._event(first, "burst", "adopted", now, changed=burst.changed)

    def _go_on(self) -> None:
        """End a step: begin a trial, set the learning rate or take a snapshot, if due."""
        burst = self._course.burst
        if burst is not None and burst.trial is None and self.steps >= burst.trials[0][0]:
            newer, (_, base) = self._shelf.spare(self.steps), burst.trials.pop(0)
            base.go_back()
            burst.trial, burst.good = Trial(base, newer, self.steps), 0
            self._pending.clear()  # measurements of weights that were replaced
        self._slow_down.factor = self.lr_factor if self.steps < self._course.slow_until else 1.0
        if burst is None and self._shelf.is_due(self.steps, self.snapshot_every, self._course.calm_since):
            self._shelf.take(self.steps, self.steps)

    def _judge_trial(self, burst: Burst, trial: Trial, now: MeasuredStep) -> SpikeEvent | None:
        if not now.is_bad:
            burst.good += 1
            return self._roll_back(burst, trial) if burst.good == _GOOD else None
        trial.newer.go_back()
        burst.trial, burst.lost = None, burst.lost + self.steps - trial.began
        self._pending.clear()
        if burst.trials:
            return None
        self._course.burst, self._course.calm_since = None, self.steps
        more = {"lost": burst.lost, "changed": burst.changed, "recovery": self.steps - burst.first}
        return self._event(burst.first, "shift", "went on", burst.seen, **more)

    def _roll_back(self, burst: Burst, trial: Trial) -> SpikeEvent:
        more = {"until": trial.began, "changed": burst.changed, "recovery": self.steps - burst.first}
        lost = trial.began - trial.base.step
        return self._went_back(trial.base, burst.first, "burst", burst.seen, lost=lost, **more)

    def _went_back(
        self, base: KeptSnapshot, first: int, what: str, seen: MeasuredStep | None = None, **more: Any
    ) -> SpikeEvent:
        """Report a roll-back; from the second on lower the learning rate, and beyond the budget raise an error."""
        self._course.burst, self._course.nonfinite, self._course.calm_since = None, 0, self.steps
        self._shelf.kept = [kept for kept in self._shelf.kept if kept.step <= base.step]
        recent = sum(e.to_step is not None and self.steps - e.step < 1000 for e in self.events)
        action = "rolled back, slowed down" if recent and self.lr_factor < 1 else "rolled back"
        event = self._event(first, what, action, seen, to_step=base.step, **more)
        if recent:
            self._course.slow_until = self.steps + _SLOW_STEPS
        if recent < self.budget:
            return event
        self._note(event)
        story = "\n  ".join(str(e) for e in self.events[-40:])
        raise SpikeError(
            f"{recent + 1} roll-backs within 1,000 steps, but budget={self.budget}: going back does not cure this "
            f"run. It is at step {self.steps}, with the weights after step {event.to_step}, which are good. What "
            f"happened:\n  {story}\nCheck the samples that the events name, or lower the learning rate."
        )

    def _event(
        self,
        step: int,
        what: str,
        action: str,
        seen: MeasuredStep | None = None,
        *,
        until: int | None = None,
        **more: Any,
    ) -> SpikeEvent:
        signal, score = self._worst(seen)
        steps = range(step, (until or step) + 1)
        own = [one for n in steps if n in self.batches.known for one in self.batches.of_step(n)]
        if action == "adopted" or what == "shift":  # the samples may be good
            return SpikeEvent(step, what, action, signal, score, _ids(own), **more)
        culprits = find_culprits(self.batches, steps, group=self._group)
        blamed, unclear = to_leave_out(culprits)
        if self.bad_samples is not None:  # all processes reach this on the same step
            reason = what if seen is None else f"{what}: {signal} {score:.1f} deviations above the median"
            for one in (*blamed, *unclear):
                self.bad_samples.add(one.ids or (), reason=reason, step=one.step, rank=one.rank, group=self._group)
        if self._evidence is not None and what == "spike" and culprits:
            base, culprit = self._shelf.before(step), culprits[0]
            older = {} if base is None else {base.step + 1: base.snapshot}
            before = None if self.detection_delay else culprit.step  # with a delay later steps may have changed them
            self._evidence.write(self.batches, culprit, self._model, older, before)
        ranks, of_steps = {one.rank for one in blamed}, {one.step for one in unclear}
        ids = _ids([*blamed, *(one for one in own if one.step in of_steps)])
        return SpikeEvent(step, what, action, signal, score, ids, rank=min(ranks) if len(ranks) == 1 else None, **more)

    def _worst(self, seen: MeasuredStep | None) -> tuple[str, float]:
        """Return the signal that stood out most and its score; "" and NaN if nothing was judged."""
        scores = [] if seen is None else seen.scores
        score, i = max(((score, i) for i, score in enumerate(scores) if not math.isnan(score)), default=(math.nan, -1))
        if i < 0:
            return "", score
        groups = getattr(self.guard.last, "group_norms", None)
        names = self._spikes.signal_names([*groups] if groups else ["norm"])
        return (names[i] if i < len(names) else f"signal {i}"), score

    # -- saving and resuming --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state, the counts and the events for a resumed run; snapshots are not saved."""
        events, slow_until = list(map(asdict, self.events)), self._course.slow_until
        return {"guard": self.guard.state_dict(), "steps": self.steps, "slow_until": slow_until, "events": events}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; the next step takes a first snapshot.

        Raises:
            InvalidValueError: If ``state_dict`` is not the state of a `SpikeRecovery`.
        """
        if set(state_dict) != {"guard", "steps", "slow_until", "events"}:
            raise InvalidValueError(
                "this is not the state of a SpikeRecovery: expected 'guard', 'steps', 'slow_until' and 'events', got "
                f"{sorted(state_dict)}. Pass what state_dict() returned."
            )
        steps, slow_until = int(state_dict["steps"]), int(state_dict["slow_until"])
        events = [SpikeEvent(**{**event, "ids": tuple(event["ids"])}) for event in state_dict["events"]]
        self.guard.load_state_dict(state_dict["guard"])
        self.events = events
        self._begin_at(steps, slow_until)

    def detach(self) -> None:
        """Detach from the optimizer, which then steps as it did before, and drop the snapshots."""
        self.guard.detach()
        self._slow_down.remove()
        self._buffers.remove()
        self._shelf.clear()


class _HostSpikes(SkipSpikes):
    """Spikes of steps that the host counts, with a watch on the weights."""

    def __init__(self, detector: Detector, weights: WeightWatch, process_group: Any) -> None:
        super().__init__(detector, process_group=process_group)
        self.weights = weights
        self.followed = 0  # the guard's step count at the last call of `SpikeRecovery.step`

    def check_captured(self, device: torch.device) -> None:
        if is_captured(device):
            raise UnsupportedGradientError(
                "the step is recorded in a CUDA graph, but SpikeRecovery counts steps on the host, which a replay "
                "does not run: it would never act. Keep the step out of the graph, or use Guard(..., spikes=) alone."
            )
        super().check_captured(device)

    def begin(self, step: int) -> None:
        if step > self.followed + _FORGOTTEN:
            raise InvalidValueError(_forgotten(step - 1 - self.followed))

    def judge_numbers(self, norms: Sequence[float], bad: bool) -> bool:
        spike, verdict = super().judge_numbers(norms, bad), self.detector.last
        stands_out = spike or getattr(verdict, "stands_out", False)
        self.changed = bool(self.weights.changed()) if stands_out else self.weights.were_written()
        return spike

    def _weights_changed(self) -> Tensor | bool:
        return self.weights.changed()


_FORGOTTEN = 4
"""Number of optimizer steps without a call of `SpikeRecovery.step` after which the next step is refused."""


def _forgotten(steps: int) -> str:
    return (
        f"the optimizer has taken {steps} steps since resilience.step() was last called, and SpikeRecovery has not "
        "followed all of them: it could neither go back nor count correctly. Call resilience.step() once after each "
        "optimizer.step(): `gradguard explain resilience`."
    )


def _ids(batches: Iterable[MicroBatch]) -> tuple[SampleId, ...]:
    return tuple(dict.fromkeys(id for one in batches for id in one.ids or ()))


def _several(what: str) -> str:
    return (
        f"{what}, and several optimizers step one after the other: the first would take a step that the last finds "
        "to be a spike. Pass one optimizer that steps all of them (Muon beside AdamW in `gradguard explain "
        "resilience`), or put all parameters into one, with groups."
    )


def _check_extra_state(extra_state: list[Any]) -> None:
    for one in extra_state:
        if isinstance(one, Optimizer):
            raise InvalidTypeError(_several("extra_state has an optimizer"))
        if isinstance(one, torch.utils.data.DataLoader):
            raise InvalidTypeError(
                f"extra_state has a {type(one).__name__}: going back must not repeat the data that did the harm, "
                "so the loader continues. Remove it from extra_state=."
            )
