"""Hugging Face Accelerate: a Guard for an optimizer that an ``Accelerator`` has prepared."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from gradguard.integrations.adapter import Run
from gradguard.integrations.guard_job import GuardJob, ResilienceJob, check_clipper
from gradguard.integrations.versions import require

require("accelerate", "1.15", "2", "accelerate")

from accelerate import Accelerator  # noqa: E402  (the version comes first, so that it is what an error is about)
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # noqa: E402
from accelerate.utils.megatron_lm import MegatronLMOptimizerWrapper  # noqa: E402

from gradguard.integrations.accelerate_per_sample import (  # noqa: E402
    PerSampleClip,
    check_types,
    clip_per_sample,
    watch_clips,
)
from gradguard.integrations.accelerate_private import PrivateClip, make_private  # noqa: E402

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
    """Clip at each real step of ``optimizer``, which ``accelerator`` has prepared; the loop needs no clip any more.

    One line after ``accelerator.prepare(...)``. What it adds to `gradguard.Guard`: it finds the optimizer inside
    Accelerate's, saves and loads the clipper's state with ``accelerator.save_state`` and ``load_state``, and refuses
    ``accelerator.clip_grad_norm_`` beside it.

    **Guarantees.**

    * Once for each real step: under ``accumulate()`` when the gradients are synchronised, and not before.
    * Thresholds are for unscaled gradients: with fp16 nothing needs to be unscaled by hand, and
      ``accelerator.unscale_gradients()`` before the step does no harm.
    * ``load_state`` brings the clipper and the counts back bit for bit.

    **Edge cases.**

    ==========================================  ================================================================
    case                                        what happens
    ==========================================  ================================================================
    a GradScaler finds an overflow              Accelerate skips step and scheduler; the guard counts the skip
    the same, with a fused optimizer            the step is skipped; Accelerate does not know and moves the scheduler
    the guard skips (bf16, fp32)                the scheduler moves: ``optimizer_step_was_skipped`` stays False
    ``accelerator.clip_grad_norm_`` beside it   an error; ``guard.last.norm`` is the norm before the clip
    several optimizers                          a call and a clipper for each
    ``model=None``                              parameters are called as the optimizer calls them
    DeepSpeed, Megatron-LM                      an error: they clip by themselves, with gradients that are their own
    FSDP1                                       needs the prepared ``model``, which knows what part each process has
    ==========================================  ================================================================

    Args:
        accelerator: The accelerator.
        optimizer: The optimizer as ``accelerator.prepare`` returned it.
        clipper: The rule for the gradients.
        model: The model, prepared or not; names the parameters. With FSDP the prepared one.
        **options: ``nonfinite`` and ``max_consecutive_skips``, as for `gradguard.Guard`.

    Returns:
        The guard, which acts already, and which the accelerator saves and loads. It need not be kept.

    Raises:
        InvalidTypeError: If one of the first three is of another type, or the optimizer is not prepared.
        UnsupportedGradientError: If DeepSpeed or Megatron-LM owns the gradients.
        InvalidValueError: If the optimizer has a guard, or an argument is not one that `gradguard.Guard` takes.

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
    as it is before Accelerate divides it, and ``step`` after each ``optimizer.step()``.

    Args:
        accelerator: The accelerator.
        model: The prepared model.
        optimizer: The optimizer as ``accelerator.prepare`` returned it.
        clipper: The rule for the gradients; None for ``gg.ClipByMedian()``.
        extra_state: Further objects that a roll-back restores, such as schedulers, prepared or not.
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
        optimizer: A prepared optimizer, or one that is not.

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
                f"{engine} owns the gradients and clips them itself: a Guard would see nothing, or parts without the "
                f"whole. Set the threshold in the configuration of {engine} (gradient_clipping, clip_grad) and use no "
                "Guard."
            )
        optimizer = cast(torch.optim.Optimizer, optimizer.optimizer)
    return optimizer
