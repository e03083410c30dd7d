"""The one place that looks into a GradScaler: which steps it skips, and what it has scaled.

`torch.amp.GradScaler` has no hooks. Its methods `step`, `scale` and `update` are therefore wrapped while somebody
listens, and given back when nobody does.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.errors import InvalidValueError
from gradguard.replacements import Replacement, once
from gradguard.tensors.layout import move
from gradguard.torch_private import (
    current_graph_task,
    gradients_are_scaled,
    loss_scale_of,
    never_compiled,
    overflows_of,
    tree_leaves,
)

_REMEMBERED_BACKWARDS = 64


class ScalerStep:
    """One ``scaler.step(optimizer)``.

    Attributes:
        scale: The scaler's factor of the loss, 0-dim, if nobody has divided the gradients by it yet when
            ``scaler.step`` began; else None.
        loss_scale: The scaler's factor of the loss, also where the gradients have been divided by it since.
    """

    def __init__(self, scale: Tensor | None = None, loss_scale: Tensor | None = None) -> None:
        self.scale, self.loss_scale = scale, loss_scale
        self.overflows: Sequence[Tensor] = ()  # what the scaler has found on each device, once it has ended

    @property
    def skipped(self) -> Tensor | None:
        """Whether the scaler found infinity or NaN and left the optimizer's step out; None until that is known.

        0-dim bool on the device of the gradients, so that only who reads it waits.
        """
        if not self.overflows:
            return None
        home = self.overflows[0].device
        return torch.stack([move(overflow.detach(), home) for overflow in self.overflows]).sum() != 0


StepListener = Callable[[Optimizer, ScalerStep], None]


def listen_to_steps(
    before: StepListener, after: StepListener, *, optimizer: Optimizer | None = None
) -> Callable[[], None]:
    """Call ``before`` and ``after`` around each ``scaler.step(optimizer)`` of every enabled GradScaler from now on.

    Args:
        before: Called with the optimizer when ``scaler.step`` begins, and with what is known of it.
        after: Called with the same when it has ended, or raised.
        optimizer: The optimizer; None for all. For one, both must be methods, whose object is not kept alive.

    Returns:
        A function that ends it; calling it again does nothing. It ends by itself when ``optimizer`` is gone.
    """
    pair: _Pair = (lambda: before), (lambda: after)
    if optimizer is not None:
        pair = weakref.WeakMethod(before), weakref.WeakMethod(after)
    key = None if optimizer is None else id(optimizer)
    _of_steps.setdefault(key, []).append(pair)
    end = once(functools.partial(_forget, key, pair), _steps.use())
    if optimizer is not None:
        weakref.finalize(optimizer, end).atexit = False
    return end


def listen_to_scale(
    scaled: Callable[[Any, Any], None], updated: Callable[[Tensor | None, Tensor | None], None]
) -> Callable[[], None]:
    """Hear of what every GradScaler multiplies losses by from now on.

    Args:
        scaled: Called with what ``scaler.scale`` got, and with what it returned.
        updated: Called with copies of the scale before and after each ``scaler.update``, each None if there was none.

    Returns:
        A function that ends it; calling it again does nothing.
    """
    pair = scaled, updated
    _of_scale.append(pair)
    return once(lambda: _of_scale.remove(pair), _scales.use(), _updates.use())


def notice_scaled_losses() -> Callable[[], None]:
    """Let `refuse_other_scaler` know which backward starts from a loss that a GradScaler scaled, from now on.

    Returns:
        A function that ends it; calling it again does nothing.
    """
    return _scales.use()


def refuse_other_scaler(task: int, scaler: Any) -> None:
    """Check that the loss of backward number ``task`` was scaled by ``scaler`` or by none.

    Raises:
        InvalidValueError: If not.
    """
    known = _scaled_by.get(task)
    if known is not None and known != id(scaler):
        raise InvalidValueError(
            "a GradScaler scaled the loss, so every per-sample gradient is as much too large. Tell the clipper: "
            "PerSampleGradientClipper(..., scaler=scaler). Nothing was clipped."
        )


# How the methods are replaced.


_Pair = tuple[Callable[[], StepListener | None], Callable[[], StepListener | None]]

_of_scale: list[tuple[Callable[[Any, Any], None], Callable[[Tensor | None, Tensor | None], None]]] = []
_of_steps: dict[int | None, list[_Pair]] = {}  # by the identity of an optimizer that lives; None stands for all
_scaled_by: "OrderedDict[int, int]" = OrderedDict()  # the identity of the scaler, by the number of a recent backward


def _forget(key: int | None, pair: _Pair) -> None:
    left = [one for one in _of_steps.pop(key, []) if one is not pair]
    if left:
        _of_steps[key] = left


def _step(original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = [*_of_steps.get(None, ()), *_of_steps.get(id(optimizer), ())] if scaler.is_enabled() else []
    if not pairs:
        return original(scaler, optimizer, *args, **kwargs)
    loss_scale = loss_scale_of(scaler)
    step = ScalerStep(loss_scale if gradients_are_scaled(scaler, optimizer) else None, loss_scale)
    _call([before() for before, _ in pairs], optimizer, step)
    try:
        result = original(scaler, optimizer, *args, **kwargs)
        step.overflows = overflows_of(scaler, optimizer)
        return result
    except BaseException:  # or a fused optimizer keeps them, and divides again on every later step
        optimizer.__dict__.pop("grad_scale", None)
        optimizer.__dict__.pop("found_inf", None)
        raise
    finally:
        _call([after() for _, after in pairs], optimizer, step)


def _call(listeners: Sequence[StepListener | None], optimizer: Optimizer, step: ScalerStep) -> None:
    for listener in listeners:
        if listener is not None:
            listener(optimizer, step)


def _scale(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    scaled = original(scaler, outputs)
    for listener, _ in tuple(_of_scale):
        listener(outputs, scaled)
    if scaler.is_enabled():
        for tensor in tree_leaves(scaled):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(_note_backward, id(scaler)))
    return scaled


def _update(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
    before = _scale_of(scaler)
    result = original(scaler, *args, **kwargs)
    for _, listener in tuple(_of_scale):
        listener(before, _scale_of(scaler))
    return result


def _scale_of(scaler: Any) -> Tensor | None:
    """A copy of its loss scale; a scaler that is disabled or has scaled nothing has none."""
    scale = loss_scale_of(scaler)
    return scale.detach().clone() if isinstance(scale, Tensor) else None


def _note_backward(scaler: int, grad: Tensor) -> None:
    del grad
    _scaled_by[current_graph_task()] = scaler
    while len(_scaled_by) > _REMEMBERED_BACKWARDS:
        _scaled_by.popitem(last=False)


_steps, _scales, _updates = (
    Replacement("torch.amp.grad_scaler", f"GradScaler.{name}", instead, decorate=never_compiled)
    for name, instead in (("step", _step), ("scale", _scale), ("update", _update))
)
