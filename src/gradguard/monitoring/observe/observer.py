"""The observer: one row for each optimizer step of a process, without a change in the script or in its numbers."""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.clip_events import listen
from gradguard.distributed.placements import is_sharded, local_part, placement_of
from gradguard.errors import GradguardError
from gradguard.grad_scaler import listen_to_steps
from gradguard.monitoring.observe.clips import AppliedClip, Applying, CapturedNorms
from gradguard.monitoring.observe.intercept import ClipCall, patched
from gradguard.monitoring.observe.measure import gradient_norms, total, unscaled
from gradguard.monitoring.observe.meta import (
    living_modules,
    living_optimizers,
    meta_line,
    name_parameters,
    parameters_of,
)
from gradguard.monitoring.observe.record_buffer import RecordBuffer
from gradguard.monitoring.observe.recorder import Recorder, safely
from gradguard.monitoring.observe.schedule import EVERY, Schedule
from gradguard.monitoring.observe.shared_norms import Shared
from gradguard.monitoring.observe.step import ScaleUpdate, StepMeasurement
from gradguard.monitoring.record.file import SCHEMA
from gradguard.monitoring.record.text import on_stderr
from gradguard.monitoring.show.sinks import Sinks
from gradguard.optimizer_hooks import EveryStep
from gradguard.tensors.layout import are_readable


