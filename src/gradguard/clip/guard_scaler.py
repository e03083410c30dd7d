"""What a GradScaler does to the optimizer of a guard: steps it skips, and gradients clipped before it unscales them."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.torch_private import gradients_are_scaled, loss_scale_of

_ROUND = 1e-5
"""A clip leaves a norm this close to its threshold; float32 gradients add less."""

_REPEATS = 3


class ScalerStep:
    """One ``scaler.step(optimizer)``, as a guard sees it.

    Attributes:
        scale: What the scaler has multiplied the loss by, 0-dim, if nobody has divided the gradients by it yet when
            ``scaler.step`` began; else None.
        reached: Whether the optimizer was stepped.
    """

    def __init__(self, scale: Tensor | None) -> None:
        self.scale = scale
        self.reached = False


Listener = Callable[[ScalerStep, bool], None]

_listeners: "WeakKeyDictionary[Optimizer, WeakMethod[Listener]]" = WeakKeyDictionary()


def listen(optimizer: Optimizer, listener: Listener) -> None:
    """Call ``listener``, a method, before each ``scaler.step(optimizer)`` of any GradScaler, and after with True."""
    _watch_scalers()
    _listeners[optimizer] = WeakMethod(listener)


def stop_listening(optimizer: Optimizer) -> None:
    """Forget the listener of ``optimizer``."""
    _listeners.pop(optimizer, None)


def _watch_scalers() -> None:
    kind = torch.amp.GradScaler
    if getattr(kind.step, "_watched_by_gradguard", False):
        return
    original = kind.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        reference = _listeners.get(optimizer) if self.is_enabled() else None
        listener = None if reference is None else reference()
        if listener is None:
            return original(self, optimizer, *args, **kwargs)
        one = ScalerStep(loss_scale_of(self) if gradients_are_scaled(self, optimizer) else None)
        listener(one, False)
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException:  # or a fused optimizer keeps them, and divides again on every later step
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)
            listener(ScalerStep(None), False)
            raise
        listener(one, True)
        return result

    step._watched_by_gradguard = True  # type: ignore[attr-defined]
    kind.step = step  # type: ignore[method-assign]


class ScaledClipDetector:
    """Notices that scaled gradients arrive clipped: their norm is the same round number, step after step.

    That is what clipping before ``scaler.unscale_`` leaves behind. Norms that were not clipped do not agree to five
    digits with a number of two, three times in a row.
    """

    def __init__(self) -> None:
        self._threshold, self._times, self._warned = math.nan, 0, False

    def saw(self, norm: float | Tensor) -> None:
        """Look at the norm of the gradients of one step, still multiplied by the loss scale; warn once."""
        scaled_norm = math.nan if self._warned else float(norm)
        if not math.isfinite(scaled_norm) or scaled_norm == 0:
            return
        threshold = float(f"{scaled_norm:.1e}")
        if abs(scaled_norm - threshold) > _ROUND * threshold:
            self._times = 0
            return
        self._times = self._times + 1 if threshold == self._threshold else 1
        self._threshold = threshold
        if self._times >= _REPEATS:
            self._warned = True
            warnings.warn(
                f"the gradients come to scaler.step with a norm of {threshold:g} while they are still multiplied by "
                f"the loss scale, {_REPEATS} times in a row: they seem to be clipped before they are unscaled, so that "
                "far smaller ones come out. Leave the clip to the guard, or call scaler.unscale_(optimizer) before "
                "yours.",
                stacklevel=2,
            )
