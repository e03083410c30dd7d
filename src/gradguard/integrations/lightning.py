"""Lightning: callbacks that clip the batch or each sample in the Trainer, and one call for Fabric."""

# ruff: noqa: E402  (the version check comes first, so that its error comes first)

from collections.abc import Callable
from typing import Any

from gradguard.integrations.versions import require

require("lightning", "2.6", "2.7", "lightning")

from lightning.fabric import Fabric
from lightning.fabric.wrappers import is_wrapped
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError, refuse
from gradguard.integrations.adapter import Job, Run, parameters_of, wrap_once
from gradguard.integrations.guard_job import (
    Clippers,
    GuardJob,
    OnlyGuard,
    ResilienceJob,
    refuse_beside_a_guard,
)
from gradguard.integrations.sample_jobs import (
    PerSampleJob,
    PrivateBatches,
    PrivateJob,
    check_norm_clipper,
    undo_division,
)
from gradguard.policies import GuardPolicy
from gradguard.torch_private import is_fsdp1

__all__ = ["GradGuardCallback", "PerSampleCallback", "PrivateCallback", "ResilienceCallback", "guard_fabric"]


class LightningClip(Job, Callback):
    """A callback that clips in place of its Trainer.

    A subclass also inherits from one of the jobs. It begins the job at the event at which everything the job needs
    exists, and overrides ``_refuse`` to refuse more.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without the module's methods that Lightning sets on the callback."""
        return {name: value for name, value in super().__getstate__().items() if name not in ("log", "log_dict")}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse unsupported set-ups, before anything is trained."""
        if stage == "fit":
            self._refuse(trainer, pl_module)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Detach from module and optimizers; learned and counted values can still be read and saved."""
        self.end()

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Detach from module and optimizers, because Lightning calls no ``teardown`` after an error."""
        self.end()

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        del module
        value = trainer.gradient_clip_val
        if value:
            rule = "ClipByValue" if trainer.gradient_clip_algorithm == "value" else "ClipByGlobalNorm"
            raise InvalidValueError(
                f"Trainer(gradient_clip_val={value}) clips too, beside the {type(self).__name__}: expected one clip. "
                f"Remove gradient_clip_val; GradGuardCallback(gg.{rule}({value})) as the only clip does the same."
            )


class GradGuardCallback(GuardJob, LightningClip):
    """Clip at each optimizer step of a Lightning Trainer, log the clip, and resume with the checkpoint.

    It attaches a `Guard` to each optimizer. The guard acts after ``on_before_optimizer_step`` of all callbacks and of
    the module, in place of ``Trainer(gradient_clip_val=...)``. Its gradients are those of this step, accumulated,
    averaged over processes and unscaled; a hook that logs their norm sees them before the clip.

    **Guarantees.**

    * It acts once for each optimizer step: automatic or manual optimization, ``accumulate_grad_batches``, closures,
      LBFGS, and also optimizers of ``self.optimizers(use_pl_optimizer=False)``, for which Lightning calls no hook.
    * All precisions: 32-true, 64-true, 16-true, bf16-true, bf16-mixed, and 16-mixed also with a fused optimizer, which
      ``gradient_clip_val`` refuses. Thresholds are for gradients without the loss scale.
    * One device, DDP, ModelParallelStrategy (FSDP2) and FSDPStrategy (FSDP1): the norm is that of the
      whole gradient, the same on all processes.
    * A resumed run continues bit by bit: clippers and counts are in the checkpoint.
    * ``"skip"``: the step does not happen, and weights and optimizer state are unchanged. Lightning still counts it in
      ``global_step`` and steps its schedulers.

    **Edge cases.**

    ===========================================  =================================================================
    case                                         what happens
    ===========================================  =================================================================
    ``gradient_clip_val`` is set                 an error: two clips would act, the second on clipped gradients
    ``self.clip_gradients`` in the module        an error for guarded optimizers: two clips
    ``configure_gradient_clipping`` overridden   it acts first; the logged norm is the one after it
    several optimizers, one clipper              an error that says what to pass: two histories must not mix
    ``configure_optimizers`` returns None        an error: there is no optimizer to guard
    DeepSpeedStrategy                            an error: its engine owns the gradients
    ``fit`` again                                the history continues with the same module, else it starts fresh
    copied, pickled                              the copy has no guards, and starts fresh with its own ``fit``
    optimizers replaced while training           the new ones are guarded from the next batch on
    16-mixed, overflow                           the scaler skips the step; ``guards[0].skipped_steps`` counts it
    ``training_step`` returns None               nothing is clipped: there are no new gradients
    no optimizer step in a batch                 nothing is logged for the batch
    ``Tuner.lr_find``                            its search runs without callbacks, so without the clip
    ===========================================  =================================================================

    Args:
        clipper: The rule. For several optimizers: a list with one for each, in the order of ``configure_optimizers``,
            with None for an optimizer without a clip.
        nonfinite: As for `Guard`: ``"skip"``, ``"propagate"``, ``"raise"`` or ``"zero"``.
        max_consecutive_skips: As for `Guard`.
        log: Prefix of the names that are logged after each step, as Lightning logs (``log_every_n_steps``):
            ``gradients/norm`` (before the clip), ``gradients/coefficient`` and ``gradients/clipped`` (1 if the clip
            changed them, else 0). With several optimizers their position follows: ``gradients/1/norm``. None logs
            nothing. There is no host sync.

    Attributes:
        guards: The `Guard` of each optimizer by position, once training has begun, and also afterwards:
            ``guards[0].last``, ``guards[0].skipped_steps``.

    Raises:
        InvalidTypeError: If ``clipper`` is none of these; the trainer and the module are checked when ``fit`` begins.
        InvalidValueError: If `Guard` refuses ``nonfinite`` or ``max_consecutive_skips``.

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
        self._of_a_run(_logged={}, _optimizers=[])
        self._prefix = log

    _logged: dict[int, int]  # the step count of each guard when it was last logged
    _optimizers: list[Optimizer]  # all optimizers, guarded or without a clip

    # -- hooks of Lightning -----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers, which the strategy has created by now."""
        trained = set(map(id, parameters_of(*trainer.optimizers)))
        if trained.isdisjoint(map(id, (trainer.strategy.model or pl_module).parameters())):
            raise InvalidValueError(
                f"no parameter of {type(pl_module).__name__} is in an optimizer that configure_optimizers returned: "
                "expected the optimizers that train it, so that the callback can guard them. Return them there also in "
                "manual optimization, or attach gg.Guard(optimizer, clipper) where you create yours."
            )
        self._optimizers, self._logged = list(trainer.optimizers), {}
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        model = _model_to_name(pl_module, trainer.strategy.model)
        self.begin(Run(pl_module, model, self._optimizers, schedulers, _scaler_of(trainer)))
        wrap_once(Precision, "clip_gradients", _clip_of_the_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Attach to optimizers that other callbacks have created meanwhile."""
        if list(trainer.optimizers) != self._optimizers:
            self.on_fit_start(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Refuse a ``gradient_clip_val`` that was set since; the guard clips after this has returned."""
        del optimizer
        self._refuse(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log the clips of this batch's steps."""
        for position, guard in self.guards.items():
            result = guard.last
            if self._prefix is None or result is None or guard.steps == self._logged.get(position):
                continue
            self._logged[position] = guard.steps
            name = self._prefix if len(self._optimizers) == 1 else f"{self._prefix}/{position}"
            values = {
                "norm": result.norm,
                "coefficient": result.coefficient,
                "clipped": (result.clipped & ~result.nonfinite).float(),
            }
            for key, value in values.items():
                pl_module.log(f"{name}/{key}", value, on_step=True, on_epoch=False)

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        super()._refuse(trainer, module)
        _refuse_engine(trainer.strategy)


class ResilienceCallback(ResilienceJob, GradGuardCallback):
    """A `GradGuardCallback` with `gradguard.SpikeRecovery`: spikes are skipped, bursts undone.

    It records the loss of each backward, and acts at the end of each batch. A roll-back restores weights, but neither
    schedulers nor data are rewound. The checkpoint contains the clipper, the detector, the number of steps and the
    events; snapshots stay in memory. Under 16-mixed Lightning passes the scaled loss, so only gradient norms are
    judged. Modules with several optimizers are refused.

    Args:
        clipper: The rule; None for ``gg.ClipByMedian()``.
        options: Arguments of `gradguard.SpikeRecovery` by name: ``detector``, ``extra_state``, ``snapshot_every``,
            ``lr_factor``, ...
        **of_guard: ``nonfinite``, ``max_consecutive_skips`` and ``log``, as for `GradGuardCallback`.

    Attributes:
        resilience: The `gradguard.SpikeRecovery` of the current or the last fit; None before the first.

    Raises:
        InvalidTypeError: If ``clipper`` is not a clipper.
        InvalidValueError: If ``options`` has a name that `gradguard.SpikeRecovery` does not take.

    Example:
        >>> import gradguard as gg
        >>> from lightning.pytorch import Trainer
        >>> from gradguard.integrations.lightning import ResilienceCallback
        >>> callback = ResilienceCallback(gg.ClipByGlobalNorm(1.0), {"snapshot_every": 100})
        >>> trainer = Trainer(max_epochs=1, callbacks=[callback])
    """

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Record the loss of a micro-batch, multiplied by their number if Lightning has divided it."""
        if _scaler_of(trainer) is None:
            times = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._attached[0].record_loss(loss.detach() * times)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log, and act on the measurements of some steps ago.

        Raises:
            SpikeError: If going back does not cure the run.
        """
        super().on_train_batch_end(trainer, pl_module)
        self._attached[0].step()


class PerSampleCallback(PerSampleJob, LightningClip):
    r"""Clip the gradient of each sample by ``norm_clipper`` in a Lightning Trainer, before they are summed.

    .. math:: \bar g = \frac1N \sum_{i=1}^{N} c_i\, \nabla \ell_i

    over all N samples of the optimizer step, including all its accumulated batches. :math:`\ell_i` is sample i's own
    loss. The result of ``training_step`` must be the mean of these over the samples of its batch (or the sum:
    ``loss_reduction="sum"``). **gradguard cannot check this.** A mean over all *tokens* of a batch is not such a mean
    if samples have unequal numbers of them: average over each sample's own tokens first, then over samples.

    **Guarantees.**

    * Each step equals that of running every sample by itself, clipping its gradient, and averaging (adding up, with
      ``loss_reduction="sum"``). This includes ``accumulate_grad_batches``, where Lightning's division of the loss is
      undone, a smaller last batch, and bf16-mixed.
    * Everything that `gradguard.PerSampleGradientClipper` refuses is refused here.
    * A checkpoint contains the learned state of the norm clipper.

    ============================================  ==============================================================
    Edge case                                     What happens
    ============================================  ==============================================================
    a sample whose gradient is not finite         adds zero; the step goes on
    ``training_step`` returns None                the batch adds nothing
    training stops within a step                  the accumulated samples are dropped
    ``gradient_clip_val``                         an error: two clips
    `GradGuardCallback` beside it                 an error: two clips
    a module's ``configure_gradient_clipping``    an error: two clips
    16-mixed                                      an error: Lightning unscales before the gradients exist
    manual optimization, LBFGS                    an error
    ``torch.compile``                             an error
    DDP                                           the average is over the samples of all processes
    DeepSpeed, FSDP, other strategies             an error
    DDP with `QuantileNormClipper`                an error: thresholds would differ between processes
    ============================================  ==============================================================

    Args:
        norm_clipper: The rule, as for `gradguard.PerSampleGradientClipper`.
        loss_reduction: Whether ``training_step`` returns the ``"mean"`` or the ``"sum"`` of the samples' losses.
        batch_first: As for `gradguard.PerSampleGradientClipper`.
        mode: As for `gradguard.PerSampleGradientClipper`.

    Attributes:
        norm_clipper: The rule.
        clipper: The `gradguard.PerSampleGradientClipper` of the current or the last ``fit``; None before it begins.
            ``clipper.statistics`` has the norms of the last batch's samples.

    Raises:
        InvalidTypeError: If ``norm_clipper`` is not one.

    Example:
        >>> import gradguard as gg, torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from gradguard.integrations.lightning import PerSampleCallback
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters())
        >>> trainer = Trainer(max_epochs=1, callbacks=[PerSampleCallback(gg.FlatNormClipper(1.0))])
        >>> # trainer.fit(Model(), loader)
    """

    def __init__(
        self,
        norm_clipper: gg.rules.NormClipper,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        mode: str = "fast",
    ) -> None:
        super().__init__(norm_clipper, loss_reduction=loss_reduction, batch_first=batch_first, mode=mode)
        self._of_a_run(_strategy=None)

    _strategy: Strategy | None  # its methods that are replaced are restored in `end`

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module, and refuse unsupported optimizers.

        Raises:
            UnsupportedGradientError: If an optimizer evaluates gradients several times in a step.
        """
        _refuse_lbfgs(trainer)
        self.end()
        self.begin(Run(pl_module, self._take_in(trainer, pl_module), trainer.optimizers))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Undo Lightning's division by the number of accumulated batches: it is part of no sample's own loss."""
        del pl_module
        undo_division(self.clipper, loss, trainer.accumulate_grad_batches)

    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        """Clip the samples of this batch, and accumulate them."""
        self.after_backward()

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Fill in the gradients of the step."""
        if self._summed:
            self.before_step()

    def _take_in(self, trainer: Trainer, module: LightningModule) -> nn.Module:
        """Return the module for the clipper: under DDP the wrapped module, through which it finds the other processes.

        Under DDP, Lightning makes ``training_step`` the forward of the wrapped module, in place of its layers.
        DistributedDataParallel has nothing to reduce, because only clipped sums are sent. So ``training_step`` is
        called directly, as on one device.
        """
        model, strategy = trainer.strategy.model, trainer.strategy
        if not isinstance(model, DistributedDataParallel):
            return module

        def training_step(*args: Any, **kwargs: Any) -> Any:
            with strategy.precision_plugin.train_step_context():
                return module.training_step(*args, **kwargs)

        self._strategy = strategy
        strategy.training_step = training_step  # type: ignore[method-assign]
        return model

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        super()._refuse(trainer, module)
        self._refuse_others(trainer.callbacks)  # type: ignore[attr-defined]
        which, name = type(self).__name__, type(module).__name__
        if type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping:
            raise InvalidValueError(
                f"{name} has a configure_gradient_clipping of its own, which would clip after the {which}: "
                "expected one clip. Remove it."
            )
        check_norm_clipper(self.norm_clipper, trainer.world_size)
        strategy = trainer.strategy
        refuse(
            UnsupportedGradientError,
            (
                not module.automatic_optimization,
                f"{name} optimizes manually, so it is not known which backward belongs to which step. Use "
                "gg.PerSampleGradientClipper(self, ...) in its training_step.",
            ),
            (
                not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy,
                f"{which} trains on one device or under DDPStrategy, and not with {type(strategy).__name__}. Use "
                "gg.PerSampleGradientClipper in a loop of your own, which takes fully_shard.",
            ),
            (
                _scaler_of(trainer) is not None or trainer.precision == "16-mixed",
                'precision="16-mixed": Lightning unscales gradients before the clipped ones exist. Use "bf16-mixed".',
            ),
            (
                getattr(module, "_compiler_ctx", None) is not None,
                f"{name} is compiled: the layers inside cannot be followed. Pass the module before torch.compile.",
            ),
        )

    def end(self) -> None:
        """Detach from module and strategy; the learned state can still be read. May be repeated."""
        super().end()
        if self._strategy is not None:
            for name in ("training_step", "process_dataloader"):
                vars(self._strategy).pop(name, None)
            self._strategy = None


class PrivateCallback(PrivateJob, PerSampleCallback):
    r"""Make the training of a Lightning Trainer differentially private: `gradguard.private.make_private` in one line.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    The training loader's data set, ``collate_fn`` and workers are kept. Its batches are replaced by Poisson samples:
    each of the N samples joins each step with probability q. The expected number qN is the loader's batch size times
    ``accumulate_grad_batches`` times the number of processes, so an epoch has as many steps as before. The result of
    ``training_step`` must be the mean of its samples' own losses, as for `PerSampleCallback`.

    **Guarantees.** Those of `gradguard.private.make_private`: the trained weights are (epsilon, delta) differentially
    private with respect to one sample of the training data, and epsilon never exceeds that of a budget. Losses and
    metrics on training data are not covered, nor what a validation on other data reveals about that data.

    * Noise is added once for each step of the optimizer, and the step is counted before the weights change.
    * Other steps of the optimizer, and changes of the gradients after the noise, are refused.
    * A checkpoint contains the accountant's steps and the norm clipper's learned state, but neither noise nor which
      samples were drawn. A resumed run continues counting, and continues within the epoch.

    ===================================================  ==========================================================
    Edge case                                            What happens
    ===================================================  ==========================================================
    a batch that draws no sample                         one stand-in sample, which does not count; noise is added
    a sample whose gradient is not finite                adds zero
    validation within an epoch                           the same steps
    DDP                                                  one Poisson sample, in equal parts; one process adds noise
    a checkpoint within an accumulation                  an error: the sums have no noise yet
    resuming from a checkpoint without this callback     an error: the cost of its steps is not known
    several training loaders, an ``IterableDataset``     an error
    a custom batch sampler                               an error
    ``limit_train_batches``                              an error if it leaves a part of an accumulation
    ``overfit_batches``                                  an error
    ``reload_dataloaders_every_n_epochs``                an error
    `GradientAccumulationScheduler`                      an error
    several optimizers                                   an error
    a ``training_step`` that returns None                an error: every drawn batch must be used
    16-mixed; all that `PerSampleCallback` refuses       an error
    a second ``fit``                                     an error: its cost would add up
    ===================================================  ==========================================================

    At the end of each epoch it logs ``epsilon``.

    Args:
        privacy: A `gradguard.private.PrivacyBudget` without ``epochs`` and ``steps``, for as many steps as the Trainer
            plans, or a `gradguard.private.FixedNoise`.
        norm_clipper: The rule; None bounds each sample's gradient by 1, as ``gg.FlatNormClipper(1.0)``.
        secure: As for `gradguard.private.make_private`.
        seed: As for `gradguard.private.make_private`.
        **options: ``loss_reduction`` (whether ``training_step`` returns the ``"mean"`` or the ``"sum"`` of the samples'
            losses), ``batch_first`` and ``mode``, as for `PerSampleCallback`.

    Attributes:
        norm_clipper: The rule.
        clipper: The `gradguard.PerSampleGradientClipper` of the current or the last ``fit``.

    Raises:
        InvalidTypeError: If ``norm_clipper`` is not one.
        InvalidValueError: If the budget names the number of steps, which the Trainer plans.

    Example:
        >>> import gradguard as gg, torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from gradguard.integrations.lightning import PrivateCallback
        >>> callback = PrivateCallback(gg.private.PrivacyBudget(epsilon=3.0, delta=1e-5))
        >>> trainer = Trainer(max_epochs=3, callbacks=[callback])
        >>> # trainer.fit(Model(), DataLoader(data, batch_size=256, shuffle=True)); callback.private.epsilon()

    Reference: Abadi et al., Deep learning with differential privacy, 2016, arXiv 1607.00133.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse unsupported set-ups, before anything is trained, and replace the loader."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._replace_batches(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse unsupported optimizers.

        Raises:
            UnsupportedGradientError: If there are several, or one evaluates gradients several times in a step.
        """
        del pl_module
        _refuse_lbfgs(trainer)
        if len(trainer.optimizers) != 1:
            raise UnsupportedGradientError(
                f"there are {len(trainer.optimizers)} optimizers, but private training counts the steps of one "
                "optimizer. Return one from configure_optimizers, with groups of parameters."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the private training, which needs the loader that Lightning has requested by now.

        Raises:
            InvalidValueError: If an epoch would end within an accumulation.
        """
        parts, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        if batches % parts:
            raise InvalidValueError(
                f"an epoch has {batches} batches, which are no whole number of steps with "
                f"accumulate_grad_batches={parts}: the last would be a part of a Poisson sample. Set "
                "limit_train_batches to a multiple, or leave it out."
            )
        model, steps = self._take_in(trainer, pl_module), trainer.estimated_stepping_batches
        self.begin(Run(pl_module, model, trainer.optimizers, steps=steps, done=trainer.global_step))

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Add the noise, and fill in the gradients of the step."""
        self.before_step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epsilon spent so far."""
        del trainer
        pl_module.log("epsilon", self._clips.epsilon())

    def _replace_batches(self, trainer: Trainer) -> None:
        """Let the strategy, which Lightning calls for each loader, return Poisson batches for the training loader."""
        strategy: Any = trainer.strategy
        original = type(strategy).process_dataloader

        def process(loader: Any) -> Any:
            processed = original(strategy, loader)
            if not trainer.training:  # a validation loader
                return processed
            if self._batches is not None:
                raise UnsupportedGradientError(
                    "there are several training loaders, but private training draws from one. Join their data sets: "
                    "torch.utils.data.ConcatDataset, or StackDataset for pairs."
                )
            parts = trainer.accumulate_grad_batches
            self._batches = PrivateBatches(processed, parts, trainer.world_size, lambda: self._clips)
            return self._batches

        self._batches = None
        strategy.process_dataloader, self._strategy = process, strategy

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        super()._refuse(trainer, module)
        changes = "changes which samples are drawn from, and so the cost of a step. Leave it out."
        refuse(
            UnsupportedGradientError,
            (
                any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks),  # type: ignore[attr-defined]
                "GradientAccumulationScheduler changes the sampling rate between epochs. Use accumulate_grad_batches.",
            ),
            *(
                (getattr(trainer, name), f"{name} {changes}")
                for name in ("overfit_batches", "reload_dataloaders_every_n_epochs")
            ),
        )


def guard_fabric(
    fabric: Fabric,
    module: nn.Module | None,
    optimizer: Optimizer,
    clipper: gg.rules.Clipper,
    **options: Any,
) -> gg.Guard:
    """Clip at each step of an optimizer that Fabric has set up: one call after ``fabric.setup``; the loop is unchanged.

    It replaces ``fabric.clip_gradients(module, optimizer, max_norm=...)`` before each step. Calling that beside it for
    the same parameters is an error: two clips, one after the other. The `Guard` is attached to the optimizer inside
    Fabric's, so it observes Fabric's GradScaler: under 16-mixed, thresholds are for gradients without the loss scale.
    Fused optimizers work too, which ``fabric.clip_gradients`` refuses.

    Args:
        fabric: The Fabric.
        module: The module as ``fabric.setup`` returned it; names the parameters, and is needed for FSDP1. None if there
            are many.
        optimizer: The optimizer as ``fabric.setup`` returned it, or the optimizer inside.
        clipper: The rule.
        **options: ``nonfinite`` and ``max_consecutive_skips``, as for `gradguard.Guard`.

    Returns:
        The guard: ``guard.last``, ``guard.detach()``. ``fabric.save(path, {"guard": guard, ...})`` saves its state and
        ``fabric.load`` restores it.

    Raises:
        InvalidTypeError: If ``module`` is not a module, ``optimizer`` cannot be hooked, or ``clipper`` is no clipper.
        InvalidValueError: As for `Guard`.
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
        raise InvalidTypeError(
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
    """Clip as Lightning does when a module requests it, unless a guard clips these parameters."""
    if clip_val > 0:
        refuse_beside_a_guard("self.clip_gradients", _parameters_of(optimizer))
    original(plugin, optimizer, clip_val, *args, **kwargs)


def _clip_of_fabric(
    original: Callable[..., Any], fabric: Fabric, module: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Clip as Fabric does, unless a guard clips these parameters."""
    clipped = _parameters_of(optimizer)
    if any(is_fsdp1(part) for part in module.modules()):
        clipped += module.parameters()  # FSDP1 clips all of them, whichever optimizer is named
    refuse_beside_a_guard("fabric.clip_gradients", clipped)
    return original(fabric, module, optimizer, *args, **kwargs)


def _parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, or of the one that Lightning has wrapped."""
    return parameters_of(getattr(optimizer, "optimizer", optimizer))


def _model_to_name(module: nn.Module | None, wrapped: nn.Module | None) -> nn.Module | None:
    """Return the module that names the parameters: itself, or FSDP1's wrapper, which locates the parts."""
    for part in () if wrapped is None else wrapped.modules():
        if is_fsdp1(part):  # the outermost wrapper comes first
            return part if any(inner is module for inner in part.modules()) else module
    return module


def _scaler_of(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _refuse_engine(strategy: object) -> None:
    if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(strategy).__mro__):
        raise UnsupportedGradientError(
            "under DeepSpeed the engine owns the gradients and the step, so a clip from outside would receive parts or "
            "nothing: expected another strategy. Set gradient_clipping in DeepSpeed's own configuration."
        )


def _refuse_lbfgs(trainer: Trainer) -> None:
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise UnsupportedGradientError(
            "LBFGS evaluates the gradients several times in a step, and samples would be clipped by another factor "
            "each time. Choose an optimizer that evaluates once, such as AdamW."
        )
