"""From a skipped step to going back: what a run does about spikes that do not end by themselves."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.arguments import check_whole
from gradguard.clip.clipper import Clipper
from gradguard.clip.guard import Guard
from gradguard.clip.thresholds.median import ClipByMedian
from gradguard.errors import InvalidTypeError, InvalidValueError, SpikeError, UnsupportedGradientError
from gradguard.optimizer_hooks import optimizers_in
from gradguard.recovery_events import tell_recovery
from gradguard.resilience.bad_samples import BadSamples
from gradguard.resilience.batches import Batches, MicroBatch, SampleId
from gradguard.resilience.culprit import Culprit, find_culprits, to_leave_out
from gradguard.resilience.event import Event, recovery_of
from gradguard.resilience.evidence import EvidenceFolder
from gradguard.resilience.slow_down import SlowDown
from gradguard.resilience.snapshot import Snapshot
from gradguard.resilience.step_buffers import StepBuffers
from gradguard.resilience.weight_watch import WeightWatch
from gradguard.spikes.base import Detector, NumberVerdict, verdict_of
from gradguard.spikes.detector import SpikeDetector
from gradguard.spikes.skip import SkipSpikes
from gradguard.tensors.host_copy import Event as CopyEvent
from gradguard.tensors.host_copy import copy_to_host, is_captured
from gradguard.tensors.layout import are_readable

LossT = TypeVar("LossT", Tensor, float)

_SLOW_STEPS = 64
"""Steps for which the learning rate stays low after a roll-back that is not the first."""

_GOOD = 2
"""Steps in a row that older weights must take without a spike to be kept."""

_NONFINITE = 18
"""Steps in a row that are not finite after which to go back; a new GradScaler may need 17 to find its scale."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the device said of one step."""

    step: int
    spike: bool
    stands_out: bool  # be it alone, which is no spike
    adopted: bool
    nonfinite: bool
    changed: bool  # weights, outside of the optimizer, before it
    in_a_row: int
    scores: list[float]


