"""Record a training loop from inside it: `gradguard.Monitor`."""

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
from gradguard.monitoring.observe.clips import StepClips, StepGradients, with_guard_event
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

    With a plain optimizer, the monitor measures :math:`\lVert g_p \rVert_2` of each parameter's gradient when the step
    begins. With a `Guard`, the monitor measures nothing and records the guard's own norms and actions; a guard whose
    norms are of another order is measured like a plain optimizer. The record also lists the clips before the step, by
    functions of gradguard or PyTorch. The recorded norms are then the norms before the first clip.

    **Guarantees.**

    * Training is bit-identical: the monitor writes to no tensor but its own, and draws no random number.
    * After construction, nothing raises. If the monitor fails, it writes one warning and one event in the record, and
      stops measuring. If a sink fails, the monitor drops this sink with one warning and keeps the others.
    * No step waits for an accelerator: the monitor copies numbers every 50 steps or 2 s, and reads them after the copy
      has arrived.
    * A dashboard gets about ten numbers per flush, independent of the number of parameters: the smallest, mean and
      largest norm since the last flush (a spike between two flushes shows in the largest), the share of clipped
      steps, and the counts of skipped and non-finite steps.

    **Edge cases.**

    ===============================================  ===================================================================
    case                                             what happens
    ===============================================  ===================================================================
    gradients clipped by hand before ``step()``      the monitor measures the clipped gradients; pass the norm before
                                                     the clip and the bound to ``log(norm=..., max_norm=...)`` to record
                                                     both. Clips by functions of PyTorch and gradguard need no ``log``
    ``log`` after ``step()``                         applies to the step before the call; the first call decides whether
                                                     ``log`` comes before or after its step
    ``log`` twice before a step                      the mean of the losses, the last of everything else
    a second loss logged after ``step()``            belongs to an iteration without a step (left out by your own check,
                                                     for example) and is left out
    a step that a guard skipped                      a line with ``skipped``
    GradScaler                                       its scale is recorded; a step that it skips is an event
    several optimizers                               create one monitor for each, each with its own file
    several processes                                only rank 0 writes
    a forked child (DataLoader)                      writes nothing
    sharded gradients (DTensor, FSDP1)               all processes measure together at each step, so create the monitor
                                                     on every process; weights are only sampled, from this process's
                                                     shard, for the size of their updates
    the program ends without ``close()``             the monitor writes the rest at exit and on SIGTERM and SIGHUP, and
                                                     the signal then has its usual effect. A killed program keeps the
                                                     lines flushed before. The monitor also writes the rest if the
                                                     optimizer is deleted before the program ends
    ===============================================  ===================================================================

    Args:
        optimizer_or_guard: A `torch.optim.Optimizer`, or a `Guard`.
        sink: Where the lines go: the path of a JSON Lines file (numbered if the path exists); a function that gets
            each line as a dictionary; ``"tensorboard"``, ``"wandb"``, ``"mlflow"`` or ``"trackio"``, which join the
            active run or start one; your own ``SummaryWriter`` or ``Run``; or a list of several sinks.
        model: The module that names the parameters. By default the monitor searches all modules in memory for names.
        every: The number of steps between two writes of each parameter's norm. By default the interval is chosen so
            that a step takes some 200 bytes; it doubles at step 50,000, again at 100,000, and so on.
        on_finding: A function called with each health finding: an object with ``kind``, ``severity``, ``message``,
            ``advice``, ``first_step``, ``last_step``, ``params``, ``optimizer`` and ``value``. It runs in its own
            thread, on rank 0. If it raises, the record gets an event. `close` waits for it for up to 10 s.

    Raises:
        InvalidTypeError: If the first argument is no optimizer or guard, a sink has the wrong type, or ``on_finding``
            is not callable.
        InvalidValueError: If ``every`` is below 1, ``model`` has none of the parameters, or a sink is not valid.
        RecordError: If the file cannot be written.
        MissingPackageError: If the package of a dashboard is not installed; the message has the install command.

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
        self._held = parameters_of(optimizer)  # keeps the parameters alive: no other tensor may reuse their ids
        check_arguments(optimizer, self._held, model, every)
        clipper, writes = getattr(self._guard, "clipper", None), rank_and_world()[0] == 0
        facts = program_facts(clip=None if clipper is None else type(clipper).__name__)
        super().__init__(lambda: None, facts, diagnostics_every=EVERY if self._guard is None else 0)
        self._optimizer, self._factor = weakref.ref(optimizer), None  # the loss scale of the last step
        self._before: _BeforeGuard | None = None
        self._result, self._guard_event = None, None  # the last ClipResult written; the event of the open step
        self._logged, self._complained = Logged(self._tell), set[str]()
        sinks = Sinks(sink if writes else [])
        self._lines = RecordBuffer(sinks, every, self._fail, on_finding=on_finding if writes else None)
        self._buffer = self._lines
        self._begin([optimizer], living_modules() if model is None else [model], None)
        if model is None:  # without `model`, the monitor cannot know which modules this loop trains
            self._unowned = None
        self._hooks = [EveryStep(self.on_step, self.on_stepped, optimizer=optimizer, first=self._guard is None)]
        if self._guard is not None:
            self._hooks.append(EveryStep(self._before_guard, lambda _: None, optimizer=optimizer, first=True))
        self._stop_listening = once(listen(weakref.proxy(self)), clips_are_heard())  # listening must not keep it alive
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
        """The last 1,000 flushed ``step`` lines, as dictionaries; call `flush` first to include the newest steps."""
        return [jsonable(row) for row in self._lines.rows]

    @property
    def last(self) -> dict[str, Any] | None:
        """The last of `rows`; None before the first flush."""
        return jsonable(self._lines.rows[-1]) if self._lines.rows else None

    def log(self, *, loss: Any = None, norm: Any = None, max_norm: Any = None, **scalars: Any) -> None:
        """Add numbers to the line of a step; call `log` at the same place in each iteration, before or after the step.

        The monitor copies a tensor and reads the copy later, without a host sync. A value that is not a single number
        is left out, with one warning.

        Args:
            loss: The loss; under accumulation, log the loss of each micro-batch, and the line has the mean.
            norm: The norm before the clip, if your own code clips before the step.
            max_norm: The threshold of your own clip.
            **scalars: Other numbers, by name.

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
            path: The path of the page; by default beside the record and with its name: ``run.html``.

        Returns:
            The path of the page. None, with a warning, if drawing failed or the monitor writes no file.
        """
        self.flush()
        record = self._lines.sinks.record
        if record is None:
            self._tell("Monitor.report() needs a record in a file: pass sink='run.jsonl', or a list with it")
            return None
        try:
            return page_of(record, path)
        except Exception as error:  # a failed drawing must not raise after hours of training
            self._tell(f"Monitor.report() failed: {type(error).__name__}: {error}. The record is in {record}")
            return None

    def close(self, exit_code: int | None = 0, interrupted: bool = False) -> None:
        """Write the remaining lines and the ``end`` line, close the sinks that the monitor opened, and stop measuring.

        A second call does nothing.

        Args:
            exit_code: The exit code in the ``end`` line; 0 for a training that ended normally.
            interrupted: Whether Ctrl-C ended the training.
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
        """Close the monitor after its optimizer, which kept it alive, was deleted."""
        with suppress(Exception):  # a monitor whose constructor raised is deleted too
            self.close()

    def __enter__(self) -> Self:
        """Return the monitor, which has recorded since its construction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the monitor; let an exception propagate."""
        if kind is None:
            self.close(exit_code=0)
        elif issubclass(kind, KeyboardInterrupt):
            self.close(exit_code=130, interrupted=True)
        else:
            self.close(exit_code=1)

    # -- differences from `Observer` -----------------------------------------------------------------------------------

    def _joined(self, parameters: Sequence[Tensor]) -> tuple[bool, Shared | None]:
        if self._guard is not None:  # the guard has already measured
            return are_spread(parameters), None
        return super()._joined(parameters)

    def _before_guard(self, optimizer: Optimizer, evaluation: int) -> None:
        """Take the clips, and norms if the guard has no 2-norms, before the guard writes to the gradients."""
        if evaluation == 0:
            parameters = self._parameters(optimizer)
            has_norms = self._guard_has_2_norms()
            joined = self._joined(parameters) if has_norms else super()._joined(parameters)
            self._take_before_guard(given_gradients(parameters, *joined), has_norms)

    @safely
    def _take_before_guard(self, given: StepGradients, has_norms: bool) -> None:
        norms = None if given.shared is None else given.shared.norms
        if not (has_norms or given.spread):
            norms = gradient_norms(given.gradients)
        self._before = _BeforeGuard(given.parameters, self._clips.take(given.gradients), norms, given.shared)

    def _guard_has_2_norms(self) -> bool:
        orders = getattr(getattr(self._guard, "clipper", None), "orders", None)
        return orders is None or orders() == {2.0}

    def _measured(
        self, optimizer: Optimizer, track: OptimizerTrack, given: StepGradients
    ) -> tuple[GradientNorms, Clips, Skip] | None:
        before, clipped = self._before, None
        if before is not None:
            if (guarded := self._guarded(optimizer, track, before)) is not None:
                return guarded
            given = StepGradients(before.parameters, grads_of(before.parameters), given.spread, before.shared)
            clipped = before.clips
        if given.spread and given.shared is None:  # no norm of the whole gradients was measured
            return None
        places = track.places.of(given.parameters, self._places)
        gradients, clips = self._clips.step(optimizer, given, places, clipped=clipped)
        return gradients, clips, Skip()

    def _guarded(
        self, optimizer: Optimizer, track: OptimizerTrack, before: "_BeforeGuard"
    ) -> tuple[GradientNorms, Clips, Skip] | None:
        """Return the gradients, clips and skip that the guard reported for this step; None without a new result."""
        event, self._guard_event = self._guard_event, None
        result = getattr(self._guard, "last", None)
        if result is None or result is self._result:
            return None
        self._result = result
        has_norms, now = self._guard_has_2_norms(), before.norms
        if has_norms:
            scale = getattr(optimizer, "grad_scale", None)  # the guard's norms are unscaled; the clips' are scaled
            now = result.tensor_norms if scale is None else result.tensor_norms * scale
        if now is None:
            return None
        if not has_norms or len(before.parameters) == len(result.names):
            given = StepGradients(before.parameters, [], shared=before.shared)
            places = track.places.of(before.parameters, self._places)
            gradients, clips = self._clips.step(optimizer, given, places, now=now, clipped=before.clips)
        else:
            nowhere, late = [-1] * len(result.names), not result.tensor_norms.is_cpu
            gradients, clips = GradientNorms(result.tensor_norms, nowhere, late=late), Clips()
        if has_norms and not clips.script:
            gradients = gradients._replace(total=result.norm)
        rule = rule_of(getattr(self._guard, "clipper", self._guard))
        clips = clips._replace(guard=ScriptClip(rule, copied(result.threshold), None, result.coefficient))
        if event is None:
            return gradients, clips, Skip()
        return gradients, *with_guard_event(clips, Skip(), event)

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
        if skip.by_scaler is not None and self._guard_event is not None:  # the guard acted before the scaler skipped
            clips, skip = with_guard_event(clips, skip, self._guard_event)
            self._guard_event, self._result = None, getattr(self._guard, "last", None)
        step = super()._begun(optimizer, track, gradients, clips, skip, kept, *stored)
        before, self._factor = self._factor, None if step.scale is None else step.scale.factor
        if before is not None and self._factor is not None:
            self._lines.add(scale_update(self._last_step, before, self._factor))
        return step

    def _is_open(self, optimizer: Optimizer) -> bool:
        del optimizer
        self._hooks[0].act_last()  # the hook must run behind a `ClipUpdate` attached later, which changes the step
        return True

    def _completed(self, step: StepMeasurement) -> StepMeasurement:
        return self._logged.given_to(step)

    def _hears(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether a clip acts on some of the optimizer's parameters, including parameters added later."""
        optimizer = self._optimizer()
        return optimizer is not None and not set(map(id, parameters_of(optimizer))).isdisjoint(map(id, parameters))

    def _note(self, event: ClipEvent) -> None:
        if self._guard is None:
            super()._note(event)
        elif event.optimizer is self._optimizer():  # the guard acts before the monitor's hook
            self._guard_event = event

    @safely
    def _take(self, known: dict[str, Any], scalars: dict[str, Any]) -> None:
        if self._guard is not None and known.pop("norm") is not None:
            self._tell("Monitor.log(norm=...) is ignored with a Guard, which reports the norm itself: leave norm out")
        self._logged.add(self._lines, known, scalars)

    def _tell(self, message: str) -> None:
        if message not in self._complained:
            self._complained.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=5)


