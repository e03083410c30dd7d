"""gradguard in Lightning: callbacks for the Trainer, for the batch or for samples, and one call for Fabric."""

# ruff: noqa: E402  (the version comes first, so that it is what an error is about)

from collections.abc import Callable
from typing import Any

from gradguard.integrations.versions import require

require("lightning", "2.6", "2.7", "lightning")

from lightning.fabric import Fabric
from lightning.fabric.wrappers import is_wrapped
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

import gradguard as gg
from gradguard.integrations.adapter import Run, wrap_once
from gradguard.integrations.guard_job import (
    Clippers,
    GuardJob,
    OnlyGuard,
    ResilienceJob,
    refuse_beside_a_guard,
)
from gradguard.integrations.lightning_clip import LightningClip
from gradguard.integrations.lightning_per_sample import PerSampleCallback
from gradguard.integrations.lightning_private import PrivateCallback
from gradguard.policies import GuardPolicy
from gradguard.torch_private import is_fsdp1

__all__ = ["GradGuardCallback", "PerSampleCallback", "PrivateCallback", "ResilienceCallback", "guard_fabric"]


class GradGuardCallback(GuardJob, LightningClip):
    """Clip at each optimizer step of a Lightning Trainer, log what the clip did, and resume with the checkpoint.

    It attaches a `Guard` to each optimizer. That acts after ``on_before_optimizer_step`` of all callbacks and of the
    module, in the place of ``Trainer(gradient_clip_val=...)``: the gradients are those of this step, accumulated,
    averaged over processes and unscaled, and a hook that logs their norm sees them before the clip.

    **Guarantees.**

    * Once for each optimizer step: automatic or manual optimization, ``accumulate_grad_batches``, closures, LBFGS,
      also where ``self.optimizers(use_pl_optimizer=False)`` is stepped, for which Lightning calls no hook.
    * All precisions: 32-true, 64-true, 16-true, bf16-true, bf16-mixed, and 16-mixed also with a fused optimizer, which
      ``gradient_clip_val`` refuses. Thresholds are for gradients without the loss scale.
    * One device, DDP, ModelParallelStrategy (FSDP2) and FSDPStrategy (FSDP1): the norm is that of the
      whole gradient, the same on all processes.
    * A run that is resumed goes on bit by bit: clippers and counts are in the checkpoint.
    * ``"skip"``: the step does not happen, and weights and optimizer state stay as they were. Lightning counts it in
      ``global_step`` and steps its schedulers all the same.

    **Edge cases.**

    ===========================================  =================================================================
    case                                         what happens
    ===========================================  =================================================================
    ``gradient_clip_val`` is set                 an error: two clips would act, and the second sees the first's
    ``self.clip_gradients`` in the module        an error, for optimizers that are guarded: two clips
    ``configure_gradient_clipping`` overridden   it acts first; the norm that is logged is what it leaves
    several optimizers, one clipper              an error says what to pass: two histories must not mix
    ``configure_optimizers`` returns None        an error: there is nothing to attach to
    DeepSpeedStrategy                            an error: its engine owns the gradients
    ``fit`` again                                the history goes on with the same module, and begins anew with another
    copied, pickled                              the copy has no guards, and begins anew with its own ``fit``
    optimizers replaced while training           the new ones are guarded from the next batch on
    16-mixed, overflow                           the scaler skips the step; ``guards[0].skipped_steps`` counts it
    ``training_step`` returns None               nothing is clipped: there are no new gradients
    no optimizer step in a batch                 nothing is logged for it
    ``Tuner.lr_find``                            its search runs without callbacks, so without the clip
    ===========================================  =================================================================

    Args:
        clipper: The rule. For several optimizers: one for each in a list, in the order of ``configure_optimizers``,
            with None for one that is left alone.
        nonfinite: As for `Guard`: ``"skip"``, ``"propagate"``, ``"raise"`` or ``"zero"``.
        max_consecutive_skips: As for `Guard`.
        log: First part of the names that are logged after each step, as Lightning logs (``log_every_n_steps``):
            ``gradients/norm`` (before the clip), ``gradients/coefficient`` and ``gradients/clipped`` (1 where the clip
            changed them, else 0). With several optimizers their position follows: ``gradients/1/norm``. None logs
            nothing. Nothing waits for an accelerator.

    Attributes:
        guards: The `Guard` of each optimizer by position, once training has begun, also afterwards:
            ``guards[0].last``, ``guards[0].skipped_steps``.

    Raises:
        InvalidTypeError: If ``clipper`` is none of these; the trainer and the module are checked when ``fit`` begins.
        InvalidValueError: If ``nonfinite`` or ``max_consecutive_skips`` is none that `Guard` takes.

    Example:
        >>> import gradguard as gg, torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from gradguard.integrations.lightning import GradGuardCallback
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters(), fused=True)
        >>> callback = GradGuardCallback(gg.ClipByMedian())
        >>> trainer = Trainer(max_epochs=1, callbacks=[callback])
        >>> # trainer.fit(Model(), loader)
    """

    def __init__(
        self,
        clipper: Clippers,
        *,
        nonfinite: GuardPolicy = "skip",
        max_consecutive_skips: int | None = 20,
        log: str | None = "gradients",
    ) -> None:
        super().__init__(clipper, nonfinite, max_consecutive_skips)
        self._prefix = log

    _logged: dict[int, int]  # steps of each guard when it was last logged
    _optimizers: list[Optimizer]  # all that are guarded or left alone on purpose

    def _not_begun(self) -> dict[str, Any]:
        return {**super()._not_begun(), "_logged": {}, "_optimizers": []}

    # -- hooks of Lightning -----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers, which the strategy has made by now."""
        _refuse_no_optimizer(trainer, pl_module)
        self._optimizers, self._logged = list(trainer.optimizers), {}
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        model = _model_to_name(pl_module, trainer.strategy.model)
        self.begin(Run(pl_module, model, self._optimizers, schedulers, _scaler_of(trainer)))
        wrap_once(Precision, "clip_gradients", _clip_of_the_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Attach to optimizers that have come in the meantime, which other callbacks may make."""
        if list(map(id, trainer.optimizers)) != list(map(id, self._optimizers)):
            self.on_fit_start(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Refuse a ``gradient_clip_val`` that has been set since; the guard clips once this has returned."""
        del optimizer
        self._refuse(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log what the steps of this batch did."""
        for position, guard in self.guards.items():
            if self._prefix is not None and guard.last is not None and guard.steps != self._logged.get(position):
                self._logged[position] = guard.steps
                self._log(pl_module, position, guard.last)

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        super()._refuse(trainer, module)
        _refuse_engine(trainer.strategy)

    def _log(self, pl_module: LightningModule, position: int, result: gg.results.ClipResult) -> None:
        name = self._prefix if len(self._optimizers) == 1 else f"{self._prefix}/{position}"
        values = {
            "norm": result.norm,
            "coefficient": result.coefficient,
            "clipped": (result.clipped & ~result.nonfinite).float(),
        }
        for key, value in values.items():
            pl_module.log(f"{name}/{key}", value, on_step=True, on_epoch=False)


class ResilienceCallback(ResilienceJob, GradGuardCallback):
    """A `GradGuardCallback` with `gradguard.SpikeRecovery`: spikes are skipped, bursts undone.

    It hears the loss of each backward, and acts at the end of each batch; schedulers keep their place when weights go
    back, and so does the data. The checkpoint holds the clipper, the detector, the number of steps and the events;
    snapshots stay in memory. Under 16-mixed Lightning passes the scaled loss, so that only the gradient norms are
    judged. Modules with several optimizers are refused.

    Args:
        clipper: The rule; None for ``gg.ClipByMedian()``.
        options: Arguments of `gradguard.SpikeRecovery` by name: ``detector``, ``extra_state``, ``snapshot_every``,
            ``lr_factor``, ...
        **of_guard: ``nonfinite``, ``max_consecutive_skips`` and ``log``, as for `GradGuardCallback`.

    Attributes:
        resilience: The `gradguard.SpikeRecovery` of the current or the last fit; None before the first.

    Raises:
        InvalidTypeError: If ``clipper`` is none.
        InvalidValueError: If ``options`` has a name that `gradguard.SpikeRecovery` does not take.

    Example:
        >>> import gradguard as gg
        >>> from lightning.pytorch import Trainer
        >>> from gradguard.integrations.lightning import ResilienceCallback
        >>> callback = ResilienceCallback(gg.ClipByGlobalNorm(1.0), {"snapshot_every": 100})
        >>> trainer = Trainer(max_epochs=1, callbacks=[callback])
    """

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Take the loss of a micro-batch, which Lightning has divided by their number where it steps by itself."""
        if self.resilience is not None and _scaler_of(trainer) is None:
            times = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.resilience.record_loss(loss.detach() * times)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log, and act on what was measured some steps ago.

        Raises:
            SpikeError: If going back does not cure the run.
        """
        super().on_train_batch_end(trainer, pl_module)
        if self.resilience is not None:
            self.resilience.step()


def guard_fabric(
    fabric: Fabric,
    module: nn.Module | None,
    optimizer: Optimizer,
    clipper: gg.rules.Clipper,
    **options: Any,
) -> gg.Guard:
    """Clip at each step of an optimizer that Fabric has set up: one call after ``fabric.setup``, and the loop stays.

    It replaces ``fabric.clip_gradients(module, optimizer, max_norm=...)`` before each step, which is an error beside it
    for the same parameters: two clips, one after the other. The `Guard` is attached to the optimizer inside Fabric's,
    so that it hears of Fabric's GradScaler: under 16-mixed, thresholds are for gradients without the loss scale, and
    fused optimizers are served, which ``fabric.clip_gradients`` refuses.

    Args:
        fabric: The Fabric.
        module: The module as ``fabric.setup`` returned it; names the parameters, and is needed for FSDP1. None if there
            are many.
        optimizer: The optimizer as ``fabric.setup`` returned it, or the optimizer inside.
        clipper: The rule.
        **options: ``nonfinite`` and ``max_consecutive_skips``, as for `gradguard.Guard`.

    Returns:
        The guard: ``guard.last``, ``guard.detach()``. ``fabric.save(path, {"guard": guard, ...})`` keeps its state and
        ``fabric.load`` brings it back.

    Raises:
        InvalidTypeError: If ``module`` is no module, ``optimizer`` cannot be hooked, or ``clipper`` is no clipper.
        InvalidValueError: As `Guard`.
        UnsupportedGradientError: Under DeepSpeed, whose engine owns the gradients.

    Example:
        >>> import gradguard as gg, torch
        >>> from lightning.fabric import Fabric
        >>> from gradguard.integrations.lightning import guard_fabric
        >>> fabric = Fabric(accelerator="cpu", devices=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> guard = guard_fabric(fabric, model, optimizer, gg.ClipByGlobalNorm(1.0))
        >>> fabric.backward(model(torch.tensor([[3.0, 4.0]])).sum())
        >>> optimizer.step()
        >>> guard.last.names, bool(guard.last.clipped)
        (('weight', 'bias'), True)
    """
    _refuse_engine(fabric.strategy)
    if module is not None and not isinstance(module, nn.Module):
        raise gg.errors.InvalidTypeError(
            f"module is {type(module).__name__}: expected the module that fabric.setup returned, or None. "
            "Type: guard_fabric(fabric, module, optimizer, clipper)."
        )
    inner: Any = getattr(optimizer, "optimizer", optimizer) if is_wrapped(optimizer) else optimizer
    original: Any = module.module if module is not None and is_wrapped(module) else module
    model = _model_to_name(original, module)
    wrap_once(Fabric, "clip_gradients", _clip_of_fabric)
    return OnlyGuard(inner, clipper, model=model, **options)


def _clip_of_the_module(
    original: Callable[..., None], plugin: Precision, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any
) -> None:
    """Clip as Lightning does when a module asks for it, unless a guard does it."""
    if clip_val > 0:
        refuse_beside_a_guard("self.clip_gradients", _parameters_of(optimizer))
    original(plugin, optimizer, clip_val, *args, **kwargs)


def _clip_of_fabric(
    original: Callable[..., Any], fabric: Fabric, module: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Clip as Fabric does, unless a guard does it."""
    clipped = _parameters_of(optimizer)
    if any(is_fsdp1(part) for part in module.modules()):
        clipped += module.parameters()  # FSDP1 clips all of them, whichever optimizer is named
    refuse_beside_a_guard("fabric.clip_gradients", clipped)
    return original(fabric, module, optimizer, *args, **kwargs)


def _parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer, or of the one that Lightning has wrapped."""
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    return [p for group in groups for p in group["params"]]


def _model_to_name(module: nn.Module | None, wrapped: nn.Module | None) -> nn.Module | None:
    """Return the module that names the parameters: itself, or FSDP1's wrapper, which knows where the parts are."""
    parts = () if wrapped is None else wrapped.modules()
    outermost = next((part for part in parts if is_fsdp1(part)), None)
    if outermost is not None and any(part is module for part in outermost.modules()):
        return outermost
    return module


def _scaler_of(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _refuse_engine(strategy: object) -> None:
    if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(strategy).__mro__):
        raise gg.errors.UnsupportedGradientError(
            "under DeepSpeed the engine owns the gradients and the step, so that a clip from outside would be of parts "
            "or of nothing: expected another strategy. Set gradient_clipping in DeepSpeed's own configuration."
        )


def _refuse_no_optimizer(trainer: Trainer, pl_module: LightningModule) -> None:
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    guarded = {id(p) for group in groups for p in group["params"]}
    model = trainer.strategy.model or pl_module
    if not any(id(p) in guarded for p in model.parameters()):
        raise gg.errors.InvalidValueError(
            f"no parameter of {type(pl_module).__name__} is in an optimizer that configure_optimizers returned: "
            "expected the optimizers that train it, so that the callback can guard them. Return them there also in "
            "manual optimization, or attach gg.Guard(optimizer, clipper) where you make yours."
        )
