"""The observer: one row for each optimizer step of a process, without a change in the script or in its numbers."""

import functools
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.distributed.placements import is_sharded, local_part, placement_of
from gradguard.errors import GradguardError
from gradguard.listeners import ClipEvent
from gradguard.monitoring.judge.health import Finding
from gradguard.monitoring.observe.clips import AppliedClip, StepClips, StepGradients
from gradguard.monitoring.observe.graph_facts import GraphFacts, origin_of
from gradguard.monitoring.observe.loop_setup import IDLE_STEPS, Unowned
from gradguard.monitoring.observe.meta import (
    Places,
    living_modules,
    living_optimizers,
    meta_line,
    name_parameters,
    parameters_of,
)
from gradguard.monitoring.observe.record_buffer import RecordBuffer
from gradguard.monitoring.observe.recorder import Recorder, safely
from gradguard.monitoring.observe.schedule import EVERY, Schedule
from gradguard.monitoring.observe.shared_norms import is_captured
from gradguard.monitoring.observe.step import ScriptClip, StepMeasurement, scale_update
from gradguard.monitoring.record.file import SCHEMA
from gradguard.monitoring.record.text import on_stderr
from gradguard.monitoring.show.sinks import Sinks
from gradguard.script_events import listening
from gradguard.tensors.layout import are_readable


class EnoughSteps(SystemExit):
    """Ends a program after as many optimizer steps as were asked for: what cleans up on the way out does so."""


class Observer(Recorder):
    """Writes the record of a run. Use `observe`.

    Args:
        path: The record; None to write nothing; or a function that gives one of these at the first step.
        meta: Fields of the first line besides versions and parameters.
        clip: A clip to apply before each step.
        every: Write the norm of each parameter every so many steps; by default so that a step takes
            some 200 bytes, and half as often from step 100,000 on, a quarter as often from 200,000, and so on.
        diagnostics_every: Steps between two measurements of what is too costly for each; 0 for none.
        last_step: After so many optimizer steps the program ends, as if it had called ``sys.exit()``.
        on_finding: Called with each finding while the run goes on, where a record is written.
        in_child: Called with this observer at the first step of a forked child, gives the record of that; without it,
            forked children are not watched.

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
        last_step: int | None = None,
        on_finding: Callable[[Finding], object] | None = None,
        in_child: Callable[["Observer"], Path | None] | None = None,
    ) -> None:
        super().__init__(Schedule(diagnostics_every), clip)
        self._diagnostics_every, self._in_child = diagnostics_every, in_child
        self._meta, self._every, self._path, self._on_finding = meta, every, path, on_finding
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._count = 0  # optimizers but one
        self._losses, self._left = Losses(), last_step
        self._graph, self._origin, self._looks_for_origin = GraphFacts(), None, True
        self._steps_at_update = -1
        self.path: Path | None = None
        self._buffer = None if callable(path) else self._open(path)

    def close(self, exit_code: int | None, interrupted: bool) -> None:
        """Write what is left and the last line; harmless in a forked child and when repeated."""
        if self._buffer is not None and not self._buffer.has_begun and os.getpid() == self._process:
            with suppress(Exception):
                self._write_meta([], [])
        self._end(exit_code, interrupted)

    # --- what the script does -----------------------------------------------------------------------------------------

    @safely
    def on_backward(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Callable[[], None] | None:
        """Keep the loss; on the first steps, look whether the gradients of the last one are still there."""
        if any(is_captured(loss) for loss in losses):  # what is copied later would be memory that only a replay writes
            return None
        with suppress(Exception):  # one that cannot be read is no reason to stop
            if self._losses.waiting and self._are_cleared():
                self._losses.clear()  # as where a step of SAM measures first and goes back
            self._losses.add(losses, weights)
        for loss in losses:
            with suppress(Exception):  # the same of a graph
                self._look_at_graph(loss)
        if self._backwards < IDLE_STEPS:
            self._backwards += 1
        if not self._kept.looks:
            return None
        self._kept.before_backward()
        return self._after_backward

    def _are_cleared(self) -> bool:
        """Whether no parameter of an optimizer has a gradient, though a backward came before."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return bool(groups) and all(p.grad is None for group in groups for p in group["params"])

    def _look_at_graph(self, loss: Tensor) -> None:
        if self._places is None and self._backwards < IDLE_STEPS:  # meta is still to be written
            self._graph.read(loss, self._losses.scales)
        if self._looks_for_origin and are_readable(loss) and not math.isfinite(loss.sum().item()):
            self._origin, self._looks_for_origin = origin_of(loss), False

    @safely
    def _after_backward(self) -> None:
        self._kept.after_backward()

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
            self._buffer.add(scale_update(self._last_step, before, after))

    def on_stepped(self, optimizer: Optimizer) -> None:
        """Add the row of the step that is done; end the program after the last step that was asked for."""
        super().on_stepped(optimizer)
        if self._left is not None and os.getpid() == self._process:  # counted also where nothing is recorded
            self._left -= 1
            if self._left <= 0:
                raise EnoughSteps

    # --- what differs from other recorders ----------------------------------------------------------------------------

    def _measured(
        self, optimizer: Optimizer, given: StepGradients, clipped: StepClips | None = None
    ) -> StepMeasurement | None:
        return super()._measured(optimizer, given, clipped) if given.parameters else None  # it has nothing to do yet

    def _begins_in_child(self) -> bool:
        """Begin anew: hooks and patches are there, and lead to this object; all else was the parent's."""
        if self._in_child is None:
            return False
        path = functools.partial(self._in_child, self)
        self.__init__(path, self._meta, self._applied, self._every, self._diagnostics_every, in_child=self._in_child)
        return True

    def _is_open(self, optimizer: Optimizer) -> bool:
        if self._places is None:
            with self._lock:
                if self._places is None:  # else another thread has
                    self._begin(optimizer)
        return self._buffer is not None and not self._buffer.sinks.empty

    def _label(self, step: StepMeasurement, optimizer: Optimizer) -> None:
        step.losses, step.optimizer = self._losses.take(), self._place_of(optimizer)
        step.origin, self._origin = self._origin, None

    def _hears(self, parameters: Sequence[Tensor]) -> bool:
        del parameters
        return True

    def _knows(self, optimizer: Optimizer) -> bool:
        return optimizer in self._optimizers

    def _clip(self, optimizer: Optimizer, first: bool) -> None:
        """Not guarded, because a clip that was asked for and cannot be made must stop the run."""
        if self._applied is not None:
            event = self._applied(optimizer, living_modules)
            if first:
                self._note_applied(event)

    @safely
    def _note_applied(self, event: ClipEvent) -> None:
        if (step := self._thread.step) is not None:
            step.applied = ScriptClip.told(event)

    @safely
    def _forget(self, parameters: list[Tensor]) -> None:
        super()._forget(parameters)
        self._losses.clear()

    def _on_replaced(self) -> None:
        self._losses.keep_last()  # those before belong to the backward passes whose step never came

    def _tell(self, message: str) -> None:
        on_stderr(message)

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
        return RecordBuffer(
            sinks, self._every, self._fail, in_background=True,
            on_finding=self._on_finding if path is not None else None,
        )  # fmt: skip

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
        self._places = Places(parameters)
        if self._buffer is not None:
            self._buffer.begin(meta_line(self._meta, optimizers, parameters, names, self._graph))
        self._graph = GraphFacts()
        with suppress(Exception):  # somebody's half-built module must not end the watch
            self._unowned = Unowned(modules, parameters)

    def _write_failure(self, buffer: RecordBuffer, message: str) -> None:
        if not buffer.has_begun:  # a record without its first line could not be read
            self._places = Places([])
            buffer.begin({"t": "meta", "schema": SCHEMA, **self._meta, "params": []})
        super()._write_failure(buffer, message)


