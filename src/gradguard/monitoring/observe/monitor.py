"""Watching from inside a training loop of one's own: `gradguard.Monitor`."""

import atexit
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.arguments import check_whole
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.grad_scaler import listen_to_steps
from gradguard.json_values import jsonable
from gradguard.listeners import ClipEvent, listen, rule_of
from gradguard.monitoring.judge.health import Finding
from gradguard.monitoring.observe.clips import StepClips, StepGradients, told_by_guard
from gradguard.monitoring.observe.measure import Norms, gradient_norms
from gradguard.monitoring.observe.meta import living_modules, parameters_of, program_facts, rank_and_world
from gradguard.monitoring.observe.observer import (
    Observer,
    OptimizerTrack,
    check_callable,
    given_gradients,
    safely,
)
from gradguard.monitoring.observe.record_buffer import RecordBuffer
from gradguard.monitoring.observe.schedule import EVERY
from gradguard.monitoring.observe.shared_norms import Shared, are_spread
from gradguard.monitoring.observe.step import (
    OWN_NAMES,
    Clips,
    GradientNorms,
    ScriptClip,
    Skip,
    StepMeasurement,
    copied,
    scale_update,
)
from gradguard.monitoring.observe.termination import before_signals
from gradguard.monitoring.observe.watch import page_of
from gradguard.monitoring.show.sinks import Sinks
from gradguard.optimizer_hooks import EveryStep, runs_hooks
from gradguard.replacements import once
from gradguard.script_events import clips_are_heard
from gradguard.torch_private import grads_of


