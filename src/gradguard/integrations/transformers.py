"""Hugging Face Transformers: callbacks that clip in the place of the Trainer's own clip, for the batch or for samples.

The last of them measures how much each sample adds to a step, TRL's too. A Trainer asks its callback wherever it clips,
computes a loss, logs, saves or loads (`watch_trainers`).
"""

# ruff: noqa: E402  (the version comes first, so that it is what an error is about)

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradguard.integrations.versions import require

require("transformers", "5.23", "6", "transformers")

import torch
from accelerate.utils import DistributedType, convert_to_fp32
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers import trainer as trainer_module
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_callback import CallbackHandler

import gradguard as gg
from gradguard.arguments import check_whole
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError, refuse
from gradguard.integrations.accelerate import inner_optimizer
from gradguard.integrations.adapter import Job, Run, replaced, wrap_once
from gradguard.integrations.guard_job import GuardJob, ResilienceJob, check_clipper
from gradguard.integrations.sample_jobs import PerSampleJob, PrivateBatches, PrivateJob
from gradguard.integrations.sample_losses import sample_losses
from gradguard.listeners import Listener, tell_of
from gradguard.policies import GuardPolicy

__all__ = [
    "GradGuardCallback",
    "LoudestSample",
    "PerSampleCallback",
    "PrivateCallback",
    "ResilienceCallback",
    "SampleNorms",
    "SampleNormsCallback",
]