class _BeforeGuard(NamedTuple):
    """The gradients of a step before its guard acts.

    Attributes:
        parameters: The parameters that have gradients; all parameters if they are sharded.
        clips: The clips before the guard.
        norms: The gradients' 2-norms, if the guard will not report them.
        shared: The norms that all processes measured together.
    """

    parameters: list[Tensor]
    clips: StepClips
    norms: Norms | None
    shared: Shared | None


def _if_living(method: weakref.WeakMethod, *args: Any) -> None:
    if (act := method()) is not None:
        act(*args)


class Logged:
    """Store logged numbers until their step is known.

    Args:
        warn: The function that shows a message to the user.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._coming: list[dict[str, Any]] = []  # the numbers for the next step
        self.comes_before: bool | None = None  # whether `log` is called before its step; None until the first call

    def add(self, buffer: RecordBuffer, known: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Store the numbers of one `log` call for the next step, or amend the newest step in ``buffer`` with them."""
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
        else:  # a second loss comes from an iteration without a step
            buffer.amend(lambda step: step if step.losses and "loss" in values else _given(step, values))

    def given_to(self, step: StepMeasurement) -> StepMeasurement:
        """Return ``step`` with the numbers logged for it."""
        coming, self._coming = self._coming, []
        return functools.reduce(_given, coming, step)

    def _number(self, key: str, value: Any) -> Any:
        """Return a number, or a copy of a one-element tensor to be read later; warn and return None otherwise."""
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
    """Return the optimizer, and the guard if ``source`` is one.

    Args:
        source: An optimizer, or an object with the attributes ``optimizer`` and ``last``, the result of its last clip.

    Returns:
        The optimizer; and the guard, or None.

    Raises:
        InvalidTypeError: If ``source`` is neither.
    """
    if runs_hooks(source):
        return source, None
    inside = getattr(source, "optimizer", None)
    if not isinstance(source, type | Optimizer) and isinstance(inside, Optimizer) and hasattr(source, "last"):
        return inside, source
    came = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    raise InvalidTypeError(
        f"optimizer_or_guard is {came}: expected a torch.optim.Optimizer or a gradguard.Guard. "
        "For a wrapper, pass the optimizer inside it, often wrapper.optimizer."
    )


def check_arguments(optimizer: Optimizer, parameters: list[Tensor], model: Any, every: Any) -> None:
    """Refuse invalid arguments before the monitor opens a file or a sink.

    Raises:
        InvalidTypeError: If ``every`` or ``model`` is of another type.
        InvalidValueError: If ``every`` is below 1, or ``model`` has none of the ``parameters``.
    """
    if every is not None:
        check_whole("every", every)
    if model is not None and not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is {type(model).__name__}: expected the torch.nn.Module that you train.")
    if model is not None and not {id(p) for p in model.parameters()} & set(map(id, parameters)):
        raise InvalidValueError(
            f"model ({type(model).__name__}) has none of the parameters of this {type(optimizer).__name__}: expected "
            "the module whose parameters the optimizer got; wrapping or moving the module may have replaced them."
        )
