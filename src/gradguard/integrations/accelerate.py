"""Hugging Face Accelerate: a Guard for an optimizer that an ``Accelerator`` has prepared, or a clip of each sample."""

# ruff: noqa: E402  (the version check comes first, so that its error comes first)

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self, cast
from weakref import WeakKeyDictionary, ref

from gradguard.integrations.versions import require

require("accelerate", "1.15", "2", "accelerate")

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, send_to_device
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from accelerate.utils.megatron_lm import MegatronLMOptimizerWrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError, refuse
from gradguard.integrations.adapter import Run, wrap_once
from gradguard.integrations.guard_job import GuardJob, ResilienceJob, check_clipper, refuse_beside_a_guard
from gradguard.integrations.sample_jobs import (
    PerSampleJob,
    PrivateBatches,
    PrivateJob,
    check_norm_clipper,
    undo_division,
)

__all__ = [
    "PerSampleClip",
    "PrivateClip",
    "clip_per_sample",
    "guard",
    "inner_optimizer",
    "make_private",
    "resilience",
]


def guard(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    clipper: gg.rules.Clipper,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> gg.Guard:
    """Clip at each real step of ``optimizer``, which ``accelerator`` has prepared; the loop needs no clip of its own.

    Call it once after ``accelerator.prepare(...)``. In addition to `gradguard.Guard`, it finds the optimizer inside
    Accelerate's, saves and loads the clipper's state with ``accelerator.save_state`` and ``load_state``, and refuses
    ``accelerator.clip_grad_norm_`` beside it.

    **Guarantees.**

    * Once for each real step: under ``accumulate()`` when the gradients are synchronised, and not before.
    * Thresholds are for unscaled gradients: with fp16 nothing needs to be unscaled by hand, and
      ``accelerator.unscale_gradients()`` before the step does no harm.
    * ``load_state`` restores the clipper and the counts bit for bit.

    **Edge cases.**

    ==========================================  ================================================================
    case                                        what happens
    ==========================================  ================================================================
    a GradScaler finds an overflow              Accelerate skips step and scheduler; the guard counts the skip
    the same, with a fused optimizer            the step is skipped; Accelerate does not notice and moves the scheduler
    the guard skips (bf16, fp32)                the scheduler moves: ``optimizer_step_was_skipped`` stays False
    ``accelerator.clip_grad_norm_`` beside it   an error; ``guard.last.norm`` is the norm before the clip
    several optimizers                          a call and a clipper for each
    ``model=None``                              parameters are named as the optimizer names them
    DeepSpeed, Megatron-LM                      an error: they own the gradients and clip them
    FSDP1                                       needs the prepared ``model``, which describes each process' part
    ==========================================  ================================================================

    Args:
        accelerator: The accelerator.
        optimizer: The optimizer as ``accelerator.prepare`` returned it.
        clipper: The rule for the gradients.
        model: The model, prepared or not; names the parameters. With FSDP the prepared one.
        **options: ``nonfinite`` and ``max_consecutive_skips``, as for `gradguard.Guard`.

    Returns:
        The guard, which is already attached, and which the accelerator saves and loads. It need not be stored.

    Raises:
        InvalidTypeError: If one of the first three is of another type, or the optimizer is not prepared.
        UnsupportedGradientError: If DeepSpeed or Megatron-LM owns the gradients.
        InvalidValueError: If the optimizer has a guard, or `gradguard.Guard` refuses an argument.

    Example:
        >>> import gradguard as gg, torch
        >>> from accelerate import Accelerator
        >>> from gradguard.integrations.accelerate import guard
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1, bias=False)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> guarded = guard(accelerator, optimizer, gg.ClipByGlobalNorm(1.0), model=model)
        >>> accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
        >>> optimizer.step()
        >>> float(guarded.last.norm), guarded.last.names
        (5.0, ('weight',))
    """
    check_types(accelerator, optimizer)
    check_clipper(clipper)
    return _begin(GuardJob(clipper, **options), accelerator, model, optimizer)


def resilience(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clipper: gg.rules.Clipper | None = None,
    *,
    extra_state: Iterable[Any] = (),
    **options: Any,
) -> gg.SpikeRecovery:
    """Skip the spikes of a run and undo its bursts: `gradguard.SpikeRecovery` after ``accelerator.prepare(...)``.

    It finds the optimizer inside Accelerate's and the accelerator's GradScaler, is saved and loaded with
    ``accelerator.save_state`` and ``load_state`` (snapshots stay in memory), and refuses
    ``accelerator.clip_grad_norm_`` beside it. The loop calls ``record_loss`` before each backward, with the loss
    before Accelerate divides it, and ``step`` after each ``optimizer.step()``.

    Args:
        accelerator: The accelerator.
        model: The prepared model.
        optimizer: The optimizer as ``accelerator.prepare`` returned it.
        clipper: The rule for the gradients; None for ``gg.ClipByMedian()``.
        extra_state: Schedulers, prepared or not, which continue at a roll-back, and further objects that it restores.
        options: Arguments of `gradguard.SpikeRecovery` by name.

    Returns:
        The `gradguard.SpikeRecovery`, which the accelerator saves and loads.

    Raises:
        InvalidTypeError: If the optimizer is not prepared, or another argument is of another type.
        UnsupportedGradientError: If DeepSpeed or Megatron-LM owns the gradients.

    Example:
        >>> import gradguard as gg, torch
        >>> from accelerate import Accelerator
        >>> from gradguard.integrations.accelerate import resilience
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1, bias=False)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> guarded = resilience(accelerator, model, optimizer, gg.ClipByGlobalNorm(1.0))
        >>> accelerator.backward(guarded.record_loss(model(torch.tensor([[3.0, 4.0]])).sum()))
        >>> optimizer.step()
        >>> guarded.step(), guarded.steps
        (None, 1)
    """
    check_types(accelerator, optimizer)
    of_guard = options.pop("guard_options", {})
    job = ResilienceJob(clipper, {"extra_state": extra_state, **options}, **of_guard)
    return _begin(job, accelerator, model, optimizer)


def _begin(job: GuardJob, accelerator: Accelerator, model: nn.Module | None, optimizer: torch.optim.Optimizer) -> Any:
    """Begin ``job`` on a prepared optimizer; return its guard, which the accelerator saves and loads."""
    watch_clips()
    job.begin(Run(model, model, [inner_optimizer(optimizer)], scaler=accelerator.scaler))
    made = job._attached[0]
    accelerator.register_for_checkpointing(made)
    return made


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside Accelerate's wrappers: the one whose hooks run once for each real step.

    Args:
        optimizer: An optimizer, prepared or not.

    Returns:
        The innermost optimizer.

    Raises:
        UnsupportedGradientError: If DeepSpeed or Megatron-LM owns the gradients.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from gradguard.integrations.accelerate import inner_optimizer
        >>> sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> inner_optimizer(Accelerator(cpu=True).prepare(sgd)) is sgd
        True
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        if isinstance(optimizer, DeepSpeedOptimizerWrapper | MegatronLMOptimizerWrapper):
            engine = "DeepSpeed" if isinstance(optimizer, DeepSpeedOptimizerWrapper) else "Megatron-LM"
            raise UnsupportedGradientError(
                f"{engine} owns the gradients and clips them itself: a Guard would receive nothing, or parts without "
                f"the whole. Set the threshold in the configuration of {engine} (gradient_clipping, clip_grad) and use "
                "no Guard."
            )
        optimizer = cast(torch.optim.Optimizer, optimizer.optimizer)
    return optimizer


_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)

