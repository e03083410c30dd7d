"""The recorder of every watcher: at a step it measures, waits for the numbers, judges and writes.

An `Observer` is told of every step of a process, a `Monitor` of those of one optimizer; the rest is the same.
"""

import functools
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradguard.errors import InvalidTypeError
from gradguard.grad_scaler import ScalerStep
from gradguard.listeners import ClipCall, ClipEvent, Listener, RecoveryEvent
from gradguard.monitoring.observe.clips import AppliedClip, HeardClips, StepClips, StepGradients, note_guard
from gradguard.monitoring.observe.kept_gradients import STEPS as KEPT_STEPS
from gradguard.monitoring.observe.kept_gradients import KeptGradients
from gradguard.monitoring.observe.loop_setup import IDLE_STEPS, IdleOptimizers, Unowned
from gradguard.monitoring.observe.measure import measure_diagnostics, measure_update
from gradguard.monitoring.observe.meta import Places
from gradguard.monitoring.observe.record_buffer import FLUSH_SECONDS, RecordBuffer
from gradguard.monitoring.observe.schedule import Schedule
from gradguard.monitoring.observe.shared_norms import Shared, SharedNorms, are_spread, is_captured
from gradguard.monitoring.observe.step import StepMeasurement, copied, recovery
from gradguard.monitoring.observe.updates import FREE, SHARE, Moving
from gradguard.monitoring.record.redaction import redacted
from gradguard.optimizer_hooks import parameters_of
from gradguard.torch_private import grads_of, never_compiled


def safely(method: Callable) -> Callable:
    """Time what a recorder does, keep its failures away from training; in a forked child do nothing, or begin anew."""

    @functools.wraps(method)
    def safe(self: "Recorder", *args: Any) -> Any:
        if not self._active or (os.getpid() != self._process and not self._begins_in_child()):
            return None
        outermost = self._begin_time()
        try:
            return method(self, *args)
        except Exception as error:
            self._fail(error)
            return None
        finally:
            if outermost:
                self._end_time()

    return never_compiled(safe)  # a script that compiles its step would wait for a compiler of our code, in our time


class _RunningStep(threading.local):
    """A step, as far as it runs in this thread.

    Attributes:
        step: The step that is open; None outside one.
        optimizer: Its optimizer, not kept alive.
        moving: Some of the weights before it.
        scaler_steps: Of the ``scaler.step`` that is running, whether it has reached the optimizer.
        loss_scale: Of that, the number that it has multiplied the loss by.
        scaled: Whether nobody had divided the gradients by that number when it began.
        began: When what is timed began; None while nothing is.
        before_guard: The facts of a step before a guard acts in it.
    """

    def __init__(self) -> None:
        self.step: StepMeasurement | None = None
        self.optimizer: Callable[[], Optimizer | None] = lambda: None
        self.moving: Moving | None = None
        self.scaler_steps, self.loss_scale, self.scaled = True, None, False
        self.began: float | None = None
        self.before_guard: Any = None


