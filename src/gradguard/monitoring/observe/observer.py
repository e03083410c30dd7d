"""Record one row for each optimizer step of a process, without changing the script or its numbers.

An `Observer` records the steps of all optimizers; its subclass `Monitor` records the steps of one optimizer.
"""

import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_not
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.distributed.placements import any_sharded
from gradguard.distributed.reduction_group import several_processes
from gradguard.errors import GradguardError, InvalidTypeError
from gradguard.grad_scaler import ScalerStep
from gradguard.listeners import ClipCall, ClipEvent, Listener, RecoveryEvent
from gradguard.monitoring.judge.health import Finding
from gradguard.monitoring.observe.clips import AppliedClip, HeardClips, StepGradients, clipped_within, with_guard_event
from gradguard.monitoring.observe.graph_facts import GraphFacts, origin_of
from gradguard.monitoring.observe.kept_gradients import STEPS as KEPT_STEPS
from gradguard.monitoring.observe.kept_gradients import KeptGradients
from gradguard.monitoring.observe.loop_setup import IDLE_STEPS, IdleOptimizers, Unowned
from gradguard.monitoring.observe.losses import Losses
from gradguard.monitoring.observe.measure import measure_diagnostics, measure_update
from gradguard.monitoring.observe.meta import (
    LastPlaces,
    Places,
    living_modules,
    living_optimizers,
    meta_line,
    name_parameters,
)
from gradguard.monitoring.observe.record_buffer import FLUSH_SECONDS, RecordBuffer
from gradguard.monitoring.observe.schedule import EVERY, Schedule
from gradguard.monitoring.observe.shared_norms import Shared, SharedNorms, are_spread, is_captured
from gradguard.monitoring.observe.step import (
    Clips,
    GradientNorms,
    ScalerFacts,
    ScriptClip,
    Skip,
    StepMeasurement,
    copied,
    recovery,
    scale_update,
)
from gradguard.monitoring.observe.updates import FREE, SHARE, Moving, Sampled
from gradguard.monitoring.record.file import SCHEMA
from gradguard.monitoring.record.redaction import redacted
from gradguard.monitoring.record.text import on_stderr
from gradguard.monitoring.show.sinks import Sinks
from gradguard.optimizer_hooks import parameters_of
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import grads_of, never_compiled


class EnoughSteps(SystemExit):
    """End the program after the requested number of optimizer steps; ``finally`` blocks and exit handlers still run."""


_process = os.getpid()  # cached: os.getpid() at each step would be a system call


def _in_child() -> None:
    global _process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_in_child)


def safely(method: Callable) -> Callable:
    """Wrap an observer's method: time it, catch its exceptions, and ignore it in a forked child without a record."""

    @functools.wraps(method)
    def safe(self: "Observer", *args: Any) -> Any:
        if not self._active or (_process != self._process and not self._begins_in_child()):
            return None
        thread = self._thread
        outermost, began = not thread.is_timed, time.perf_counter()
        thread.is_timed = True
        try:
            return method(self, *args)
        except Exception as error:
            self._fail(error)
            return None
        finally:
            if outermost:
                thread.is_timed = False
                self._overhead += time.perf_counter() - began

    return never_compiled(safe)  # a script that compiles its step must not compile the observer too


@dataclass(slots=True)
class OptimizerTrack:
    """The state of one optimizer from step to step.

    Attributes:
        place: The optimizer's index among the optimizers of the record.
        optimizer: A weak reference to the optimizer.
        turn: The number of steps that this optimizer has made. Schedules count an optimizer's own steps.
        last: The number of its last step in the record; None before its first step.
        places: The cached indices of its parameters.
        sampled: The choice of sampled elements of its weights.
    """

    place: int
    optimizer: Callable[[], Optimizer | None]
    turn: int = 0
    last: int | None = None
    places: LastPlaces = field(default_factory=LastPlaces)
    sampled: Sampled = field(default_factory=Sampled)


