"""The observer: one row for each optimizer step, without a change in the script or in its numbers.

It measures and never writes to a tensor of the script (unless it was given a clip to apply), draws no random number,
waits for no device between flushes, and swallows its own failures: after one it notes an event and stops measuring.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from gradguard.watch.patches import patched
from gradguard.watch.record import RecordWriter
from gradguard.watch.rows import Row, ScaleUpdate, write_row

FLUSH_ROWS = 50
FLUSH_SECONDS = 2.0


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


@dataclass(slots=True)
class _ScriptClip:
    """A clip that the script itself made since the last step."""

    rule: str
    parameters: list[Tensor]
    norms: Tensor
    threshold: Any
    norm_type: float
    returned: Any = None


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
        self._known: dict[int, int] | None = None  # identity of a parameter -> its place in meta
        self._names: list[str] = []
        self._optimizers: list[int] = []
        self._losses: list[Tensor] = []  # since the last step, like the clips
        self._clips: list[_ScriptClip] = []
        self._apply: Callable[[list[Tensor], float | Tensor], object] | None = None
        self._scaled: tuple[Any, Any] = (None, None)
        self._amp_scale: Tensor | None = None
        self._row: Row | None = None
        self._rows: list[Row | ScaleUpdate] = []
        self._steps = 0
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
        self._writer.close()

    # --- what the script does -----------------------------------------------------------------------------------------

    @_safely
    def on_backward(self, loss: Tensor) -> None:
        """Keep the loss, unscaled where a GradScaler scaled it."""
        plain = self._scaled[0] if loss is self._scaled[1] else loss
        if isinstance(plain, Tensor) and plain.numel() == 1:
            self._losses.append(plain.detach().reshape(()).clone())

    @_safely
    def on_clip(self, rule: str, parameters: list[Tensor], threshold: Any, norm_type: float) -> None:
        """Measure before the script's own clip changes anything."""
        having = [p for p in parameters if p.grad is not None]
        norms = self._measure(having)
        self._clips.append(_ScriptClip(rule, having, norms, threshold, norm_type))

    @_safely
    def on_clipped(self, norm: Any) -> None:
        """Keep what the script's clip returned."""
        if self._clips:
            self._clips[-1].returned = norm

    def on_scale(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled loss came from."""
        self._scaled = (loss, scaled)

    @_safely
    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """Note a loss scale, and at the next flush whether it fell."""
        self._amp_scale = after
        if before is not None and after is not None:
            self._rows.append(ScaleUpdate(self._steps, before, after))

    def _before_step(self, optimizer: Optimizer) -> None:
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        self._measure_step(optimizer, parameters)
        if self._clip is not None and os.getpid() == self._process:
            scale = getattr(optimizer, "grad_scale", None)
            self._apply = self._apply or self._clip.bind(living_modules())
            self._apply(parameters, 1.0 if scale is None else scale)
            if self._clip.rule != "norm":
                self._measure_clipped(parameters)

    @_safely
    def _measure_step(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        if self._row is None:  # a closure is evaluated several times: the first has the weights of this step
            self._row = self._measured_row(optimizer, parameters)

    @_safely
    def _measure_clipped(self, parameters: list[Tensor]) -> None:
        if self._row is not None:
            self._row.post = torch.linalg.vector_norm(self._measure(parameters))

    @_safely
    def _after_step(self, optimizer: Optimizer) -> None:
        row, self._row = self._row, None
        if row is None:
            return
        row.wall = time.perf_counter() - self._started
        found_inf = getattr(optimizer, "found_inf", None)
        row.found_inf = found_inf.clone() if isinstance(found_inf, Tensor) else None
        self._rows.append(row)
        self._steps += 1
        self._losses, self._clips = [], []
        if len(self._rows) >= FLUSH_ROWS or time.perf_counter() - self._flushed > FLUSH_SECONDS:
            self._flush()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _measured_row(self, optimizer: Optimizer, parameters: list[Tensor]) -> Row:
        if self._known is None:
            self._write_meta(living_optimizers(optimizer))
        clips = self._clips
        before = {id(p): norm for clip in reversed(clips) for p, norm in zip(clip.parameters, clip.norms, strict=True)}
        by_norm = len(clips) == 1 and clips[0].rule == "norm" and all(id(p) in before for p in parameters)
        if by_norm:
            norms, post = torch.stack([before[id(p)] for p in parameters]), None
        else:
            now = self._measure(parameters)
            norms = torch.stack([before.get(id(p), n) for p, n in zip(parameters, now, strict=True)]) if clips else now
            post = torch.linalg.vector_norm(now) if clips else None
        scale = getattr(optimizer, "grad_scale", None)
        return Row(
            index=self._steps,
            norms=norms if scale is None else norms / scale,
            places=[(self._known or {}).get(id(p), -1) for p in parameters],
            post=post if scale is None or post is None else post / scale,
            losses=self._losses,
            lr=float(optimizer.param_groups[0].get("lr", float("nan"))),
            rule=self._clip.rule if self._clip else (clips[-1].rule if clips else None),
            threshold=self._clip.threshold if self._clip else (clips[-1].threshold if clips else None),
            user_threshold=clips[-1].threshold if clips else None,
            clip_norm=(clips[0].returned if clips[0].norm_type != 2 else None) if by_norm else None,
            amp_scale=self._amp_scale,
            optimizer=self._place_of(optimizer),
        )

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
        self._known = {id(p): i for i, p in enumerate(parameters)}

    def _flush(self) -> None:
        every = self._every or max(1, len(self._names) // 20)
        while self._rows:  # one by one, so that Ctrl-C in between loses nothing
            write_row(self._writer, self._rows.pop(0), self._names, every)
        self._writer.flush()
        self._flushed = time.perf_counter()

    def _fail(self, error: Exception) -> None:
        """Stop measuring, and say so in the record rather than in the script."""
        self._broken = True
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


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Let ``observer`` see everything that runs inside the block; closing it is up to the caller."""
    with patched(observer):
        yield observer