class Recorder(Listener):
    """Makes one row of each optimizer step that it is told of.

    **Guarantees**: it writes to no tensor of the training (unless it was given a clip to apply), draws no random
    number, waits for no device, and swallows its own failures: after one it notes an event and stops measuring.

    Args:
        schedule: When diagnostics are measured.
        applied: A clip that it applies itself before each step.
    """

    def __init__(self, schedule: Schedule, applied: AppliedClip | None = None) -> None:
        self._process, self._started, self._overhead = os.getpid(), time.perf_counter(), 0.0
        self._buffer: RecordBuffer | None = None  # once it is known where to write
        self._places: Places | None = None  # once it is known what is trained
        self._clips, self._shared, self._applied = HeardClips(), SharedNorms(), applied
        self._schedule = schedule
        self._unowned: Unowned | None = None
        self._idle, self._kept = IdleOptimizers(), KeptGradients()
        self._thread = _RunningStep()
        self._steps, self._active, self._lock = 0, True, threading.RLock()
        self._backwards = 0  # heard of, up to as many as matter
        self._ending: int | None = None
        self._ended = threading.Event()  # the thread that writes the end, and whether it has
        self._last_steps: dict[int, int] = {}  # the number of the last one of each optimizer
        self._watching_updates = 0.0  # seconds
        self._logits: dict[str, Tensor] = {}  # the largest of each attention since the last step
        self._turns = Counter[int]()  # steps of each optimizer: one that takes every second turn has its schedule too

    @property
    def steps(self) -> int:
        """Number of optimizer steps seen."""
        return self._steps

    @property
    def clip_calls(self) -> int:
        """Number of clips of the script seen."""
        return self._clips.count

    @property
    def overhead(self) -> float:
        """Seconds that watching took so far."""
        return self._overhead

    # --- what differs -------------------------------------------------------------------------------------------------

    def _measured(
        self, optimizer: Optimizer, given: StepGradients, clipped: StepClips | None = None
    ) -> StepMeasurement | None:
        """Return the facts known before a step; None if the step is not recorded."""
        if self._places is None:
            return None
        step = self._clips.step(self._steps, optimizer, given, clipped=clipped)
        step.places = self._places.of(optimizer, given.parameters) if len(step.norms) else []
        return step

    def _is_open(self, optimizer: Optimizer) -> bool:
        """Whether anybody takes what would be recorded of it."""
        raise NotImplementedError

    def _label(self, step: StepMeasurement, optimizer: Optimizer) -> None:
        """Add what is known beside the norms."""
        raise NotImplementedError

    def _place_of(self, optimizer: Optimizer) -> int | None:
        """Which optimizer this is, where there are several."""
        del optimizer

    def _complete(self, step: StepMeasurement) -> None:
        """Add what is known after it."""

    def _begins_in_child(self) -> bool:
        """Whether it begins anew in this forked child, with a record of its own."""
        return False

    def _clip(self, optimizer: Optimizer, first: bool) -> None:
        """Apply a clip of our own; what it raises ends the run."""

    def _knows(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer concerns us."""
        raise NotImplementedError

    def _hears(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a clip of ``parameters`` concerns us."""
        raise NotImplementedError

    def _tell(self, message: str) -> None:
        """Let the user know that something was lost."""
        raise NotImplementedError

    # --- a step -------------------------------------------------------------------------------------------------------

    def on_step(self, optimizer: Optimizer, evaluation: int) -> None:
        """Measure the gradients that an optimizer is about to use, and apply a clip of our own."""
        self._thread.scaler_steps = True
        first = evaluation == 0  # a closure is evaluated several times: the first has the weights of this step
        parameters = self._parameters(optimizer)
        spread, shared = self._joined(parameters) if first else (are_spread(parameters), None)
        gradients = grads_of(parameters)
        with_grad = parameters
        if not spread and not all(map(is_not, gradients, repeat(None))):
            with_grad = [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
            gradients = grads_of(with_grad)
        if first:
            self._measure_step(optimizer, StepGradients(with_grad, gradients, spread, shared), parameters)
        else:
            self._forget(parameters)
        self._clip(optimizer, first)
        if first:
            self._look_at_weights(optimizer, with_grad, spread)

    def _parameters(self, optimizer: Optimizer) -> list[Tensor]:
        try:
            return parameters_of(optimizer)
        except Exception as error:  # an optimizer without the usual groups
            self._fail(error)
            return []

    @never_compiled
    def _joined(self, parameters: Sequence[Tensor]) -> tuple[bool, Shared | None]:
        """Take part in what processes measure together, also where nothing is written, or watching has failed."""
        outermost = self._begin_time()
        try:
            return self._shared.join(parameters, self._fail)
        finally:
            if outermost:
                self._end_time()

    def _begin_time(self) -> bool:
        """Tell whether this is within nothing else of ours, so that its time is to be added to `overhead`."""
        if self._thread.began is not None:
            return False
        self._thread.began = time.perf_counter()
        return True

    def _end_time(self) -> None:
        began, self._thread.began = self._thread.began, None
        self._overhead += time.perf_counter() - (began or 0.0)

    @safely
    def _measure_step(self, optimizer: Optimizer, given: StepGradients, parameters: list[Tensor]) -> None:
        self._thread.step = None  # of a step that raised
        if parameters and is_captured(parameters[0]):
            return
        if not self._is_open(optimizer):
            self._forget(given.parameters)
        elif (step := self._measured(optimizer, given)) is not None:
            step.amp_scale = self._thread.loss_scale  # each optimizer may have a scaler of its own
            self._label(step, optimizer)
            step.lr = copied(optimizer.param_groups[0].get("lr"))
            step.logits, self._logits = self._logits, {}
            step.scaled = self._thread.scaled
            step.kept_gradients = self._kept.before_step(optimizer) if self._kept.looks else None
            self._thread.step, self._thread.optimizer = step, weakref.ref(optimizer)
        if self._buffer is not None and (self._unowned is not None or id(optimizer) not in self._idle.alive):
            self._look_at_setup(self._buffer, optimizer, parameters, bool(given.parameters))

    def _look_at_setup(
        self, buffer: RecordBuffer, optimizer: Optimizer, parameters: list[Tensor], has_gradients: bool
    ) -> None:
        place, sure, last = self._place_of(optimizer), self._backwards >= IDLE_STEPS, self._last_step
        events = list(self._idle.before_step(optimizer, place, parameters, has_gradients, sure, last))
        if self._unowned is not None:
            events += self._unowned.before_step(optimizer, parameters, last)
            self._unowned = None if self._unowned.is_over else self._unowned
        for event in events:
            buffer.add(event)

    @property
    def _last_step(self) -> int:
        return max(self._steps - 1, 0)

    @safely
    def _look_at_weights(self, optimizer: Optimizer, parameters: list[Tensor], spread: bool) -> None:
        """Measure what is costlier, as often as it is due, and keep some of the weights until the step is done."""
        step, self._thread.moving = self._thread.step, None
        if step is None or not parameters:
            return
        now = time.perf_counter()
        elapsed = now - self._started
        measurable = not spread and step.total is None  # of a part, or scaled, diagnostics would be wrong
        if measurable and self._schedule.due(self._turns[step.optimizer or 0], elapsed):
            step.diagnostics = measure_diagnostics(parameters)
            step.diagnostics.seconds = time.perf_counter() - now
        if step.diagnostics is not None or self._watching_updates <= FREE + SHARE * elapsed:
            began = time.thread_time()  # which other programs do not make longer
            self._thread.moving = Moving(optimizer, parameters, self._turns[step.optimizer or 0])
            self._watching_updates += time.thread_time() - began

    @safely
    def on_stepped(self, optimizer: Optimizer) -> None:
        """Add the row of the step that is done."""
        step, moving = self._thread.step, self._thread.moving
        self._thread.step = self._thread.moving = None
        if step is None or self._buffer is None:
            return
        if moving is not None:
            began, step.moved = time.thread_time(), moving.moved()
            self._watching_updates += time.thread_time() - began
        now = time.perf_counter()
        if step.diagnostics is not None:
            measure_update(step.diagnostics)
            self._schedule.spent(step.diagnostics.seconds + time.perf_counter() - now)
        step.wall = now - self._started
        found_inf = getattr(optimizer, "found_inf", None)
        step.found_inf = copied(found_inf) if isinstance(found_inf, Tensor) else None
        self._add(self._buffer, step)
        if self._backwards and step.turn < KEPT_STEPS:
            self._kept.after_step(optimizer)

    def _add(self, buffer: RecordBuffer, step: StepMeasurement) -> None:
        with self._lock:  # several threads may train at once
            self._complete(step)
            optimizer = step.optimizer or 0
            step.index, step.turn = self._steps, self._turns[optimizer]
            self._steps, self._turns[optimizer] = step.index + 1, step.turn + 1
            self._last_steps[optimizer] = step.index
            buffer.add(step)
        self._active = self._active and not buffer.sinks.lost

    @safely
    def on_scaler_step(self, optimizer: Optimizer, step: ScalerStep) -> None:
        """Note the loss scale."""
        del optimizer
        self._thread.scaler_steps, self._thread.loss_scale = False, copied(step.loss_scale)
        self._thread.scaled = step.scale is not None

    @safely
    def on_scaler_stepped(self, optimizer: Optimizer, step: ScalerStep) -> None:
        """A step that a GradScaler leaves out never reaches the optimizer; it is a step all the same, a skipped one."""
        skipped = None if self._thread.scaler_steps else step.skipped
        if skipped is not None and bool(skipped):  # the scaler has waited for it already
            self._add_left_out(optimizer)
        self._thread.scaler_steps, self._thread.loss_scale, self._thread.scaled = True, None, False

    def _add_left_out(self, optimizer: Optimizer) -> None:
        if self._is_open(optimizer) and self._buffer is not None:
            step = StepMeasurement(self._steps, [], (), total=math.inf, skipped=True, found_inf=1.0)
            step.amp_scale = self._thread.loss_scale  # each optimizer may have a scaler of its own
            self._label(step, optimizer)
            step.lr, step.wall = copied(optimizer.param_groups[0].get("lr")), time.perf_counter() - self._started
            self._add(self._buffer, step)
        self._forget(self._parameters(optimizer))

    @safely
    def _forget(self, parameters: list[Tensor]) -> None:
        """Forget what another evaluation of a closure told: it belongs to this step, and the next one would get it."""
        self._clips.forget(parameters)

    # --- clips --------------------------------------------------------------------------------------------------------

    def on_clip(self, call: ClipCall, parameters: Sequence[Tensor]) -> None:
        """Measure before a clip changes anything, unless it measures for both of us."""
        if not (parameters and is_captured(parameters[0])) and self._hears(parameters):
            listed = list(parameters)
            self._begin_clip(call, listed, *self._joined(listed))

    @safely
    def _begin_clip(self, call: ClipCall, parameters: list[Tensor], spread: bool, shared: Shared | None) -> None:
        if self._clips.begin(call, parameters, spread, shared):
            self._on_replaced()

    def _on_replaced(self) -> None:
        """The step that the clips before were for never came."""

    @safely
    def on_clipped(self, event: ClipEvent) -> None:
        """Keep what a clip tells: of one before a step, or within it."""
        if event.optimizer is None:
            if self._hears(event.parameters):
                self._clips.end(event)
        else:
            self._note(event)

    def _note(self, event: ClipEvent) -> None:
        """Keep what a clip within a step tells."""
        step = self._thread.step
        if step is not None and self._thread.optimizer() is event.optimizer:
            note_guard(step, event)

    @safely
    def on_recover(self, event: RecoveryEvent) -> None:
        """Note behind the last step of an optimizer what was done about spikes."""
        if self._buffer is not None and self._knows(event.optimizer):
            place = self._place_of(event.optimizer)
            if (index := self._last_steps.get(place or 0)) is not None:
                self._buffer.add(recovery(index, event, place))

    @safely
    def on_logits(self, name: str, largest: Tensor) -> None:
        """Keep the largest attention logit until the next step."""
        known = self._logits.get(name)
        largest = largest.detach().amax()
        self._logits[name] = largest if known is None else torch.maximum(known, largest)

    # --- the end ------------------------------------------------------------------------------------------------------

    @safely
    def flush(self) -> None:
        """Write everything that has been seen, the last step included; the host waits for the device."""
        if self._buffer is not None:
            self._buffer.flush(wait=True)

    def _end(self, exit_code: int | None, interrupted: bool) -> None:
        """Write what is left and the last line; harmless in a forked child and when repeated."""
        if self._ending is not None:
            if self._ending != threading.get_ident():  # a function for findings may end it, in a thread of its own
                self._ended.wait(FLUSH_SECONDS)
            return
        self._ending = threading.get_ident()
        try:
            self._write_end(exit_code, interrupted)
        finally:
            self._ended.set()

    def _write_end(self, exit_code: int | None, interrupted: bool) -> None:
        buffer, self._buffer = self._buffer, None
        active, self._active = self._active, False
        if buffer is None or os.getpid() != self._process:
            return
        with suppress(Exception):  # what cannot be told of the set-up must not take the last line with it
            if active and buffer.has_begun:
                left = () if self._unowned is None else self._unowned.end(self._last_step)
                for event in [*left, *self._idle.end(self._last_step)]:
                    buffer.add(event)
        with suppress(Exception):  # nothing here may change how the training ends
            buffer.close(
                {
                    "t": "end",
                    "steps": self._steps,
                    "wall": time.perf_counter() - self._started,
                    "overhead_ms": 1e3 * (self._overhead + buffer.seconds),
                    "exit": exit_code,
                    "interrupted": interrupted,
                    "clips": self._clips.count if not self._steps and self._clips.count else None,
                    "idle_steps": self._idle.steps or None,
                }
            )

    def _fail(self, error: Exception) -> None:
        """Stop measuring, and say so in the record and to the user rather than in the training."""
        active, self._active = self._active, False
        if active:
            words = f"stopped measuring: {type(error).__name__}: {error}"
            with suppress(Exception):
                if self._buffer is not None:
                    self._write_failure(self._buffer, f"gradguard {words}")
                self._tell(f"{words}. Training goes on untouched.")

    def _write_failure(self, buffer: RecordBuffer, message: str) -> None:
        advice = "training itself goes on untouched; please report this with the script"
        event = {"t": "event", "i": self._steps, "kind": "observer_failed", "severity": "error"}
        buffer.write(event | {"message": redacted(message), "advice": advice})


def check_callable(on_finding: Any) -> None:
    """Refuse what cannot be called with a finding.

    Raises:
        InvalidTypeError: If so.
    """
    if on_finding is not None and not callable(on_finding):
        raise InvalidTypeError(
            f"on_finding is {type(on_finding).__name__}: expected a function of one argument, as in on_finding=print."
        )
