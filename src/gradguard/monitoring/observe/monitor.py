"""Watching from inside a training loop of one's own: `gradguard.Monitor`."""

import atexit
import functools
import os
import time
import warnings
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.clip_events import ClipEvent, listen, rule_of
from gradguard.monitoring.observe.environment import rank_and_world
from gradguard.monitoring.observe.extras import measure_extras, measure_update
from gradguard.monitoring.observe.heard_clips import HeardClips, note_guard
from gradguard.monitoring.observe.measure import unscaled
from gradguard.monitoring.observe.monitor_arguments import check_arguments, taken_apart
from gradguard.monitoring.observe.monitor_lines import LineMaker, Seen
from gradguard.monitoring.observe.monitor_log import Log
from gradguard.monitoring.observe.monitor_meta import meta_of
from gradguard.monitoring.observe.monitor_output import Output
from gradguard.monitoring.observe.names import living_modules, name_parameters, parameters_of
from gradguard.monitoring.observe.rows import Row
from gradguard.monitoring.observe.schedule import Alarm, Schedule
from gradguard.monitoring.observe.script_clips import copied
from gradguard.monitoring.observe.shared_norms import Shared, SharedNorms, are_spread
from gradguard.monitoring.show.sinks import Sinks
from gradguard.optimizer_hooks import EveryStep
from gradguard.torch_private import loss_scale_of


def _safely(method: Callable) -> Callable:
    """Time what the monitor does, keep its failures away from training, and do nothing in a forked child."""

    @functools.wraps(method)
    def safe(self: "Monitor", *args: Any, **kwargs: Any) -> None:
        if not self._active or os.getpid() != self._process:
            return
        started = time.perf_counter()
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._fail(error)
        finally:
            self._overhead += time.perf_counter() - started

    return safe