_ASKED = (
    "training_step",
    "_clip_grad_norm",
    "_get_grad_norm",
    "log",
    "get_train_dataloader",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
"""Methods of the Trainer in whose place a callback may have one, called by the name with one underscore.

It is given the call that the Trainer would make of its own method (``own``), the Trainer, and the arguments.
"""


Own = Callable[[], Any]


class TransformersClip(Job, TrainerCallback):
    """A callback that clips in the place of its Trainer, whose methods ask it.

    A subclass is of one of the jobs too, and says who clips (``_clip_grad_norm``, ``_get_grad_norm``), what is logged
    (``_logged``) and what else is refused (``_refuse``).
    """

    state_file: str
    """Where a checkpoint holds the state."""
    _max_grad_norms: Collection[float] | None = (0, TrainingArguments.max_grad_norm)
    """Those of the Trainer beside which it clips: none, and the default, which nobody may have asked for; None: any."""

    _norm: Tensor | None  # what the Trainer is given as the norm of this step, from its clip until its step

    def __init__(self) -> None:
        super().__init__()
        self._of_a_run(_norm=None)
        watch_trainers()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        watch_trainers()  # it may be another process

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Make sure that the Trainer has left the gradients alone.

        Raises:
            UnsupportedGradientError: If it has not, or may not have.
        """
        if self._norm is None:
            raise UnsupportedGradientError(
                "the Trainer has not asked gradguard for the norm of this step, so it may have clipped already: its "
                "class seems to have methods _clip_grad_norm and _get_grad_norm of its own. Let them return what "
                f"super() returns, or remove the {type(self).__name__}."
            )

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Begin anew: the gradients were used."""
        self._norm = None

    def _refuse(self, trainer: Trainer) -> None:
        self._refuse_others(trainer.callback_handler.callbacks)
        self._refuse_arguments(trainer.args)

    def _refuse_arguments(self, args: TrainingArguments) -> None:
        if self._max_grad_norms is not None and args.max_grad_norm not in self._max_grad_norms:
            raise InvalidValueError(
                f"TrainingArguments has max_grad_norm={args.max_grad_norm!r}, and there is a {type(self).__name__}: "
                "one clip would be done after the other. Pass max_grad_norm=0 if the callback's clip is what you mean, "
                "or leave the callback out."
            )
        optim = str(getattr(args.optim, "value", args.optim))
        if "lomo" in optim or "layerwise" in optim:
            raise UnsupportedGradientError(
                f'optim="{optim}" steps inside backward, one parameter after the other: when a clip could look, there '
                "are no gradients any more. Choose an optimizer that steps after backward, such as "
                '"adamw_torch_fused".'
            )

    def _begins_anew(self, checkpoint: str) -> None:
        """Do what is due where training resumes from a checkpoint without a state."""

    def _after_saving(self, state: dict[str, Any]) -> None:
        """Do what is due when the optimizer has been saved; ``state`` is from before."""

    def _logged(self) -> dict[str, float]:
        return {}

    def _log(self, own: Own, trainer: Trainer, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "grad_norm" in logs:
            logs.update(self._logged())
        return own()

    def _save_optimizer_and_scheduler(self, own: Own, trainer: Trainer, output_dir: str) -> Any:
        state = self.state_dict()
        done = own()
        if state:
            self._after_saving(state)
            if trainer.args.should_save:
                torch.save(state, Path(output_dir) / self.state_file)
        return done

    def _load_optimizer_and_scheduler(self, own: Own, trainer: Trainer, checkpoint: str | None) -> Any:
        done = own()
        if checkpoint is not None:
            path = Path(checkpoint) / self.state_file
            self._loaded = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}
            if not self._loaded:
                self._begins_anew(checkpoint)
        return done


def watch_trainers() -> None:
    """Let every Trainer ask its `TransformersClip`; Trainers without one do as before."""
    wrap_once(Trainer, "train", _train)
    for name in _ASKED:
        wrap_once(Trainer, name, partial(_ask, name))
    for name in ("remove_callback", "pop_callback"):
        wrap_once(CallbackHandler, name, _take_out)
    wrap_once(trainer_module, "skip_first_batches", _skip_first_batches)


def _clips_of(handler: CallbackHandler) -> list[TransformersClip]:
    return [one for one in handler.callbacks if isinstance(one, TransformersClip)]


def _ask(name: str, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    own = partial(original, trainer, *args, **kwargs)
    clips = _clips_of(trainer.callback_handler)
    instead = getattr(clips[0], f"_{name.lstrip('_')}", None) if clips else None
    return own() if instead is None else instead(own, trainer, *args, **kwargs)


def _train(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    for clip in _clips_of(trainer.callback_handler):
        clip._refuse(trainer)
        clip._loaded = None  # left by a training that failed before it began
    try:
        return original(trainer, *args, **kwargs)
    finally:
        for clip in _clips_of(trainer.callback_handler):  # on_train_end is not reached by a training that fails
            clip.end()


def _take_out(original: Callable[..., Any], handler: CallbackHandler, *args: Any, **kwargs: Any) -> Any:
    before = list(handler.callbacks)
    done = original(handler, *args, **kwargs)
    for clip in before:
        if isinstance(clip, TransformersClip) and clip._acting and clip not in handler.callbacks:
            handler.callbacks[:] = before
            raise InvalidValueError(
                f"a {type(clip).__name__} was removed while training, which would go on with another clip or with "
                "none. Remove it when train() has returned."
            )
    return done


def _skip_first_batches(original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the batches of a private training alone: it knows itself where in the epoch it goes on."""
    if isinstance(loader, PrivateBatches):
        return loader
    return original(loader, *args, **kwargs)


_BLOCK = 1000


class GradGuardCallback(GuardJob, TransformersClip):
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
    ``train()`` again                     the history goes on with the same model, and begins anew with another
    added while training                  it clips from that step on
    removed while training                an error
    copied, pickled                       the copy has no guard, and its history begins anew with its own training
    a Trainer with its own                an error at the first step, unless it calls ``super()``
    ``_clip_grad_norm``
    LOMO, GaLore and APOLLO by layer      an error: they step inside backward
    DeepSpeed                             an error: it clips by itself
    ====================================  ======================================================================

    Args:
        clipper: The rule for the gradients.
        nonfinite: As for `gradguard.Guard`.
        max_consecutive_skips: As for `gradguard.Guard`.

    Attributes:
        clipper: The clipper.
        guard: The guard of the current or the last training; None before the first.

    Raises:
        InvalidTypeError: If ``clipper`` is not a clipper.
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
        check_clipper(clipper)
        super().__init__(clipper, nonfinite, max_consecutive_skips)
        self._of_a_run(_window=_Window())
        self.clipper = clipper

    state_file = "gradguard.pt"
    _steps = 0  # of the guard, when the Trainer's last step was counted
    _window: "_Window"

    @property
    def guard(self) -> gg.Guard | None:
        """The guard of the current or the last training; None before the first."""
        return self.guards.get(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the guard, for a checkpoint."""
        return self._attached[0].state_dict() if self._attached else {}

    def _load(self, state: dict[str, Any]) -> None:
        self._attached[0].load_state_dict(state)

    # -- events of the Trainer --------------------------------------------------------------------------------------

    def on_train_begin(
        self, *args: Any, model: nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        """Attach a guard to the optimizer, with the state of the checkpoint if training resumes.

        Raises:
            InvalidValueError: If the checkpoint's state is of another clipper.
        """
        self._norm, self._window = None, _Window()
        scaler = getattr(optimizer, "scaler", None)
        self.begin(Run(model, model, [inner_optimizer(optimizer)], [lr_scheduler], scaler))
        self._steps = self.guards[0].steps

    def on_pre_optimizer_step(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        """Make sure that the Trainer has left the gradients alone, and that there is a guard.

        Raises:
            InvalidValueError: If the callback was added while training, and ``max_grad_norm`` is set.
            UnsupportedGradientError: If the Trainer has not left the gradients alone, or may not have.
        """
        if not self._acting:  # it was added while training
            norm = self._norm
            self._refuse_arguments(args)
            self.on_train_begin(**kwargs)
            self._norm = norm
        super().on_pre_optimizer_step()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Tell the Trainer the norm before the clip, and remember what the clip did.

        Raises:
            UnsupportedGradientError: If the optimizer took no step that a guard could see.
        """
        guard, norm, self._norm = self.guards[0], self._norm, None
        assert norm is not None  # `on_pre_optimizer_step` has seen to it
        if guard.steps == self._steps or guard.last is None:
            raise UnsupportedGradientError(
                f"optimizer.step() did not run the hooks of {type(guard.optimizer).__name__}, so nothing was clipped. "
                "A guard needs an optimizer whose step() takes one with the gradients that are there."
            )
        self._steps = guard.steps
        norm.copy_(guard.last.norm)
        self._window.add(guard.last)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Take the guard off the optimizer; what it has counted can still be read."""
        self.end()

    # -- what the Trainer does instead of its own -------------------------------------------------------------------

    def _clip_grad_norm(self, own: Own, trainer: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        """Return the norm of the step that has not been taken yet: NaN until it is known."""
        if self._norm is None:
            self._norm = torch.full((), torch.nan, device=trainer.args.device)
        return self._norm

    def _get_grad_norm(
        self, own: Own, trainer: Trainer, model: nn.Module, grad_norm: object = None, **kwargs: Any
    ) -> object:
        """Return that norm, or what a subclass of the Trainer made of the gradients: then the next event refuses."""
        if grad_norm is None or grad_norm is self._norm:
            return self._clip_grad_norm(own, trainer)
        self._norm = None
        return grad_norm

    def _logged(self) -> dict[str, float]:
        return self._window.read()

    def _begins_anew(self, checkpoint: str) -> None:
        if any(leaf.state_dict() for leaf in self.clipper.leaves()):
            warnings.warn(
                f"{checkpoint} has no {self.state_file}: it was saved without a GradGuardCallback, or with "
                f"save_only_model. {type(self.clipper).__name__} begins anew, as at the first step of training.",
                stacklevel=2,
            )

    def _after_saving(self, state: dict[str, Any]) -> None:
        guard, before = self.guards[0], state.get("guard", state)
        if guard.steps != before["steps"]:
            guard.load_state_dict(before)  # saving a sharded SGD takes steps, with zeros, to find that it has none
            self._steps = guard.steps


class ResilienceCallback(ResilienceJob, GradGuardCallback):
    """A `GradGuardCallback` with `gradguard.SpikeRecovery`: spikes are skipped, bursts undone.

    The loss of each micro-batch is the one that ``Trainer.training_step`` returns, times the number of micro-batches in
    the step, by which the Trainer has divided it. The Trainer's scheduler keeps its place when weights go back, and so
    does the data. A checkpoint holds the clipper, the detector, the number of steps and the events, as
    `GradGuardCallback` says; snapshots stay in memory.

    Args:
        clipper: The rule for the gradients; None for ``gg.ClipByMedian()``.
        options: Arguments of `gradguard.SpikeRecovery` by name: ``detector``, ``extra_state``, ``snapshot_every``,
            ``lr_factor``, ...
        **of_guard: ``nonfinite`` and ``max_consecutive_skips``, as for `gradguard.Guard`.

    Attributes:
        resilience: The `gradguard.SpikeRecovery` of the current or the last training; None before the first.

    Raises:
        InvalidTypeError: If ``clipper`` is not a clipper.
        InvalidValueError: If ``options`` has a name that `gradguard.SpikeRecovery` does not take.

    Example:
        >>> import gradguard as gg
        >>> from gradguard.integrations.transformers import ResilienceCallback
        >>> callback = ResilienceCallback(gg.ClipByGlobalNorm(1.0), {"snapshot_every": 100})
        >>> # Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    """

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Act on what was measured some steps ago.

        Raises:
            SpikeError: If going back does not cure the run.
        """
        super().on_optimizer_step(*args, **kwargs)
        self._attached[0].step()

    def _training_step(self, own: Own, trainer: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        loss = own()
        if self._acting:
            # Trainer.training_step returns the micro-batch's share of the step's loss, and record_loss takes a mean.
            self._attached[0].record_loss(loss.detach() * trainer.current_gradient_accumulation_steps)
        return loss


class _Window:
    """Clips since the last log; the numbers stay on their device until they are read."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []  # [steps, 3]: norm, coefficient, clipped

    def add(self, result: gg.results.ClipResult) -> None:
        numbers = (result.norm, result.coefficient, result.clipped)
        self._rows.append(torch.stack([number.to(result.norm.dtype) for number in numbers])[None])
        if len(self._rows) == _BLOCK:
            self._rows = [torch.cat(self._rows)]  # a row takes a kilobyte by itself

    def read(self) -> dict[str, float]:
        """Return what to log, and begin anew. The host waits."""
        if not self._rows:
            return {}
        rows = torch.cat(self._rows).cpu().double()
        self._rows = []
        norms, coefficients, clipped = rows[rows[:, 0].isfinite()].unbind(1)
        read: dict[str, Tensor] = {}
        if len(norms):
            if len(rows) > 1:
                read = {"grad_norm_min": norms.min(), "grad_norm_mean": norms.mean(), "grad_norm_max": norms.max()}
            read |= {"clip_coefficient": coefficients.mean(), "clip_binding_share": clipped.mean()}
        return {name: float(value) for name, value in read.items()} | {"grad_nonfinite_steps": len(rows) - len(norms)}


_AGREEMENT = {torch.float32: 1e-4, torch.float64: 1e-9}  # in half precision the two losses round differently

SampleLosses = Callable[[Any, Mapping[str, Any]], Tensor]


class PerSampleCallback(PerSampleJob, TransformersClip):
    r"""Clip the gradient of each sample by ``norm_clipper`` in a `transformers.Trainer`, before they are summed.

    .. math:: \bar g = \frac1N \sum_{i=1}^{N} c_i\, \nabla \ell_i, \qquad
              \ell_i = \frac{1}{T_i} \sum_{t=1}^{T_i} \ell_{it}

    over all N samples of the optimizer step, those of all its accumulated batches. Sample i's own loss :math:`\ell_i`
    is the mean over its own :math:`T_i` labels that are not -100. That is **not** the Trainer's loss, which is a mean
    over all tokens of the step, so that long samples weigh more and every token depends on how long the others are.
    With equally many tokens in each sample, and no clip, both are the same.

    The callback computes that loss in the Trainer's place, from the model's ``logits`` and the ``labels``
    (`sample_losses`: cross entropy, shifted for causal language models; binary cross entropy; squared error), or by
    ``loss``. On the first batch it computes the model's own loss too, and refuses a model whose loss is another.

    **Guarantees.**

    * Each step is that of running every sample by itself, clipping its gradient, and averaging: with accumulation, a
      smaller last batch, unequal lengths, gradient checkpointing, bf16, and fp16 with its GradScaler.
    * The Trainer neither clips nor divides: not by the number of accumulated batches, nor by ``num_items_in_batch``.
    * What `gradguard.PerSampleGradientClipper` refuses is refused here.
    * A checkpoint holds what the norm clipper has learned (``gradguard_per_sample.pt``, beside the
      optimizer's).

    The Trainer logs ``loss``, the mean of the samples' losses, and ``grad_norm``, that of the clipped average. The loss
    of an evaluation stays the Trainer's own.

    ======================================  ====================================================================
    Edge case                               What happens
    ======================================  ====================================================================
    ``max_grad_norm`` left at 1.0, or 0     the Trainer does not clip
    ``max_grad_norm`` of another value      an error: two clips
    a `GradGuardCallback` beside it         an error: two clips
    a sample all of whose labels are -100   adds zero, and counts as a sample
    a sample whose gradient is not finite   adds zero; the step goes on
    ``label_smoothing_factor``              an error: another loss than the one that is clipped
    ``compute_loss_func``                   the same
    a Trainer's own ``compute_loss``        the same
    a Trainer's own ``training_step``       the same
    training stops within a step            what was accumulated is dropped
    removed while training                  an error
    several processes or GPUs               an error
    DeepSpeed, FSDP, ``torch_compile``      an error
    optimizers that step inside backward    an error
    ======================================  ====================================================================

    Args:
        norm_clipper: The rule, as for `gradguard.PerSampleGradientClipper`.
        loss: ``loss(outputs, inputs)``, from what the model returned and the batch it was called with, with the labels
            in it; returns one loss for each sample, ``[B]``. It must treat each sample by itself. Default: from
            ``outputs["logits"]`` and ``inputs["labels"]``, which the model is then called without.
        mode: As for `gradguard.PerSampleGradientClipper`.

    Attributes:
        norm_clipper: The rule.
        clipper: The `gradguard.PerSampleGradientClipper` of the current or the last training; None before the first
            batch. ``clipper.statistics`` has the norms of the last batch's samples.

    Raises:
        InvalidTypeError: If an argument is of another type.

    Example:
        >>> import gradguard as gg, tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> from gradguard.integrations.transformers import PerSampleCallback
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return {"logits": super().forward(x)}
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=1, disable_tqdm=True,
        ...                               save_strategy="no", per_device_train_batch_size=2, logging_strategy="no",
        ...                               report_to=[])
        >>> callback = PerSampleCallback(gg.FlatNormClipper(1.0), loss=lambda outputs, inputs: outputs["logits"].sum(1))
        >>> data = [{"x": torch.tensor([3.0, 4.0])}, {"x": torch.tensor([0.0, 0.5])}]
        >>> trainer = Trainer(Model(2, 1, bias=False), arguments, train_dataset=data, callbacks=[callback])
        >>> _ = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...
        >>> sorted(callback.clipper.statistics.norms.tolist())
        [0.5, 5.0]
    """

    def __init__(
        self,
        norm_clipper: gg.rules.NormClipper,
        *,
        loss: SampleLosses | None = None,
        mode: str = "fast",
    ) -> None:
        if loss is not None and not callable(loss):
            raise InvalidTypeError(f"loss: expected a function of outputs and inputs, or None, got {loss!r}.")
        super().__init__(norm_clipper, mode=mode)
        self._of_a_run(_compared=False)
        self.loss = loss

    state_file = "gradguard_per_sample.pt"
    _compared: bool  # with the model's own loss

    def _refuse(self, trainer: Trainer) -> None:
        super()._refuse(trainer)
        _refuse_other_losses(type(self).__name__, trainer)
        _refuse_unfollowed(type(self).__name__, trainer)

    # -- what the Trainer does instead of its own -------------------------------------------------------------------

    def _training_step(self, own: Own, trainer: Trainer, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch, of the mean of its samples' losses; then clip and sum."""
        with ExitStack() as instead:
            instead.enter_context(_without_autocast_in_forward(model))
            # The Trainer would divide the loss by the number of accumulated batches.
            instead.enter_context(replaced(trainer, "loss_is_scaled_for_ga", True))
            if not self._acting:
                self._refuse(trainer)
                self._compared, self._norm = False, None
                self.begin(_run_of(trainer, model))
            instead.enter_context(replaced(trainer, "compute_loss", partial(self._mean_loss, trainer)))
            loss = own()
            self.after_backward()
        return loss / trainer.current_gradient_accumulation_steps  # which the Trainer adds up to log

    def _mean_loss(
        self, trainer: Trainer, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        if self.loss is None:
            if not self._compared:
                self._compare_with_the_models_own(trainer, model, inputs)
                self._compared = True
            outputs = _forward(trainer, model, {k: v for k, v in inputs.items() if k != "labels"})
            losses = _losses_of(trainer, outputs, inputs)[0]
        else:
            outputs = _forward(trainer, model, inputs)
            losses: Any = self.loss(outputs, inputs)
            if not isinstance(losses, Tensor) or losses.ndim != 1:
                shape = f"a tensor of shape {list(losses.shape)}" if isinstance(losses, Tensor) else ""
                raise InvalidTypeError(
                    f"loss returned {shape or type(losses).__name__}: expected a tensor [B], one loss for each sample, "
                    "that is neither averaged nor summed over them."
                )
            sizes = {len(v) for v in inputs.values() if isinstance(v, Tensor) and v.ndim}
            if sizes and len(losses) not in sizes:
                raise InvalidValueError(
                    f"loss returned {len(losses)} losses for a batch with {sorted(sizes)} rows: expected one for each "
                    "sample."
                )
        return (losses.mean(), outputs) if return_outputs else losses.mean()

    def _compare_with_the_models_own(self, trainer: Trainer, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Refuse a model whose own loss has something in it that would be left out: a penalty, weights of classes."""
        if not isinstance(inputs.get("labels"), Tensor) or "shift_labels" in inputs:
            raise UnsupportedGradientError(
                f"the batch has {sorted(inputs)}: samples' own losses are made from one tensor of labels, called "
                "labels. Give PerSampleCallback(..., loss=function) a function that returns one loss for each sample."
            )
        device = trainer.args.device
        with torch.no_grad(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            outputs = _forward(trainer, model, inputs)
            losses, counts = _losses_of(trainer, outputs, inputs)
            own = outputs.get("loss")
            ours = (losses * counts).sum() / counts.sum()
        if not isinstance(own, Tensor) or own.numel() != 1:
            raise UnsupportedGradientError(
                f"{type(model).__name__} returned no loss for a batch with labels, with which to compare the losses of "
                "samples. Give PerSampleCallback(..., loss=function) a function that returns one loss for each sample."
            )
        bar = 0.02 if trainer.accelerator.native_amp else _AGREEMENT.get(outputs["logits"].dtype, 0.02)
        agrees = torch.isclose(own.to(ours), ours, rtol=bar, atol=bar)
        # A sample with a gradient that is not finite adds zero, and there is nothing to compare.
        if bool(agrees | ~own.isfinite() | (counts.sum() == 0)):
            return
        raise UnsupportedGradientError(
            f"{type(model).__name__} has a loss of {float(own):.6g} on the first batch, and its tokens' or samples' "
            f"losses from logits and labels have a mean of {float(ours):.6g}: its loss is another one, and what is in "
            "it besides would be left out. Give PerSampleCallback(..., loss=function) a function that returns one "
            "loss for each sample."
        )

    def _clip_grad_norm(self, own: Own, trainer: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        """Fill in the gradients of the optimizer step, once, and return their norm."""
        if self._norm is None:
            if not self._summed:
                raise UnsupportedGradientError(
                    f"nothing was clipped in this step: the {type(self).__name__} was added after its first backward. "
                    "Add it before training, or between steps as in on_step_end."
                )
            self.before_step()
            scaler = trainer.accelerator.scaler
            scale = 1.0 if scaler is None else scaler.get_scale()
            gradients = [p.grad for p in self.clipper.trained.values() if p.grad is not None]
            self._norm = gg.get_total_norm(gradients) / scale
        return self._norm

    _get_grad_norm = _clip_grad_norm


def _run_of(trainer: Trainer, model: nn.Module) -> Run:
    """Return the run of a Trainer that has made its optimizer."""
    optimizer, state = inner_optimizer(trainer.optimizer), trainer.state  # type: ignore[arg-type]
    return Run(
        model, model, [optimizer], scaler=trainer.accelerator.scaler, steps=state.max_steps, done=state.global_step
    )


def _losses_of(trainer: Trainer, outputs: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    if not isinstance(outputs, Mapping) or not isinstance(outputs.get("logits"), Tensor):
        raise UnsupportedGradientError(
            "the model returned no logits, from which samples' own losses could be made. Give "
            "PerSampleCallback(..., loss=function) a function that returns one loss for each sample."
        )
    config = getattr(trainer.model, "config", None)
    causal = getattr(trainer.model, "loss_function", None) is ForCausalLMLoss  # the Trainer's own word misses GPT-2
    shifted = causal and not getattr(config, "is_encoder_decoder", False)
    problem_type = getattr(config, "problem_type", None)
    return sample_losses(outputs["logits"], inputs["labels"], shifted=shifted, problem_type=problem_type)


def _forward(trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The forward with the Trainer's precision: its own autocast is inside ``model.forward``, and is off meanwhile."""
    with trainer.accelerator.autocast():
        outputs = model(**inputs)
    return convert_to_fp32(outputs) if trainer.accelerator.native_amp else outputs


def _without_autocast_in_forward(model: nn.Module) -> AbstractContextManager[None]:
    """Give the model its own forward back, of which Accelerate has made one with autocast and float32 outputs."""
    own = vars(model).get("_original_forward")  # the clipper cannot know of a precision that begins inside
    return replaced(model, "forward", own) if own is not None and "forward" in vars(model) else nullcontext()


def _refuse_other_losses(which: str, trainer: Trainer) -> None:
    give = f"give {which}(..., loss=function) a function that returns one loss for each sample."
    own = f"{type(trainer).__name__} has a %s of its own, so its %s is not the one whose gradients are clipped. "
    whole = "is set: a loss of the whole batch, and not the one whose gradients are clipped. Leave it out, and"
    refuse(
        UnsupportedGradientError,
        *(
            (
                getattr(getattr(trainer, name), "__func__", None) is not getattr(Trainer, name),
                f"{own % (name, what)}Use Trainer itself, and {give}",
            )
            for name, what in (("compute_loss", "loss"), ("training_step", "step"))
        ),
        (trainer.compute_loss_func is not None, f"compute_loss_func {whole} {give}"),
        (trainer.label_smoother is not None, f"label_smoothing_factor {whole} {give}"),
    )


def _refuse_unfollowed(which: str, trainer: Trainer) -> None:
    """Raise if samples cannot be followed through the Trainer's model; ``which`` names the callback."""
    args, accelerator = trainer.args, trainer.accelerator
    refuse(
        UnsupportedGradientError,
        (
            accelerator.distributed_type != DistributedType.NO or args.n_gpu > 1,
            f"{which} trains in one process on one device, and not with {accelerator.distributed_type} on "
            f"{max(args.n_gpu, accelerator.num_processes)} of them. Use a loop of your own, in which "
            "gg.PerSampleGradientClipper and gg.private.make_private take DistributedDataParallel and fully_shard.",
        ),
        (
            args.torch_compile,
            "torch_compile is on: the layers inside a compiled model cannot be followed. Leave it out.",
        ),
        (
            args.fp16 and accelerator.scaler is None and accelerator.native_amp and args.device.type != "cpu",
            "fp16 without a GradScaler of Accelerate's: the scale of the loss is not known. Use bf16.",
        ),
    )


class PrivateCallback(PrivateJob, PerSampleCallback):
    r"""Make the training of a `transformers.Trainer` differentially private: `make_private` in one line.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    The Trainer's data set, collator and workers are kept. Its batches are replaced by Poisson samples: in each step
    every one of the N samples joins with probability q. The expected number qN is ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps``, so an epoch has as many steps as before, to within rounding. Each sample's loss is
    its own, as in `PerSampleCallback`: not the Trainer's mean over all tokens.

    **Guarantees.** Those of `gradguard.private.make_private`: what the weights become is (epsilon, delta)
    differentially private with respect to one sample of the training data, epsilon never exceeds that of a budget.
    The losses that the Trainer logs are not covered.

    * Noise is added once for each step of the optimizer, and the step is counted before the weights change.
    * No other step of the optimizer is let through, and no change of the gradients after the noise.
    * A checkpoint holds the accountant's steps and what the norm clipper has learned (``gradguard_private.pt``);
      neither noise nor which samples were drawn. A resumed run goes on counting, and goes on within the epoch.

    With the Trainer's own numbers it logs ``epsilon``; ``grad_norm`` is the norm of the noised average.

    ==================================================  ==========================================================
    Edge case                                           What happens
    ==================================================  ==========================================================
    a batch that draws no sample                        one sample that does not count stands in; noise is added
    a sample whose gradient is not finite               adds zero
    evaluation within an epoch                          the same steps
    resuming from a checkpoint without this callback    an error: what its steps have cost is not known
    ``fp16``                                            an error: a scale that follows overflows tells of samples
    a Trainer with its own ``get_train_dataloader``     an error
    an ``IterableDataset``, ``group_by_length``         an error
    ``auto_find_batch_size``                            an error
    what `PerSampleCallback` refuses                    an error
    a second ``train``                                  an error: its cost would add up
    ==================================================  ==========================================================

    Args:
        privacy: A `gradguard.private.PrivacyBudget` without ``epochs`` and ``steps``, for as many steps as the Trainer
            plans, or a `gradguard.private.FixedNoise`.
        norm_clipper: The rule; None bounds each sample's gradient by 1, as ``gg.FlatNormClipper(1.0)``.
        secure: As for `gradguard.private.make_private`.
        seed: As for `gradguard.private.make_private`.
        **options: ``loss`` and ``mode``, as for `PerSampleCallback`.

    Attributes:
        norm_clipper: The rule.
        clipper: The `gradguard.PerSampleGradientClipper` of the current or the last training.

    Raises:
        InvalidTypeError: If an argument is of another type.
        InvalidValueError: If the budget names the number of steps, which the Trainer plans.

    Example:
        >>> import gradguard as gg, tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> from gradguard.integrations.transformers import PrivateCallback
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return {"logits": super().forward(x)}
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=4, disable_tqdm=True,
        ...                               save_strategy="no", per_device_train_batch_size=5, logging_strategy="no",
        ...                               report_to=[])
        >>> callback = PrivateCallback(gg.private.PrivacyBudget(epsilon=3.0, delta=1e-3, accountant="rdp"),
        ...                            loss=lambda outputs, inputs: outputs["logits"].square().sum(1))
        >>> data = [{"x": x} for x in torch.randn(20, 2)]
        >>> trainer = Trainer(Model(2, 1), arguments, train_dataset=data, callbacks=[callback])
        >>> _ = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...
        >>> callback.private.steps, 2.99 < callback.private.epsilon() <= 3.0
        (4, True)

    Reference: Abadi et al., Deep learning with differential privacy, 2016, arXiv 1607.00133.
    """

    state_file = "gradguard_private.pt"

    def _logged(self) -> dict[str, float]:
        return {} if self.private is None else {"epsilon": self.private.epsilon()}

    def _refuse(self, trainer: Trainer) -> None:
        super()._refuse(trainer)
        refuse(
            UnsupportedGradientError,
            (
                trainer.args.fp16,
                "fp16: the scale of the loss follows overflows, which tell of single samples. Use bf16.",
            ),
            (
                trainer.args.auto_find_batch_size,
                "auto_find_batch_size begins again with another sampling rate, and the steps before would be "
                "forgotten. Choose per_device_train_batch_size, with gradient_accumulation_steps for the rest.",
            ),
        )

    def _get_train_dataloader(self, own: Own, trainer: Trainer) -> PrivateBatches:
        """Keep the Trainer's loader, and give it Poisson batches instead."""
        # Accelerate would wrap the loader, whose batches are not used, and take its order over.
        with replaced(trainer.accelerator, "prepare", lambda loader: loader):
            loader = own()
        parts = trainer.args.gradient_accumulation_steps
        self._batches = PrivateBatches(loader, parts, 1, lambda: self._started(trainer))
        return self._batches

    def _started(self, trainer: Trainer) -> gg.private.PrivateTraining:
        """Begin when the first batch is asked for: the model is wrapped then, and the checkpoint is read."""
        if not self._acting:
            self.begin(_run_of(trainer, trainer.model_wrapped))  # type: ignore[arg-type]
        assert self.private is not None
        return self.private


@dataclass(frozen=True)
class LoudestSample:
    """The sample that added most to a step.

    Attributes:
        step: The optimizer's step, from 1: the Trainer's ``global_step`` after it.
        micro_batch: Which of the batches that were accumulated, from 0.
        row: Its row of that batch, from 0.
        norm: The norm of its share of the step's gradient; NaN or inf where that is not finite.
        inputs: Its row of each tensor of the batch: in TRL's GRPO ``prompt_ids``, ``completion_ids``, ``advantages``.
    """

    step: int
    micro_batch: int
    row: int
    norm: float
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class SampleNorms:
    """How much each sample added to one step.

    Attributes:
        step: The optimizer's step, from 1.
        norms: For each accumulated batch the norm of each sample's share of the step's gradient, float64 ``[B]``.
        loudest_inputs: For each, the row of the sample with the largest, of each tensor of the batch.
    """

    step: int
    norms: Sequence[Tensor]
    loudest_inputs: Sequence[Mapping[str, Tensor]]

    def loudest(self) -> LoudestSample:
        """Return the sample with the largest norm; one that is not finite comes before all others. Reads the device."""
        tops = [(float(norms.max()), int(norms.argmax())) for norms in self.norms]  # both take NaN for the largest
        which = max(range(len(tops)), key=lambda i: tops[i][0] if math.isfinite(tops[i][0]) else math.inf)
        norm, row = tops[which]
        return LoudestSample(self.step, which, row, norm, self.loudest_inputs[which])

    @property
    def without_a_share(self) -> list[int]:
        """The accumulated batches all of whose samples have a share that is zero, or none that is finite.

        Nothing counts in such a batch: no token is left by the mask, all advantages are zero, or the loss was divided
        by zero. Reads the device.
        """
        return _empty(self.norms).nonzero().flatten().tolist()


class SampleNormsCallback(PerSampleJob, TransformersClip):
    r"""Measure how much each sample adds to the steps of a `transformers.Trainer`: which sequence made the spike?

    .. math:: g = \sum_{i=1}^{N} g_i, \qquad
              g_i = \Bigl(\frac{\partial y_i}{\partial \theta}\Bigr)^{\!\top} \frac{\partial L}{\partial y_i}

    with :math:`y_i` what the model returned for sample i and :math:`L` the Trainer's own loss, whatever it is: of TRL's
    `GRPOTrainer` in each of its forms (``grpo``, ``bnpo``, ``dr_grpo``, ``dapo``), of `RLOOTrainer`, of a subclass of
    your own. Shares :math:`g_i` add up to the gradient of the step over all its accumulated batches.

    **Guarantees.**

    * The step is the Trainer's own: its loss, its gradient (in another order of sums, so that it rounds differently),
      its ``max_grad_norm``. Nothing is clipped here, and a sample that is not finite makes the step not finite, as
      without the callback.
    * Norms are exact, or the model is refused by `gradguard.PerSampleGradientClipper` with ``loss_reduction="share"``.
    * Norms stay on the device until they are asked for, or the Trainer logs.

    **What the Trainer logs**, of the step that is logged: ``sample_norm_max``, ``sample_norm_median`` over its finite
    samples, ``sample_norm_max_micro_batch`` and ``sample_norm_max_row``; and ``sample_norm_empty_micro_batches``, the
    number of its batches that add nothing, and count in the average where the loss is divided by their number. A
    record of the run (`gradguard.watch`, ``gradguard run``) has the finding ``empty_micro_batch``.

    ======================================  ====================================================================
    Edge case                               What happens
    ======================================  ====================================================================
    a model that returns its loss           an error: no sample has a part in a number. Compute the loss from
                                            logits, as TRL's trainers for preferences and rewards do
    a loss with a weight in it              an error: it belongs to no sample
    a batch in which nothing counts         `SampleNorms.without_a_share` has its place
    another clip among the callbacks        an error; `max_grad_norm` of the Trainer may be any
    training stops within a step            what was measured of it is dropped
    several processes or GPUs               an error
    DeepSpeed, FSDP, ``torch_compile``      an error
    ======================================  ====================================================================

    Args:
        keep: How many steps are kept in ``steps``.

    Attributes:
        steps: `SampleNorms` of the last steps, the newest last.
        clipper: The `gradguard.PerSampleGradientClipper` that measures; None before the first batch.

    Example:
        >>> import gradguard as gg, tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> from gradguard.integrations.transformers import SampleNormsCallback
        >>> class OwnLoss(Trainer):
        ...     def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ...         return (model(inputs["x"]).square().sum(1) * inputs["advantage"]).mean()
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x)
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=1, disable_tqdm=True,
        ...                               save_strategy="no", per_device_train_batch_size=4, logging_strategy="no",
        ...                               report_to=[], remove_unused_columns=False)
        >>> data = [{"x": torch.ones(3), "advantage": torch.tensor(a)} for a in (1.0, -1.0, 50.0, 0.0)]
        >>> callback = SampleNormsCallback()
        >>> _ = OwnLoss(Model(3, 1), arguments, train_dataset=data, callbacks=[callback]).train()  # doctest: +ELLIPSIS
        {'train_runtime': ...
        >>> callback.steps[-1].loudest().inputs["advantage"]
        tensor(50.)
    """

    state_file = "gradguard_sample_norms.pt"
    _max_grad_norms = None

    def __init__(self, *, keep: int = 1) -> None:
        self._keep = check_whole("keep", keep, 1)
        super().__init__(gg.FlatNormClipper(math.inf), loss_reduction="share")
        self._of_a_run(steps=deque(maxlen=self._keep), _measured=[], _inputs={}, _hooks=ExitStack())

    steps: deque[SampleNorms]
    _measured: list[tuple[Tensor, Mapping[str, Tensor]]]  # of the batches of this step
    _inputs: Mapping[str, Any]  # what the loss of this batch is computed from
    _hooks: ExitStack

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: nothing is learned."""
        return {}

    def _refuse(self, trainer: Trainer) -> None:
        super()._refuse(trainer)
        _refuse_unfollowed(type(self).__name__, trainer)

    def _training_step(self, own: Own, trainer: Trainer, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch, as the Trainer does them; then measure."""
        if not self._acting:
            self._refuse(trainer)
            if trainer.accelerator.native_amp:
                self._hooks.enter_context(_autocast_outside(model, trainer.accelerator.autocast))
            self.begin(_run_of(trainer, model))
        loss_of = trainer.compute_loss

        def seen(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self._inputs = dict(inputs)  # the loss may take its labels out
            with _without_autocast_in_forward(model):
                return loss_of(model, inputs, *args, **kwargs)

        with replaced(trainer, "compute_loss", seen):
            loss = own()
        self.after_backward()
        norms = self.clipper.statistics.norms
        self._measured.append((norms, _row(self._inputs, norms)))
        self._inputs = {}
        return loss

    def _clip_grad_norm(self, own: Own, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        """Fill in the gradients, once, and let the Trainer clip them."""
        if not self._summed and self._norm is None:
            raise UnsupportedGradientError(
                f"nothing was measured in this step: the {type(self).__name__} was added after its first backward. "
                "Add it before training, or between steps as in on_step_end."
            )
        if not self._summed:
            return own()
        self.before_step()
        norms, inputs = zip(*self._measured, strict=True)
        # The clipper has left out a sample that is not finite, for which the gradient is not.
        finite = torch.cat(norms).isfinite().all()
        smallest = min((p.grad for p in self.clipper.trained.values() if p.grad is not None), key=Tensor.numel)
        smallest += torch.where(finite, 0.0, torch.nan).to(smallest)
        self.steps.append(SampleNorms(trainer.state.global_step + 1, norms, inputs))
        tell_of(Listener.on_empty_batches, _empty(norms).sum())
        self._measured = []
        self._norm = own()
        return self._norm

    _get_grad_norm = _clip_grad_norm

    def _logged(self) -> dict[str, float]:
        if not self.steps:
            return {}
        loudest, norms = self.steps[-1].loudest(), torch.cat([*self.steps[-1].norms])
        return {
            "sample_norm_max": loudest.norm,
            "sample_norm_median": float(norms[norms.isfinite()].median()),
            "sample_norm_max_micro_batch": loudest.micro_batch,
            "sample_norm_max_row": loudest.row,
            "sample_norm_empty_micro_batches": len(self.steps[-1].without_a_share),
        }

    def end(self) -> None:
        """Give the model back; what was measured of a step that did not come is dropped. May be repeated."""
        super().end()
        self._hooks.close()
        self._norm, self._measured, self._inputs = None, [], {}


def _empty(norms: Sequence[Tensor]) -> Tensor:
    """Tell of each accumulated batch whether none of its samples has a share."""
    return torch.stack([~(of_batch.isfinite() & (of_batch > 0)).any() for of_batch in norms])


@contextmanager
def _autocast_outside(model: nn.Module, autocast: Callable[..., Any]) -> Iterator[None]:
    """Let autocast begin before the clipper looks at a call of the model, which has its own forward back."""
    running: list[Any] = []  # calls of the model within each other: the clipper tries it out in its first call

    def begin(*_: Any) -> None:
        running.append(autocast())
        running[-1].__enter__()

    def end(module: nn.Module, arguments: Any, outputs: Any) -> Any:
        del module, arguments
        running.pop().__exit__(None, None, None)
        return convert_to_fp32(outputs)

    first = model.register_forward_pre_hook(begin, prepend=True)
    last = model.register_forward_hook(end, always_call=True)
    try:
        yield
    finally:
        first.remove()
        last.remove()


def _row(inputs: Mapping[str, Any], norms: Tensor) -> dict[str, Tensor]:
    """The row of the sample with the largest norm; nothing waits for the device."""
    if not len(norms):
        return {}
    which = norms.argmax().reshape(1)
    return {
        name: value.detach().index_select(0, which.to(value.device))[0]
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.shape[:1] == norms.shape
    }
