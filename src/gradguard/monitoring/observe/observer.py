"""The observer: one row for each optimizer step, without a change in the script or in its numbers.

It measures and never writes to a tensor of the script (unless it was given a clip to apply), draws no random number,
waits for no device, and swallows its own failures: after one it notes an event and stops measuring.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.clip_events import ClipEvent, listen
from gradguard.errors import RecordError
from gradguard.monitoring.observe.applied import AppliedClip, Applying
from gradguard.monitoring.observe.environment import describe
from gradguard.monitoring.observe.extras import measure_extras, measure_update
from gradguard.monitoring.observe.heard_clips import HeardClips, note_guard
from gradguard.monitoring.observe.losses import Losses
from gradguard.monitoring.observe.measure import Norms, gradient_norms, total, unscaled
from gradguard.monitoring.observe.names import (
    described,
    living_modules,
    living_optimizers,
    name_parameters,
    parameters_of,
)
from gradguard.monitoring.observe.outbox import Outbox, warn
from gradguard.monitoring.observe.patches import ClipCall, patched
from gradguard.monitoring.observe.rows import Row, ScaleUpdate, total_of
from gradguard.monitoring.observe.safely import safely
from gradguard.monitoring.observe.schedule import EVERY, Alarm, Schedule
from gradguard.monitoring.observe.script_clips import CapturedNorms, copied
from gradguard.monitoring.observe.shared_norms import Shared, SharedNorms, are_spread, is_captured, refuse_lost
from gradguard.monitoring.record.file import SCHEMA, RecordWriter
from gradguard.optimizer_hooks import EveryStep


class Observer:
    """Writes the record of a run. Use `observe`.

    Args:
        path: The record; None to write nothing; or a function that gives one of these at the first step.
        meta: What the first line says besides versions and parameters.
        clip: A clip to apply before each step.
        every: Write the norm of each parameter every so many steps; by default so that a step takes some 200 bytes.
        extras_every: Steps between two measurements of what is dear; 0 for none.

    Attributes:
        path: The record, once it is open.
    """

    def __init__(
        self,
        path: Path | Callable[[], Path | None] | None,
        meta: dict[str, Any],
        clip: AppliedClip | None = None,
        every: int | None = None,
        extras_every: int = EVERY,
    ) -> None:
        self._meta, self._clip, self._every, self._path = meta, clip, every, path
        self._process, self._started, self._overhead = os.getpid(), time.perf_counter(), 0.0
        self._known: dict[int, tuple[weakref.ref, int]] | None = None  # identity -> parameter, its place in meta
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._losses, self._clips = Losses(), HeardClips()
        self._applying, self._shared = Applying(), SharedNorms()
        self._amp_scale: Tensor | None = None
        self._thread = threading.local()  # .row: the row of the step that is running, and its .optimizer
        self._schedule, self._alarms = Schedule(extras_every), dict[int | None, Alarm]()
        self._steps, self._steps_at_update, self._count = 0, -1, 0
        self._broken, self._closed, self._lock = False, False, threading.RLock()
        self.path: Path | None = None
        self._outbox: Outbox | None = None if callable(path) else self._open(path)

    @property
    def steps(self) -> int:
        """Optimizer steps seen so far."""
        return self._steps

    @property
    def overhead(self) -> float:
        """Seconds that watching took so far."""
        return self._overhead

    def close(self, exit_code: int | None, interrupted: bool) -> None:
        """Write what is left and the last line; harmless in a forked child and when repeated."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        with suppress(Exception):  # nothing here may change how the script ends
            if self._outbox is not None:
                if not self._outbox.has_begun:
                    self._write_meta([], [])
                clips = self._clips.count if not self._steps and self._clips.count else None
                self._outbox.flush(wait=True)
                self._outbox.close(
                    steps=self._steps,
                    wall=time.perf_counter() - self._started,
                    overhead_ms=1e3 * self._overhead,
                    exit=exit_code,
                    interrupted=interrupted,
                    clips=clips,
                )
        self._broken = True

    @safely
    def flush(self) -> None:
        """Write what was seen so far."""
        if self._outbox is not None:
            self._outbox.flush(wait=True)

    # --- what the script does -----------------------------------------------------------------------------------------

    @safely
    def on_backward(self, loss: Tensor) -> None:
        """Keep the loss."""
        with suppress(Exception):  # one that cannot be read is no reason to stop
            self._losses.add(loss)

    def on_clip(self, call: ClipCall, parameters: list[Tensor]) -> CapturedNorms | None:
        """Measure before a foreign clip changes anything, or let the clip measure for both of us."""
        return self._begin_clip(parameters, *self._joined(parameters), call)

    @safely
    def on_clipped(self, norm: Any) -> None:
        """Keep what the foreign clip returned."""
        self._clips.end_foreign(norm)

    def before_clip(self, parameters: Sequence[Tensor], tells_norms: bool) -> None:
        """Measure before a clip of gradguard's changes anything, unless it measures for both of us."""
        if not self._is_applying():
            listed = list(parameters)
            self._begin_clip(listed, *self._joined(listed), None, tells_norms)

    @safely
    def after_clip(self, event: ClipEvent) -> None:
        """Keep what a clip of gradguard's tells: of one before a step, or within it."""
        if event.optimizer is None:
            if not self._is_applying():
                self._clips.end(event)
            return
        row: Row | None = getattr(self._thread, "row", None)
        if row is not None and self._thread.optimizer() is event.optimizer:
            note_guard(row, event)

    def _is_applying(self) -> bool:
        """Whether the clip that is running in this thread is the one that we were asked to apply."""
        return getattr(self._thread, "applying", False)

    @safely
    def _begin_clip(
        self,
        parameters: list[Tensor],
        spread: bool,
        shared: Shared | None,
        call: ClipCall | None,
        tells_norms: bool = False,
    ) -> CapturedNorms | None:
        captured, replaced = self._clips.begin(parameters, spread, shared, call, tells_norms)
        if replaced:  # the step of the losses before this backward pass never came
            self._losses.keep_last()
        return captured

    @safely
    def on_scale(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled loss came from."""
        self._losses.scaled(loss, scaled)

    @safely
    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """Note a loss scale, and at the next flush whether it fell; forget what led to a step that was skipped."""
        self._amp_scale = after
        if self._steps == self._steps_at_update:
            self._losses.clear()
            self._clips.forget()
        self._steps_at_update = self._steps
        if before is not None and after is not None and self._outbox is not None:
            self._outbox.add(ScaleUpdate(self._steps, before, after))

    def _before_step(self, optimizer: Optimizer, evaluation: int) -> None:
        first = evaluation == 0  # a closure is evaluated several times: the first has the weights of this step
        parameters = self._parameters(optimizer)
        spread, shared = self._joined(parameters) if first else (are_spread(parameters), None)
        having = parameters if spread else [p for p in parameters if p.grad is not None]
        if first:
            self._measure_step(optimizer, having, shared)
        else:
            self._forget(parameters)
        if self._clip is not None:
            self._thread.applying = True
            try:
                self._applying.apply(self._clip, optimizer, having)
            finally:
                self._thread.applying = False
            if first:
                self._measure_clipped(optimizer, having, *self._joined(parameters))
        if first and not spread:  # of a part, what is dear would be wrong
            self._measure_extras(optimizer, having)

    @safely
    def _forget(self, parameters: list[Tensor]) -> None:
        """Forget what another evaluation of a closure told: it belongs to this step, and the next one would get it."""
        self._losses.clear()
        self._clips.forget(parameters)

    def _parameters(self, optimizer: Optimizer) -> list[Tensor]:
        try:
            return [p for p in parameters_of(optimizer) if isinstance(p, Tensor)]
        except Exception as error:  # an optimizer without the usual groups
            self._fail(error)
            return []

    def _joined(self, parameters: list[Tensor]) -> tuple[bool, Shared | None]:
        started = time.perf_counter()
        joined = self._shared.join(parameters, self._stop)
        self._overhead += time.perf_counter() - started
        return joined

    def _stop(self, error: Exception) -> None:
        if not self._broken:
            warn(f"stopped measuring: {type(error).__name__}: {error}. The program goes on without it.")
        self._fail(error)

    @safely
    def _measure_step(self, optimizer: Optimizer, parameters: list[Tensor], shared: Shared | None) -> None:
        self._thread.row = None  # of a step that raised
        if parameters and not is_captured(parameters[0]):
            self._thread.row = self._measured_row(optimizer, parameters, shared)
            self._thread.optimizer = weakref.ref(optimizer)

    @safely
    def _measure_clipped(
        self, optimizer: Optimizer, parameters: list[Tensor], spread: bool, shared: Shared | None
    ) -> None:
        """The norm after our own clip, where it does not follow from the one before."""
        row: Row | None = getattr(self._thread, "row", None)
        if row is not None and (spread or row.applied_rule != "norm" or row.post is not None or row.clips):
            norms = self._measure(parameters) if shared is None else shared.norms
            row.post = unscaled(total(norms), getattr(optimizer, "grad_scale", None))

    @safely
    def _measure_extras(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        row: Row | None = getattr(self._thread, "row", None)
        self._thread.parameters = None
        if row is None or row.total is not None:
            return
        started = time.perf_counter()
        if self._schedule.due(self._steps, started - self._started):
            row.extras = measure_extras(parameters, getattr(optimizer, "grad_scale", None))
            self._thread.parameters, self._thread.spent = parameters, time.perf_counter() - started

    @safely
    def _after_step(self, optimizer: Optimizer) -> None:
        row: Row | None = getattr(self._thread, "row", None)
        self._thread.row = None
        if row is None or self._outbox is None:
            return
        now = time.perf_counter()
        if row.extras is not None and self._thread.parameters is not None:
            measure_update(row.extras, self._thread.parameters)
            self._schedule.spent(self._thread.spent + time.perf_counter() - now)
            self._thread.parameters = None
        row.wall = now - self._started
        found_inf = getattr(optimizer, "found_inf", None)
        row.found_inf = copied(found_inf) if isinstance(found_inf, Tensor) else None
        with self._lock:  # several threads may train at once
            row.index = self._steps
            self._steps += 1
            self._outbox.add(row)
        if not row.late:
            self._watch_norm(row)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _measured_row(self, optimizer: Optimizer, parameters: list[Tensor], shared: Shared | None) -> Row | None:
        if self._known is None:
            with self._lock:
                if self._known is None:  # else another thread has
                    self._begin(optimizer)
        if self._outbox is None or not self._outbox.is_open:
            self._clips.forget(parameters)
            self._losses.clear()
            return None
        row = self._clips.row(self._steps, optimizer, parameters, shared, self._clip)
        row.places = [self._place(p) for p in parameters] if len(row.norms) else []
        row.losses, row.lr = self._losses.take(), copied(optimizer.param_groups[0].get("lr"))
        row.amp_scale, row.optimizer = self._amp_scale, self._place_of(optimizer)
        return row

    def _measure(self, parameters: Sequence[Tensor]) -> Norms:
        return gradient_norms([p.grad for p in parameters if p.grad is not None])

    def _watch_norm(self, row: Row) -> None:
        """Start a burst of dear measurements after a norm that is out of the ordinary."""
        if (alarm := self._alarms.get(row.optimizer)) is None:
            alarm = self._alarms[row.optimizer] = Alarm()
        if alarm.see(total_of(row)):
            self._schedule.alert(self._steps, time.perf_counter() - self._started)

    def _place(self, parameter: Tensor) -> int:
        """The place of ``parameter`` in meta, or -1 for one that came later."""
        known = (self._known or {}).get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else -1

    def _place_of(self, optimizer: Optimizer) -> int | None:
        """Which optimizer this is, where the script has several; one that came later gets a number of its own."""
        if (place := self._optimizers.get(optimizer)) is None:
            place = self._optimizers[optimizer] = self._count = self._count + 1
        return place if self._count > 0 else None

    # --- the record ---------------------------------------------------------------------------------------------------

    def _open(self, path: Path | None) -> Outbox:
        writer = None
        try:
            writer = RecordWriter(path) if path is not None else None
            self.path = path
        except RecordError as error:
            warn(f"{error}. The program runs without a record.")
        return Outbox(writer, self._every, seen=self._arrived, failed=self._fail)

    def _arrived(self, row: Row) -> None:
        if row.late:
            refuse_lost(row.lost)
            self._watch_norm(row)

    def _begin(self, optimizer: Optimizer) -> None:
        if self._outbox is None and callable(self._path):
            self._outbox = self._open(self._path())
        self._write_meta(living_optimizers(optimizer), living_modules())

    def _write_meta(self, optimizers: list[Optimizer], modules: list[nn.Module]) -> None:
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        names = name_parameters(parameters, modules)
        for place, optimizer in enumerate(optimizers):
            self._optimizers[optimizer] = place
        self._count = len(optimizers) - 1
        self._known = {id(p): (weakref.ref(p), i) for i, p in enumerate(parameters)}
        if self._outbox is None:
            return
        self._outbox.begin(
            names,
            **{"schema": SCHEMA, **self._meta},
            torch=torch.__version__,
            **describe(parameters),
            optimizers=[type(optimizer).__name__ for optimizer in optimizers],
            params=described(names, parameters, optimizers),
        )

    def _fail(self, error: Exception) -> None:
        """Stop measuring, and say so in the record rather than in the script."""
        broken, self._broken = self._broken, True
        with suppress(Exception):
            if self._outbox is None or broken:
                return
            if not self._outbox.has_begun:  # a record without its first line could not be read
                self._known = {}
                self._outbox.begin([], **{"schema": SCHEMA, **self._meta}, params=[])
            self._outbox.write(
                "event",
                i=self._steps,
                kind="observer_failed",
                severity="error",
                message=f"gradguard stopped measuring: {type(error).__name__}: {error}",
                advice="the script itself went on untouched; please report this with the script",
            )


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Let ``observer`` see everything that runs inside the block; closing it is up to the caller."""
    hooks, end = EveryStep(observer._before_step, observer._after_step), listen(observer)
    try:
        with patched(observer):
            yield observer
    finally:
        end()
        hooks.remove()