class Monitor:
    r"""Record the gradients at each step of an optimizer, as ``gradguard run`` does, from inside a training loop.

    Of a plain optimizer it measures :math:`\lVert g_p \rVert_2` of each parameter as the gradients reach the step. Of
    a `Guard` it measures nothing: it writes down what the guard has measured and done.

    **Guarantees.**

    * Training comes out bit-identical: it writes to no tensor but its own, and draws no random number.
    * After construction nothing raises. If it fails it says so in one warning and in the record, and stops; a sink
      that fails is dropped with one warning, and the others go on.
    * No step waits for an accelerator: numbers are copied every 50 steps or 2 s, and looked at once they are there.
    * A dashboard gets about ten numbers a flush, however many parameters there are: the smallest, mean and largest
      norm, so that a spike between two flushes shows, and counts of what was clipped, skipped or not finite.

    **Edge cases.**

    ================================  ==========================================================================
    case                              what happens
    ================================  ==========================================================================
    PyTorch's ``clip_grad_norm_``     the gradients seen are clipped ones: ``log(norm=..., max_norm=...)`` what it
    before ``step()``                 returned and got, and the record has both. Clips of gradguard's are seen
    ``log`` after ``step()``          belongs to the step before it; the first call tells which way you do it
    ``log`` twice before a step       the mean of the losses, the last of everything else
    ``log`` after a loss for a step   belongs to an iteration without a step (a GradScaler's, say): it is left out
    a step that a guard skipped       a line with ``skipped``
    GradScaler                        pass ``scaler=``; a step that it leaves out is an event
    several optimizers                one monitor for each, each with a file of its own
    several processes                 only rank 0 writes
    a forked child (DataLoader)       writes nothing
    sharded gradients (DTensor,       measured by all processes together at each step: make the monitor on every one
    FSDP1)                            of them; without max, weights, updates and histogram
    the program ends without          what is there is written at exit; a program that is killed keeps what was
    ``close()``                       flushed
    ================================  ==========================================================================

    Args:
        optimizer_or_guard: A `torch.optim.Optimizer`, or a `Guard`.
        sink: Where lines go: a path of a JSON Lines file, which is replaced; a function that gets each line as a
            dictionary; ``"tensorboard"``, ``"wandb"``, ``"mlflow"`` or ``"trackio"``, which join a run that is active
            or make one; a ``SummaryWriter`` or ``Run`` of yours; or a list of several.
        model: Names the parameters. Without it they are looked for in all modules that exist.
        scaler: The GradScaler, for its loss scale and the steps that it leaves out.
        every: Write the norm of each parameter every so many steps; by default so that a step takes some 200 bytes.

    Raises:
        InvalidTypeError: If it is no optimizer or guard, or a sink is none.
        InvalidValueError: If ``every`` is below 1, ``model`` has none of the parameters, or a sink cannot be meant; if
            the gradients are sharded and the guard has stepped without a monitor, so that nobody sends what it needs.
        RecordError: If the file cannot be written.
        MissingPackageError: If the package of a dashboard is not installed; it says what to type.

    Example:
        >>> import gradguard as gg, torch
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> lines = []
        >>> with Monitor(optimizer, sink=lines.append, model=layer) as monitor:
        ...     loss = layer(torch.tensor([[3.0, 4.0]])).sum()
        ...     loss.backward()
        ...     monitor.log(loss=2.0, accuracy=0.5)
        ...     optimizer.step()
        >>> [line["t"] for line in lines], monitor.last["norm"], monitor.last["accuracy"]
        (['meta', 'step', 'tensors', 'end'], 5.0, 0.5)
    """

    def __init__(
        self,
        optimizer_or_guard: Any,
        sink: Any = "run.jsonl",
        *,
        model: nn.Module | None = None,
        scaler: Any = None,
        every: int | None = None,
    ) -> None:
        optimizer, self._guard = taken_apart(optimizer_or_guard)
        self._parameters = parameters_of(optimizer)  # alive, so that no other tensor gets one of their ids
        check_arguments(optimizer, self._parameters, model, scaler, every)
        names = name_parameters(self._parameters, [model] if model is not None else living_modules())
        self._place = {id(p): i for i, p in enumerate(self._parameters)}
        self._places: tuple[list[int], array] = ([], array("q"))  # of the last step, which the next one shares
        self._scaler, self._result, self._rule = scaler, None, self._name_of_rule()
        self._open: Seen | None = None  # the step that is running
        self._having: list[Tensor] = []  # the parameters of the last extras
        self._clips, self._optimizer = HeardClips(), weakref.ref(optimizer)
        self._schedule = Schedule() if self._guard is None else Schedule(every=0)
        self._log, self._shared = Log(self._warn), SharedNorms()
        self._complained: set[str] = set()
        self._steps, self._overhead, self._process, self._active = 0, 0.0, os.getpid(), True
        sinks = Sinks(sink if rank_and_world()[0] == 0 else [])
        meta = meta_of(optimizer, getattr(self._guard, "clipper", None), self._parameters, names)
        lines = LineMaker(names, every or max(1, len(names) // 20), self._guard_skips, meta)
        if self._guard is not None and hasattr(self._guard, "tensor_norms"):
            self._guard.tensor_norms = True  # processes send each other the norm of each only if one of them asks
        self._output, self._alarm = Output(lines, sinks, seen=self._look), Alarm()
        self._started = time.perf_counter()
        sinks.push([meta])
        self._hooks = EveryStep(self._before, self._after, optimizer=optimizer, first=self._guard is None)
        self._stop_listening = listen(_Ear(self))
        weakref.finalize(self, self._stop_listening)
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    # -- for the user -----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of optimizer steps seen."""
        return self._steps

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The last 1,000 ``step`` lines that were flushed, as plain dictionaries; `flush` first for the newest."""
        return [dict(row) for row in self._output.rows]

    @property
    def last(self) -> dict[str, Any] | None:
        """The last of `rows`; None before the first."""
        return dict(self._output.rows[-1]) if self._output.rows else None

    def log(self, *, loss: Any = None, norm: Any = None, max_norm: Any = None, **scalars: Any) -> None:
        """Add numbers to the line of a step: call it at the same place of each iteration, before or after the step.

        A tensor is copied and read later, so that nothing waits. A value that is no single number is left out, with
        one warning.

        Args:
            loss: The loss; under accumulation call it for each micro-batch, and the line has the mean.
            norm: What ``clip_grad_norm_`` returned, if you clip by hand before the step.
            max_norm: The threshold that it was given.
            **scalars: Anything else, by name.

        Example:
            >>> import torch
            >>> layer = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(layer.parameters())
            >>> with Monitor(optimizer, sink=[], model=layer) as monitor:
            ...     layer(torch.ones(1)).sum().backward()
            ...     norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), max_norm=0.5)
            ...     monitor.log(norm=norm, max_norm=0.5)
            ...     optimizer.step()
            >>> {key: round(monitor.last[key], 3) for key in ("norm", "post_norm", "threshold")}
            {'norm': 1.414, 'post_norm': 0.5, 'threshold': 0.5}
        """
        self._take({"loss": loss, "norm": norm, "max_norm": max_norm}, scalars)

    def flush(self) -> None:
        """Write everything that has been seen, the last step included; the host waits for the device."""
        self._write_all()

    def report(self, path: str | os.PathLike | None = None) -> Path | None:
        """Draw the record so far as one HTML page.

        Args:
            path: Where the page goes; by default ``report.html`` beside the record.

        Returns:
            Where it is; None, with a warning, if it could not be drawn or there is no record in a file.
        """
        self.flush()
        record = self._output.sinks.record
        if record is None:
            self._warn("Monitor.report() needs a record in a file: pass sink='run.jsonl', or a list with it")
            return None
        try:
            from gradguard.monitoring.record.file import read_record
            from gradguard.monitoring.show.report import write_report

            target = record.with_name("report.html") if path is None else Path(path)
            return write_report([read_record(record)], target)
        except Exception as error:  # the training that is over must not be lost for a picture
            self._warn(f"Monitor.report() failed: {type(error).__name__}: {error}. The record is in {record}")
            return None

    def close(self, *, exit_code: int = 0, interrupted: bool = False) -> None:
        """Write what is left and the last line, close what was opened here, and stop; a second call does nothing.

        Args:
            exit_code: What the ``end`` line says; 0 for a training that came to its end.
            interrupted: Whether Ctrl-C ended it.
        """
        self._hooks.remove()
        self._stop_listening()
        if os.getpid() != self._process:
            return
        atexit.unregister(self._at_exit)
        self._write_all()
        self._write_end(exit_code, interrupted)
        self._active = False
        self._output.sinks.close()

    def __enter__(self) -> Self:
        """Return the monitor, which records already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; an exception goes on."""
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close(exit_code=0 if kind is None else 130 if interrupted else 1, interrupted=interrupted)

    # -- at a step --------------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, evaluation: int) -> None:
        if evaluation == 0:  # a closure is evaluated several times: the first has the weights of this step
            self._begin_step(optimizer, *self._joined(optimizer))

    def _joined(self, optimizer: Optimizer) -> tuple[bool, Shared | None]:
        if self._guard is not None:  # which has measured
            return are_spread(parameters_of(optimizer)), None
        started = time.perf_counter()
        joined = self._shared.join(parameters_of(optimizer), self._fail)
        self._overhead += time.perf_counter() - started
        return joined

    @_safely
    def _begin_step(self, optimizer: Optimizer, spread: bool, shared: Shared | None) -> None:
        self._open = None  # of a step that raised
        parameters, scale = parameters_of(optimizer), getattr(optimizer, "grad_scale", None)
        having = parameters if spread else [p for p in parameters if p.grad is not None]
        if shared is not None:
            places, lost = self._places_of(having), shared.lost
            seen = Seen(Row(index=self._steps, norms=unscaled(shared.norms, scale), places=places, lost=lost))
        elif (guarded := self._guarded(having)) is not None:
            seen = guarded
        elif spread:  # nobody has measured
            return
        else:
            seen = self._measured(optimizer, having, scale)
        seen.row.lr = copied(optimizer.param_groups[0].get("lr"))
        scale = loss_scale_of(self._scaler)  # get_scale() would wait
        seen.row.amp_scale = copied(scale) if isinstance(scale, Tensor) else None
        self._open = seen

    def _after(self, optimizer: Optimizer) -> None:
        self._end_step(optimizer)

    @_safely
    def _end_step(self, optimizer: Optimizer) -> None:
        seen, self._open = self._open, None
        if seen is None:
            return
        row = seen.row
        row.wall = time.perf_counter() - self._started
        found_inf = getattr(optimizer, "found_inf", None)
        row.found_inf = copied(found_inf) if isinstance(found_inf, Tensor) else None
        if row.extras is not None and row.extras.before is not None:
            measure_update(row.extras, self._having)
        self._log.give(seen)
        self._steps += 1
        self._output.add(seen, keep=not self._log.comes_before)
        self._active = not self._output.sinks.lost

    def _guarded(self, having: list[Tensor]) -> Seen | None:
        """What the guard did at this step; None if nothing guards it, or not any more."""
        result = getattr(self._guard, "last", None)
        if result is None or result is self._result:
            return None
        self._result = result
        fits = len(having) == len(result.names)
        places = self._places_of(having) if fits else array("q", [-1] * len(result.names))
        row = Row(index=self._steps, norms=result.tensor_norms, places=places, total=result.norm)
        return Seen(row, self._rule, result.coefficient, copied(result.threshold))

    def _measured(self, optimizer: Optimizer, having: list[Tensor], scale: Tensor | None) -> Seen:
        row = self._clips.row(self._steps, optimizer, having, None)
        row.places = self._places_of(having) if len(row.norms) else []
        elapsed = time.perf_counter() - self._started
        if having and self._schedule.due(self._steps, elapsed):
            row.extras, self._having = measure_extras(having, scale), having
            self._schedule.spent(time.perf_counter() - self._started - elapsed)
        return Seen(row)

    def before_clip(self, parameters: Sequence[Tensor], tells_norms: bool) -> None:
        """A clip is about to act; `gradguard.clip_events` calls this."""
        if self._guard is None and self._is_mine(parameters):
            self._begin_clip(parameters, tells_norms)

    def _is_mine(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the optimizer has some of them; it may have got some since this was made."""
        optimizer = self._optimizer()
        return optimizer is not None and not set(map(id, parameters_of(optimizer))).isdisjoint(map(id, parameters))

    @_safely
    def _begin_clip(self, parameters: Sequence[Tensor], tells_norms: bool) -> None:
        self._clips.begin(parameters, *self._shared.join(parameters, self._fail), tells_norms=tells_norms)

    @_safely
    def after_clip(self, event: ClipEvent) -> None:
        """A clip is done; `gradguard.clip_events` calls this."""
        if self._guard is not None or (event.optimizer is not None and event.optimizer is not self._optimizer()):
            return
        if event.optimizer is None:
            if self._is_mine(event.parameters):
                self._clips.end(event)
        elif self._open is not None:
            note_guard(self._open.row, event)

    def _places_of(self, parameters: list[Tensor]) -> array:
        keys = list(map(id, parameters))
        if keys != self._places[0]:
            self._places = keys, array("q", [self._place.get(key, -1) for key in keys])
        return self._places[1]

    # -- inside -----------------------------------------------------------------------------------------------------

    @_safely
    def _take(self, known: dict[str, Any], scalars: dict[str, Any]) -> None:
        if self._guard is not None and known.pop("norm") is not None:
            self._warn("Monitor.log(norm=...) is not needed with a Guard, which says the norm itself")
        self._log.add(self._output.newest, known, scalars)

    @_safely
    def _write_all(self) -> None:
        self._output.write_all()
        self._active = not self._output.sinks.lost

    @_safely
    def _write_end(self, exit_code: int, interrupted: bool) -> None:
        wall, overhead = time.perf_counter() - self._started, 1e3 * self._overhead
        end = {"t": "end", "steps": self._steps, "wall": wall, "overhead_ms": overhead}
        self._output.sinks.push([end | {"exit": exit_code, "interrupted": interrupted}])

    def _name_of_rule(self) -> str | None:
        return None if self._guard is None else rule_of(getattr(self._guard, "clipper", self._guard))

    def _look(self, norm: float) -> None:
        if self._alarm.see(norm):
            self._schedule.alert(self._steps, time.perf_counter() - self._started)

    def _guard_skips(self) -> bool:
        return int(getattr(self._guard, "skipped_steps", 0)) > 0

    def _fail(self, error: Exception) -> None:
        """Stop, and say so once."""
        if not self._active:
            return
        self._active = False
        message = f"gradguard stopped measuring: {type(error).__name__}: {error}"
        event = {"t": "event", "i": self._steps, "kind": "observer_failed", "severity": "error", "message": message}
        self._output.sinks.push([event | {"advice": "training itself goes on untouched"}])
        self._warn(f"{message}. Training goes on untouched")

    def _warn(self, message: str) -> None:
        if message not in self._complained:
            self._complained.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=5)


class _Ear:
    """Hears for a monitor, and does not keep it alive."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = weakref.ref(monitor)

    def before_clip(self, parameters: Sequence[Tensor], tells_norms: bool) -> None:
        if (monitor := self._monitor()) is not None:
            monitor.before_clip(parameters, tells_norms)

    def after_clip(self, event: ClipEvent) -> None:
        if (monitor := self._monitor()) is not None:
            monitor.after_clip(event)


def _close_at_exit(monitor: "weakref.ref[Monitor]") -> None:
    living = monitor()
    if living is not None:
        living.close()
