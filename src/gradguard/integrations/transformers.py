"""Hugging Face Transformers: callbacks that replace the Trainer's own clip, for the batch or for each sample.

The last of them measures how much each sample adds to a step, also in TRL. A Trainer calls its callback wherever it
clips, computes a loss, logs, saves or loads (`watch_trainers`).
"""

# ruff: noqa: E402  (the version check comes first, so that its error comes first)

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
"""Methods of the Trainer that a callback may replace by one of its own, named with one underscore.

The callback's method receives a call of the Trainer's own method (``own``), the Trainer, and the arguments.
"""


Own = Callable[[], Any]


class TransformersClip(Job, TrainerCallback):
    """A callback that clips in place of its Trainer, whose methods call it.

    A subclass also inherits from one of the jobs. It defines the clip (``_clip_grad_norm``, ``_get_grad_norm``), the
    logged values (``_logged``) and what else is refused (``_refuse``).
    """

    state_file: str
    """The file of a checkpoint that holds the state."""
    _max_grad_norms: Collection[float] | None = (0, TrainingArguments.max_grad_norm)
    """Accepted values of ``max_grad_norm``: 0, and the default, which the user may not have chosen; None for any."""

    _norm: Tensor | None  # the norm returned to the Trainer for this step, from its clip until its step

    def __init__(self) -> None:
        super().__init__()
        self._of_a_run(_norm=None)
        watch_trainers()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        watch_trainers()  # the copy may be in another process

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Check that the Trainer has left the gradients unchanged.

        Raises:
            UnsupportedGradientError: If it has not, or may not have.
        """
        if self._norm is None:
            raise UnsupportedGradientError(
                "the Trainer has not asked gradguard for the norm of this step, so it may have clipped already: its "
                "class seems to have its own methods _clip_grad_norm and _get_grad_norm. Let them return the result of "
                f"super(), or remove the {type(self).__name__}."
            )

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Reset the norm: the gradients were used."""
        self._norm = None

    def _refuse(self, trainer: Trainer) -> None:
        self._refuse_others(trainer.callback_handler.callbacks)
        self._refuse_arguments(trainer.args)

    def _refuse_arguments(self, args: TrainingArguments) -> None:
        if self._max_grad_norms is not None and args.max_grad_norm not in self._max_grad_norms:
            raise InvalidValueError(
                f"TrainingArguments has max_grad_norm={args.max_grad_norm!r}, and there is a {type(self).__name__}: "
                "one clip would be done after the other. Pass max_grad_norm=0 if you want the callback's clip, "
                "or remove the callback."
            )
        optim = str(getattr(args.optim, "value", args.optim))
        if "lomo" in optim or "layerwise" in optim:
            raise UnsupportedGradientError(
                f'optim="{optim}" steps inside backward, one parameter after the other: when a clip could act, the '
                "gradients no longer exist. Choose an optimizer that steps after backward, such as "
                '"adamw_torch_fused".'
            )

    def _begins_anew(self, checkpoint: str) -> None:
        """Act on training that resumes from a checkpoint without a state."""

    def _after_saving(self, state: dict[str, Any]) -> None:
        """Act after the optimizer was saved; ``state`` is from before."""

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
    """Let every Trainer call its `TransformersClip`; Trainers without one are not affected."""
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
        clip._loaded = None  # a training that failed before it began may have left a state
    try:
        return original(trainer, *args, **kwargs)
    finally:
        for clip in _clips_of(trainer.callback_handler):  # a training that fails does not reach on_train_end
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
    """Skip no batches of a private training, which itself knows its position in the epoch."""
    if isinstance(loader, PrivateBatches):
        return loader
    return original(loader, *args, **kwargs)


_BLOCK = 1000