class Monitor(Observer):
    r"""Record the gradients at each step of an optimizer, as ``gradguard run`` does, from inside a training loop.

    Of a plain optimizer it measures :math:`\lVert g_p \rVert_2` of each parameter as the gradients reach the step. Of
    a `Guard` it measures nothing: it writes down what the guard has measured and done (a guard that takes norms of
    another order is measured like a plain optimizer). Clips before the step, gradguard's and PyTorch's functions, are
    listed beside it, and the norms are those before the first of them.

    **Guarantees.**

    * Training comes out bit-identical: it writes to no tensor but its own, and draws no random number.
    * After construction nothing raises. If it fails it says so in one warning and in the record, and stops; a sink
      that fails is dropped with one warning, and the others go on.
    * No step waits for an accelerator: numbers are copied every 50 steps or 2 s, and looked at once they are there.
    * A dashboard gets about ten numbers a flush, however many parameters there are: the smallest, mean and largest
      norm, so that a spike between two flushes shows, and counts of what was clipped, skipped or not finite.

    **Edge cases.**

    ===============================================  ===================================================================
    case                                             what happens
    ===============================================  ===================================================================
    gradients clipped by hand before ``step()``      the gradients seen are clipped ones: ``log(norm=...,
                                                     max_norm=...)`` the norm before and the bound, and the record has
                                                     both. Functions of PyTorch's and of gradguard's are seen
    ``log`` after ``step()``                         belongs to the step before it; the first call tells which way you
                                                     do it
    ``log`` twice before a step                      the mean of the losses, the last of everything else
    ``log`` after a loss for a step                  belongs to an iteration without a step (a GradScaler's, say): it is
                                                     left out
    a step that a guard skipped                      a line with ``skipped``
    GradScaler                                       its scale is recorded; a step that it leaves out is an event
    several optimizers                               one monitor for each, each with a file of its own
    several processes                                only rank 0 writes
    a forked child (DataLoader)                      writes nothing
    sharded gradients (DTensor, FSDP1)               measured by all processes together at each step: make the monitor
                                                     on every one of them; without weights and their updates
    the program ends without ``close()``             what is there is written at exit and on SIGTERM and SIGHUP, after
                                                     which the signal does what it would have done; a program that is
                                                     killed keeps what was flushed. The same where the optimizer goes
                                                     before the program does
    ===============================================  ===================================================================

    Args:
        optimizer_or_guard: A `torch.optim.Optimizer`, or a `Guard`.
        sink: Where lines go: a path of a JSON Lines file, which gets a number if that exists; a function that gets
            each line as a dictionary; ``"tensorboard"``, ``"wandb"``, ``"mlflow"`` or ``"trackio"``, which join a run
            that is active or make one; a ``SummaryWriter`` or ``Run`` of yours; or a list of several.
        model: Names the parameters. Without it they are looked for in all modules that exist.
        every: Write the norm of each parameter every so many steps; by default so that a step takes
            some 200 bytes, and half as often from step 50,000 on, a quarter as often from 100,000, and so on.
        on_finding: Called with each health finding as it is made: an object with ``kind``, ``severity``, ``message``,
            ``advice``, ``first_step``, ``last_step``, ``params``, ``optimizer`` and ``value``. It runs in a thread of
            its own, on the process of rank 0; what it raises is an event in the record. `close` waits for it, up to
            10 s.

    Raises:
        InvalidTypeError: If it is not an optimizer or guard, a sink is not one, or ``on_finding`` is not a function.
        InvalidValueError: If ``every`` is below 1, ``model`` has none of the parameters, or a sink is not valid; if
            the gradients are sharded and the guard has stepped without a monitor, and so without sending what it needs.
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
        every: int | None = None,
        on_finding: Callable[[Finding], object] | None = None,
    ) -> None:
        check_callable(on_finding)
        optimizer, self._guard = unwrap_optimizer(optimizer_or_guard)
        self._held = parameters_of(optimizer)  # alive, so that no other tensor gets one of their ids
        check_arguments(optimizer, self._held, model, every)
        clipper, writes = getattr(self._guard, "clipper", None), rank_and_world()[0] == 0
        facts = program_facts(clip=None if clipper is None else type(clipper).__name__)
        super().__init__(lambda: None, facts, diagnostics_every=EVERY if self._guard is None else 0)
        self._optimizer, self._factor = weakref.ref(optimizer), None  # the loss scale of the last step
        self._before: _BeforeGuard | None = None
        self._result, self._guard_event = None, None  # the last that was written; the one of the step that begins
        self._logged, self._complained = Logged(self._tell), set[str]()
        sinks = Sinks(sink if writes else [])
        self._lines = RecordBuffer(sinks, every, self._fail, on_finding=on_finding if writes else None)
        self._buffer = self._lines
        self._begin([optimizer], living_modules() if model is None else [model], None)
        if model is None:  # it is not known which modules are trained here
            self._unowned = None
        self._hooks = [EveryStep(self.on_step, self.on_stepped, optimizer=optimizer, first=self._guard is None)]
        if self._guard is not None:
            self._hooks.append(EveryStep(self._before_guard, lambda _: None, optimizer=optimizer, first=True))
        self._stop_listening = once(listen(weakref.proxy(self)), clips_are_heard())  # which does not keep it alive
        weakref.finalize(self, self._stop_listening)
        self._leave_scaler = listen_to_steps(self.on_scaler_step, self.on_scaler_stepped, optimizer=optimizer)
        close, terminated, flush = (
            functools.partial(_if_living, weakref.WeakMethod(method))
            for method in (self.close, self._terminated, self.flush)
        )
        self._at_exit = close
        atexit.register(close)
        self._give_back = before_signals(terminated, flush)

    # -- for the user -----------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The last 1,000 ``step`` lines that were flushed, as plain dictionaries; `flush` first for the newest."""
        return [jsonable(row) for row in self._lines.rows]

    @property
    def last(self) -> dict[str, Any] | None:
        """The last of `rows`; None before the first."""
        return jsonable(self._lines.rows[-1]) if self._lines.rows else None

    def log(self, *, loss: Any = None, norm: Any = None, max_norm: Any = None, **scalars: Any) -> None:
        """Add numbers to the line of a step: call it at the same place of each iteration, before or after the step.

        A tensor is copied and read later, so that nothing waits. A value that is no single number is left out, with
        one warning.

        Args:
            loss: The loss; under accumulation call it for each micro-batch, and the line has the mean.
            norm: The norm before the clip, if code of your own clips before the step.
            max_norm: The threshold of that clip.
            **scalars: Anything else, by name.

        Example:
            >>> import torch
            >>> layer = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(layer.parameters())
            >>> with Monitor(optimizer, sink=[], model=layer) as monitor:
            ...     layer(torch.ones(1)).sum().backward()
            ...     norm = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
            ...     for p in layer.parameters():
            ...         _ = p.grad.mul_(0.5 / norm)
            ...     monitor.log(norm=norm, max_norm=0.5)
            ...     optimizer.step()
            >>> {key: round(monitor.last[key], 3) for key in ("norm", "post_norm", "threshold")}
            {'norm': 1.414, 'post_norm': 0.5, 'threshold': 0.5}
        """
        self._take({"loss": loss, "norm": norm, "max_norm": max_norm}, scalars)

    def report(self, path: str | os.PathLike | None = None) -> Path | None:
        """Draw the record so far as one HTML page.

        Args:
            path: Where the page goes; by default beside the record, with its name: ``run.html``.

        Returns:
            Where it is; None, with a warning, if it could not be drawn or there is no record in a file.
        """
        self.flush()
        record = self._lines.sinks.record
        if record is None:
            self._tell("Monitor.report() needs a record in a file: pass sink='run.jsonl', or a list with it")
            return None
        try:
            return page_of(record, path)
        except Exception as error:  # the training that is over must not be lost for a picture
            self._tell(f"Monitor.report() failed: {type(error).__name__}: {error}. The record is in {record}")
            return None

    def close(self, exit_code: int | None = 0, interrupted: bool = False) -> None:
        """Write what is left and the last line, close what was opened here, and stop; a second call does nothing.

        Args:
            exit_code: The exit code in the ``end`` line; 0 for a training that has ended as it should.
            interrupted: Whether Ctrl-C ended it.
        """
        for hooks in self._hooks:
            hooks.remove()
        self._stop_listening()
        self._leave_scaler()
        if os.getpid() == self._process:
            atexit.unregister(self._at_exit)
            self._give_back()
        self._end(exit_code, interrupted)

    def _terminated(self, code: int) -> None:
        self._end(code, interrupted=True)

    def __del__(self) -> None:
        """Write what is left: the optimizer that kept it alive is gone."""
        with suppress(Exception):  # of one that was never complete, too
            self.close()

    def __enter__(self) -> Self:
        """Return the monitor, which records already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; an exception goes on."""
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close(exit_code=0 if kind is None else 130 if interrupted else 1, interrupted=interrupted)

    # -- what differs from other recorders -----------------------------------------------------------------------------

    def _joined(self, parameters: Sequence[Tensor]) -> tuple[bool, Shared | None]:
        if self._guard is not None:  # which has measured
            return are_spread(parameters), None
        return super()._joined(parameters)

    def _before_guard(self, optimizer: Optimizer, evaluation: int) -> None:
        """Look at the gradients before the guard writes to them."""
        if evaluation == 0:
            parameters = self._parameters(optimizer)
            told = self._guard_tells_2_norms()
            joined = self._joined(parameters) if told else super()._joined(parameters)
            self._look_before_guard(given_gradients(parameters, *joined), told)

    @safely
    def _look_before_guard(self, given: StepGradients, told: bool) -> None:
        norms = None if given.shared is None else given.shared.norms
        if not (told or given.spread):
            norms = gradient_norms(given.gradients)
        self._before = _BeforeGuard(given.parameters, self._clips.take(given.gradients), norms, given.shared)

    def _guard_tells_2_norms(self) -> bool:
        orders = getattr(getattr(self._guard, "clipper", None), "orders", None)
        return orders is None or orders() == {2.0}

    def _measured(
        self, optimizer: Optimizer, track: OptimizerTrack, given: StepGradients
    ) -> tuple[GradientNorms, Clips, Skip] | None:
        before, clipped = self._before, None
        if before is not None:
            if (seen := self._guarded(optimizer, track, before)) is not None:
                return seen
            given = StepGradients(before.parameters, grads_of(before.parameters), given.spread, before.shared)
            clipped = before.clips
        if given.spread and given.shared is None:  # nobody has measured
            return None
        places = track.places.of(given.parameters, self._places)
        gradients, clips = self._clips.step(optimizer, given, places, clipped=clipped)
        return gradients, clips, Skip()

    def _guarded(
        self, optimizer: Optimizer, track: OptimizerTrack, before: "_BeforeGuard"
    ) -> tuple[GradientNorms, Clips, Skip] | None:
        """Return the guard's outcome at this step; None if it has none."""
        event, self._guard_event = self._guard_event, None
        result = getattr(self._guard, "last", None)
        if result is None or result is self._result:
            return None
        self._result = result
        told, now = self._guard_tells_2_norms(), before.norms
        if told:
            scale = getattr(optimizer, "grad_scale", None)  # which the guard has taken off, and others have not
            now = result.tensor_norms if scale is None else result.tensor_norms * scale
        if now is None:
            return None
        if not told or len(before.parameters) == len(result.names):
            given = StepGradients(before.parameters, [], shared=before.shared)
            places = track.places.of(before.parameters, self._places)
            gradients, clips = self._clips.step(optimizer, given, places, now=now, clipped=before.clips)
        else:
            nowhere, late = [-1] * len(result.names), not result.tensor_norms.is_cpu
            gradients, clips = GradientNorms(result.tensor_norms, nowhere, late=late), Clips()
        if told and not clips.script:
            gradients = gradients._replace(total=result.norm)
        rule = rule_of(getattr(self._guard, "clipper", self._guard))
        clips = clips._replace(guard=ScriptClip(rule, copied(result.threshold), None, result.coefficient))
        return gradients, *((clips, Skip()) if event is None else told_by_guard(clips, Skip(), event))

    def _begun(
        self,
        optimizer: Optimizer,
        track: OptimizerTrack,
        gradients: GradientNorms,
        clips: Clips,
        skip: Skip,
        kept: Any,
        *told: Mapping,
    ) -> StepMeasurement:
        if skip.by_scaler is not None and self._guard_event is not None:  # the scaler left it out; the guard said so
            clips, skip = told_by_guard(clips, skip, self._guard_event)
            self._guard_event, self._result = None, getattr(self._guard, "last", None)
        step = super()._begun(optimizer, track, gradients, clips, skip, kept, *told)
        before, self._factor = self._factor, None if step.scale is None else step.scale.factor
        if before is not None and self._factor is not None:
            self._lines.add(scale_update(self._last_step, before, self._factor))
        return step

    def _is_open(self, optimizer: Optimizer) -> bool:
        del optimizer
        self._hooks[0].act_last()  # to see what a `ClipUpdate` that came later has left of the step
        return True

    def _completed(self, step: StepMeasurement) -> StepMeasurement:
        return self._logged.given_to(step)

    def _hears(self, parameters: Sequence[Tensor]) -> bool:
        """Clips of some of the optimizer's parameters; it may have got some since this was made."""
        optimizer = self._optimizer()
        return optimizer is not None and not set(map(id, parameters_of(optimizer))).isdisjoint(map(id, parameters))

    def _note(self, event: ClipEvent) -> None:
        if self._guard is None:
            super()._note(event)
        elif event.optimizer is self._optimizer():  # our guard acts before our own hook
            self._guard_event = event

    @safely
    def _take(self, known: dict[str, Any], scalars: dict[str, Any]) -> None:
        if self._guard is not None and known.pop("norm") is not None:
            self._tell("Monitor.log(norm=...) is not needed with a Guard, which says the norm itself")
        self._logged.add(self._lines, known, scalars)

    def _tell(self, message: str) -> None:
        if message not in self._complained:
            self._complained.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=5)