class _Running(threading.local):
    """The open step of this thread.

    Attributes:
        step: The measurement of the open step; None outside a step.
        track: The optimizer of the step.
        with_clips: The step including the script's clips within it; None without such clips.
        moving: Samples of the weights before the step.
        scale: The GradScaler's facts while ``scaler.step`` runs.
        reached: Whether ``scaler.step`` has called the optimizer.
        is_timed: Whether an outer call already measures the observer's time.
    """

    def __init__(self) -> None:
        self.step: StepMeasurement | None = None
        self.track = OptimizerTrack(0, lambda: None)
        self.with_clips: StepMeasurement | None = None
        self.moving: Moving | None = None
        self.scale: ScalerFacts | None = None
        self.reached = False
        self.is_timed = False


class Observer(Listener):
    """Measure each optimizer step of a process, turn it into one row, and write the record of the run.

    **Guarantees**: The observer writes to no tensor of the training (unless it got a clip to apply), draws no random
    number, waits for no device, and catches its own exceptions: after one, it records an event and stops measuring.

    Args:
        path: The path of the record; None to write nothing; or a function that returns either at the first step.
        meta: Fields of the first line besides versions and parameters.
        clip: A clip to apply before each step; an exception from it ends the run.
        every: The number of steps between two writes of each parameter's norm. By default the interval is chosen so
            that a step takes some 200 bytes; it doubles at step 50,000, again at 100,000, and so on.
        diagnostics_every: Steps between two measurements that are too costly for every step; 0 for none.
        last_step: The number of optimizer steps after which the program ends, as by ``sys.exit()``.
        on_finding: A function called with each finding during the run, if a record is written.
        in_child: A function called with this observer at the first step of a forked child; it returns the path of the
            child's record. Without it, forked children are not recorded.

    Attributes:
        path: The path of the record, once the file is open.
    """

    def __init__(
        self,
        path: Path | Callable[[], Path | None] | None,
        meta: dict[str, Any],
        clip: AppliedClip | None = None,
        every: int | None = None,
        diagnostics_every: int = EVERY,
        last_step: int | None = None,
        on_finding: Callable[[Finding], object] | None = None,
        in_child: Callable[["Observer"], Path | None] | None = None,
    ) -> None:
        self._path, self._meta, self._applied, self._every = path, meta, clip, every
        self._diagnostics_every, self._left, self._on_finding = diagnostics_every, last_step, on_finding
        self._in_child = in_child
        self._process, self._started, self._overhead = _process, time.perf_counter(), 0.0
        self._active, self._lock, self._thread = True, threading.RLock(), _Running()
        self._ending: int | None = None
        self._ended = threading.Event()  # set when the thread `_ending` has written the `end` line
        # Models and optimizers, from the first line on.
        self._places: Any = None  # `Places`
        self._tracks: weakref.WeakKeyDictionary[Optimizer, OptimizerTrack] = weakref.WeakKeyDictionary()
        self._count = 0  # the number of optimizers minus one
        # Observations.
        self._steps = self._backwards = 0  # backwards are counted up to IDLE_STEPS
        self._steps_at_update = -1
        self._losses, self._clips, self._shared = Losses(), HeardClips(), SharedNorms()
        self._logits: dict[str, Tensor] = {}  # each attention's largest logit since the last step
        self._reported: dict[str, Tensor] = {}  # other numbers for the next step
        self._graph, self._origin, self._looks_for_origin = GraphFacts(), None, True
        self._unowned: Unowned | None = None
        self._idle, self._kept = IdleOptimizers(), KeptGradients()
        self._schedule = Schedule(diagnostics_every)
        self._watching_updates = 0.0  # seconds
        self.path: Path | None = None
        self._buffer = None if callable(path) else self._open(path)  # a function is called at the first step

    @property
    def steps(self) -> int:
        """The number of optimizer steps recorded."""
        return self._steps

    @property
    def clip_calls(self) -> int:
        """The number of the script's clips before or within steps."""
        return self._clips.count

    @property
    def overhead(self) -> float:
        """The seconds that the observer has taken so far."""
        return self._overhead

    # --- a backward ---------------------------------------------------------------------------------------------------

    @safely
    def on_backward(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Callable[[], None] | None:
        """Store the loss; on the first steps, check whether the gradients of the step before were cleared."""
        if any(map(is_captured, losses)):  # under CUDA graph capture, only a replay writes the loss's memory
            return None
        finite = False
        with suppress(Exception):  # an unreadable loss must not stop the recording
            if self._losses.waiting and self._are_cleared():
                self._losses.clear()  # SAM's first pass, for example, clears the gradients without a step
            finite = self._losses.add(losses, weights)
        if not finite or self._places is None:  # None until the first line is written, which uses the graph
            for loss in losses:
                with suppress(Exception):  # neither must an unreadable graph
                    self._look_at_graph(loss)
        if self._backwards < IDLE_STEPS:
            self._backwards += 1
        if not self._kept.looks:
            return None
        self._kept.before_backward()
        return self._after_backward

    def _are_cleared(self) -> bool:
        """Return whether no parameter of the known optimizers has a gradient."""
        groups = [group for optimizer in self._tracks for group in optimizer.param_groups]
        return bool(groups) and all(p.grad is None for group in groups for p in group["params"])

    def _look_at_graph(self, loss: Tensor) -> None:
        if self._places is None and self._backwards < IDLE_STEPS:
            self._graph.read(loss, self._losses.scales)
        if self._looks_for_origin and are_readable(loss) and not math.isfinite(loss.sum().item()):
            self._origin, self._looks_for_origin = origin_of(loss), False

    @safely
    def _after_backward(self) -> None:
        self._kept.after_backward()

    # --- clips --------------------------------------------------------------------------------------------------------

    def on_clip(self, call: ClipCall, parameters: Sequence[Tensor]) -> None:
        """Measure the gradients before a clip changes them, unless the clip reports the norms itself."""
        if not (parameters and is_captured(parameters[0])) and self._hears(parameters):
            listed = list(parameters)
            self._begin_clip(call, listed, *self._joined(listed))

    @safely
    def _begin_clip(self, call: ClipCall, parameters: list[Tensor], spread: bool, shared: Shared | None) -> None:
        if self._clips.begin(call, given_gradients(parameters, spread, shared)):
            self._losses.keep_last()  # earlier losses belong to backwards without a step

    @safely
    def on_clipped(self, event: ClipEvent) -> None:
        """Store the event of a clip before a step or within it."""
        if event.optimizer is not None:
            self._note(event)
        elif self._hears(event.parameters):
            self._clips.end(event)
            self._look_within()

    def _look_within(self) -> None:
        """Store a script's clip within the open step now, because the step may clear the gradients later."""
        step, optimizer = self._thread.step, self._thread.track.optimizer()
        if step is not None and optimizer is not None:
            parameters = parameters_of(optimizer)
            given = given_gradients(parameters, are_spread(parameters), None)
            clipped = clipped_within(step, optimizer, given, self._clips.within(given.gradients))
            self._thread.with_clips = None if clipped is step else clipped

    def _note(self, event: ClipEvent) -> None:
        """Add a guard's event to the open step."""
        step = self._thread.step
        if step is not None and self._thread.track.optimizer() is event.optimizer:
            clips, skip = with_guard_event(step.clips, step.skip, event)
            self._thread.step = step._replace(clips=clips, skip=skip)

    @safely
    def on_logits(self, name: str, largest: Tensor) -> None:
        """Store the largest attention logit for the next step."""
        known = self._logits.get(name)
        largest = largest.detach().amax()
        self._logits[name] = largest if known is None else torch.maximum(known, largest)

    def on_empty_batches(self, count: Tensor) -> None:
        """Store the number of empty batches for the next step."""
        self._reported["empty_batches"] = count

    # --- a step -------------------------------------------------------------------------------------------------------

    def on_step(self, optimizer: Optimizer, evaluation: int) -> None:
        """Measure the gradients that an optimizer is about to use, and apply the requested clip."""
        self._thread.reached, self._thread.with_clips = True, None  # discard clips within an earlier evaluation
        parameters = self._parameters(optimizer)
        if evaluation:  # only a closure's first evaluation has the weights from before the step
            self._forget(parameters)
            self._clip(optimizer)
            return
        self._measure_step(optimizer, given_gradients(parameters, *self._joined(parameters)), parameters)
        if (event := self._clip(optimizer)) is not None:
            self._note_applied(event)

    def _parameters(self, optimizer: Optimizer) -> list[Tensor]:
        try:
            return parameters_of(optimizer)
        except Exception as error:  # an optimizer without the usual groups
            self._fail(error)
            return []

    @never_compiled
    def _joined(self, parameters: Sequence[Tensor]) -> tuple[bool, Shared | None]:
        """Join the other processes' measurement, even if this process writes nothing or has stopped measuring."""
        if not (any_sharded(parameters) or several_processes()):  # the usual case, on one process
            return False, None
        began = time.perf_counter()
        joined = self._shared.join(parameters, self._fail)
        self._overhead += time.perf_counter() - began
        return joined

    @safely
    def _measure_step(self, optimizer: Optimizer, given: StepGradients, parameters: list[Tensor]) -> None:
        thread = self._thread
        thread.step = thread.moving = None  # a step that raised leaves them behind
        if parameters and is_captured(parameters[0]):
            return
        if not self._is_open(optimizer):
            self._forget(given.parameters)
        elif (measured := self._measured(optimizer, track := self._track_of(optimizer), given)) is not None:
            kept = self._kept.before_step(optimizer) if self._kept.looks else None
            stored, self._logits, self._reported = (self._logits, self._reported), {}, {}
            thread.track, thread.step = track, (step := self._begun(optimizer, track, *measured, kept, *stored))
            self._look_at_weights(optimizer, track, given, step)
        if self._buffer is not None and (self._unowned is not None or id(optimizer) not in self._idle.alive):
            self._look_at_setup(self._buffer, optimizer, parameters, bool(given.parameters))

    def _measured(
        self, optimizer: Optimizer, track: OptimizerTrack, given: StepGradients
    ) -> tuple[GradientNorms, Clips, Skip] | None:
        """Return the gradients, clips and skip before a step; None if the step is not recorded."""
        if not given.parameters:  # no parameter has a gradient
            return None
        return *self._clips.step(optimizer, given, track.places.of(given.parameters, self._places)), Skip()

    def _begun(
        self,
        optimizer: Optimizer,
        track: OptimizerTrack,
        gradients: GradientNorms,
        clips: Clips,
        skip: Skip,
        kept: Any,
        *stored: Mapping,
    ) -> StepMeasurement:
        """Return the measurement of a step that begins; ``stored`` holds the stored logits and other numbers."""
        origin, self._origin = self._origin, None
        lr, losses, scale = optimizer.param_groups[0].get("lr"), self._losses.take(), self._thread.scale
        place = self._place_of(track)
        ended = 0, 0.0, skip, None, None  # turn, wall, skip, diagnostics and moved; `_add` replaces them
        return StepMeasurement(
            self._steps, gradients, *ended, clips, scale, place, losses, copied(lr), kept, origin, *stored
        )

    def _look_at_setup(
        self, buffer: RecordBuffer, optimizer: Optimizer, parameters: list[Tensor], has_gradients: bool
    ) -> None:
        place, sure, last = self._place_of(self._track_of(optimizer)), self._backwards >= IDLE_STEPS, self._last_step
        events = list(self._idle.before_step(optimizer, place, parameters, has_gradients, sure, last))
        if self._unowned is not None:
            events += self._unowned.before_step(optimizer, parameters, last)
            self._unowned = None if self._unowned.is_over else self._unowned
        for event in events:
            buffer.add(event)

    @property
    def _last_step(self) -> int:
        return max(self._steps - 1, 0)

    def _clip(self, optimizer: Optimizer) -> ClipEvent | None:
        """Apply the requested clip. Its exceptions propagate: a run must not train unclipped by mistake."""
        return None if self._applied is None else self._applied(optimizer, living_modules)

    @safely
    def _note_applied(self, event: ClipEvent) -> None:
        if (step := self._thread.step) is not None:
            self._thread.step = step._replace(clips=step.clips._replace(applied=ScriptClip.from_event(event)))

    def _look_at_weights(
        self, optimizer: Optimizer, track: OptimizerTrack, given: StepGradients, step: StepMeasurement
    ) -> None:
        """Measure the weights if a full measurement is due, and sample the weights before the step."""
        now, turn = time.perf_counter(), track.turn
        elapsed = now - self._started
        full, moves = self._schedule.due(turn, elapsed), self._watching_updates <= FREE + SHARE * elapsed
        if not (full or moves) or not given.parameters:
            return
        # the norm of a shard is not the norm of its weight, and without norms of each gradient no line is written
        full = full and not given.spread and step.gradients.total is None
        if full:
            found = measure_diagnostics(given.parameters)
            self._thread.step = step._replace(diagnostics=found._replace(seconds=time.perf_counter() - now))
        if full or moves:
            began = time.perf_counter()  # time.thread_time() would be a system call
            self._thread.moving = Moving(optimizer, given.parameters, track.sampled.of(given.parameters), turn)
            self._watching_updates += time.perf_counter() - began

    def on_stepped(self, optimizer: Optimizer) -> None:
        """Record the finished step; end the program after the last requested step."""
        self._end_step(optimizer)
        if self._left is not None and _process == self._process:  # unrecorded steps count too
            self._left -= 1
            if self._left <= 0:
                raise EnoughSteps

    @safely
    def _end_step(self, optimizer: Optimizer) -> None:
        thread = self._thread
        step, moving, clipped = thread.step, thread.moving, thread.with_clips
        thread.step = thread.moving = thread.with_clips = None
        if step is not None and clipped is not None:
            clips = step.clips._replace(script=clipped.clips.script, reach=clipped.clips.reach)
            step = step._replace(clips=clips, gradients=clipped.gradients)
            self._clips.forget(self._parameters(optimizer))
        if step is None or self._buffer is None:
            return
        moved, diagnostics, skip = None, step.diagnostics, step.skip
        if moving is not None:
            began, moved = time.perf_counter(), moving.moved()
            self._watching_updates += time.perf_counter() - began
        now = time.perf_counter()
        if diagnostics is not None:
            diagnostics = measure_update(diagnostics)
            self._schedule.spent(diagnostics.seconds + time.perf_counter() - now)
        if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
            skip = skip._replace(by_scaler=copied(found_inf))
        turn = self._add(self._buffer, thread.track, step, now, skip, diagnostics, moved)
        if turn < KEPT_STEPS and self._backwards:
            self._kept.after_step(optimizer)

    def _add(self, buffer: RecordBuffer, track: OptimizerTrack, step: StepMeasurement, now: float, *ended: Any) -> int:
        """Record a finished step with its skip, diagnostics and moves; return how many its optimizer made before."""
        wall = now - self._started
        with self._lock:  # several threads may train at once
            number, turn = self._steps, track.turn
            step = StepMeasurement._make((number, step[1], turn, wall, *ended, *step[7:]))
            buffer.add(self._completed(step))
            track.last, self._steps, track.turn = number, number + 1, turn + 1
        self._active = self._active and not buffer.sinks.lost
        return turn

    def _completed(self, step: StepMeasurement) -> StepMeasurement:
        """Return the step with its logged numbers; an observer has none."""
        return step

    @safely
    def _forget(self, parameters: list[Tensor]) -> None:
        """Discard the pending clips of ``parameters`` and the pending losses, which must not reach the next step."""
        self._clips.forget(parameters)
        self._losses.clear()

    @safely
    def on_recover(self, event: RecoveryEvent) -> None:
        """Record a recovery from spikes as an event after the optimizer's last step."""
        track = self._tracks.get(event.optimizer)
        if self._buffer is not None and track is not None and track.last is not None:
            self._buffer.add(recovery(track.last, event, self._place_of(track)))

    # --- a GradScaler -------------------------------------------------------------------------------------------------

    @safely
    def on_scale(self, loss: Any, scaled: Any) -> None:
        """Store which loss a scaled loss came from."""
        self._losses.scaled(loss, scaled)

    @safely
    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """Record an event if the loss scale fell; discard the losses and clips of a skipped step."""
        if self._steps == self._steps_at_update:
            self._losses.clear()
            self._clips.forget()
        self._steps_at_update = self._steps
        if before is not None and after is not None and self._buffer is not None:
            self._buffer.add(scale_update(self._last_step, before, after))

    @safely
    def on_scaler_step(self, optimizer: Optimizer, step: ScalerStep) -> None:
        """Store the loss scale of the step that begins."""
        del optimizer
        self._thread.scale = ScalerFacts(copied(step.loss_scale), step.scale is not None)
        self._thread.reached = False

    @safely
    def on_scaler_stepped(self, optimizer: Optimizer, step: ScalerStep) -> None:
        """Record a skipped step if the GradScaler did not call the optimizer."""
        skipped = None if self._thread.reached else step.skipped
        if skipped is not None and bool(skipped):  # no extra host sync: the scaler has read the flag already
            if self._is_open(optimizer) and self._buffer is not None:
                skip = Skip(by_guard=True, by_scaler=1.0)
                track = self._track_of(optimizer)
                begun = self._begun(optimizer, track, GradientNorms([], total=math.inf), Clips(), skip, None, {}, {})
                self._add(self._buffer, track, begun, time.perf_counter(), begun.skip, None, None)
            self._forget(self._parameters(optimizer))
        self._thread.scale, self._thread.reached = None, True

    # --- models and optimizers ----------------------------------------------------------------------------------------

    def _hears(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether a clip of ``parameters`` is recorded."""
        del parameters
        return True

    def _is_open(self, optimizer: Optimizer) -> bool:
        """Write the first line if it is missing; return whether any sink takes the optimizer's steps."""
        if self._places is None:
            with self._lock:
                if self._places is None:  # another thread may have written it in the meantime
                    if self._buffer is None and callable(self._path):
                        self._buffer = self._open(self._path())
                    self._begin(living_optimizers(optimizer), living_modules(), self._graph)
        return self._buffer is not None and not self._buffer.sinks.empty

    def _open(self, path: Path | None) -> RecordBuffer:
        sinks = Sinks([], on_stderr)
        try:
            if path is not None:
                sinks = Sinks([path], on_stderr)
                self.path = sinks.record
        except GradguardError as error:
            on_stderr(f"{error} The program runs without a record.")
        on_finding = self._on_finding if path is not None else None
        return RecordBuffer(sinks, self._every, self._fail, in_background=True, on_finding=on_finding)

    def _begin(self, optimizers: list[Optimizer], modules: list[nn.Module], graph: GraphFacts | None) -> None:
        """Write the first line and start tracking the optimizers."""
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        names = name_parameters(parameters, modules)
        for place, optimizer in enumerate(optimizers):
            self._tracks[optimizer] = OptimizerTrack(place, weakref.ref(optimizer))
        self._count = len(optimizers) - 1
        self._places = Places(parameters)
        if self._buffer is not None:
            self._buffer.begin(meta_line(self._meta, optimizers, parameters, names, graph))
        self._graph = GraphFacts()
        with suppress(Exception):  # a user's half-built module must not stop the recording
            self._unowned = Unowned(modules, parameters, [] if graph is None else graph.living())

    def _track_of(self, optimizer: Optimizer) -> OptimizerTrack:
        """Return the track of an optimizer; an optimizer created after the first line gets the next index."""
        if (track := self._tracks.get(optimizer)) is None:
            self._count += 1
            track = self._tracks[optimizer] = OptimizerTrack(self._count, weakref.ref(optimizer))
        return track

    def _place_of(self, track: OptimizerTrack) -> int | None:
        """Return the optimizer's index if the script has several optimizers, else None."""
        return track.place if self._count > 0 else None

    def _begins_in_child(self) -> bool:
        """Restart the observer in a forked child if the child has its own record; return whether it restarted."""
        if self._in_child is None:
            return False
        # the hooks and patches stay; all other state belongs to the parent
        path = functools.partial(self._in_child, self)
        self.__init__(path, self._meta, self._applied, self._every, self._diagnostics_every, in_child=self._in_child)
        return True

    # --- the end ------------------------------------------------------------------------------------------------------

    @safely
    def flush(self) -> None:
        """Write all recorded steps, including the last; the host waits for the device."""
        if self._buffer is not None:
            self._buffer.flush(wait=True)

    def close(self, exit_code: int | None, interrupted: bool) -> None:
        """Write the remaining lines and the ``end`` line; nothing on a second call, or in a child without a record."""
        if self._buffer is not None and not self._buffer.has_begun and os.getpid() == self._process:
            with suppress(Exception):
                self._begin([], [], self._graph)
        self._end(exit_code, interrupted)

    def _end(self, exit_code: int | None, interrupted: bool) -> None:
        if self._ending is not None:
            if self._ending != threading.get_ident():  # `on_finding`, in its own thread, may be ending the run
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
        with suppress(Exception):  # a failure while describing the set-up must not prevent the `end` line
            if active and buffer.has_begun:
                left = () if self._unowned is None else self._unowned.end(self._last_step)
                for event in [*left, *self._idle.end(self._last_step)]:
                    buffer.add(event)
        with suppress(Exception):  # a failure here must not change how the training ends
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
        """Stop measuring, and report the error in the record and to the user instead of raising it."""
        active, self._active = self._active, False
        if active:
            words = f"stopped measuring: {type(error).__name__}: {error}"
            with suppress(Exception):
                if self._buffer is not None:
                    self._write_failure(self._buffer, f"gradguard {words}")
                self._tell(f"{words}. Training continues unchanged.")

    def _write_failure(self, buffer: RecordBuffer, message: str) -> None:
        if not buffer.has_begun:  # a record without its first line is unreadable
            self._places = Places([])
            buffer.begin({"t": "meta", "schema": SCHEMA, **self._meta, "params": []})
        advice = "training continues unchanged; please report this error with the script"
        event = {"t": "event", "i": self._steps, "kind": "observer_failed", "severity": "error"}
        buffer.write(event | {"message": redacted(message), "advice": advice})

    def _tell(self, message: str) -> None:
        """Show the user a message."""
        on_stderr(message)


def given_gradients(parameters: list[Tensor], spread: bool, shared: Shared | None) -> StepGradients:
    """Return the parameters that have gradients, and the gradients; all parameters if processes hold shards."""
    gradients = grads_of(parameters)
    if not spread and not all(map(is_not, gradients, repeat(None))):
        parameters = [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        gradients = grads_of(parameters)
    return StepGradients(parameters, gradients, spread, shared)


def check_callable(on_finding: Any) -> None:
    """Refuse an ``on_finding`` that is not callable.

    Raises:
        InvalidTypeError: If ``on_finding`` is neither None nor callable.
    """
    if on_finding is not None and not callable(on_finding):
        raise InvalidTypeError(
            f"on_finding is {type(on_finding).__name__}: expected a function of one argument, as in on_finding=print."
        )
