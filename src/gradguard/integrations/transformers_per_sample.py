"""Hugging Face Transformers: a callback that clips each sample's gradient, under the Trainer's own loop."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.integrations.one_clip import OnlyClip, wrap_once
from gradguard.integrations.per_sample import check_norm_clipper, refuse_other_clips
from gradguard.integrations.sample_losses import sample_losses
from gradguard.integrations.versions import require

require("transformers", "5.23", "6", "transformers")

from accelerate.utils import DistributedType, convert_to_fp32  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402
from transformers.trainer_callback import CallbackHandler  # noqa: E402

_MAX_GRAD_NORMS = (0, TrainingArguments.max_grad_norm)  # none, and the default, which nobody may have asked for
_AGREEMENT = {torch.float32: 1e-4, torch.float64: 1e-9}  # in half precision the two losses round differently

SampleLosses = Callable[[Any, Mapping[str, Any]], Tensor]


class PerSampleCallback(TrainerCallback, OnlyClip):
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
    * A checkpoint holds what the norm clipper and the noise scale have learned (``gradguard_per_sample.pt``, beside the
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
    removed within a step                   an error
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
        noise_scale: As for `gradguard.PerSampleGradientClipper`; read it from ``callback.clipper.noise_scale``.

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
        noise_scale: bool | int = False,
    ) -> None:
        check_norm_clipper(norm_clipper)
        if loss is not None and not callable(loss):
            raise InvalidTypeError(f"loss: expected a function of outputs and inputs, or None, got {loss!r}.")
        self.norm_clipper, self.loss = norm_clipper, loss
        self.clipper: gg.PerSampleGradientClipper | None = None
        self._mode, self._noise_scale = mode, noise_scale
        self._at_first = copy.deepcopy(norm_clipper.state_dict())
        self._loaded: dict[str, Any] | None = None  # from a checkpoint, until there is a clipper
        self._attached = self._in_step = self._compared = False
        self._summed = False  # samples of this optimizer step were accumulated
        self._norm: Tensor | None = None  # of the gradients that pre_step has filled in
        self._begun = False
        _watch_trainers()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: the rule, and no clipper, which is on this model."""
        gone = {"clipper": None, "_attached": False, "_in_step": False, "_summed": False, "_norm": None}
        return {**vars(self), **gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _watch_trainers()  # it may be another process

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make sure that the gradients are clipped ones.

        Raises:
            UnsupportedGradientError: If the Trainer has not let the callback fill them in.
        """
        del args, state, control, kwargs
        if self._norm is None:
            raise UnsupportedGradientError(
                "the Trainer has not asked gradguard for the clipped gradients of this step: its class seems to have "
                "methods _clip_grad_norm and _get_grad_norm of its own. Let them return what super() returns, or "
                f"remove the {type(self).__name__}."
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin anew: the gradients were used."""
        del args, state, control, kwargs
        self._norm = None

    # -- what makes the gradients of a step, and what is saved of it -------------------------------------------------

    state_file = "gradguard_per_sample.pt"
    """Where a checkpoint holds the state."""

    @property
    def _clips(self) -> gg.PerSampleGradientClipper | gg.private.PrivateTraining:
        """Who clips after each backward, and fills in the gradients before each step."""
        assert self.clipper is not None
        return self.clipper

    def _make_clipper(self, trainer: Trainer, model: nn.Module) -> gg.PerSampleGradientClipper:
        state, self._loaded = self._loaded, None
        if state is None and self._begun:
            self.norm_clipper.load_state_dict(copy.deepcopy(self._at_first))
        clipper = gg.PerSampleGradientClipper(
            model, self.norm_clipper, mode=self._mode, scaler=trainer.accelerator.scaler, noise_scale=self._noise_scale
        )
        if state is not None:
            clipper.load_state_dict(state)
        return clipper

    def _state(self) -> dict[str, Any]:
        assert self.clipper is not None
        return self.clipper.state_dict()

    def _refuse(self, trainer: Trainer) -> None:
        _refuse(self, trainer)

    # -- what the Trainer does instead of its own -------------------------------------------------------------------

    def _training_step(
        self, original: Callable[..., Any], trainer: Trainer, model: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Forward and backward of one batch, of the mean of its samples' losses; then clip and sum."""
        with _without_autocast_in_forward(model), _undivided(trainer):
            if not self._attached:
                self._attach(trainer, model)
            assert self.clipper is not None
            self._in_step = True
            try:
                loss = original(trainer, model, *args, **kwargs)
            finally:
                self._in_step = False
            self._clips.clip_and_accumulate()
            self._summed = True
        return loss / trainer.current_gradient_accumulation_steps  # which the Trainer adds up to log

    def _compute_loss(self, trainer: Trainer, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if self.loss is None and not self._compared:
            self._compare_with_the_models_own(trainer, model, inputs)
            self._compared = True
        given = inputs if self.loss is not None else {k: v for k, v in inputs.items() if k != "labels"}
        outputs = _forward(trainer, model, given)
        if self.loss is None:
            losses = _losses_of(trainer, outputs, inputs)[0]
        else:
            losses = self.loss(outputs, inputs)
            _check_losses(losses, inputs)
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
            own = outputs.get("loss") if isinstance(outputs, Mapping) else None
            ours = (losses * counts).sum() / counts.sum()
        if not isinstance(own, Tensor) or own.numel() != 1:
            raise UnsupportedGradientError(
                f"{type(model).__name__} returned no loss for a batch with labels, with which to compare the losses of "
                "samples. Give PerSampleCallback(..., loss=function) a function that returns one loss for each sample."
            )
        bar = _AGREEMENT.get(outputs["logits"].dtype, 0.02) if not trainer.accelerator.native_amp else 0.02
        if bool(counts.sum() == 0) or bool(torch.isclose(own.to(ours), ours, rtol=bar, atol=bar)):
            return
        if not bool(own.isfinite()):
            return  # a sample with a gradient that is not finite adds zero, and there is nothing to compare
        raise UnsupportedGradientError(
            f"{type(model).__name__} has a loss of {float(own):.6g} on the first batch, and its tokens' or samples' "
            f"losses from logits and labels have a mean of {float(ours):.6g}: its loss is another one, and what is in "
            "it besides would be left out. Give PerSampleCallback(..., loss=function) a function that returns one "
            "loss for each sample."
        )

    def _attach(self, trainer: Trainer, model: nn.Module) -> None:
        self._refuse(trainer)
        self.clipper = self._make_clipper(trainer, model)
        self._attached = self._begun = True
        self._compared, self._norm = False, None

    def _release(self) -> None:
        if self.clipper is not None and self._attached:
            self.clipper.discard()
            self.clipper.detach()
        self._attached, self._summed, self._norm = False, False, None

    def _norm_of_step(self, trainer: Trainer) -> Tensor:
        """Fill in the gradients of the optimizer step, once, and return their norm."""
        if self._norm is None:
            if self.clipper is None or not self._summed:
                raise UnsupportedGradientError(
                    f"nothing was clipped in this step: the {type(self).__name__} was added after its first backward. "
                    "Add it before training, or between steps as in on_step_end."
                )
            self._clips.pre_step()
            self._summed = False
            scaler = trainer.accelerator.scaler
            scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
            gradients = [p.grad for p in self.clipper.trained.values() if p.grad is not None]
            self._norm = gg.get_total_norm(gradients) / scale
        return self._norm


def _losses_of(trainer: Trainer, outputs: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    if not isinstance(outputs, Mapping) or not isinstance(outputs.get("logits"), Tensor):
        raise UnsupportedGradientError(
            "the model returned no logits, from which samples' own losses could be made. Give "
            "PerSampleCallback(..., loss=function) a function that returns one loss for each sample."
        )
    config = getattr(trainer.model, "config", None)
    shifted = getattr(trainer.model, "loss_function", None) is ForCausalLMLoss  # the Trainer's own word misses GPT-2
    if getattr(config, "is_encoder_decoder", False):
        shifted = False
    problem_type = getattr(config, "problem_type", None)
    return sample_losses(outputs["logits"], inputs["labels"], shifted=shifted, problem_type=problem_type)


def _check_losses(losses: object, inputs: Mapping[str, Any]) -> None:
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        came = f"a tensor of shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidTypeError(
            f"loss returned {came}: expected a tensor [B], one loss for each sample, that is neither averaged nor "
            "summed over them."
        )
    sizes = {len(v) for v in inputs.values() if isinstance(v, Tensor) and v.ndim > 0}
    if sizes and len(losses) not in sizes:
        raise InvalidValueError(
            f"loss returned {len(losses)} losses for a batch with {sorted(sizes)} rows: expected one for each sample."
        )


def _forward(trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The forward with the Trainer's precision: its own autocast is inside ``model.forward``, and is off meanwhile."""
    with trainer.accelerator.autocast():
        outputs = model(**inputs)
    return convert_to_fp32(outputs) if trainer.accelerator.native_amp else outputs


@contextlib.contextmanager
def _without_autocast_in_forward(model: nn.Module) -> Iterator[None]:
    """Give the model its own forward back, of which Accelerate has made one with autocast and float32 outputs.

    The clipper looks at what goes on inside the model, and cannot know the precision that begins in there.
    """
    own, wrapped = vars(model).get("_original_forward"), vars(model).get("forward")
    if own is None or wrapped is None:
        yield
        return
    model.forward = own
    try:
        yield
    finally:
        model.forward = wrapped


@contextlib.contextmanager
def _undivided(trainer: Trainer) -> Iterator[None]:
    """Keep the Trainer from dividing the loss by the number of accumulated batches."""
    before = trainer.loss_is_scaled_for_ga
    trainer.loss_is_scaled_for_ga = True
    try:
        yield
    finally:
        trainer.loss_is_scaled_for_ga = before


def _refuse(callback: PerSampleCallback, trainer: Trainer) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    which = type(callback).__name__
    refuse_other_clips(callback, trainer.callback_handler.callbacks)
    if args.max_grad_norm not in _MAX_GRAD_NORMS:
        raise InvalidValueError(
            f"TrainingArguments has max_grad_norm={args.max_grad_norm!r}, and there is a {which}: one clip "
            "would be done after the other. Pass max_grad_norm=0, or leave the callback out."
        )
    for name, where in (("compute_loss", "loss"), ("training_step", "step")):
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(Trainer, name):
            raise UnsupportedGradientError(
                f"{type(trainer).__name__} has a {name} of its own, so its {where} is not the one whose gradients are "
                f"clipped. Use Trainer itself, and give {which}(..., loss=function) a function that returns one loss "
                "for each sample."
            )
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        option = "compute_loss_func" if trainer.compute_loss_func is not None else "label_smoothing_factor"
        raise UnsupportedGradientError(
            f"{option} is set: a loss of the whole batch, and not the one whose gradients are clipped. Leave it out, "
            f"and give {which}(..., loss=function) a function that returns one loss for each sample."
        )
    if accelerator.distributed_type != DistributedType.NO or args.n_gpu > 1:
        raise UnsupportedGradientError(
            f"{which} trains in one process on one device, and not with {accelerator.distributed_type} on "
            f"{max(args.n_gpu, accelerator.num_processes)} of them. Use a loop of your own, in which "
            "gg.PerSampleGradientClipper and gg.private.make_private take DistributedDataParallel and fully_shard."
        )
    if args.torch_compile:
        raise UnsupportedGradientError(
            "torch_compile is on: the layers inside a compiled model cannot be followed. Leave it out."
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise UnsupportedGradientError(
            f'optim="{optim}" steps inside backward, where no sample has been clipped yet. Choose an optimizer that '
            'steps after backward, such as "adamw_torch_fused".'
        )
    if args.fp16 and accelerator.scaler is None and accelerator.native_amp and args.device.type != "cpu":
        raise UnsupportedGradientError(
            "fp16 without a GradScaler of Accelerate's: the scale of the loss cannot be told. Use bf16."
        )


def _watch_trainers() -> None:
    """Let every Trainer that has a `PerSampleCallback` ask it; the others do as before."""
    wrap_once(Trainer, "train", _train)
    wrap_once(Trainer, "training_step", _training_step)
    wrap_once(Trainer, "compute_loss", _compute_loss)
    wrap_once(Trainer, "_clip_grad_norm", _clip_grad_norm)
    wrap_once(Trainer, "_get_grad_norm", _get_grad_norm)
    wrap_once(Trainer, "_save_optimizer_and_scheduler", _save_optimizer_and_scheduler)
    wrap_once(Trainer, "_load_optimizer_and_scheduler", _load_optimizer_and_scheduler)
    wrap_once(CallbackHandler, "remove_callback", _take_out)
    wrap_once(CallbackHandler, "pop_callback", _take_out)


def _callback_of(trainer: Trainer) -> PerSampleCallback | None:
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, PerSampleCallback)), None)


def _train(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback = _callback_of(trainer)
    if callback is not None:
        callback._refuse(trainer)
        callback._loaded = None  # left by a training that failed before its first batch
    try:
        return original(trainer, *args, **kwargs)
    finally:
        for one in trainer.callback_handler.callbacks:
            if isinstance(one, PerSampleCallback):
                one._release()


def _training_step(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback = _callback_of(trainer)
    if callback is None:
        return original(trainer, *args, **kwargs)
    return callback._training_step(original, trainer, *args, **kwargs)


def _compute_loss(
    original: Callable[..., Any],
    trainer: Trainer,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    **kwargs: Any,
) -> Any:
    callback = _callback_of(trainer)
    if callback is None or not callback._in_step:
        return original(trainer, model, inputs, return_outputs=return_outputs, **kwargs)
    return callback._compute_loss(trainer, model, inputs, return_outputs)


def _clip_grad_norm(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback = _callback_of(trainer)
    return original(trainer, *args, **kwargs) if callback is None else callback._norm_of_step(trainer)


def _get_grad_norm(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback = _callback_of(trainer)
    return original(trainer, *args, **kwargs) if callback is None else callback._norm_of_step(trainer)


def _save_optimizer_and_scheduler(original: Callable[..., Any], trainer: Trainer, output_dir: str) -> Any:
    done, callback = original(trainer, output_dir), _callback_of(trainer)
    if callback is not None and callback.clipper is not None and trainer.args.should_save:
        torch.save(callback._state(), Path(output_dir) / callback.state_file)
    return done


def _load_optimizer_and_scheduler(original: Callable[..., Any], trainer: Trainer, checkpoint: str | None) -> Any:
    done, callback = original(trainer, checkpoint), _callback_of(trainer)
    if callback is not None and checkpoint is not None:
        path = Path(checkpoint) / callback.state_file
        callback._loaded = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None
    return done


def _take_out(original: Callable[..., Any], handler: CallbackHandler, *args: Any, **kwargs: Any) -> Any:
    before = list(handler.callbacks)
    done = original(handler, *args, **kwargs)
    for callback in before:
        if isinstance(callback, PerSampleCallback) and callback not in handler.callbacks:
            if callback._summed or callback._in_step or callback._norm is not None:
                handler.callbacks[:] = before
                raise InvalidValueError(
                    f"a {type(callback).__name__} was removed within an optimizer step, some of whose samples it has "
                    "clipped already: the step would have lost them. Remove it between steps, as in on_step_end."
                )
            callback._release()
    return done
