"""The observer: one row for each optimizer step, without a change in the script or in its numbers.

It measures and never writes to a tensor of the script (unless it was given a clip to apply), draws no random number,
waits for no device between flushes, and swallows its own failures: after one it notes an event and stops measuring.
"""

import functools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.distributed import refuse_sharded
from gradguard.optimizer_hooks import EveryStep
from gradguard.tensors.norms import tensor_norms
from gradguard.watch.names import living_modules, living_optimizers, name_parameters, parameters_of
from gradguard.watch.patches import ClipCall, patched
from gradguard.watch.record import RecordWriter
from gradguard.watch.rows import Row, ScaleUpdate, write_row
from gradguard.watch.script_clips import PendingClips, ScriptClip, copied, last_clip, single_norm_clip

FLUSH_ROWS = 50
FLUSH_SECONDS = 2.0
MOST_LOSSES = 1000
MOST_SCALED = 16


@dataclass(frozen=True, slots=True)
class AppliedClip:
    """A clip that the observer applies before each step, where the user asked for one.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``.
        threshold: Its threshold.
        bind: Given the modules of the script, returns a function that clips the gradients of given parameters; its
            second argument is what the threshold is multiplied by: the loss scale, where the gradients have one.
    """

    rule: str
    threshold: float
    bind: Callable[[Sequence[nn.Module]], Callable[[list[Tensor], float | Tensor], object]]


def _safely(method: Callable) -> Callable:
    """Time what the observer does, keep its failures away from the script, and do nothing in a forked child."""

    @functools.wraps(method)
    def safe(self: "Observer", *args: Any) -> None:
        if self._broken or os.getpid() != self._process:
            return
        started = time.perf_counter()
        try:
            method(self, *args)
        except Exception as error:
            self._fail(error)
        finally:
            self._overhead += time.perf_counter() - started

    return safe