class GradGuardCallback(GuardJob, TransformersClip):
    """Let ``clipper`` clip once at each real step of a `transformers.Trainer`, instead of the Trainer.

    Pass it to the Trainer (``callbacks=[GradGuardCallback(clipper)]`` or ``trainer.add_callback``); nothing else
    changes. It attaches a `gradguard.Guard` to the Trainer's optimizer while ``train()`` runs.

    **Guarantees.**

    * The clipper receives the gradients that backward computed: the Trainer neither clips nor measures before.
      (Its measurement, also with ``max_grad_norm=0``, is a clip to infinity: a norm that overflows makes all gradients
      NaN.)
    * It acts once for each real step, under accumulation too, and on unscaled gradients with fp16.
    * A checkpoint contains the clipper's state and the counts (``gradguard.pt``, beside the optimizer's), and resuming
      restores them bit for bit.
    * Norms are kept on the device and read when the Trainer logs.

    **Logged values.**

    =========================================  =========================================================================
    ``grad_norm``                              the norm before the clip, of the step that is logged
    ``grad_norm_min``, ``_mean`` and ``_max``  over all finite steps since the last log; only if there were several
                                               steps
    ``clip_coefficient``                       norm after divided by norm before, the mean over these steps
    ``clip_binding_share``                     the share of these steps on which the clip bound
    ``grad_nonfinite_steps``                   the number of steps since the last log with NaN or inf in a gradient
    =========================================  =========================================================================

    **Edge cases.**

    ====================================  ======================================================================
    case                                  what happens
    ====================================  ======================================================================
    ``max_grad_norm`` left at 1.0         the Trainer's default: the clipper replaces it
    ``max_grad_norm=0``                   the same
    ``max_grad_norm`` of another value    an error: two rules, of which only one can be intended
    a step is skipped, no GradScaler      ``global_step`` and the scheduler advance, as after any step
    resuming without a saved state        a warning if the clipper has one; it starts fresh
    ``save_only_model``                   the state is not saved, nor is the optimizer's
    ``train()`` again                     the history continues with the same model, else it starts fresh
    added while training                  it clips from that step on
    removed while training                an error
    copied, pickled                       the copy has no guard, and its history starts fresh with its own training
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
        InvalidValueError: If `Guard` refuses ``nonfinite`` or ``max_consecutive_skips``.
        UnsupportedVersionError: If the Trainer lacks a required method.

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
    _steps = 0  # the guard's step count at the Trainer's last step
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
        """Check that the Trainer has left the gradients unchanged, and that there is a guard.

        Raises:
            InvalidValueError: If the callback was added while training, and ``max_grad_norm`` is set.
            UnsupportedGradientError: If the Trainer has changed the gradients, or may have.
        """
        if not self._acting:  # it was added while training
            norm = self._norm
            self._refuse_arguments(args)
            self.on_train_begin(**kwargs)
            self._norm = norm
        super().on_pre_optimizer_step()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Write the norm before the clip into the Trainer's tensor, and record the result of the clip.

        Raises:
            UnsupportedGradientError: If the optimizer took no step that a guard could observe.
        """
        guard, norm, self._norm = self.guards[0], self._norm, None
        assert norm is not None  # checked by `on_pre_optimizer_step`
        if guard.steps == self._steps or guard.last is None:
            raise UnsupportedGradientError(
                f"optimizer.step() did not run the hooks of {type(guard.optimizer).__name__}, so nothing was clipped. "
                "A guard needs an optimizer whose step() takes one step with the present gradients."
            )
        self._steps = guard.steps
        norm.copy_(guard.last.norm)
        self._window.add(guard.last)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Detach the guard from the optimizer; its counts can still be read."""
        self.end()

    # -- replacements of the Trainer's methods ----------------------------------------------------------------------

    def _clip_grad_norm(self, own: Own, trainer: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        """Return a tensor for the norm of the coming step: NaN until it is known."""
        if self._norm is None:
            self._norm = torch.full((), torch.nan, device=trainer.args.device)
        return self._norm

    def _get_grad_norm(
        self, own: Own, trainer: Trainer, model: nn.Module, grad_norm: object = None, **kwargs: Any
    ) -> object:
        """Return the tensor of `_clip_grad_norm`, or a subclass's own norm, which the next event refuses."""
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
                f"save_only_model. {type(self.clipper).__name__} starts fresh, as at the first step of training.",
                stacklevel=2,
            )

    def _after_saving(self, state: dict[str, Any]) -> None:
        guard, before = self.guards[0], state.get("guard", state)
        if guard.steps != before["steps"]:
            guard.load_state_dict(before)  # to save a sharded SGD, torch takes steps with zero gradients
            self._steps = guard.steps