class Resilience:
    r"""Guard an optimizer against spikes: skip them, slow down, go back to a snapshot, leave the samples out.

    Call `loss` for each micro-batch, and `step` once after each step of the optimizer. What happens:

    1. A step that is a **spike** is skipped (`SkipSpikes`).
    2. After ``detector.cap`` spikes in a row (a **burst**) the detector adopts the new level, and training goes on with
       it: the data may have changed for good. The weights from before the burst are kept, untouched, in memory.
    3. At each of ``trials`` steps later these older weights are **tried** on the data that come then. If two steps in a
       row are no spike to them, the burst is over: they are kept, with their optimizer state, and what was learnt from
       the burst is gone (**rolled back**). The data are not rewound, nor are schedules and generators. At the first
       step that spikes it was no end yet: the newer weights come back bit by bit, and training goes on.
    4. If the last trial fails, the data have **shifted**: training goes on as usual.
    5. Gradients that are not finite on 18 steps in a row are answered by going back at once.
    6. From the second roll-back within 1,000 steps on the **learning rate** is ``slow`` times as high for 64 steps: it
       may be the weights, and not the data. Schedulers do not see it.
    7. More than ``budget`` roll-backs within 1,000 steps end the run with an error that tells the whole story.

    A legitimate shift of the data so costs ``cap`` skipped steps, and ``lag`` + 1 steps a trial.

    **Guarantees.**

    * All processes do the same on the same step: they judge numbers that were added up over all of them, and read what
      the device said of step t after step t + ``lag``, never earlier where it happens to be there. The host waits for
      a step that is ``lag`` old.
    * A skipped step changes nothing; what its forward wrote to buffers (BatchNorm's statistics) is undone by `step`. A
      roll-back gives back weights, buffers, optimizer state, scaler, ``more``, clipper and detector bit by bit
      (`Snapshot`).
    * Never two snapshots of a suspicious time: one is older than the detection delay, and none is taken while spikes
      are near.

    **Memory.** Two snapshots, three while a burst goes on: 12 bytes a parameter each for AdamW in float32, on the host
    where the model is on an accelerator.

    **Edge cases.**

    ===================================  ======================================================================
    case                                 what happens
    ===================================  ======================================================================
    bursts below ``detector.cap``        skipped whole; nothing to roll back
    bursts longer than the last trial    taken for a shift of the data, and learnt
    the loss is not told                 judged by gradient norms alone
    a scheduler                          pass it in ``more``; its schedule goes on, it is not rewound
    a data loader in ``more``            refused: going back must not bring the same data again
    several optimizers                   refused, unless one has the others as attributes, and steps them
    accumulation                         call `step` after the real steps, or after each micro-batch: no difference
    ``add_param_group``                  snapshots are let go, and a new one is taken: a burst from before is learnt,
                                         and weights that are being tried stay
    resumed from `state_dict`            calm, with new snapshots: they are not saved
    ===================================  ======================================================================

    Args:
        model: The module that is trained.
        optimizer: Its optimizer.
        clipper: The clipper; None for ``ClipByMedian()``.
        detector: What tells a spike; None for ``SpikeDetector(cap=5)``. Those without ``adopted`` only ever skip.
        more: What else goes back, as for `Snapshot`: schedulers, a GradScaler, an averaged model.
        bad: Where to note the samples of bursts and spikes; None for nowhere.
        every: Steps between two snapshots.
        lag: Steps from a measurement to what is done about it; None for 2 on an accelerator, so that the host does not
            wait, and 0 on the CPU. Weights from just before a burst are there if it is below ``detector.cap`` - 2; else
            those of the last snapshot.
        slow: What the learning rate is multiplied by after a second roll-back; 1 leaves it.
        trials: How many steps after an adoption the older weights are tried.
        budget: Roll-backs within 1,000 steps that are no error.
        evidence: A folder for what ``gradguard replay-step`` reads: one file, as large as the weights twice, at the
            first spike of a burst, and at most one in ``every`` steps. `batch` must then be given the batches, which
            are kept for as long as their samples. A file that cannot be written is a warning.
        process_group: The processes that train this model together, as for `SkipSpikes`.
        guard_options: What `Guard` takes beside: ``nonfinite``, ``max_consecutive_skips``, ``mesh``, ...

    Attributes:
        guard: The `Guard` that it has made.
        events: What happened, in order.
        steps: Steps so far, skipped and undone ones included.
        batches: Which samples the last steps had.

    Raises:
        InvalidTypeError: If an argument is of another type.
        InvalidValueError: If a number is outside its range.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> resilience = gg.Resilience(model, optimizer, detector=gg.SpikeDetector(warmup=4))
        >>> for size in [1.0, 1.0, 1.0, 1.0, 50.0, 1.0, 1.0]:
        ...     optimizer.zero_grad()
        ...     resilience.loss(model(torch.full((1, 1), size)).square().mean()).backward()
        ...     optimizer.step()
        ...     _ = resilience.step()
        >>> [(event.what, event.action, event.step) for event in resilience.events]
        [('spike', 'skipped', 5)]

    Reference:
        Chowdhery et al. (2022), PaLM, arXiv 2204.02311 (going back some 100 steps and leaving batches out).
    """

    _guard_type: type[Guard] = Guard  # a trainer's refuses the trainer's own clip

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        clipper: Clipper | None = None,
        *,
        detector: Detector | None = None,
        more: Iterable[Any] = (),
        bad: BadSamples | None = None,
        every: int = 50,
        lag: int | None = None,
        slow: float = 0.5,
        trials: Sequence[int] = (6, 16, 36),
        budget: int = 3,
        evidence: str | os.PathLike[str] | None = None,
        process_group: Any = None,
        guard_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_more(more := list(more))
        if isinstance(optimizer, list | tuple):
            raise InvalidTypeError(_several(f"optimizer is a {type(optimizer).__name__}"))
        lag = (0 if _is_on_cpu(model) else 2) if lag is None else lag
        self.every, self.lag = check_whole("every", every, 1), check_whole("lag", lag, 0)
        self.trials, self.budget = _checked_trials(trials), check_whole("budget", budget, 0)
        if not 0 < slow <= 1:
            raise InvalidValueError(f"slow={slow!r}: expected a number above 0 and at most 1, such as 0.5.")
        self.slow = slow
        clipper = ClipByMedian() if clipper is None else clipper
        self._detector = SpikeDetector(cap=5) if detector is None else detector
        self._group, self._optimizer, self._model = process_group, optimizer, model
        self._evidence = None if evidence is None else EvidenceFolder(evidence, self.every)
        self._spikes = _HostSpikes(self._detector, WeightWatch(optimizer), process_group)
        self.guard = self._guard_type(optimizer, clipper, model=model, spikes=self._spikes, **(guard_options or {}))
        self._slow_down, self._buffers = SlowDown(optimizer), StepBuffers(model)
        everything = [self._detector, clipper, *more]
        self._shelf = _Shelf(lambda: Snapshot(model, optimizer, more=everything), self._delay)
        self._held_at = 0  # the step at which weights from before a row of spikes were taken, while it may be none
        self.batches = Batches(steps=self.trials[-1] + self._cap + self.lag + 32, keep=evidence is not None)
        self.batches.load_state_dict({"step": 1})  # as steps are counted here
        self.bad, self.events, self.steps = bad, list[Event](), 0
        self._guarded, self._slow_until = self.guard.steps, 0
        self._missed = 0  # steps of the optimizer between the last two calls of `step`, less one
        self._pending: deque[tuple[int, Tensor | list[float] | None, CopyEvent | None]] = deque()
        self._verdict: Any = None
        self._calm_since, self._nonfinite = 0, 0
        self._changed_at = 0  # the last step that began with weights that something else had changed
        self._burst: _Burst | None = None
        self._optimizers = optimizers_in(optimizer)
        self._groups = self._group_sizes()

    @property
    def _cap(self) -> int:
        return getattr(self._detector, "cap", 0)

    @property
    def _delay(self) -> int:
        return self._cap + self.lag

    # -- what the loop tells --------------------------------------------------------------------------------------

    def loss(self, loss: LossT, weight: float | Tensor = 1.0, kind: str | None = None) -> LossT:
        """Tell the loss of one micro-batch before its step; return it as it came. See `Guard.loss`."""
        if not self.guard.is_evaluation(loss):
            self.batches.loss(loss)
        return self.guard.loss(loss, weight, kind)

    def batch(self, ids: Any = None, batch: Any = None) -> None:
        """Tell which samples the next micro-batch holds, before its `loss`, and what it is, where it is to be kept.

        Args:
            ids: Whole numbers or strings.
            batch: The batch, for ``evidence``.
        """
        self.batches.saw(ids, batch=batch)

    def step(self) -> Event | None:
        """Act on what the device has said of the step ``lag`` steps ago; call it after each ``optimizer.step()``.

        Returns:
            What was done; None for nothing.

        Raises:
            SpikeError: If there were more roll-backs than the budget allows.
            InvalidValueError: If the optimizer has taken several steps since the last call.
        """
        if self.guard.steps == self._guarded:  # a micro-batch that was only accumulated
            return None
        missed, before = self.guard.steps - self._guarded - 1, self._missed
        self._missed = missed
        if missed > 1 or (missed and before):  # one alone may be a step that raised an error
            raise InvalidValueError(_forgotten(missed + 1))
        self._guarded = self._spikes.followed = self.guard.steps
        self._buffers.put_back(self.guard.skipped)
        self.steps += 1
        changed = self._follow_groups()
        self.batches.end_step()
        self._pending.append((self.steps, *self._measured()))
        event = None
        if len(self._pending) > self.lag:
            measured = _read(*self._pending.popleft())
            event = None if measured is None else self._process(measured)
        self._go_on()
        self._buffers.keep()
        self._spikes.weights.keep()
        for one in filter(None, (changed, event)):
            self._note(one)
        return event or changed

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if event.action != "skipped":  # which the clip's own event tells
            slowed = f"; the learning rate is {self.slow:g} times as high for {_SLOW_STEPS} steps"
            tell_recovery(recovery_of(event, self._optimizer, slowed))

    def _measured(self) -> tuple[Tensor | list[float] | None, CopyEvent | None]:
        verdict, result = verdict_of(self._detector), self.guard.last
        if verdict is None or verdict is self._verdict or result is None:  # a GradScaler has not let it step
            return None, None
        self._verdict = verdict
        bad = result.nonfinite if self._spikes.nonfinite is None else self._spikes.nonfinite
        changed = self._spikes.changed
        if isinstance(verdict, NumberVerdict) and are_readable(bad) and isinstance(changed, bool):
            flags = [verdict.spike, verdict.stands_out, verdict.adopted, bool(bad), changed, verdict.in_a_row]
            return [*flags, *verdict.scores], None
        verdict = verdict.tensors() if isinstance(verdict, NumberVerdict) else verdict
        stands_out = verdict.spike if verdict.stands_out is None else verdict.stands_out
        device, kind = verdict.scores.device, verdict.scores.dtype
        flags = [verdict.spike, stands_out, verdict.adopted, bad, changed, verdict.in_a_row]
        numbers = [torch.as_tensor(flag).to(device, kind) for flag in flags]
        return copy_to_host(torch.cat([torch.stack(numbers), verdict.scores]))

    # -- what is done ---------------------------------------------------------------------------------------------

    def _process(self, now: _Measured) -> Event | None:
        self._nonfinite = self._nonfinite + 1 if now.nonfinite else 0
        if now.stands_out or now.nonfinite:
            self._calm_since = self.steps
        if now.changed:
            self._changed_at = now.step
        if self._burst is not None and self._burst.is_tried:
            return self._judge_trial(self._burst, now)
        if self._nonfinite >= _NONFINITE:
            return self._leave_nonfinite(now)
        if not now.spike:
            self._drop_if_trained_since(now)
            return None
        if self._burst is None and now.in_a_row == 2 and self.steps - now.step + 2 < self._cap:  # not adopted yet
            self._held_at = self.steps
            self._shelf.take(now.step - 2, self.steps)  # whose weights these are, if all steps since then were spikes
        if now.adopted and self._burst is None:
            return self._suspect(now)
        return self._event(now.step, "spike", "skipped", now, lost=1)

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for one in self._optimizers for group in one.param_groups]

    def _follow_groups(self) -> Event | None:
        """Let go of the snapshots if parameters have come since: none of them could be restored."""
        before, self._groups = self._groups, self._group_sizes()
        if self._groups == before:
            return None
        self._shelf.clear()
        self._buffers.remove()
        self._buffers = StepBuffers(self._model)  # of layers that have come too
        self._spikes.weights = WeightWatch(self._optimizer)
        self._held_at, burst = 0, self._burst
        self._burst = None
        if burst is None or burst.is_tried:  # then the newer weights cannot come back
            return None if burst is None else self._roll_back(burst)
        return self._event(burst.first, "burst", "went on", burst.seen, lost=burst.lost)

    def _drop_if_trained_since(self, now: _Measured) -> None:
        if not now.nonfinite and now.step <= self._held_at:
            self._shelf.drop_newest()
        if not now.nonfinite:
            self._held_at = 0

    def _suspect(self, now: _Measured) -> Event:
        first = now.step - now.in_a_row + 1
        bases, self._held_at = self._bases(first), 0
        if not bases:
            return self._event(first, "burst", "went on", now, lost=now.in_a_row)
        changed = len(bases) > 1
        self._burst = _Burst(first, bases, [self.steps + wait for wait in self.trials], now, changed)
        return self._event(first, "burst", "adopted", now, changed=changed)

    def _bases(self, first: int) -> list[tuple[int, Snapshot]]:
        """The weights to try: the newest from before the burst, and those from before something else changed them."""
        base, changed = self._shelf.before(first), self._changed_at
        if base is None:
            return []
        older = self._shelf.taken_before(changed) if self._shelf.taken_at(base) >= changed > 0 else None
        return [base] if older is None else [base, older]

    def _go_on(self) -> None:
        """What is due at the end of a step: a trial, the end of a slow time, or a snapshot."""
        burst = self._burst
        if burst is not None and not burst.is_tried and self.steps >= burst.trials[0][0]:
            burst.begin_trial(self._shelf, self.steps)
            self._pending.clear()  # of weights that are gone
        self._slow_down.factor = self.slow if self.steps < self._slow_until else 1.0
        quiet = self.steps - self._calm_since > self._delay or not self._shelf.steps
        if burst is None and quiet and self._shelf.is_due(self.steps, self.every):
            self._shelf.take(self.steps, self.steps)

    def _judge_trial(self, burst: "_Burst", now: _Measured) -> Event | None:
        if not (now.stands_out or now.nonfinite):
            burst.good += 1
            return self._roll_back(burst) if burst.good == _GOOD else None
        burst.end_trial(self.steps)
        self._pending.clear()
        if burst.trials:
            return None
        self._burst = None
        self._calm_since = self.steps
        passed = self.steps - burst.first
        more = {"recovery": passed, "lost": burst.lost, "changed": burst.changed}
        return self._event(burst.first, "shift", "went on", burst.seen, **more)

    def _roll_back(self, burst: "_Burst") -> Event:
        self._burst, self._nonfinite = None, 0
        self._calm_since = self.steps
        self._shelf.drop_after(burst.base[0])
        event = self._event(
            burst.first,
            "burst",
            self._going_back(),
            burst.seen,
            to_step=burst.base[0],
            recovery=self.steps - burst.first,
            lost=burst.tried_at - burst.base[0],
            until=burst.tried_at,
            changed=burst.changed,
        )
        self._spend(event)
        return event

    def _leave_nonfinite(self, now: _Measured) -> Event | None:
        first = now.step - self._nonfinite + 1
        self._nonfinite = 0
        base = self._shelf.before(first)
        if base is None:
            return None
        base[1].restore(rewind_generators=False, rewind_schedule=False)
        self._shelf.drop_after(base[0])
        self._pending.clear()
        self._burst = None
        passed, lost = self.steps - first + 1, self.steps - base[0]
        event = self._event(first, "nonfinite", self._going_back(), to_step=base[0], recovery=passed, lost=lost)
        self._spend(event)
        return event

    def _recent(self) -> int:
        """Roll-backs in the last 1,000 steps."""
        return sum(e.to_step is not None and self.steps - e.step < 1000 for e in self.events)

    def _going_back(self) -> str:
        return "rolled back" if self.slow == 1 or not self._recent() else "rolled back, slowed down"

    def _spend(self, event: Event) -> None:
        recent = self._recent()
        if recent:
            self._slow_until = self.steps + _SLOW_STEPS
        if recent < self.budget:
            return
        self._note(event)
        told = "\n  ".join(str(e) for e in self.events[-40:])
        raise SpikeError(
            f"{recent + 1} roll-backs within 1,000 steps, and budget={self.budget}: going back does not cure this "
            f"run. It is at step {self.steps}, with the weights after step {event.to_step}, which are good. What "
            f"happened:\n  {told}\nLook at the samples that the events name, or lower the learning rate."
        )

    def _event(
        self, step: int, what: str, action: str, seen: _Measured | None = None, *, until: int | None = None, **more: Any
    ) -> Event:
        signal, score = ("", math.nan) if seen is None else self._worst(seen)
        steps = range(step, (step if until is None else until) + 1)
        if action == "adopted" or what == "shift":  # the samples may be good
            return Event(step, what, action, signal, score, _ids(self._own(steps)), **more)
        culprits = find_culprits(self.batches, [*map(self._number_of, steps)], group=self._group)
        blamed, unclear = to_leave_out(culprits)
        reason = f"{what}: {signal} {score:.1f} deviations above the median"
        if (bad := self.bad) is not None:  # on all processes, on the same step
            for one in (*blamed, *unclear):
                bad.add(one.ids or (), reason=reason, step=one.step, rank=one.rank, group=self._group)
        if self._evidence is not None and what == "spike" and culprits:
            self._write_evidence(self._evidence, step, culprits[0])
        own = [one for one in self._own(steps) if one.step in {other.step for other in unclear}]
        ranks = {one.rank for one in blamed}
        rank = ranks.pop() if len(ranks) == 1 else None
        return Event(step, what, action, signal, score, _ids([*blamed, *own]), rank=rank, **more)

    def _write_evidence(self, evidence: EvidenceFolder, step: int, culprit: Culprit) -> None:
        base = self._shelf.before(step)
        older = {} if base is None else {self._number_of(base[0] + 1): base[1]}
        before = culprit.step if self.lag == 0 else None  # else later steps may have changed the weights
        evidence.write(self.batches, culprit, self._model, older, before)

    def _worst(self, seen: _Measured) -> tuple[str, float]:
        known = [(score, i) for i, score in enumerate(seen.scores) if not math.isnan(score)]
        score, i = max(known, default=(math.nan, 0))
        groups = getattr(self.guard.last, "group_norms", None)
        names = self._spikes.signal_names([*groups] if groups else ["norm"])
        return (names[i] if i < len(names) else f"signal {i}"), score

    def _own(self, steps: range) -> list[MicroBatch]:
        known = self.batches.known
        return [one for n in map(self._number_of, steps) if n in known for one in self.batches.of_step(n)]

    def _number_of(self, step: int) -> int:
        """What `batches` calls a step: the same, unless somebody has set its count."""
        return self.batches.step - 1 - (self.steps - step)

    # -- between runs ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the guard's state, counts and events. Snapshots stay in memory."""
        events = [asdict(event) for event in self.events]
        return {"guard": self.guard.state_dict(), "steps": self.steps, "slow_until": self._slow_until, "events": events}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; the next step takes a first snapshot.

        Raises:
            InvalidValueError: If it is no such state.
        """
        if set(state_dict) != {"guard", "steps", "slow_until", "events"}:
            raise InvalidValueError(
                "this is not the state of a Resilience: expected 'guard', 'steps', 'slow_until' and 'events', got "
                f"{sorted(state_dict)}. Pass what state_dict() returned."
            )
        self.guard.load_state_dict(state_dict["guard"])
        self.steps, self._slow_until = int(state_dict["steps"]), int(state_dict["slow_until"])
        self.events = [Event(**{**event, "ids": tuple(event["ids"])}) for event in state_dict["events"]]
        self.batches.load_state_dict({"step": self.steps + 1})
        self._guarded, self._calm_since, self._nonfinite = self.guard.steps, self.steps, 0
        self._spikes.followed, self._changed_at = self.guard.steps, 0
        self._pending.clear()
        self._shelf.clear()
        self._burst = None

    def detach(self) -> None:
        """Stop acting: the optimizer steps as it did before, and the snapshots are let go."""
        self.guard.detach()
        self._slow_down.remove()
        self._buffers.remove()
        self._shelf.clear()


class _HostSpikes(SkipSpikes):
    """Spikes of steps that the host counts, and of weights that are watched."""

    def __init__(self, detector: Detector, weights: WeightWatch, process_group: Any) -> None:
        super().__init__(detector, process_group=process_group)
        self.weights = weights
        self.followed = 0  # the last step of the guard after which `Resilience.step` was called

    def check_captured(self, device: torch.device) -> None:
        if is_captured(device):
            raise UnsupportedGradientError(
                "the step is recorded in a CUDA graph, and Resilience counts its steps on the host, which replays do "
                "not reach: it would never act. Leave the step out of the graph, or take Guard(..., spikes=) alone."
            )
        super().check_captured(device)

    def begin(self, step: int) -> None:
        if step > self.followed + _FORGOTTEN:
            raise InvalidValueError(_forgotten(step - 1 - self.followed))

    def judge_numbers(self, norms: Sequence[float], bad: bool) -> bool:
        spike, verdict = super().judge_numbers(norms, bad), verdict_of(self.detector)
        stands_out = spike or getattr(verdict, "stands_out", False)
        self.changed = bool(self.weights.changed()) if stands_out else self.weights.were_written()
        return spike

    def _weights_changed(self) -> Tensor | bool:
        return self.weights.changed()


_FORGOTTEN = 4
"""Steps of the optimizer, the present one included, after which `Resilience.step` was forgotten."""


def _forgotten(steps: int) -> str:
    return (
        f"the optimizer has taken {steps} steps since resilience.step() was last called, which cannot follow what it "
        "has not seen: it would neither go back nor count right. Call resilience.step() once after each "
        "optimizer.step(), as in docs/resilience.md."
    )


class _Burst:
    """Spikes in a row that were adopted, the weights from before them, and the steps at which to try these."""

    def __init__(
        self, first: int, bases: Sequence[tuple[int, Snapshot]], trials: list[int], seen: _Measured, changed: bool
    ) -> None:
        self.first, self.seen, self.changed = first, seen, changed
        self.base = bases[0]  # what is tried, or was tried last
        self.trials = [(step, base) for step in trials for base in bases]
        self.good, self.is_tried, self.tried_at = 0, False, 0
        self.lost = seen.in_a_row  # and the steps of trials that failed
        self._newer: Snapshot | None = None

    def begin_trial(self, shelf: "_Shelf", step: int) -> None:
        self._newer = shelf.spare()
        self._newer.take()
        _, self.base = self.trials.pop(0)
        self.base[1].restore(rewind_generators=False, rewind_schedule=False)
        self.is_tried, self.good, self.tried_at = True, 0, step

    def end_trial(self, step: int) -> None:
        assert self._newer is not None
        self.lost += step - self.tried_at
        self._newer.restore(rewind_generators=False, rewind_schedule=False)
        self.is_tried = False


class _Shelf:
    """Two snapshots, of which one is older than the detection delay, and a spare one."""

    def __init__(self, make: Callable[[], Snapshot], delay: int) -> None:
        self._make, self._delay = make, delay
        self._kept: list[tuple[int, Snapshot]] = []
        self._taken: dict[int, int] = {}  # the step at which each was taken, by the step whose weights it holds
        self._spare: Snapshot | None = None

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self._kept]

    def is_due(self, step: int, every: int) -> bool:
        return not self._kept or step - self._kept[-1][0] >= max(every, self._delay)

    def take(self, step: int, now: int) -> None:
        """Keep the state as it is at step ``now``, which is that after ``step``."""
        snapshot = self._make() if len(self._kept) < 2 else self._kept.pop(self._least_needed(step))[1]
        snapshot.take()
        self._kept = sorted([*self._kept, (step, snapshot)], key=lambda kept: kept[0])
        self._taken = {kept: self._taken.get(kept, now) for kept in self.steps} | {step: now}

    def taken_at(self, kept: tuple[int, Snapshot]) -> int:
        """Return the step at which one was taken."""
        return self._taken[kept[0]]

    def taken_before(self, step: int) -> tuple[int, Snapshot] | None:
        """Return the newest that was taken before ``step`` began."""
        fit = [kept for kept in self._kept if self.taken_at(kept) < step]
        return fit[-1] if fit else None

    def _least_needed(self, step: int) -> int:
        """The older one, unless the newer is too young to be alone: it may hold what is not detected yet."""
        return 0 if step - self._kept[1][0] >= self._delay else 1

    def before(self, step: int) -> tuple[int, Snapshot] | None:
        """Return the newest from before ``step``."""
        fit = [kept for kept in self._kept if kept[0] < step]
        return fit[-1] if fit else None

    def drop_newest(self) -> None:
        self._kept = self._kept[:-1]

    def drop_after(self, step: int) -> None:
        self._kept = [kept for kept in self._kept if kept[0] <= step]

    def spare(self) -> Snapshot:
        spare = self._spare = self._spare or self._make()
        return spare

    def clear(self) -> None:
        self._kept, self._spare = [], None


def _read(step: int, numbers: Tensor | list[float] | None, event: CopyEvent | None) -> _Measured | None:
    if numbers is None:
        return None
    if event is not None:
        event.synchronize()
    found = numbers.tolist() if isinstance(numbers, Tensor) else numbers
    spike, stands_out, adopted, nonfinite, changed = map(bool, found[:5])
    return _Measured(step, spike, stands_out, adopted, nonfinite, changed, int(found[5]), found[6:])


def _ids(batches: Iterable[MicroBatch]) -> tuple[SampleId, ...]:
    return tuple(dict.fromkeys(id for one in batches for id in one.ids or ()))


def _is_on_cpu(model: nn.Module) -> bool:
    return all(p.device.type == "cpu" for p in model.parameters())


def _checked_trials(trials: Sequence[int]) -> tuple[int, ...]:
    steps = tuple(check_whole("trials", step, 1) for step in trials)
    if not steps or list(steps) != sorted(set(steps)):
        raise InvalidValueError(f"trials={trials!r}: expected numbers of steps that rise, such as (6, 16, 36).")
    return steps


def _several(what: str) -> str:
    return (
        f"{what}, and of several that step one after the other the first would take what the last finds to be a spike: "
        "make one that steps all (docs/resilience.md, Muon beside AdamW), or put all parameters into one, with groups."
    )


def _check_more(more: list[Any]) -> None:
    for one in more:
        if isinstance(one, Optimizer):
            raise InvalidTypeError(_several("more has an optimizer"))
        if isinstance(one, torch.utils.data.DataLoader):
            raise InvalidTypeError(
                f"more has a {type(one).__name__}: going back must not bring back the data that did the harm, so the "
                "loader goes on. Leave it out of more=."
            )