class Observer:
    """Writes the record of a run. Use `observe`.

    Args:
        path: The record.
        meta: What the first line says besides versions and parameters.
        clip: A clip to apply before each step.
        every: Write the norm of each parameter every so many steps; by default so that a step takes some 200 bytes.
    """

    def __init__(
        self, path: Path, meta: dict[str, Any], clip: AppliedClip | None = None, every: int | None = None
    ) -> None:
        self._writer = RecordWriter(path)
        self._meta, self._clip, self._every = meta, clip, every
        self._process, self._started, self._flushed = os.getpid(), time.perf_counter(), time.perf_counter()
        self._overhead = 0.0
        self._hooks = EveryStep(self._before_step, self._after_step)
        self._known: dict[int, tuple[weakref.ref, int]] | None = None  # identity -> parameter, its place in meta
        self._names: list[str] = []
        self._optimizers: list[int] = []
        self._losses: deque[Tensor] = deque(maxlen=MOST_LOSSES)  # since the last step
        self._clips = PendingClips()
        self._apply: Callable[[list[Tensor], float | Tensor], object] | None = None
        self._bound: dict[int, weakref.ref] = {}  # the parameters that `_apply` knows
        self._scales = False  # whether a GradScaler is at work, and the last losses that it scaled
        self._scaled: deque[tuple[weakref.ref, Tensor]] = deque(maxlen=MOST_SCALED)
        self._amp_scale: Tensor | None = None
        self._thread = threading.local()  # .row: the row of the step that is running
        self._rows: list[Row | ScaleUpdate] = []
        self._steps, self._steps_at_update = 0, -1
        self._broken = False

    @property
    def steps(self) -> int:
        """Optimizer steps seen so far."""
        return self._steps

    def close(self, exit_code: int, interrupted: bool) -> None:
        """Write what is left and the last line; harmless in a forked child and when repeated."""
        self._hooks.remove()
        if os.getpid() != self._process:
            return
        try:
            if self._known is None:
                self._write_meta([])
            self._flush()
            self._writer.write(
                "end",
                steps=self._steps,
                wall=time.perf_counter() - self._started,
                overhead_ms=1e3 * self._overhead,
                exit=exit_code,
                interrupted=interrupted,
            )
        except Exception as error:  # a full disk must not change how the script ends
            print(f"gradguard: cannot finish {self._writer.path}: {error}", file=sys.stderr)
        finally:
            with suppress(OSError):
                self._writer.close()

    # --- what the script does -----------------------------------------------------------------------------------------

    @_safely
    def on_backward(self, loss: Tensor) -> None:
        """Keep the loss, unscaled where a GradScaler scaled it."""
        plain = next((its for scaled, its in self._scaled if scaled() is loss), None if self._scales else loss)
        if plain is not None and plain.numel() == 1:
            self._losses.append(plain.detach().reshape(()).clone())

    @_safely
    def on_clip(self, call: ClipCall, parameters: list[Tensor]) -> None:
        """Measure before the script's own clip changes anything."""
        having = [p for p in parameters if p.grad is not None]
        norms = self._measure(having)
        norm = copied(call.norm)
        if norm is None and call.norm_type == 2:
            norm = torch.linalg.vector_norm(norms)
        clip = ScriptClip(call.rule, copied(call.threshold), norm)
        if self._clips.add(clip, having, norms):  # the step of the losses before this backward pass never came
            while len(self._losses) > 1:
                self._losses.popleft()

    @_safely
    def on_clipped(self, norm: Any) -> None:
        """Keep what the script's clip returned."""
        self._clips.finish(norm)

    @_safely
    def on_scale(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled loss came from."""
        self._scales = True
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._scaled.append((weakref.ref(scaled), loss.detach()))
        elif isinstance(loss, list | tuple):
            for one, its_scaled in zip(loss, scaled, strict=True):
                self.on_scale(one, its_scaled)

    @_safely
    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """Note a loss scale, and at the next flush whether it fell; forget what led to a step that was skipped."""
        self._amp_scale = after
        if self._steps == self._steps_at_update:
            self._losses.clear()
            self._clips.clear()
        self._steps_at_update = self._steps
        if before is not None and after is not None:
            self._rows.append(ScaleUpdate(self._steps, before, after))

    def _before_step(self, optimizer: Optimizer, evaluation: int) -> None:
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        if evaluation == 0:  # a closure is evaluated several times: the first has the weights of this step
            self._measure_step(optimizer, parameters)
        if self._clip is not None:
            self._apply_clip(self._clip, optimizer, parameters)
            if evaluation == 0:
                self._measure_clipped(optimizer, parameters)

    def _apply_clip(self, clip: AppliedClip, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        """Clip; not guarded, because a clip that was asked for and cannot be made must stop the run."""
        if self._apply is None or any(_unknown(self._bound, p) for p in parameters):
            self._apply = clip.bind(living_modules())
            self._bound = {key: alive for key, alive in self._bound.items() if alive() is not None}
            self._bound |= {id(p): weakref.ref(p) for p in parameters}
        scale = getattr(optimizer, "grad_scale", None)
        self._apply(parameters, 1.0 if scale is None else scale)

    @_safely
    def _measure_step(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        self._thread.row = None  # of a step that raised
        if parameters:
            self._thread.row = self._measured_row(optimizer, parameters)

    @_safely
    def _measure_clipped(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        """The norm after our own clip, where it does not follow from the one before."""
        row: Row | None = getattr(self._thread, "row", None)
        if row is not None and (row.rule != "norm" or row.post is not None):
            row.post = _unscaled(torch.linalg.vector_norm(self._measure(parameters)), optimizer)

    @_safely
    def _after_step(self, optimizer: Optimizer) -> None:
        row: Row | None = getattr(self._thread, "row", None)
        self._thread.row = None
        if row is None:
            return
        row.wall = time.perf_counter() - self._started
        found_inf = getattr(optimizer, "found_inf", None)
        row.found_inf = found_inf.clone() if isinstance(found_inf, Tensor) else None
        row.index = self._steps
        self._rows.append(row)
        self._steps += 1
        if len(self._rows) >= FLUSH_ROWS or time.perf_counter() - self._flushed > FLUSH_SECONDS:
            self._flush()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _measured_row(self, optimizer: Optimizer, parameters: list[Tensor]) -> Row:
        if self._known is None:
            self._write_meta(living_optimizers(optimizer))
        clipped = self._clips.take(parameters)
        last = last_clip(clipped)
        alone = single_norm_clip(clipped) if self._clip is None else None
        if alone is not None:  # everything follows from what the clip was told: no second measurement
            norms, post = torch.stack([entry.norm for entry in clipped if entry is not None]), None
        else:
            norms = now = self._measure(parameters)
            post = _unscaled(torch.linalg.vector_norm(now), optimizer) if last is not None else None
            if last is not None:
                pairs = zip(clipped, now, strict=True)
                norms = torch.stack([n if entry is None else entry.norm for entry, n in pairs])
        losses, self._losses = list(self._losses), deque(maxlen=MOST_LOSSES)
        threshold = last.threshold if last is not None else None
        return Row(
            index=self._steps,
            norms=_unscaled(norms, optimizer),
            places=[self._place(p) for p in parameters],
            post=post,
            losses=losses,
            lr=copied(optimizer.param_groups[0].get("lr")),
            rule=self._clip.rule if self._clip else (last.rule if last is not None else None),
            threshold=self._clip.threshold if self._clip else threshold,
            user_threshold=threshold,
            clip_norm=alone.norm if alone is not None else None,
            amp_scale=self._amp_scale,
            optimizer=self._place_of(optimizer),
        )

    def _place(self, parameter: Tensor) -> int:
        """The place of ``parameter`` in meta, or -1 for one that came later."""
        known = (self._known or {}).get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else -1

    def _place_of(self, optimizer: Optimizer) -> int | None:
        """Which optimizer this is, where the script has several."""
        several = len(self._optimizers) > 1 and id(optimizer) in self._optimizers
        return self._optimizers.index(id(optimizer)) if several else None

    def _measure(self, parameters: Sequence[Tensor]) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        refuse_sharded(gradients)
        return tensor_norms(gradients)

    def _write_meta(self, optimizers: list[Optimizer]) -> None:
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        group_of = {id(p): k for opt in optimizers for k, group in enumerate(opt.param_groups) for p in group["params"]}
        self._names = name_parameters(parameters, living_modules())
        self._optimizers = [id(optimizer) for optimizer in optimizers]
        self._writer.write(
            "meta",
            **self._meta,
            torch=torch.__version__,
            device=str(parameters[0].device) if parameters else "cpu",
            optimizers=[type(optimizer).__name__ for optimizer in optimizers],
            params=[
                {
                    "name": name,
                    "shape": list(p.shape),
                    "numel": p.numel(),
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "group": group_of[id(p)],
                }
                for name, p in zip(self._names, parameters, strict=True)
            ],
        )
        self._known = {id(p): (weakref.ref(p), i) for i, p in enumerate(parameters)}

    def _flush(self) -> None:
        every = self._every or max(1, len(self._names) // 20)
        while self._rows:  # one by one, so that Ctrl-C in between loses nothing
            row = self._rows.pop(0)
            try:
                write_row(self._writer, row, self._names, every)
            except OSError:
                raise
            except Exception as error:  # one bad row must not take the others, or the end, with it
                self._fail(error)
        self._writer.flush()
        self._flushed = time.perf_counter()

    def _fail(self, error: Exception) -> None:
        """Stop measuring, and say so in the record rather than in the script."""
        self._broken = True
        with suppress(OSError):
            if self._known is None:  # a record without its first line could not be read
                self._known = {}
                self._writer.write("meta", **self._meta, params=[])
            self._writer.write(
                "event",
                i=self._steps,
                kind="observer_failed",
                severity="error",
                message=f"gradguard stopped measuring: {type(error).__name__}: {error}",
                advice="the script itself went on untouched; please report this with the script",
            )


def _unscaled(norm: Tensor, optimizer: Optimizer) -> Tensor:
    """The norm of the gradients without the loss scale that a fused optimizer takes off itself."""
    scale = getattr(optimizer, "grad_scale", None)
    return norm if scale is None else norm / scale


def _unknown(known: dict[int, weakref.ref], parameter: Tensor) -> bool:
    reference = known.get(id(parameter))
    return reference is None or reference() is not parameter


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Let ``observer`` see everything that runs inside the block; closing it is up to the caller."""
    with patched(observer):
        yield observer
