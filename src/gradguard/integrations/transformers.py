"""Hugging Face Transformers: callbacks that take the place of the Trainer's own clip, for the batch or for samples."""

# ruff: noqa: E402  (the version comes first, so that it is what an error is about)

import warnings
from collections.abc import Callable
from typing import Any

from gradguard.integrations.versions import require

require("transformers", "5.23", "6", "transformers")

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from gradguard.integrations.accelerate import inner_optimizer
from gradguard.integrations.adapter import Run
from gradguard.integrations.guard_job import GuardJob, ResilienceJob, check_clipper
from gradguard.integrations.transformers_clip import TransformersClip
from gradguard.integrations.transformers_per_sample import PerSampleCallback
from gradguard.integrations.transformers_private import PrivateCallback
from gradguard.integrations.transformers_shares import LoudestSample, SampleNorms, SampleNormsCallback
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


_BLOCK = 1000


class GradGuardCallback(GuardJob, TransformersClip):
    """Let ``clipper`` clip once at each real step of a `transformers.Trainer`, instead of the Trainer.

    Pass it to the Trainer (``callbacks=[GradGuardCallback(clipper)]`` or ``trainer.add_callback``); nothing else
    changes. It is a `gradguard.Guard` on the Trainer's optimizer while ``train()`` runs.

    **Guarantees.**

    * The clipper sees the gradients as backward left them: the Trainer neither clips nor measures before. (Measuring,
      which it does with ``max_grad_norm=0`` too, is a clip to infinity: a norm that overflows makes all of them NaN.)
    * Once for each real step, under accumulation too, and on unscaled gradients with fp16.
    * A checkpoint holds the clipper's state and the counts (``gradguard.pt``, beside the optimizer's), and resuming
      brings them back bit for bit.
    * Norms are kept on the device and read when the Trainer logs.

    **What the Trainer logs.**

    =========================================  =========================================================================
    ``grad_norm``                              the norm before the clip, of the step that is logged
    ``grad_norm_min``, ``_mean`` and ``_max``  over all steps since the last log that were finite; only where there were
                                               several
    ``clip_coefficient``                       norm after over norm before, the mean of these steps
    ``clip_binding_share``                     the share of these steps on which the clip bound
    ``grad_nonfinite_steps``                   the number of steps since the last log with NaN or inf in a gradient
    =========================================  =========================================================================

    **Edge cases.**

    ====================================  ======================================================================
    case                                  what happens
    ====================================  ======================================================================
    ``max_grad_norm`` left at 1.0         the Trainer's default: the clipper takes its place
    ``max_grad_norm=0``                   the same
    ``max_grad_norm`` of another value    an error: two rules, of which only one can be meant
    a step is skipped, no GradScaler      ``global_step`` and the scheduler go on, as after any step
    resuming where no state was saved     a warning if the clipper has one; it begins anew
    ``save_only_model``                   the state is not saved, as the optimizer's is not
    ``train()`` again                     the history goes on with the same model, and begins anew with another
    added while training                  it clips from that step on
    removed while training                an error
    copied, pickled                       the copy has no guard, and its history begins anew with its own training
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
        InvalidValueError: If ``nonfinite`` or ``max_consecutive_skips`` is none that `Guard` takes.
        UnsupportedVersionError: If the Trainer lacks a method that is needed.

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
        self.clipper = clipper

    state_file = "gradguard.pt"
    _steps = 0  # of the guard, when the Trainer's last step was counted

    def _not_begun(self) -> dict[str, Any]:
        return {**super()._not_begun(), "_window": _Window()}

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
        """Make sure that the Trainer has left the gradients alone, and that there is a guard.

        Raises:
            InvalidValueError: If the callback was added while training, and ``max_grad_norm`` is set.
            UnsupportedGradientError: If the Trainer has not left the gradients alone, or may not have.
        """
        if not self._acting:  # it was added while training
            norm = self._norm
            self._refuse_arguments(args)
            self.on_train_begin(**kwargs)
            self._norm = norm
        super().on_pre_optimizer_step()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Tell the Trainer the norm before the clip, and remember what the clip did.

        Raises:
            UnsupportedGradientError: If the optimizer took no step that a guard could see.
        """
        guard, norm, self._norm = self.guard, self._norm, None
        if guard is None or norm is None:
            return
        if guard.steps == self._steps or guard.last is None:
            raise UnsupportedGradientError(
                f"optimizer.step() did not run the hooks of {type(guard.optimizer).__name__}, so nothing was clipped. "
                "A guard needs an optimizer whose step() takes one with the gradients that are there."
            )
        self._steps = guard.steps
        norm.copy_(guard.last.norm)
        self._window.add(guard.last)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Take the guard off the optimizer; what it has counted can still be read."""
        self.end()

    # -- what the Trainer does instead of its own -------------------------------------------------------------------

    def _clip_grad_norm(self, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        """Return the norm of the step that has not been taken yet: NaN until it is known."""
        if self._norm is None:
            self._norm = torch.full((), torch.nan, device=trainer.args.device)
        return self._norm

    def _get_grad_norm(
        self,
        original: Callable[..., Any],
        trainer: Trainer,
        model: nn.Module,
        grad_norm: object = None,
        **kwargs: Any,
    ) -> object:
        """Return that norm, or what a subclass of the Trainer made of the gradients: then the next event refuses."""
        if grad_norm is None or grad_norm is self._norm:
            return self._clip_grad_norm(original, trainer)
        self._norm = None
        return grad_norm

    def _logged(self) -> dict[str, float]:
        return self._window.read()

    def _begins_anew(self, checkpoint: str) -> None:
        if any(leaf.state_dict() for leaf in self.clipper.leaves()):
            warnings.warn(
                f"{checkpoint} has no {self.state_file}: it was saved without a GradGuardCallback, or with "
                f"save_only_model. {type(self.clipper).__name__} begins anew, as at the first step of training.",
                stacklevel=2,
            )

    def _after_saving(self, state: dict[str, Any]) -> None:
        guard, before = self.guards[0], state.get("guard", state)
        if guard.steps != before["steps"]:
            guard.load_state_dict(before)  # saving a sharded SGD takes steps, with zeros, to find that it has none
            self._steps = guard.steps


class ResilienceCallback(ResilienceJob, GradGuardCallback):
    """A `GradGuardCallback` with `gradguard.SpikeRecovery`: spikes are skipped, bursts undone.

    The loss of each micro-batch is the one that ``Trainer.training_step`` returns, times the number of micro-batches in
    the step, by which the Trainer has divided it. The Trainer's scheduler keeps its place when weights go back, and so
    does the data. A checkpoint holds the clipper, the detector, the number of steps and the events, as
    `GradGuardCallback` says; snapshots stay in memory.

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
        """Act on what was measured some steps ago.

        Raises:
            SpikeError: If going back does not cure the run.
        """
        super().on_optimizer_step(*args, **kwargs)
        if self.resilience is not None:
            self.resilience.step()

    def _training_step(self, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        loss = original(trainer, *args, **kwargs)
        if self.resilience is not None and self._acting:
            # Trainer.training_step returns the micro-batch's share of the step's loss, and record_loss takes a mean.
            self.resilience.record_loss(loss.detach() * trainer.current_gradient_accumulation_steps)
        return loss


class _Window:
    """Clips since the last log; the numbers stay on their device until they are read."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []  # [steps, 3]: norm, coefficient, clipped

    def add(self, result: gg.results.ClipResult) -> None:
        numbers = (result.norm, result.coefficient, result.clipped)
        self._rows.append(torch.stack([number.to(result.norm.dtype) for number in numbers])[None])
        if len(self._rows) == _BLOCK:
            self._rows = [torch.cat(self._rows)]  # a row takes a kilobyte by itself

    def read(self) -> dict[str, float]:
        """Return what to log, and begin anew. The host waits."""
        if not self._rows:
            return {}
        rows = torch.cat(self._rows).cpu().double()
        self._rows = []
        finite = rows[rows[:, 0].isfinite()]
        norms, coefficients, clipped = finite.unbind(1)
        read: dict[str, float] = {}
        if len(finite) and len(rows) > 1:
            of_norms = {"grad_norm_min": norms.min(), "grad_norm_mean": norms.mean(), "grad_norm_max": norms.max()}
            read |= {name: float(norm) for name, norm in of_norms.items()}
        if len(finite):
            read |= {"clip_coefficient": float(coefficients.mean()), "clip_binding_share": float(clipped.mean())}
        return {**read, "grad_nonfinite_steps": len(rows) - len(finite)}
