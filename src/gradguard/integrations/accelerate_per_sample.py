"""Hugging Face Accelerate: clip each sample's gradient in a loop that an ``Accelerator`` runs."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError, refuse
from gradguard.integrations.adapter import Run, wrap_once
from gradguard.integrations.guard_job import refuse_beside_a_guard
from gradguard.integrations.sample_jobs import PerSampleJob, check_norm_clipper, undo_division

_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)

_attached: "WeakKeyDictionary[Accelerator, PerSampleClip]" = WeakKeyDictionary()


class PerSampleClip(PerSampleJob):
    """Clips samples for an accelerator; `clip_per_sample` makes it.

    Attributes:
        norm_clipper: The rule.
        clipper: The `gradguard.PerSampleGradientClipper`; ``clipper.statistics`` has the norms of the last batch.
    """

    _accelerator: "ref[Accelerator]"  # which holds this one in its checkpoints
    _optimizer: AcceleratedOptimizer

    def attach(self, accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer) -> Self:
        """Begin, and let ``accelerator`` call this one: at each backward, at each real step, and in checkpoints."""
        self.begin(Run(model, model, [optimizer.optimizer]))
        self._accelerator, self._optimizer = ref(accelerator), optimizer
        _attached[accelerator] = self
        accelerator.register_for_checkpointing(self)
        wrap_once(Accelerator, "backward", _backward)
        wrap_once(AcceleratedOptimizer, "step", _step)
        watch_clips()
        return self

    def detach(self) -> None:
        """Give model, optimizer and accelerator back as they were; calling it again does nothing."""
        accelerator = self._accelerator()
        if accelerator is not None and _attached.get(accelerator) is self:
            del _attached[accelerator]
        self.end()


def clip_per_sample(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    norm_clipper: gg.rules.NormClipper,
    **options: Any,
) -> PerSampleClip:
    r"""Clip the gradient of each sample by ``norm_clipper``, before they are summed; the loop stays as it is.

    .. math:: \bar g = \frac1N \sum_{i=1}^{N} c_i\, \nabla \ell_i

    over all N samples of the optimizer step, those of all its accumulated batches. :math:`\ell_i` is sample i's own
    loss, of which what is passed to ``accelerator.backward`` must be the mean over the samples of its batch (or the
    sum: ``loss_reduction="sum"``). **gradguard cannot check this.** A mean over all *tokens* of a batch, where samples
    have unequal numbers of them, is not: average over each sample's own tokens first, then over samples.

    ``accelerator.backward`` clips the samples of a batch and adds them up. Its division of the loss by
    ``gradient_accumulation_steps`` is undone before. ``optimizer.step`` fills in the gradients before each real step.
    ``accelerator.save_state`` and ``load_state`` keep what the norm clipper and the noise scale have learned.

    =======================================================  ===========================================================
    Edge case                                                What happens
    =======================================================  ===========================================================
    ``accelerator.clip_grad_norm_`` beside it, or a `guard`  an error: two clips
    ``mixed_precision``                                      an error: it begins inside the model's forward, where the
                                                             clipper cannot know of it; use ``torch.autocast`` in the
                                                             loop
    several processes                                        the average is over the samples of all of them
    DeepSpeed, FSDP and other engines                        an error
    processes with `QuantileNormClipper`                     an error: thresholds would differ between them
    a second one for the same accelerator                    an error; call ``detach()`` on the first
    =======================================================  ===========================================================

    Args:
        accelerator: The accelerator.
        model: The model as ``accelerator.prepare`` returned it.
        optimizer: The optimizer as it returned it.
        norm_clipper: The rule, as for `gradguard.PerSampleGradientClipper`.
        **options: Those of `gradguard.PerSampleGradientClipper`: ``loss_reduction``, ``batch_first`` and ``mode``.

    Returns:
        The object that clips, until its `PerSampleClip.detach`. It need not be kept.

    Raises:
        InvalidTypeError: If an argument is of another type, or the optimizer is not prepared.
        InvalidValueError: If the accelerator has one already, or a guard clips the same gradients.
        UnsupportedGradientError: If it could not be exact.

    Example:
        >>> import gradguard as gg, torch
        >>> from accelerate import Accelerator
        >>> from gradguard.integrations.accelerate import clip_per_sample
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1, bias=False)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> clip = clip_per_sample(accelerator, model, optimizer, gg.FlatNormClipper(1.0))
        >>> accelerator.backward(model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).mean())
        >>> optimizer.step()
        >>> clip.clipper.statistics.norms.tolist()
        [5.0, 0.5]
        >>> clip.detach()
    """
    check_prepared("clip_per_sample", accelerator, model, optimizer)
    check_norm_clipper(norm_clipper, accelerator.num_processes)
    return PerSampleClip(norm_clipper, **options).attach(accelerator, model, optimizer)  # type: ignore[arg-type]


def check_types(accelerator: object, optimizer: object) -> None:
    """Raise unless ``accelerator`` is an Accelerator, and ``optimizer`` was prepared by one.

    Args:
        accelerator: The first argument of the user.
        optimizer: The optimizer of the user.

    Raises:
        InvalidTypeError: If one of the two is something else.
    """
    if not isinstance(accelerator, Accelerator):
        raise InvalidTypeError(f"accelerator is {type(accelerator).__name__}: expected an accelerate.Accelerator.")
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise InvalidTypeError(
            f"optimizer is {type(optimizer).__name__}, which no accelerator has prepared: expected what "
            "accelerator.prepare(model, optimizer) returned for it. Before that, parameters may still be replaced."
        )


def check_prepared(call: str, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the gradient of each sample could not be exact, or something else clips.

    Args:
        call: The call of the user, for the message.
        accelerator: The accelerator.
        model: A model that it has prepared.
        optimizer: An optimizer that it has prepared.

    Raises:
        InvalidTypeError: If ``accelerator`` is no Accelerator, or the optimizer is not prepared.
        InvalidValueError: If the accelerator has a per-sample clip already, or a guard clips the same gradients.
        UnsupportedGradientError: If it could not be exact.
    """
    check_types(accelerator, optimizer)
    if accelerator in _attached:
        raise InvalidValueError(
            "this accelerator has a per-sample clip already, and two would both clip: call detach() on the other."
        )
    replicated = isinstance(model, DistributedDataParallel)
    refuse(
        UnsupportedGradientError,
        (
            accelerator.distributed_type in _ENGINES or (accelerator.num_processes > 1 and not replicated),
            f"{call} is for one process, or several with DistributedDataParallel, and not for "
            f"{accelerator.distributed_type} with a {type(model).__name__}. In a loop of your own "
            "gg.PerSampleGradientClipper and gg.private.make_private take fully_shard.",
        ),
        (
            accelerator.native_amp or accelerator.mixed_precision != "no",
            f'mixed_precision="{accelerator.mixed_precision}" begins inside the forward of the prepared model, where '
            'the clipper cannot know of it. Leave it "no", and write `with torch.autocast(...)` round the forward.',
        ),
    )
    refuse_beside_a_guard(call, model.parameters())