_attached: "WeakKeyDictionary[Accelerator, PerSampleClip]" = WeakKeyDictionary()


class PerSampleClip(PerSampleJob):
    """Clips samples for an accelerator; `clip_per_sample` creates it.

    Attributes:
        norm_clipper: The rule.
        clipper: The `gradguard.PerSampleGradientClipper`; ``clipper.statistics`` has the norms of the last batch.
    """

    _accelerator: "ref[Accelerator]"  # a weak reference: the accelerator holds this object in its checkpoints
    _optimizer: AcceleratedOptimizer

    def attach(self, accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer) -> Self:
        """Begin, and let ``accelerator`` call this object: at each backward, at each real step, and in checkpoints."""
        self.begin(Run(model, model, [optimizer.optimizer]))
        self._accelerator, self._optimizer = ref(accelerator), optimizer
        _attached[accelerator] = self
        accelerator.register_for_checkpointing(self)
        wrap_once(Accelerator, "backward", _backward)
        wrap_once(AcceleratedOptimizer, "step", _step)
        watch_clips()
        return self

    def detach(self) -> None:
        """Detach from model, optimizer and accelerator; calling it again does nothing."""
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
    r"""Clip the gradient of each sample by ``norm_clipper``, before they are summed; the loop is unchanged.

    .. math:: \bar g = \frac1N \sum_{i=1}^{N} c_i\, \nabla \ell_i

    over all N samples of the optimizer step, including all its accumulated batches. :math:`\ell_i` is sample i's own
    loss. The loss passed to ``accelerator.backward`` must be the mean of these over the samples of its batch (or the
    sum: ``loss_reduction="sum"``). **gradguard cannot check this.** A mean over all *tokens* of a batch is not such a
    mean if samples have unequal numbers of them: average over each sample's own tokens first, then over samples.

    ``accelerator.backward`` undoes its division of the loss by ``gradient_accumulation_steps``, clips the samples of a
    batch and accumulates them. ``optimizer.step`` fills in the gradients before each real step.
    ``accelerator.save_state`` and ``load_state`` keep the learned state of the norm clipper and the noise scale.

    =======================================================  ===========================================================
    Edge case                                                What happens
    =======================================================  ===========================================================
    ``accelerator.clip_grad_norm_`` beside it, or a `guard`  an error: two clips
    ``mixed_precision``                                      an error: it begins inside the model's forward, where the
                                                             clipper cannot observe it; use ``torch.autocast`` in the
                                                             loop
    several processes                                        the average is over the samples of all of them
    DeepSpeed, FSDP and other engines                        an error
    processes with `QuantileNormClipper`                     an error: thresholds would differ between them
    a second one for the same accelerator                    an error; call ``detach()`` on the first
    =======================================================  ===========================================================

    Args:
        accelerator: The accelerator.
        model: The model as ``accelerator.prepare`` returned it.
        optimizer: The optimizer as ``accelerator.prepare`` returned it.
        norm_clipper: The rule, as for `gradguard.PerSampleGradientClipper`.
        **options: Arguments of `gradguard.PerSampleGradientClipper`: ``loss_reduction``, ``batch_first``, ``mode``.

    Returns:
        The object that clips, until its `PerSampleClip.detach`. It need not be stored.

    Raises:
        InvalidTypeError: If an argument is of another type, or the optimizer is not prepared.
        InvalidValueError: If the accelerator has one already, or a guard clips the same gradients.
        UnsupportedGradientError: If the clip could not be exact.

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


class PrivateClip(PrivateJob, PerSampleClip):
    """One private training of an accelerator; `make_private` creates it.

    Attributes:
        loader: The loader to loop over. It yields ``gradient_accumulation_steps`` batches for each step, on the
            accelerator's device.
        private: The `gradguard.private.PrivateTraining`: ``private.epsilon()``, ``private.steps``.
        norm_clipper: The rule.
        clipper: Its `gradguard.PerSampleGradientClipper`.
    """

    _trainer_plans = False
    loader: PrivateBatches


def make_private(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    privacy: gg.private.PrivacyBudget | gg.private.FixedNoise,
    norm_clipper: gg.rules.NormClipper | None = None,
    *,
    secure: bool = False,
    seed: int | None = None,
    **options: Any,
) -> PrivateClip:
    r"""Make training differentially private; the loop is unchanged, except for the loader.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    Loop over ``loader`` of the result: Poisson samples of the same data set, in which each of the N samples joins each
    step with probability q. The expected number qN is the loader's batch size times ``gradient_accumulation_steps``
    times the number of processes. ``accelerator.backward`` undoes its division by ``gradient_accumulation_steps``,
    clips each sample and accumulates them. Before a real step, ``optimizer.step`` adds the noise and counts the step.
    ``accelerator.save_state`` saves the counts, but neither noise nor which samples were drawn; ``load_state``
    continues, within the epoch too.

    **Guarantees.** Those of `gradguard.private.make_private`.

    ==============================================  ============================================================
    Edge case                                       What happens
    ==============================================  ============================================================
    a batch that draws no sample                    one stand-in sample, which does not count; noise is added
    several processes (DistributedDataParallel)     one Poisson sample, in equal parts; one process adds noise
    a loop over another loader                      an error at the first ``accelerator.backward``
    ``optimizer.step`` within an accumulation       no step, as in Accelerate
    ``save_state`` within an accumulation           an error: the sums have no noise yet
    an epoch left within an accumulation            an error at the next step: Accelerate continues to count
    anything that `clip_per_sample` refuses         an error
    ==============================================  ============================================================

    Args:
        accelerator: The accelerator.
        model: The model as ``accelerator.prepare`` returned it.
        optimizer: The optimizer as ``accelerator.prepare`` returned it.
        loader: The DataLoader before ``prepare``, with ``batch_size`` and ``shuffle``.
        privacy: A `gradguard.private.PrivacyBudget` for the whole training, or a `gradguard.private.FixedNoise`.
        norm_clipper: The rule; None bounds each sample's gradient by 1, as ``gg.FlatNormClipper(1.0)``.
        secure: As for `gradguard.private.make_private`.
        seed: As for `gradguard.private.make_private`.
        **options: Arguments of `gradguard.PerSampleGradientClipper`: ``loss_reduction``, ``batch_first``, ``mode``.

    Returns:
        The training.

    Raises:
        InvalidTypeError: If an argument is of another type, the optimizer is not prepared, or the loader is prepared.
        InvalidValueError: If arguments contradict each other, or another object clips.
        UnsupportedGradientError: If the guarantee could not be kept.

    Example:
        >>> import gradguard as gg, torch
        >>> from accelerate import Accelerator
        >>> from torch.utils.data import DataLoader
        >>> from gradguard.integrations.accelerate import make_private
        >>> accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), torch.nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loader = DataLoader(torch.randn(40, 2), batch_size=5, shuffle=True)
        >>> private = make_private(accelerator, model, optimizer, loader,
        ...                        gg.private.PrivacyBudget(epsilon=3.0, delta=1e-3, epochs=1, accountant="rdp"))
        >>> for batch in private.loader:
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(model(batch).square().mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> private.private.steps, 2.99 < private.private.epsilon() <= 3.0
        (4, True)
        >>> private.detach()

    Reference: Abadi et al., Deep learning with differential privacy, 2016, arXiv 1607.00133.
    """
    check_prepared("make_private", accelerator, model, optimizer)
    assert isinstance(optimizer, AcceleratedOptimizer)
    if isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
        raise InvalidTypeError(
            f"loader is a {type(loader).__name__}, which accelerator.prepare has made: expected the DataLoader before "
            "prepare, because other batches are drawn from it."
        )
    clip = PrivateClip(privacy, norm_clipper, secure=secure, seed=seed, **options)
    clip.loader = clip._batches = PrivateBatches(
        loader,
        accelerator.gradient_accumulation_steps,
        accelerator.num_processes,
        lambda: clip.private,
        partial(send_to_device, device=accelerator.device),
    )
    return clip.attach(accelerator, model, optimizer)


def check_types(accelerator: object, optimizer: object) -> None:
    """Raise unless ``accelerator`` is an Accelerator, and ``optimizer`` was prepared by one.

    Args:
        accelerator: The user's accelerator.
        optimizer: The user's optimizer.

    Raises:
        InvalidTypeError: If one of the two is something else.
    """
    if not isinstance(accelerator, Accelerator):
        raise InvalidTypeError(f"accelerator is {type(accelerator).__name__}: expected an accelerate.Accelerator.")
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise InvalidTypeError(
            f"optimizer is {type(optimizer).__name__}, which no accelerator has prepared: expected the result of "
            "accelerator.prepare(model, optimizer). Before that, parameters may still be replaced."
        )


def check_prepared(call: str, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the clip of each sample could not be exact, or another object clips.

    Args:
        call: The user's call, for the message.
        accelerator: The accelerator.
        model: A model that it has prepared.
        optimizer: An optimizer that it has prepared.

    Raises:
        InvalidTypeError: If ``accelerator`` is not an Accelerator, or the optimizer is not prepared.
        InvalidValueError: If the accelerator has a per-sample clip already, or a guard clips the same gradients.
        UnsupportedGradientError: If the clip could not be exact.
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
            'the clipper cannot observe it. Leave it "no", and write `with torch.autocast(...)` around the forward.',
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
    """Let Accelerate's own clips refuse parameters that a guard or a `PerSampleClip` clips."""
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
    """Clip as Accelerate does, unless gradguard clips these parameters."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_beside_a_guard(f"accelerator.{name}", listed)
    clip = _attached.get(accelerator)
    if clip is not None and not {*map(id, clip.clipper.trained.values())}.isdisjoint(map(id, listed)):
        raise InvalidValueError(
            f"accelerator.{name} was called with gradients whose samples are clipped: one clip would be done after the "
            "other. Remove the call, or call detach() on the result of clip_per_sample."
        )
    return original(accelerator, listed, *args, **kwargs)
