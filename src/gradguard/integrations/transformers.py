"""Hugging Face Transformers: callbacks that take the place of the Trainer's own clip, for the batch or for samples."""

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.integrations.accelerate import inner_optimizer
from gradguard.integrations.one_clip import OnlyClip, wrap_once
from gradguard.integrations.per_sample import shown
from gradguard.integrations.versions import require
from gradguard.policies import GuardPolicy, check_guard_options

require("transformers", "5.23", "6", "transformers")

from transformers import (  # noqa: E402  (the version comes first, so that it is what an error is about)
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler  # noqa: E402

from gradguard.integrations.transformers_per_sample import PerSampleCallback  # noqa: E402
from gradguard.integrations.transformers_private import PrivateCallback  # noqa: E402

__all__ = ["GradGuardCallback", "PerSampleCallback", "PrivateCallback", "ResilienceCallback"]


_STATE_FILE = "gradguard.pt"
_BLOCK = 1000
_DEFAULT_MAX_GRAD_NORM = TrainingArguments.max_grad_norm


class GradGuardCallback(TrainerCallback, OnlyClip):
    """Let ``clipper`` clip once at each real step of a `transformers.Trainer`, instead of the Trainer.

    Pass it to the Trainer (``callbacks=[GradGuardCallback(clipper)]`` or ``trainer.add_callback``); nothing else
    changes. It is a `gradguard.Guard` on the Trainer's optimizer while ``train()`` runs.

    **Guarantees.**

    * The clipper sees the gradients as backward left them: the Trainer neither clips nor measures before. (Measuring,
      which it does with ``max_grad_norm=0`` too, is a clip to infinity: a norm that overflows makes all of them NaN.)
    * Once for each real step, under accumulation too, and on unscaled gradients with fp16.
    * A checkpoint holds the clipper's state and the counts (``gradguard.pt``, beside the optimizer's), and resuming
      brings them back bit for bit.
    * Norms are kept on the device and read when the Trainer logs.

    **What the Trainer logs.**

    =========================================  =========================================================================
    ``grad_norm``                              the norm before the clip, of the step that is logged
    ``grad_norm_min``, ``_mean`` and ``_max``  over all steps since the last log that were finite; only where there were
                                               several
    ``clip_coefficient``                       norm after over norm before, the mean of these steps
    ``clip_binding_share``                     the share of these steps on which the clip bound
    ``grad_nonfinite_steps``                   the number of steps since the last log with NaN or inf in a gradient
    =========================================  =========================================================================

    **Edge cases.**

    ====================================  ======================================================================
    case                                  what happens
    ====================================  ======================================================================
    ``max_grad_norm`` left at 1.0         the Trainer's default: the clipper takes its place
    ``max_grad_norm=0``                   the same
    ``max_grad_norm`` of another value    an error: two rules, of which only one can be meant
    a step is skipped, no GradScaler      ``global_step`` and the scheduler go on, as after any step
    resuming where no state was saved     a warning if the clipper has one; it begins anew
    ``save_only_model``                   the state is not saved, as the optimizer's is not
    ``train()`` again                     the history goes on with the same optimizer, and begins anew with another
    added while training                  it clips from that step on
    removed between steps                 the Trainer clips from that step on
    removed within a step                 an error: nobody would clip it
    copied, pickled                       the copy has no guard, and its history begins anew with its own training
    a Trainer with its own                an error at the first step, unless it calls ``super()``
    ``_clip_grad_norm``
    LOMO, GaLore and APOLLO by layer      an error: they step inside backward
    DeepSpeed                             an error: it clips by itself
    ====================================  ======================================================================

    Args:
        clipper: What to do with the gradients.
        nonfinite: As for `gradguard.Guard`.
        max_consecutive_skips: As for `gradguard.Guard`.

    Attributes:
        clipper: The clipper.
        guard: The guard of the current or the last training; None before the first.

    Raises:
        InvalidTypeError: If ``clipper`` is no clipper.
        InvalidValueError: If ``nonfinite`` or ``max_consecutive_skips`` is none that `Guard` takes.
        UnsupportedVersionError: If the Trainer lacks a method that is needed.

    Example:
        >>> import gradguard as gg, tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> from gradguard.integrations.transformers import GradGuardCallback
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return {"loss": super().forward(x).sum()}
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=1, logging_steps=1, report_to=[],
        ...                               disable_tqdm=True, save_strategy="no", per_device_train_batch_size=1)
        >>> callback, data = GradGuardCallback(gg.ClipByGlobalNorm(1.0)), [{"x": torch.tensor([3.0, 4.0])}]
        >>> trainer = Trainer(Model(2, 1, bias=False), arguments, train_dataset=data, callbacks=[callback])
        >>> _ = trainer.train()  # doctest: +ELLIPSIS
        {'loss': ..., 'grad_norm': '5', ... 'clip_coefficient': '0.2', 'clip_binding_share': '1', ...
    """

    def __init__(
        self, clipper: gg.rules.Clipper, *, nonfinite: GuardPolicy = "skip", max_consecutive_skips: int | None = 20
    ) -> None:
        if not isinstance(clipper, gg.rules.Clipper):
            raise InvalidTypeError(f"clipper is {shown(clipper)}: expected a clipper, such as ClipByGlobalNorm(1.0).")
        check_guard_options(nonfinite, max_consecutive_skips)
        self.clipper, self.guard = clipper, None
        self._options: dict[str, Any] = {"nonfinite": nonfinite, "max_consecutive_skips": max_consecutive_skips}
        self._at_first = copy.deepcopy(clipper.state_dict())
        self._loaded: tuple[str, dict[str, Any] | None] | None = None  # the checkpoint, and what it has for us
        self._norm: Tensor | None = None  # what the Trainer will log, until the step has filled it in
        self._window, self._steps = _Window(), 0
        self._begun, self._acting = False, False
        self._scheduler: Any = None
        _watch_trainers()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: no guard, which sits on this optimizer, and a history that begins anew."""
        return {
            **vars(self),
            "guard": None,
            "_norm": None,
            "_window": _Window(),
            "_steps": 0,
            "_acting": False,
            "_scheduler": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _watch_trainers()  # it may be another process

    # -- events of the Trainer --------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse what cannot work, before the work begins.

        Raises:
            InvalidValueError: If ``max_grad_norm`` was set.
            UnsupportedGradientError: If the optimizer steps where no guard can act.
        """
        del state, control, kwargs
        _refuse(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach a guard to the optimizer, with the state of the checkpoint if training resumes.

        Raises:
            InvalidValueError: If ``max_grad_norm`` was set, or the checkpoint's state is of another clipper.
            UnsupportedGradientError: If the optimizer steps where no guard can act.
        """
        del control
        _refuse(args)
        if state.global_step == 0:
            self._loaded = None  # left by a training that failed before it began
        self._norm, self._window = None, _Window()
        self._scheduler = kwargs.get("lr_scheduler")
        self._begin(kwargs["model"], inner_optimizer(kwargs["optimizer"]))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make sure that the Trainer has left the gradients alone, and that there is a guard.

        Raises:
            InvalidValueError: If the callback was added while training, and ``max_grad_norm`` is set.
            UnsupportedGradientError: If the Trainer has not left the gradients alone, or may not have.
        """
        del state, control
        if not self._acting:  # it was added while training
            _refuse(args)
            self._scheduler = kwargs.get("lr_scheduler")
            self._begin(kwargs["model"], inner_optimizer(kwargs["optimizer"]))
        if self._norm is None:
            raise UnsupportedGradientError(
                "the Trainer has not asked gradguard for the norm of this step, so it may have clipped already: its "
                "class seems to have methods _clip_grad_norm and _get_grad_norm of its own. Let them return what "
                "super() returns, or remove the GradGuardCallback."
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the Trainer the norm before the clip, and remember what the clip did.

        Raises:
            UnsupportedGradientError: If the optimizer took no step that a guard could see.
        """
        del args, state, control, kwargs
        guard, norm, self._norm = self.guard, self._norm, None
        if guard is None or norm is None:
            return
        if guard.steps == self._steps or guard.last is None:
            raise UnsupportedGradientError(
                f"optimizer.step() did not run the hooks of {type(guard.optimizer).__name__}, so nothing was clipped. "
                "A guard needs an optimizer whose step() takes one with the gradients that are there."
            )
        self._steps = guard.steps
        norm.copy_(guard.last.norm)
        self._window.add(guard.last)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the guard off the optimizer; what it has counted can still be read."""
        del args, state, control, kwargs
        self._release()

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before = self.guard
        self._release()
        self.guard = self._attach(model, optimizer, before)
        self._steps, self._begun, self._acting = self.guard.steps, True, True

    def _release(self) -> None:
        self._acting = False
        if self.guard is not None:
            self.guard.detach()

    # -- what the Trainer does instead of its own -------------------------------------------------------------------

    def _norm_to_come(self, device: torch.device) -> Tensor:
        """The norm of the step that has not been taken yet: NaN until it is known."""
        if self._norm is None:
            self._norm = torch.full((), torch.nan, device=device)
        return self._norm

    def _norm_if_unclipped(self, device: torch.device, came: object) -> object:
        """The same, or what a subclass of the Trainer made of the gradients: then the next event refuses."""
        if came is None or came is self._norm:
            return self._norm_to_come(device)
        self._norm = None
        return came

    def _save(self, folder: str, state: dict[str, Any], here: bool) -> None:
        """Save what the state was before the optimizer's was saved, on the process that saves."""
        if self.guard is not None and self.guard.steps != state["steps"]:
            self.guard.load_state_dict(state)  # saving a sharded SGD takes steps, with zeros, to find that it has none
            self._steps = self.guard.steps
        if here:
            torch.save(state, Path(folder) / _STATE_FILE)

    def _load(self, folder: str) -> None:
        path = Path(folder) / _STATE_FILE
        self._loaded = folder, torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None

    def _attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, before: gg.Guard | None) -> gg.Guard:
        goes_on = before is not None and before.optimizer is optimizer
        state = before.state_dict() if before is not None and goes_on else None
        if self._loaded is not None:
            (folder, state), self._loaded = self._loaded, None
            if state is None:
                _warn_that_it_begins_anew(self.clipper, folder)
        if state is None and self._begun:
            self.clipper.load_state_dict(copy.deepcopy(self._at_first))
        guard = self._guard(model, optimizer)
        if state is not None:
            guard.load_state_dict(state)
        return guard

    def _guard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> gg.Guard:
        return gg.Guard(optimizer, self.clipper, model=model, **self._options)


class ResilienceCallback(GradGuardCallback):
    """A `GradGuardCallback` with `gradguard.Resilience`: spikes are skipped, bursts undone.

    The loss is what ``Trainer.training_step`` returns, for each micro-batch; the Trainer's scheduler keeps its place
    when weights go back, and so does the data. A checkpoint holds the clipper and the detector, as `GradGuardCallback`
    says; snapshots stay in memory.

    Args:
        clipper: What to do with the gradients; None for ``gg.ClipByMedian()``.
        options: What `gradguard.Resilience` takes by name: ``detector``, ``more``, ``every``, ``slow``, ...
        nonfinite: As for `gradguard.Guard`.
        max_consecutive_skips: As for `gradguard.Guard`.

    Attributes:
        resilience: The `gradguard.Resilience` of the current or the last training; None before the first.

    Raises:
        InvalidTypeError: If ``clipper`` is no clipper.

    Example:
        >>> import gradguard as gg
        >>> from gradguard.integrations.transformers import ResilienceCallback
        >>> callback = ResilienceCallback(gg.ClipByGlobalNorm(1.0), {"every": 100})
        >>> # Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    """

    def __init__(
        self,
        clipper: gg.rules.Clipper | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        nonfinite: GuardPolicy = "skip",
        max_consecutive_skips: int | None = 20,
    ) -> None:
        clipper = gg.ClipByMedian() if clipper is None else clipper
        super().__init__(clipper, nonfinite=nonfinite, max_consecutive_skips=max_consecutive_skips)
        self.resilience: gg.Resilience | None = None
        self._resilience_options = dict(options or {})

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: no guard, and no snapshots."""
        return {**super().__getstate__(), "resilience": None}

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Act on what was measured some steps ago.

        Raises:
            SpikeError: If going back does not cure the run.
        """
        super().on_optimizer_step(args, state, control, **kwargs)
        if self.resilience is not None:
            self.resilience.step()

    def _guard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> gg.Guard:
        options = dict(self._resilience_options)
        scheduler = [] if self._scheduler is None else [self._scheduler]
        more = [*scheduler, *options.pop("more", ())]
        self.resilience = gg.Resilience(
            model, optimizer, self.clipper, more=more, guard_options=self._options, **options
        )
        return self.resilience.guard

    def _release(self) -> None:
        super()._release()
        if self.resilience is not None:
            self.resilience.detach()


class _Window:
    """What clips did since the last log; it stays on its device until it is read."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []  # [norm, coefficient, clipped], a step each
        self._blocks: list[Tensor] = []  # many of them in one: a row takes a kilobyte by itself

    def add(self, result: gg.results.ClipResult) -> None:
        numbers = (result.norm, result.coefficient, result.clipped)
        self._rows.append(torch.stack([number.to(result.norm.dtype) for number in numbers]))
        if len(self._rows) == _BLOCK:
            self._blocks.append(torch.stack(self._rows))
            self._rows = []

    def read(self) -> dict[str, float]:
        """Return what to log, and begin anew. The host waits."""
        if not self._rows and not self._blocks:
            return {}
        rows = torch.cat([*self._blocks, *([torch.stack(self._rows)] if self._rows else [])]).cpu().double()
        self._rows, self._blocks = [], []
        finite = rows[rows[:, 0].isfinite()]
        read: dict[str, float] = {}
        if len(finite) > 0:
            norms, coefficients, clipped = finite.unbind(1)
            if len(rows) > 1:
                names = {"grad_norm_min": norms.min(), "grad_norm_mean": norms.mean(), "grad_norm_max": norms.max()}
                read |= {name: float(value) for name, value in names.items()}
            read |= {"clip_coefficient": float(coefficients.mean()), "clip_binding_share": float(clipped.mean())}
        return {**read, "grad_nonfinite_steps": len(rows) - len(finite)}


def _warn_that_it_begins_anew(clipper: gg.rules.Clipper, folder: str) -> None:
    if _holds_something(clipper.state_dict()):
        warnings.warn(
            f"{folder} has no {_STATE_FILE}: it was saved without a GradGuardCallback, or with save_only_model. "
            f"{type(clipper).__name__} begins anew, as at the first step of training.",
            stacklevel=2,
        )


def _holds_something(state: object) -> bool:
    return any(map(_holds_something, state.values())) if isinstance(state, dict) else True


def _refuse(args: TrainingArguments) -> None:
    if args.max_grad_norm not in (0, _DEFAULT_MAX_GRAD_NORM):
        raise InvalidValueError(
            f"TrainingArguments has max_grad_norm={args.max_grad_norm!r}, and there is a GradGuardCallback: one clip "
            "would be done after the other. Pass max_grad_norm=0 if the callback's clipper is what you mean, or leave "
            "the callback out."
        )
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        raise UnsupportedGradientError(
            f'optim="{name}" steps inside backward, one parameter after the other: when a clipper could look, there '
            'are no gradients any more. Choose an optimizer that steps after backward, such as "adamw_torch_fused".'
        )


def _watch_trainers() -> None:
    """Let every Trainer that has a `GradGuardCallback` ask it; the others do as before."""
    wrap_once(Trainer, "train", _train)
    wrap_once(Trainer, "training_step", _training_step)
    wrap_once(Trainer, "_clip_grad_norm", _clip_grad_norm)
    wrap_once(Trainer, "_get_grad_norm", _get_grad_norm)
    wrap_once(Trainer, "log", _log)
    wrap_once(Trainer, "_save_optimizer_and_scheduler", _save_optimizer_and_scheduler)
    wrap_once(Trainer, "_load_optimizer_and_scheduler", _load_optimizer_and_scheduler)
    wrap_once(CallbackHandler, "remove_callback", _take_out)
    wrap_once(CallbackHandler, "pop_callback", _take_out)


def _callback_of(trainer: Trainer) -> GradGuardCallback | None:
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, GradGuardCallback)), None)


def _take_out(original: Callable[..., Any], handler: CallbackHandler, *args: Any, **kwargs: Any) -> Any:
    before = list(handler.callbacks)
    done = original(handler, *args, **kwargs)
    for callback in before:
        if isinstance(callback, GradGuardCallback) and callback not in handler.callbacks:
            if callback._norm is not None:
                handler.callbacks[:] = before
                raise InvalidValueError(
                    "a GradGuardCallback was removed after the Trainer had left the gradients to it and before the "
                    "step: nobody would clip them. Remove it between steps, as in on_step_end."
                )
            callback._release()  # from here on the Trainer clips
    return done


def _train(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback = _callback_of(trainer)
    try:
        return original(trainer, *args, **kwargs)
    finally:
        if callback is not None:  # on_train_end is not reached by a training that fails or is interrupted
            callback._release()


def _training_step(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    loss, callback = original(trainer, *args, **kwargs), _callback_of(trainer)
    if isinstance(callback, ResilienceCallback) and callback.resilience is not None and callback._acting:
        callback.resilience.loss(loss.detach())
    return loss


def _clip_grad_norm(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback = _callback_of(trainer)
    return original(trainer, *args, **kwargs) if callback is None else callback._norm_to_come(trainer.args.device)


def _get_grad_norm(
    original: Callable[..., Any], trainer: Trainer, model: nn.Module, grad_norm: object = None, **kwargs: Any
) -> Any:
    callback = _callback_of(trainer)
    if callback is None:
        return original(trainer, model, grad_norm=grad_norm, **kwargs)
    return callback._norm_if_unclipped(trainer.args.device, grad_norm)


def _log(original: Callable[..., Any], trainer: Trainer, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    callback = _callback_of(trainer)
    if callback is not None and "grad_norm" in logs:
        logs.update(callback._window.read())
    return original(trainer, logs, *args, **kwargs)


def _save_optimizer_and_scheduler(original: Callable[..., Any], trainer: Trainer, output_dir: str) -> Any:
    callback = _callback_of(trainer)
    state = None if callback is None or callback.guard is None else callback.guard.state_dict()
    done = original(trainer, output_dir)
    if callback is not None and state is not None:
        callback._save(output_dir, state, trainer.args.should_save)
    return done


def _load_optimizer_and_scheduler(original: Callable[..., Any], trainer: Trainer, checkpoint: str | None) -> Any:
    done, callback = original(trainer, checkpoint), _callback_of(trainer)
    if callback is not None and checkpoint is not None:
        callback._load(checkpoint)
    return done
