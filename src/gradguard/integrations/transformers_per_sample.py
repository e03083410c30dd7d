"""Hugging Face Transformers: a callback that clips each sample's gradient, under the Trainer's own loop."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType, convert_to_fp32
from torch import Tensor, nn
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError, refuse
from gradguard.integrations.accelerate import inner_optimizer
from gradguard.integrations.adapter import Run, replaced
from gradguard.integrations.sample_jobs import PerSampleJob
from gradguard.integrations.sample_losses import sample_losses
from gradguard.integrations.transformers_clip import TransformersClip

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
        self.loss = loss

    state_file = "gradguard_per_sample.pt"
    _in_step: bool  # within the forward and backward of a batch
    _compared: bool  # with the model's own loss

    def _not_begun(self) -> dict[str, Any]:
        return {**super()._not_begun(), "_in_step": False, "_compared": False}

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Begin anew: the gradients were used."""
        self._norm = None

    def _refuse(self, trainer: Trainer) -> None:
        super()._refuse(trainer)
        _refuse_other_losses(type(self).__name__, trainer)
        refuse_unfollowed(type(self).__name__, trainer)

    # -- what the Trainer does instead of its own -------------------------------------------------------------------

    def _training_step(
        self, original: Callable[..., Any], trainer: Trainer, model: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Forward and backward of one batch, of the mean of its samples' losses; then clip and sum."""
        # The Trainer would divide the loss by the number of accumulated batches.
        with without_autocast_in_forward(model), replaced(trainer, "loss_is_scaled_for_ga", True):
            if not self._acting:
                self._refuse(trainer)
                self._compared, self._norm = False, None
                self.begin(run_of(trainer, model))
            self._in_step = True
            try:
                loss = original(trainer, model, *args, **kwargs)
            finally:
                self._in_step = False
            self.after_backward()
        return loss / trainer.current_gradient_accumulation_steps  # which the Trainer adds up to log

    def _compute_loss(
        self,
        original: Callable[..., Any],
        trainer: Trainer,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not self._in_step:
            return original(trainer, model, inputs, return_outputs=return_outputs, **kwargs)
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

    def _clip_grad_norm(self, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        """Fill in the gradients of the optimizer step, once, and return their norm."""
        if self._norm is None:
            if self.clipper is None or not self._summed:
                raise UnsupportedGradientError(
                    f"nothing was clipped in this step: the {type(self).__name__} was added after its first backward. "
                    "Add it before training, or between steps as in on_step_end."
                )
            self.before_step()
            scaler = trainer.accelerator.scaler
            scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
            gradients = [p.grad for p in self.clipper.trained.values() if p.grad is not None]
            self._norm = gg.get_total_norm(gradients) / scale
        return self._norm

    _get_grad_norm = _clip_grad_norm


def run_of(trainer: Trainer, model: nn.Module) -> Run:
    """Return the run of a Trainer that has made its optimizer.

    Args:
        trainer: The Trainer.
        model: The model as it trains it.

    Returns:
        The run.
    """
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


def without_autocast_in_forward(model: nn.Module) -> AbstractContextManager[None]:
    """Give the model its own forward back, of which Accelerate has made one with autocast and float32 outputs.

    Args:
        model: The model that Accelerate has prepared.

    Returns:
        A block.
    """
    own = vars(model).get("_original_forward")  # the clipper cannot know of a precision that begins inside
    if own is None or "forward" not in vars(model):
        return nullcontext()
    return replaced(model, "forward", own)


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


def refuse_unfollowed(which: str, trainer: Trainer) -> None:
    """Raise if samples cannot be followed through the Trainer's model.

    Args:
        which: The callback, for the message.
        trainer: The Trainer.

    Raises:
        UnsupportedGradientError: If it trains in several processes or on several devices, compiled, or in float16
            whose scale is not known.
    """
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
