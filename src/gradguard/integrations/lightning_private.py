"""Lightning: a callback that makes training differentially private, under the Trainer's own loop."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from gradguard.errors import InvalidValueError, UnsupportedGradientError, refuse
from gradguard.integrations.adapter import Run
from gradguard.integrations.lightning_per_sample import PerSampleCallback, refuse_optimizers
from gradguard.integrations.sample_jobs import PrivateBatches, PrivateJob


class PrivateCallback(PrivateJob, PerSampleCallback):
    r"""Make the training of a Lightning Trainer differentially private: `gradguard.private.make_private` in one line.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    The training loader's data set, ``collate_fn`` and workers are kept. Its batches are replaced by Poisson samples: in
    each step every one of the N samples joins with probability q. The expected number qN is the loader's batch size
    times ``accumulate_grad_batches`` times the number of processes, so an epoch has as many steps as before. What
    ``training_step`` returns must be the mean of its samples' own losses, as for `PerSampleCallback`.

    **Guarantees.** Those of `gradguard.private.make_private`: what the weights become is (epsilon, delta)
    differentially private with respect to one sample of the training data, epsilon never exceeds that of a budget.
    Losses and metrics on training data are not covered, nor is what a validation on other data tells of that data.

    * Noise is added once for each step of the optimizer, and the step is counted before the weights change.
    * No other step of the optimizer is let through, and no change of the gradients after the noise.
    * A checkpoint holds the accountant's steps and what the norm clipper has learned; neither noise nor which samples
      were drawn. A resumed run goes on counting, and goes on within the epoch.

    ===================================================  ==========================================================
    Edge case                                            What happens
    ===================================================  ==========================================================
    a batch that draws no sample                         one sample that does not count stands in; noise is added
    a sample whose gradient is not finite                adds zero
    validation within an epoch                           the same steps
    DDP                                                  one Poisson sample, in equal parts; one process adds noise
    a checkpoint within an accumulation                  an error: the sums have no noise yet
    resuming from a checkpoint without this callback     an error: what its steps have cost is not known
    several training loaders, an ``IterableDataset``     an error
    a batch sampler of one's own                         an error
    ``limit_train_batches``                              an error where it leaves a part of an accumulation
    ``overfit_batches``                                  an error
    ``reload_dataloaders_every_n_epochs``                an error
    `GradientAccumulationScheduler`                      an error
    several optimizers                                   an error
    a ``training_step`` that returns None                an error: every batch that is drawn must be used
    16-mixed, and what `PerSampleCallback` refuses       an error
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
        InvalidTypeError: If ``norm_clipper`` is none.
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
        """Refuse, before anything is trained, what cannot be right, and take the loader's place."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._replace_batches(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse optimizers that cannot be served.

        Raises:
            UnsupportedGradientError: If there are several, or one asks for gradients several times in a step.
        """
        del pl_module
        refuse_optimizers(trainer)
        if len(trainer.optimizers) != 1:
            raise UnsupportedGradientError(
                f"there are {len(trainer.optimizers)} optimizers, and a step of private training is one of one "
                "optimizer. Return one from configure_optimizers, with groups of parameters."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the private training, which needs the loader that Lightning has asked for by now.

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
        """Log what was spent."""
        del trainer
        pl_module.log("epsilon", self._clips.epsilon())

    def _replace_batches(self, trainer: Trainer) -> None:
        """Let the strategy, which is asked about each loader, give Poisson batches for the training loader."""
        strategy: Any = trainer.strategy
        original = type(strategy).process_dataloader

        def process(loader: Any) -> Any:
            processed = original(strategy, loader)
            if not trainer.training:  # it is one for validation
                return processed
            if self._batches is not None:
                raise UnsupportedGradientError(
                    "there are several training loaders, and private training draws from one. Join their data sets: "
                    "torch.utils.data.ConcatDataset, or StackDataset for pairs."
                )
            parts = trainer.accumulate_grad_batches
            self._batches = PrivateBatches(processed, parts, trainer.world_size, lambda: self._clips)
            return self._batches

        self._batches = None
        strategy.process_dataloader, self._strategy = process, strategy

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        super()._refuse(trainer, module)
        changes = "changes what samples are drawn from, and with it what a step costs. Leave it out."
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