class _BeforeGuard(NamedTuple):
    """The gradients of a step before its guard acts.

    Attributes:
        parameters: Those that have gradients; all where processes hold parts.
        clips: The clips before the guard.
        norms: Their norms, where the guard will not tell them.
        shared: Norms that processes have measured together.
    """

    parameters: list[Tensor]
    clips: StepClips
    norms: Norms | None
    shared: Shared | None


def _if_living(method: weakref.WeakMethod, *args: Any) -> None:
    if (act := method()) is not None:
        act(*args)


class Logged:
    """Keeps what was logged until its step is known.

    Args:
        warn: Takes a message for the user.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._coming: list[dict[str, Any]] = []  # for the step to come
        self.comes_before: bool | None = None  # whether it is called before its step; None until it is called

    def add(self, buffer: RecordBuffer, known: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Take what one call logged: for the step to come, or for the one that was, which may wait in ``buffer``."""
        if self.comes_before is None:
            self.comes_before = not buffer.has_newest
        values = {key: value for key, given in known.items() if (value := self._number(key, given)) is not None}
        for key, given in scalars.items():
            if key in OWN_NAMES:
                self._warn(f"Monitor.log({key}=...) is left out: the record has a field {key!r} of its own")
            elif (value := self._number(key, given)) is not None:
                values[key] = value
        if self.comes_before or not buffer.has_newest:
            self._coming.append(values)
        else:  # a second loss is of an iteration that had no step
            buffer.amend(lambda step: step if step.losses and "loss" in values else _given(step, values))

    def given_to(self, step: StepMeasurement) -> StepMeasurement:
        """Return ``step`` with what was logged for it."""
        coming, self._coming = self._coming, []
        return functools.reduce(_given, coming, step)

    def _number(self, key: str, value: Any) -> Any:
        """The value as a number, or a copy of a tensor of one element, which is read later; None for anything else."""
        if value is None:
            return None
        if isinstance(value, Tensor):
            if value.numel() == 1 and not value.is_complex():
                return value.detach().reshape(()).clone()
        elif not isinstance(value, str | bytes):
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):
                return float(value)
        self._warn(f"Monitor.log({key}=...) is left out: expected one number, got {_shown(value)}")
        return None


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _given(step: StepMeasurement, values: Mapping[str, Any]) -> StepMeasurement:
    logged = {**step.logged, **values}
    losses = [*step.losses, logged.pop("loss")] if "loss" in logged else step.losses
    return step._replace(losses=losses, logged=logged)