class ResilienceCallback(ResilienceJob, GradGuardCallback):
    """A `GradGuardCallback` with `gradguard.SpikeRecovery`: spikes are skipped, bursts undone.

    The loss of each micro-batch is the result of ``Trainer.training_step`` times the number of micro-batches in the
    step, by which the Trainer has divided it. A roll-back restores weights, but neither the Trainer's scheduler nor the
    data are rewound. A checkpoint contains the clipper, the detector, the number of steps and the events, like that of
    `GradGuardCallback`; snapshots stay in memory.

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
        """Act on the measurements of some steps ago.

        Raises:
            SpikeError: If going back does not cure the run.
        """
        super().on_optimizer_step(*args, **kwargs)
        self._attached[0].step()

    def _training_step(self, own: Own, trainer: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        loss = own()
        if self._acting:
            # Trainer.training_step returns the micro-batch's share of the step's loss, but record_loss takes a mean.
            self._attached[0].record_loss(loss.detach() * trainer.current_gradient_accumulation_steps)
        return loss


class _Window:
    """The clips since the last log; the numbers stay on their device until they are read."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []  # [steps, 3]: norm, coefficient, clipped

    def add(self, result: gg.results.ClipResult) -> None:
        numbers = (result.norm, result.coefficient, result.clipped)
        self._rows.append(torch.stack([number.to(result.norm.dtype) for number in numbers])[None])
        if len(self._rows) == _BLOCK:
            self._rows = [torch.cat(self._rows)]  # a tensor for each row would take a kilobyte

    def read(self) -> dict[str, float]:
        """Return the values to log, and reset; a host sync."""
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

    over all N samples of the optimizer step, including all its accumulated batches. Sample i's own loss :math:`\ell_i`
    is the mean over its own :math:`T_i` labels that are not -100. That is **not** the Trainer's loss, which is a mean
    over all tokens of the step, so that long samples weigh more and every token's weight depends on the other samples'
    lengths. With equally many tokens in each sample, and no clip, both are the same.

    The callback computes that loss in place of the Trainer, from the model's ``logits`` and the ``labels``
    (`sample_losses`: cross entropy, shifted for causal language models; binary cross entropy; squared error), or by
    ``loss``. On the first batch it also computes the model's own loss, and refuses a model whose loss differs.

    **Guarantees.**

    * Each step equals that of running every sample by itself, clipping its gradient, and averaging: with accumulation,
      a smaller last batch, unequal lengths, gradient checkpointing, bf16, and fp16 with its GradScaler.
    * The Trainer neither clips nor divides: not by the number of accumulated batches, nor by ``num_items_in_batch``.
    * Everything that `gradguard.PerSampleGradientClipper` refuses is refused here.
    * A checkpoint contains the norm clipper's learned state (``gradguard_per_sample.pt``, beside the optimizer's).

    The Trainer logs ``loss``, the mean of the samples' losses, and ``grad_norm``, the norm of the clipped average. The
    loss of an evaluation stays the Trainer's own.

    ======================================  ====================================================================
    Edge case                               What happens
    ======================================  ====================================================================
    ``max_grad_norm`` left at 1.0, or 0     the Trainer does not clip
    ``max_grad_norm`` of another value      an error: two clips
    a `GradGuardCallback` beside it         an error: two clips
    a sample all of whose labels are -100   adds zero, and counts as a sample
    a sample whose gradient is not finite   adds zero; the step goes on
    ``label_smoothing_factor``              an error: the loss differs from the one that is clipped
    ``compute_loss_func``                   the same
    a Trainer's own ``compute_loss``        the same
    a Trainer's own ``training_step``       the same
    training stops within a step            the accumulated samples are dropped
    removed while training                  an error
    several processes or GPUs               an error
    DeepSpeed, FSDP, ``torch_compile``      an error
    optimizers that step inside backward    an error
    ======================================  ====================================================================

    Args:
        norm_clipper: The rule, as for `gradguard.PerSampleGradientClipper`.
        loss: ``loss(outputs, inputs)``, from the model's output and the batch that it received, including the labels;
            returns one loss for each sample, ``[B]``. It must treat each sample by itself. Default: from
            ``outputs["logits"]`` and ``inputs["labels"]``; the model is then called without labels.
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
    _compared: bool  # whether the loss was compared with the model's own

    def _refuse(self, trainer: Trainer) -> None:
        super()._refuse(trainer)
        _refuse_other_losses(type(self).__name__, trainer)
        _refuse_unfollowed(type(self).__name__, trainer)

    # -- replacements of the Trainer's methods ----------------------------------------------------------------------

    def _training_step(self, own: Own, trainer: Trainer, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of one batch with the mean of its samples' losses; then clip and accumulate."""
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
        return loss / trainer.current_gradient_accumulation_steps  # the Trainer sums these for its log

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
        """Refuse a model whose own loss contains more than the samples' losses: a penalty, weights of classes."""
        if not isinstance(inputs.get("labels"), Tensor) or "shift_labels" in inputs:
            raise UnsupportedGradientError(
                f"the batch has {sorted(inputs)}: samples' own losses are computed from one tensor of labels, named "
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
                f"{type(model).__name__} returned no loss for a batch with labels, to compare with the losses of "
                "samples. Give PerSampleCallback(..., loss=function) a function that returns one loss for each sample."
            )
        bar = 0.02 if trainer.accelerator.native_amp else _AGREEMENT.get(outputs["logits"].dtype, 0.02)
        agrees = torch.isclose(own.to(ours), ours, rtol=bar, atol=bar)
        # If a gradient is not finite, its sample adds zero, and there is nothing to compare.
        if bool(agrees | ~own.isfinite() | (counts.sum() == 0)):
            return
        raise UnsupportedGradientError(
            f"{type(model).__name__} has a loss of {float(own):.6g} on the first batch, but its tokens' or samples' "
            f"losses from logits and labels have a mean of {float(ours):.6g}: its loss is another one, whose other "
            "parts would be lost. Give PerSampleCallback(..., loss=function) a function that returns one "
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
    """Return the run of a Trainer that has created its optimizer."""
    optimizer, state = inner_optimizer(trainer.optimizer), trainer.state  # type: ignore[arg-type]
    return Run(
        model, model, [optimizer], scaler=trainer.accelerator.scaler, steps=state.max_steps, done=state.global_step
    )


def _losses_of(trainer: Trainer, outputs: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    if not isinstance(outputs, Mapping) or not isinstance(outputs.get("logits"), Tensor):
        raise UnsupportedGradientError(
            "the model returned no logits, from which samples' own losses could be computed. Give "
            "PerSampleCallback(..., loss=function) a function that returns one loss for each sample."
        )
    config = getattr(trainer.model, "config", None)
    causal = getattr(trainer.model, "loss_function", None) is ForCausalLMLoss  # the Trainer's own test misses GPT-2
    shifted = causal and not getattr(config, "is_encoder_decoder", False)
    problem_type = getattr(config, "problem_type", None)
    return sample_losses(outputs["logits"], inputs["labels"], shifted=shifted, problem_type=problem_type)


def _forward(trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run the forward in the Trainer's precision; autocast inside ``model.forward`` is removed meanwhile."""
    with trainer.accelerator.autocast():
        outputs = model(**inputs)
    return convert_to_fp32(outputs) if trainer.accelerator.native_amp else outputs


def _without_autocast_in_forward(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the model's own forward, which Accelerate has replaced by one with autocast and float32 outputs."""
    own = vars(model).get("_original_forward")  # the clipper cannot observe autocast that begins inside
    return replaced(model, "forward", own) if own is not None and "forward" in vars(model) else nullcontext()


def _refuse_other_losses(which: str, trainer: Trainer) -> None:
    give = f"give {which}(..., loss=function) a function that returns one loss for each sample."
    own = f"{type(trainer).__name__} has its own %s, so its %s is not the one whose gradients are clipped. "
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
            "fp16 without a GradScaler of Accelerate: the scale of the loss is not known. Use bf16.",
        ),
    )


class PrivateCallback(PrivateJob, PerSampleCallback):
    r"""Make the training of a `transformers.Trainer` differentially private: `make_private` in one line.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    The Trainer's data set, collator and workers are kept. Its batches are replaced by Poisson samples: each of the N
    samples joins each step with probability q. The expected number qN is ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps``, so an epoch has as many steps as before, to within rounding. Each sample's loss is
    its own, as in `PerSampleCallback`: not the Trainer's mean over all tokens.

    **Guarantees.** Those of `gradguard.private.make_private`: the trained weights are (epsilon, delta) differentially
    private with respect to one sample of the training data, and epsilon never exceeds that of a budget. The losses
    that the Trainer logs are not covered.

    * Noise is added once for each step of the optimizer, and the step is counted before the weights change.
    * Other steps of the optimizer, and changes of the gradients after the noise, are refused.
    * A checkpoint contains the accountant's steps and the norm clipper's learned state (``gradguard_private.pt``), but
      neither noise nor which samples were drawn. A resumed run continues counting, and continues within the epoch.

    Beside the Trainer's own values it logs ``epsilon``; ``grad_norm`` is the norm of the noised average.

    ==================================================  ==========================================================
    Edge case                                           What happens
    ==================================================  ==========================================================
    a batch that draws no sample                        one stand-in sample, which does not count; noise is added
    a sample whose gradient is not finite               adds zero
    evaluation within an epoch                          the same steps
    resuming from a checkpoint without this callback    an error: the cost of its steps is not known
    ``fp16``                                            an error: a scale that follows overflows reveals samples
    a Trainer with its own ``get_train_dataloader``     an error
    an ``IterableDataset``, ``group_by_length``         an error
    ``auto_find_batch_size``                            an error
    all that `PerSampleCallback` refuses                an error
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
                "fp16: the scale of the loss follows overflows, which reveal single samples. Use bf16.",
            ),
            (
                trainer.args.auto_find_batch_size,
                "auto_find_batch_size starts again with another sampling rate, and the steps before would be "
                "forgotten. Choose per_device_train_batch_size, with gradient_accumulation_steps for the rest.",
            ),
        )

    def _get_train_dataloader(self, own: Own, trainer: Trainer) -> PrivateBatches:
        """Keep the Trainer's loader, and return Poisson batches from its data."""
        # Accelerate would wrap the loader, whose batches are not used, and take over its order.
        with replaced(trainer.accelerator, "prepare", lambda loader: loader):
            loader = own()
        parts = trainer.args.gradient_accumulation_steps
        self._batches = PrivateBatches(loader, parts, 1, lambda: self._started(trainer))
        return self._batches

    def _started(self, trainer: Trainer) -> gg.private.PrivateTraining:
        """Begin when the first batch is requested: by then the model is wrapped, and the checkpoint is read."""
        if not self._acting:
            self.begin(_run_of(trainer, trainer.model_wrapped))  # type: ignore[arg-type]
        assert self.private is not None
        return self.private


@dataclass(frozen=True)
class LoudestSample:
    """The sample that added most to a step.

    Attributes:
        step: The optimizer's step, from 1: the Trainer's ``global_step`` after it.
        micro_batch: Index of its accumulated batch, from 0.
        row: Its row in that batch, from 0.
        norm: The norm of its share of the step's gradient; NaN or inf if that is not finite.
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
        loudest_inputs: For each batch, the row of each of its tensors that belongs to the sample with the largest norm.
    """

    step: int
    norms: Sequence[Tensor]
    loudest_inputs: Sequence[Mapping[str, Tensor]]

    def loudest(self) -> LoudestSample:
        """Return the sample with the largest norm; a norm that is not finite comes before all others. A host sync."""
        tops = [(float(norms.max()), int(norms.argmax())) for norms in self.norms]  # both treat NaN as the largest
        which = max(range(len(tops)), key=lambda i: tops[i][0] if math.isfinite(tops[i][0]) else math.inf)
        norm, row = tops[which]
        return LoudestSample(self.step, which, row, norm, self.loudest_inputs[which])

    @property
    def without_a_share(self) -> list[int]:
        """The indices of accumulated batches in which no sample has a finite share above zero; a host sync.

        No token of such a batch counts: the mask leaves none, all advantages are zero, or the loss was divided by
        zero.
        """
        return _empty(self.norms).nonzero().flatten().tolist()


class SampleNormsCallback(PerSampleJob, TransformersClip):
    r"""Measure how much each sample adds to the steps of a `transformers.Trainer`, to find what caused a spike.

    .. math:: g = \sum_{i=1}^{N} g_i, \qquad
              g_i = \Bigl(\frac{\partial y_i}{\partial \theta}\Bigr)^{\!\top} \frac{\partial L}{\partial y_i}

    with :math:`y_i` the model's output for sample i and :math:`L` the Trainer's own loss, which may be any: of TRL's
    `GRPOTrainer` in each of its forms (``grpo``, ``bnpo``, ``dr_grpo``, ``dapo``), of `RLOOTrainer`, of a subclass of
    your own. The shares :math:`g_i` add up to the gradient of the step over all its accumulated batches.

    **Guarantees.**

    * The step is the Trainer's own: its loss, its gradient (summed in another order, so rounded differently), its
      ``max_grad_norm``. Nothing is clipped here, and a sample that is not finite makes the step not finite, as without
      the callback.
    * Norms are exact, or `gradguard.PerSampleGradientClipper` with ``loss_reduction="share"`` refuses the model.
    * Norms stay on the device until they are read, or the Trainer logs.

    **Logged values**, of the step that is logged: ``sample_norm_max``, ``sample_norm_median`` over its finite samples,
    ``sample_norm_max_micro_batch`` and ``sample_norm_max_row``; and ``sample_norm_empty_micro_batches``, the number of
    its batches that add nothing but count in the average, if the loss is divided by their number. A record of the run
    (`gradguard.watch`, ``gradguard run``) has the finding ``empty_micro_batch``.

    ======================================  ====================================================================
    Edge case                               What happens
    ======================================  ====================================================================
    a model that returns its loss           an error: a single number has no part of a sample. Compute the loss from
                                            logits, as TRL's trainers for preferences and rewards do
    a loss with a weight in it              an error: the weight belongs to no sample
    a batch in which nothing counts         `SampleNorms.without_a_share` has its index
    another clip among the callbacks        an error; ``max_grad_norm`` of the Trainer may be any
    training stops within a step            its measurements are dropped
    several processes or GPUs               an error
    DeepSpeed, FSDP, ``torch_compile``      an error
    ======================================  ====================================================================

    Args:
        keep: Number of steps that are kept in ``steps``.

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
    _measured: list[tuple[Tensor, Mapping[str, Tensor]]]  # norms and loudest rows of this step's batches
    _inputs: Mapping[str, Any]  # the arguments of this batch's loss
    _hooks: ExitStack

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: nothing is learned."""
        return {}

    def _refuse(self, trainer: Trainer) -> None:
        super()._refuse(trainer)
        _refuse_unfollowed(type(self).__name__, trainer)

    def _training_step(self, own: Own, trainer: Trainer, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of one batch as the Trainer does; then measure."""
        if not self._acting:
            self._refuse(trainer)
            if trainer.accelerator.native_amp:
                self._hooks.enter_context(_autocast_outside(model, trainer.accelerator.autocast))
            self.begin(_run_of(trainer, model))
        loss_of = trainer.compute_loss

        def seen(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self._inputs = dict(inputs)  # a copy: the loss may remove labels
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
        # The clipper leaves out samples that are not finite: make the gradient not finite, as without it.
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
        """Detach from the model; measurements of a step that never came are dropped. May be repeated."""
        super().end()
        self._hooks.close()
        self._norm, self._measured, self._inputs = None, [], {}


def _empty(norms: Sequence[Tensor]) -> Tensor:
    """Return, for each accumulated batch, whether none of its samples has a finite share above zero."""
    return torch.stack([~(of_batch.isfinite() & (of_batch > 0)).any() for of_batch in norms])


@contextmanager
def _autocast_outside(model: nn.Module, autocast: Callable[..., Any]) -> Iterator[None]:
    """Begin autocast before the clipper's hook on a call of the model, which has its own forward again."""
    running: list[Any] = []  # a stack of nested calls: the clipper tries the model out in its first call

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
    """Return the row of the sample with the largest norm, without a host sync."""
    if not len(norms):
        return {}
    which = norms.argmax().reshape(1)
    return {
        name: value.detach().index_select(0, which.to(value.device))[0]
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.shape[:1] == norms.shape
    }
