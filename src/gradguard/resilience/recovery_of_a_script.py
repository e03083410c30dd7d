"""``gradguard run --resilient``: skip spikes in a script that does not call gradguard."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.clip.clip_rules import ClipByGlobalNorm
from gradguard.clip.guard import Guard
from gradguard.distributed.reduction_group import several_processes
from gradguard.errors import GradguardError
from gradguard.grad_scaler import ScalerStep
from gradguard.listeners import ClipCall, ClipEvent, Listener
from gradguard.monitoring.observe.losses import Losses
from gradguard.optimizer_hooks import parameters_of
from gradguard.spikes.skip import SkipSpikes
from gradguard.tensors.host_copy import is_captured

NO_ROLL_BACK = (
    "--resilient skips spikes and steps that are not finite. It does not go back to older weights, because the states "
    "of the schedule, an averaged model and the data are not known from outside. For that use gradguard.SpikeRecovery "
    "in the script."
)


class GuardEachOptimizer(Listener):
    """Attaches a `Guard` that skips spikes to each optimizer of a script, after its first step.

    The signals are the loss, on which ``backward`` is called, and the norm before any clip of the script. If a script
    has several optimizers, it is uncertain to which the loss belongs, so each is judged by its norm alone. Under a
    GradScaler, the norm that the script's clip returned may be scaled, so only the loss is judged.

    **Guarantees.** A step that is no spike keeps every bit. If an optimizer cannot be guarded, or several processes
    train together, `refused` contains the reason and no guard is attached.

    Args:
        applied: A clip to apply before each step, which returns the norm before it; None for no clip.

    Attributes:
        refused: The reasons why optimizers have no guard, by the name of their class.
    """

    def __init__(self, applied: Callable[..., ClipEvent] | None = None) -> None:
        self._applied = applied
        # Each value is a function that returns the guard, or None if the optimizer cannot be guarded.
        self._guards: WeakKeyDictionary[Optimizer, Callable[[], Guard | None]] = WeakKeyDictionary()
        self._spikes: list[_ScriptSpikes] = []
        self._losses, self._scales = Losses(), False
        self._clipped: Sequence[Tensor] = ()  # the parameters of the script's clip that is acting now
        self._steps = self._nonfinite = 0
        self.refused: dict[str, str] = {}

    def on_end(self) -> None:
        """Detach the guards."""
        for one in list(self._guards.values()):
            if (guard := one()) is not None:
                guard.detach()

    def clip(self, optimizer: Optimizer, modules: Callable[[], Sequence[nn.Module]]) -> ClipEvent:
        """Apply the given clip, and store the norm before it."""
        assert self._applied is not None
        event = self._applied(optimizer, modules)
        if (guard := self._guard_of(optimizer)) is not None and event.norm is not None:
            _spikes_of(guard).hear(event.norm)
        return event

    def report(self) -> str:
        """Return a summary of the skipped steps and of the optimizers without a guard."""
        skipped = sum(spikes.skipped for spikes in self._spikes)
        nonfinite = f", {self._nonfinite:,} more were not finite" if self._nonfinite else ""
        why = "".join(f" {name} was left alone: {reason}" for name, reason in self.refused.items())
        return f"--resilient skipped {skipped:,} of {self._steps:,} steps as spikes{nonfinite}.{why}"

    # Events of the script.

    def on_backward(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> None:
        """Store the loss for the next step."""
        if not any(is_captured(loss.device) for loss in losses):
            with suppress(Exception):  # a loss that cannot be read must not stop the script
                self._losses.add(losses, weights)

    def on_clip(self, call: ClipCall, parameters: Sequence[Tensor]) -> None:
        """Note the parameters that the script clips: afterwards their norm shows no spike."""
        if call.rule:
            self._clipped = parameters if call.rule == "norm" else ()

    def on_clipped(self, event: ClipEvent) -> None:
        """Store the norm before the script's clip."""
        if event.parameters is not self._clipped:  # a clip of gradguard's own
            return
        norm, parameters, self._clipped = event.norm, event.parameters, ()
        if norm is None or norm.numel() != 1 or type(norm) is not Tensor:
            return
        clipped = _trained(parameters)
        for optimizer in list(self._guards):
            own = _trained(parameters_of(optimizer))
            if clipped == own and (guard := self._guard_of(optimizer)) is not None:
                _spikes_of(guard).hear(None if self._scales else norm.detach().reshape(()))

    def on_scale(self, loss: Any, scaled: Any) -> None:
        """Record the loss before a GradScaler scaled it."""
        if scaled is not loss:  # a disabled scaler returns the loss itself
            self._scales = True
            self._losses.scaled(loss, scaled)

    def on_scaler_stepped(self, optimizer: Optimizer, step: ScalerStep) -> None:
        """Drop the losses of a step that the scaler skipped."""
        del optimizer, step
        self._losses.clear()

    def on_step(self, optimizer: Optimizer, evaluation: int) -> None:
        """Pass the losses to the guard, which judges the step."""
        if evaluation:
            return
        self._steps += 1
        losses, guard = self._losses.take(), self._guard_of(optimizer)
        if guard is None:
            return
        if len(self._guards) == 1:
            for loss in losses:
                guard.record_loss(loss)
        elif _spikes_of(guard).norm_is_hidden:
            self.refused[type(optimizer).__name__] = (
                "a GradScaler and the script's clip hide its norm, and with several optimizers it is unknown to which "
                "the loss belongs. Put gradguard.Guard(optimizer, clipper, spikes=gradguard.SkipSpikes()) into the "
                "script."
            )

    def on_stepped(self, optimizer: Optimizer) -> None:
        """Attach a guard to an optimizer after its first step; count the non-finite steps that its guard skipped."""
        if optimizer not in self._guards:
            self._guards[optimizer] = self._attached(optimizer)
        elif (guard := self._guard_of(optimizer)) is not None and guard.last_skip not in (None, "spike"):
            self._nonfinite += 1

    def _guard_of(self, optimizer: Optimizer) -> Guard | None:
        return self._guards.get(optimizer, lambda: None)()

    def _attached(self, optimizer: Optimizer) -> Callable[[], Guard | None]:
        name = type(optimizer).__name__
        if several_processes():
            self.refused[name] = (
                "several processes train together, and whether all of them are guarded cannot be known from outside. "
                "Put gradguard.Guard(optimizer, clipper, spikes=gradguard.SkipSpikes()) into the script."
            )
            return lambda: None
        spikes = _ScriptSpikes()
        try:
            guard = Guard(optimizer, ClipByGlobalNorm(float("inf")), spikes=spikes)
        except GradguardError as error:
            self.refused[name] = str(error)
            return lambda: None
        self._spikes.append(spikes)
        return ref(guard)


class _ScriptSpikes(SkipSpikes):
    """Judges by the norm before the script's own clip, if there was one."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: Tensor | None = None
        self.norm_is_hidden = False

    def hear(self, norm: Tensor | None) -> None:
        """Store the norm before the next step's first clip, None if it is not known; later clips are ignored."""
        if self._heard is None and not self.norm_is_hidden:
            self._heard, self.norm_is_hidden = None if norm is None else norm.clone(), norm is None

    def judge(self, norms: Tensor, bad: Tensor) -> Tensor:
        heard = torch.full_like(norms, torch.nan) if self.norm_is_hidden else self._heard
        self._heard, self.norm_is_hidden = None, False
        return super().judge(norms if heard is None else heard.reshape(1).to(norms), bad)

    def forget_loss(self) -> None:
        super().forget_loss()
        self._heard, self.norm_is_hidden = None, False


def _spikes_of(guard: Guard) -> _ScriptSpikes:
    assert isinstance(guard.spikes, _ScriptSpikes)
    return guard.spikes


def _trained(parameters: Any) -> set[int]:
    return {id(p) for p in parameters if p.requires_grad}
