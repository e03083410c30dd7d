"""Watch a GradScaler: which steps it skips, and which losses it has scaled.

`torch.amp.GradScaler` has no hooks. Its methods `step`, `scale` and `update` are therefore wrapped as long as there
are listeners, and restored afterwards.
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
    """One call of ``scaler.step(optimizer)``.

    Attributes:
        scale: The loss scale, 0-dim, if the gradients were still multiplied by it when ``scaler.step`` began; else
            None.
        loss_scale: The loss scale, also if ``unscale_`` has already divided the gradients by it.
    """

    def __init__(self, scale: Tensor | None = None, loss_scale: Tensor | None = None) -> None:
        self.scale, self.loss_scale = scale, loss_scale
        self.overflows: Sequence[Tensor] = ()  # the scaler's found_inf of each device, once `step` has ended

    @property
    def skipped(self) -> Tensor | None:
        """Whether the scaler found infinity or NaN and skipped the optimizer's step; None until that is known.

        A 0-dim bool on the gradients' device: only code that reads it causes a host sync.
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
        before: Called with the optimizer and a `ScalerStep` when ``scaler.step`` begins.
        after: Called with the same two when ``scaler.step`` has returned or raised.
        optimizer: The only optimizer to listen to; None for all. With an optimizer, both functions must be bound
            methods; their object is not kept alive.

    Returns:
        A function that ends the listening; further calls do nothing. Listening also ends when ``optimizer`` is garbage
        collected.
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
    """Tell listeners about every loss that a GradScaler scales, and every update of its scale, from now on.

    Args:
        scaled: Called with the argument of ``scaler.scale`` and with its result.
        updated: Called with copies of the scale before and after each ``scaler.update``, each None if there was none.

    Returns:
        A function that ends the listening; further calls do nothing.
    """
    pair = scaled, updated
    _of_scale.append(pair)
    return once(lambda: _of_scale.remove(pair), _scales.use(), _updates.use())


def notice_scaled_losses() -> Callable[[], None]:
    """Record from now on which backward starts from a loss that a GradScaler scaled, for `scale_of_backward`.

    Returns:
        A function that ends the recording; further calls do nothing.
    """
    return _scales.use()


def scale_of_backward(task: int, scaler: Any) -> Tensor | None:
    """Return the scale by which ``scaler`` multiplied the loss of backward number ``task``; None if it is not known.

    The scaler may have been updated since that backward, for example after the step of another optimizer.

    Args:
        task: The number of the backward.
        scaler: The scaler of the loss, or None.

    Returns:
        A copy of the scale when the loss was scaled, 0-dim; None without an enabled scaler, or for one whose ``scale``
        was never noticed, such as a class with a ``scale`` of its own.

    Raises:
        InvalidValueError: If another GradScaler scaled the loss, or if ``scaler`` did not.
    """
    by, scale = _scaled_by.get(task, (None, None))
    if by is not None and by != id(scaler):
        raise InvalidValueError(
            "a GradScaler scaled the loss, so every per-sample gradient is too large by the same factor. Pass the "
            "scaler to the clipper: PerSampleGradientClipper(..., scaler=scaler). Nothing was clipped."
        )
    if by is None and scaler is not None and scaler in _noticed and scaler.is_enabled():
        raise InvalidValueError(
            "the clipper's GradScaler did not scale the loss of this backward, so every per-sample gradient would be "
            "too small by its scale. Call scaler.scale(loss).backward(), or make the clipper without scaler=. Nothing "
            "was clipped."
        )
    return scale


# The replaced methods of GradScaler.


_Pair = tuple[Callable[[], StepListener | None], Callable[[], StepListener | None]]

_of_scale: list[tuple[Callable[[Any, Any], None], Callable[[Tensor | None, Tensor | None], None]]] = []
_of_steps: dict[int | None, list[_Pair]] = {}  # by the id of a live optimizer; None holds listeners to all optimizers
_scaled_by: "OrderedDict[int, tuple[int, Tensor | None]]" = OrderedDict()
"""By the number of a recent backward: the id of the scaler of its loss, and the scale."""

_noticed: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Scalers that have scaled a loss since `notice_scaled_losses`."""


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
    except BaseException:  # a fused optimizer would keep these attributes and unscale again on every later step
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
        _noticed.add(scaler)
        note = functools.partial(_note_backward, id(scaler), _scale_of(scaler))
        for tensor in tree_leaves(scaled):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(note)
    return scaled


def _update(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
    before = _scale_of(scaler)
    result = original(scaler, *args, **kwargs)
    for _, listener in tuple(_of_scale):
        listener(before, _scale_of(scaler))
    return result


def _scale_of(scaler: Any) -> Tensor | None:
    """Return a copy of the scaler's loss scale; None if the scaler has scaled nothing yet."""
    scale = loss_scale_of(scaler)
    return scale.detach().clone() if isinstance(scale, Tensor) else None


def _note_backward(scaler: int, scale: Tensor | None, grad: Tensor) -> None:
    del grad
    _scaled_by[current_graph_task()] = scaler, scale
    while len(_scaled_by) > _REMEMBERED_BACKWARDS:
        _scaled_by.popitem(last=False)


_steps, _scales, _updates = (
    Replacement("torch.amp.grad_scaler", f"GradScaler.{name}", instead, decorate=never_compiled)
    for name, instead in (("step", _step), ("scale", _scale), ("update", _update))
)