def _backward(original: Callable[..., Any], accelerator: Accelerator, loss: Tensor, **kwargs: Any) -> Any:
    """Undo the division by the number of accumulated batches, which is part of no sample's own loss; then clip."""
    clip = _attached.get(accelerator)
    if clip is None:
        return original(accelerator, loss, **kwargs)
    undo_division(clip.clipper, loss, accelerator.gradient_accumulation_steps)
    done = original(accelerator, loss, **kwargs)
    clip.after_backward()
    return done


def _step(original: Callable[..., Any], optimizer: AcceleratedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """Fill in the clipped gradients before a real step."""
    if optimizer.gradient_state.sync_gradients:
        for clip in _attached.values():
            if clip._optimizer is optimizer:
                clip.before_step()
    return original(optimizer, *args, **kwargs)


def watch_clips() -> None:
    """Let Accelerate's own clips refuse what a guard or a `PerSampleClip` clips."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrap_once(Accelerator, name, partial(_clip, name))


def _clip(
    name: str,
    original: Callable[..., Any],
    accelerator: Accelerator,
    parameters: Iterable[Tensor] | Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Clip as Accelerate does, unless something of gradguard clips these parameters."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_beside_a_guard(f"accelerator.{name}", listed)
    clip = _attached.get(accelerator)
    if clip is not None and not {*map(id, clip.clipper.trained.values())}.isdisjoint(map(id, listed)):
        raise InvalidValueError(
            f"accelerator.{name} was called with gradients whose samples are clipped: one clip would be done after the "
            "other. Remove the call, or call detach() on what clip_per_sample returned."
        )
    return original(accelerator, listed, *args, **kwargs)