class Observer(Recorder):
    """Writes the record of a run. Use `observe`.

    Args:
        path: The record; None to write nothing; or a function that gives one of these at the first step.
        meta: What the first line says besides versions and parameters.
        clip: A clip to apply before each step.
        every: Write the norm of each parameter every so many steps; by default so that a step takes some 200 bytes.
        diagnostics_every: Steps between two measurements of what is too costly for each; 0 for none.

    Attributes:
        path: The record, once it is open.
    """

    def __init__(
        self,
        path: Path | Callable[[], Path | None] | None,
        meta: dict[str, Any],
        clip: AppliedClip | None = None,
        every: int | None = None,
        diagnostics_every: int = EVERY,
    ) -> None:
        super().__init__(Schedule(diagnostics_every), clip)
        self._meta, self._every, self._path = meta, every, path
        self._known: dict[int, tuple[weakref.ref, int]] | None = None  # identity -> parameter, its place in meta
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._count = 0  # optimizers but one
        self._losses, self._applying = Losses(), Applying()
        self._steps_at_update = -1
        self.path: Path | None = None
        self._buffer = None if callable(path) else self._open(path)

    def close(self, exit_code: int | None, interrupted: bool) -> None:
        """Write what is left and the last line; harmless in a forked child and when repeated."""
        if self._buffer is not None and not self._buffer.has_begun and os.getpid() == self._process:
            with suppress(Exception):
                self._write_meta([], [])
        self._end(exit_code, interrupted)

    def flush(self) -> None:
        """Write what was seen so far."""
        self._flush()

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

    @safely
    def on_scale(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled loss came from."""
        self._losses.scaled(loss, scaled)

    @safely
    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """Note at the next flush whether the loss scale fell; forget what led to a step that was skipped."""
        if self._steps == self._steps_at_update:
            self._losses.clear()
            self._clips.forget()
        self._steps_at_update = self._steps
        if before is not None and after is not None and self._buffer is not None:
            self._buffer.add(ScaleUpdate(max(self._steps - 1, 0), before, after))

    # --- what differs from other recorders ----------------------------------------------------------------------------

    def _measured(
        self, optimizer: Optimizer, parameters: list[Tensor], spread: bool, shared: Shared | None
    ) -> StepMeasurement | None:
        del spread
        if not parameters:  # an optimizer that has nothing to do yet
            return None
        step = self._clips.step(self._steps, optimizer, parameters, shared, self._applied)
        step.places = [self._place(p) for p in parameters] if len(step.norms) else []
        return step

    def _is_open(self, optimizer: Optimizer) -> bool:
        if self._known is None:
            with self._lock:
                if self._known is None:  # else another thread has
                    self._begin(optimizer)
        return self._buffer is not None and not self._buffer.sinks.empty

    def _label(self, step: StepMeasurement, optimizer: Optimizer) -> None:
        step.losses, step.optimizer = self._losses.take(), self._place_of(optimizer)
        step.amp_scale = getattr(self._thread, "loss_scale", None)  # each optimizer may have a scaler of its own

    def _hears(self, parameters: Sequence[Tensor]) -> bool:
        """Every clip but the one that is running in this thread because we were asked to apply it."""
        del parameters
        return not getattr(self._thread, "applying", False)

    def _clip(self, optimizer: Optimizer, with_grad: list[Tensor], parameters: list[Tensor], first: bool) -> None:
        if self._applied is None:
            return
        self._thread.applying = True
        try:
            self._applying.apply(self._applied, optimizer, with_grad)
        finally:
            self._thread.applying = False
        if first:
            self._measure_clipped(optimizer, with_grad, *self._joined(parameters))

    @safely
    def _measure_clipped(
        self, optimizer: Optimizer, parameters: list[Tensor], spread: bool, shared: Shared | None
    ) -> None:
        """The norm after our own clip, where it does not follow from the one before."""
        step = self._open_step()
        if step is not None and (spread or step.applied_rule != "norm" or step.post is not None or step.clips):
            gradients = [p.grad for p in parameters if p.grad is not None]
            norms = gradient_norms(gradients) if shared is None else shared.norms
            step.post = unscaled(total(norms), getattr(optimizer, "grad_scale", None))

    @safely
    def _forget(self, parameters: list[Tensor]) -> None:
        super()._forget(parameters)
        self._losses.clear()

    def _on_replaced(self) -> None:
        self._losses.keep_last()  # those before belong to the backward passes whose step never came

    def _tell(self, message: str) -> None:
        on_stderr(message)

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

    def _open(self, path: Path | None) -> RecordBuffer:
        sinks = Sinks([], on_stderr)
        try:
            if path is not None:
                sinks = Sinks([path], on_stderr)
                self.path = sinks.record
        except GradguardError as error:
            on_stderr(f"{error} The program runs without a record.")
        return RecordBuffer(sinks, self._every, arrived=self._arrived, failed=self._fail, in_background=True)

    def _begin(self, optimizer: Optimizer) -> None:
        if self._buffer is None and callable(self._path):
            self._buffer = self._open(self._path())
        self._write_meta(living_optimizers(optimizer), living_modules())

    def _write_meta(self, optimizers: list[Optimizer], modules: list[nn.Module]) -> None:
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        names = name_parameters(parameters, modules)
        for place, optimizer in enumerate(optimizers):
            self._optimizers[optimizer] = place
        self._count = len(optimizers) - 1
        self._known = {id(p): (weakref.ref(p), i) for i, p in enumerate(parameters)}
        if self._buffer is not None:
            self._buffer.begin(meta_line(self._meta, optimizers, parameters, names))

    def _write_failure(self, buffer: RecordBuffer, message: str) -> None:
        if not buffer.has_begun:  # a record without its first line could not be read
            self._known = {}
            buffer.begin({"t": "meta", "schema": SCHEMA, **self._meta, "params": []})
        super()._write_failure(buffer, message)


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Let ``observer`` see everything that runs inside the block; closing it is up to the caller."""
    hooks = EveryStep(observer._before_step, observer._after_step)
    ends = listen(observer), listen_to_steps(observer._scaler_begins, observer._scaler_ends)
    try:
        with patched(observer):
            yield observer
    finally:
        for end in ends:
            end()
        hooks.remove()


MOST_LOSSES = 1000
MOST_SCALED = 16


class Losses:
    """What backward was called on; numbers on the CPU, copies on a device."""

    def __init__(self) -> None:
        self._losses: deque[Any] = deque(maxlen=MOST_LOSSES)
        self._scales = False  # whether a GradScaler is at work, and the last losses that it scaled
        self._scaled: deque[tuple[weakref.ref, Tensor]] = deque(maxlen=MOST_SCALED)

    def add(self, loss: Tensor) -> None:
        """Keep ``loss``, as it was before a GradScaler scaled it; one that nothing is known of is left out."""
        plain = loss
        if self._scales:
            plain = next((its for scaled, its in self._scaled if scaled() is loss), None)
        if plain is not None and is_sharded(plain):  # to read parts would need every process
            plain = local_part(plain) if placement_of(plain).is_whole and not _is_partial(plain) else None
        if plain is not None and plain.numel() == 1:
            self._losses.append(plain.item() if are_readable(plain) else plain.detach().reshape(()).clone())

    def scaled(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled one came from."""
        self._scales = True
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._scaled.append((weakref.ref(scaled), loss.detach()))
        elif isinstance(loss, list | tuple):
            for one, its_scaled in zip(loss, scaled, strict=True):
                self.scaled(one, its_scaled)

    def keep_last(self) -> None:
        """Forget all but the last: the step of the others never came."""
        while len(self._losses) > 1:
            self._losses.popleft()

    def take(self) -> list[Any]:
        """Return all and forget them."""
        found = list(self._losses)
        self._losses.clear()
        return found

    clear = take


def _is_partial(tensor: Any) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)