def observe(observer: Observer) -> AbstractContextManager[None]:
    """Let ``observer`` see everything that runs inside the block; closing it is up to the caller."""
    return listening(observer)


MOST_LOSSES = 1000
MOST_SCALED = 16


class Losses:
    """The losses of the backwards: numbers on the CPU, copies on a device."""

    def __init__(self) -> None:
        self._losses: deque[Any] = deque(maxlen=MOST_LOSSES)
        self.scales = False  # whether a GradScaler is at work, and the last losses that it scaled
        self._scaled: deque[tuple[weakref.ref, Tensor]] = deque(maxlen=MOST_SCALED)

    def add(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> None:
        """Keep the loss of a backward: the weighted sum of those that it starts from; left out if one is not known."""
        pairs = zip(losses, weights, strict=True)
        numbers = [number for loss, weight in pairs if (number := self._number(loss, weight)) is not None]
        if numbers and len(numbers) == len(losses):
            self._losses.append(sum(numbers[1:], start=numbers[0]))

    def _number(self, loss: Tensor, weight: Tensor | None) -> Any:
        """Return ``loss`` as it was before a GradScaler scaled it, weighted; None if that is not known or no scalar."""
        plain: Tensor | None = loss
        if self.scales:
            plain = next((its for scaled, its in self._scaled if scaled() is loss), None)
        if plain is None or weight is None or plain.numel() != 1 or not _is_whole(plain):
            return None
        plain, weight = local_part(plain), local_part(weight)
        if are_readable(plain, weight):
            return plain.item() * weight.item()
        return plain.detach().reshape(()) * weight.detach().reshape(())

    def scaled(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled one came from."""
        self.scales = True
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._scaled.append((weakref.ref(scaled), loss.detach()))
        elif isinstance(loss, list | tuple):
            for one, its_scaled in zip(loss, scaled, strict=True):
                self.scaled(one, its_scaled)

    @property
    def waiting(self) -> bool:
        """Whether a loss is kept whose step has not come."""
        return bool(self._losses)

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


def _is_whole(loss: Any) -> bool:
    """Tell whether this process holds all of a loss: to read parts of it would need every process."""
    if not is_sharded(loss):
        return True
    return placement_of(loss).is_whole and not any(placement.is_partial() for placement in loss.placements)
