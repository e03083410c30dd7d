"""Lightning: a callback that clips each sample's gradient, under the Trainer's own loop."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError, refuse
from gradguard.integrations.adapter import Run
from gradguard.integrations.lightning_clip import LightningClip
from gradguard.integrations.sample_jobs import PerSampleJob, check_norm_clipper, undo_division


class PerSampleCallback(PerSampleJob, LightningClip):
    r"""Clip the gradient of each sample by ``norm_clipper`` in a Lightning Trainer, before they are summed.

    .. math:: \bar g = \frac1N \sum_{i=1}^{N} c_i\, \nabla \ell_i

    over all N samples of the optimizer step, those of all its accumulated batches. :math:`\ell_i` is sample i's own
    loss, of which what ``training_step`` returns must be the mean over the samples of its batch (or the sum:
    ``loss_reduction="sum"``). **Nobody can see whether it is.** A mean over all *tokens* of a batch, where samples have
    unequal numbers of them, is not: average over each sample's own tokens first, then over samples.

    **Guarantees.**

    * Each step is that of running every sample by itself, clipping its gradient, and averaging (adding up, with
      ``loss_reduction="sum"``): with ``accumulate_grad_batches``, by which Lightning's division of the loss is undone,
      a smaller last batch, and bf16-mixed.
    * What `gradguard.PerSampleGradientClipper` refuses is refused here.
    * A checkpoint holds what the norm clipper has learned.

    ============================================  ==============================================================
    Edge case                                     What happens
    ============================================  ==============================================================
    a sample whose gradient is not finite         adds zero; the step goes on
    ``training_step`` returns None                the batch adds nothing
    training stops within a step                  what was accumulated is dropped
    ``gradient_clip_val``                         an error: two clips
    `GradGuardCallback` beside it                 an error: two clips
    a module's ``configure_gradient_clipping``    an error: two clips
    16-mixed                                      an error: Lightning unscales before the gradients are there
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
        InvalidTypeError: If ``norm_clipper`` is none.

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

    _strategy: Strategy | None  # some of whose methods are replaced

    def _not_begun(self) -> dict[str, Any]:
        return {**super()._not_begun(), "_strategy": None}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module, and refuse optimizers that cannot be served.

        Raises:
            UnsupportedGradientError: If an optimizer asks for gradients several times in a step.
        """
        refuse_optimizers(trainer)
        self.end()
        self.begin(Run(pl_module, self._take_in(trainer, pl_module), trainer.optimizers))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Undo Lightning's division by the number of accumulated batches: it is part of no sample's own loss."""
        del pl_module
        undo_division(self.clipper, loss, trainer.accumulate_grad_batches)

    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        """Clip the samples of this batch, and add them up."""
        self.after_backward()

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Fill in the gradients of the step."""
        if self._summed:
            self.before_step()

    def _take_in(self, trainer: Trainer, module: LightningModule) -> nn.Module:
        """Return what the clipper is given: under DDP the wrapped module, so that it finds the other processes.

        Lightning calls ``training_step`` there as if it were the module's forward, in place of the layers that it
        calls. DistributedDataParallel has nothing to do in it, because only clipped sums are sent, so it is called as
        on one device.
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
                "expected one clip. Take it away."
            )
        check_norm_clipper(self.norm_clipper, trainer.world_size)
        strategy, scaler = trainer.strategy, getattr(trainer.precision_plugin, "scaler", None)
        refuse(
            UnsupportedGradientError,
            (
                not module.automatic_optimization,
                f"{name} optimizes by hand, so that it is not known which backward is for which step. Use "
                "gg.PerSampleGradientClipper(self, ...) in its training_step.",
            ),
            (
                not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy,
                f"{which} trains on one device or under DDPStrategy, and not with {type(strategy).__name__}. Use "
                "gg.PerSampleGradientClipper in a loop of your own, which takes fully_shard.",
            ),
            (
                scaler is not None or trainer.precision == "16-mixed",
                'precision="16-mixed": Lightning unscales gradients before the clipped ones are there. Use '
                '"bf16-mixed".',
            ),
            (
                getattr(module, "_compiler_ctx", None) is not None,
                f"{name} is compiled: the layers inside cannot be followed. Give the module as it was before "
                "torch.compile.",
            ),
        )

    def end(self) -> None:
        """Give module and strategy back; what was learned can still be read. May be repeated."""
        super().end()
        if self._strategy is not None:
            for name in ("training_step", "process_dataloader"):
                vars(self._strategy).pop(name, None)
            self._strategy = None


def refuse_optimizers(trainer: Trainer) -> None:
    """Raise if an optimizer asks for gradients several times in a step.

    Args:
        trainer: Which has made its optimizers.

    Raises:
        UnsupportedGradientError: If one is LBFGS.
    """
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise UnsupportedGradientError(
            "LBFGS asks for the gradients several times in a step, and samples would be clipped by another factor "
            "each time. Choose an optimizer that asks once, such as AdamW."
        )