def unwrap_optimizer(source: Any) -> tuple[Optimizer, Any]:
    """Return the optimizer, and the guard if that is what came.

    Args:
        source: An optimizer, or anything with an ``optimizer`` and the result of its ``last`` clip.

    Returns:
        The optimizer; and the guard, or None.

    Raises:
        InvalidTypeError: If it is neither.
    """
    if runs_hooks(source):
        return source, None
    inside = getattr(source, "optimizer", None)
    if not isinstance(source, type | Optimizer) and isinstance(inside, Optimizer) and hasattr(source, "last"):
        return inside, source
    came = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    raise InvalidTypeError(
        f"optimizer_or_guard is {came}: expected a torch.optim.Optimizer or a gradguard.Guard. "
        "Of a wrapper pass the optimizer inside, often wrapper.optimizer."
    )


def check_arguments(optimizer: Optimizer, parameters: list[Tensor], model: Any, every: Any) -> None:
    """Refuse what cannot be meant, before anything is opened.

    Raises:
        InvalidTypeError: If ``every`` or ``model`` is of another type.
        InvalidValueError: If ``every`` is below 1, or ``model`` has none of the ``parameters``.
    """
    if every is not None:
        check_whole("every", every)
    if model is not None and not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is {type(model).__name__}: expected the torch.nn.Module that is trained.")
    if model is not None and not {id(p) for p in model.parameters()} & set(map(id, parameters)):
        raise InvalidValueError(
            f"model ({type(model).__name__}) has none of the parameters of this {type(optimizer).__name__}: expected "
            "the module that was given to it, as it is now; wrapping or moving it may have made new parameters."
        )
