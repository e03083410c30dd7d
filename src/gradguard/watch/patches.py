"""Wrappers round the calls through which a script shows its loss, its own clipping and its loss scale.

Each wrapper tells a listener and then does exactly what the original did, with the same arguments and result.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn


class Listener(Protocol):
    """What is told."""

    def on_backward(self, loss: Tensor) -> None:
        """``loss.backward()`` is about to run."""

    def on_clip(self, call: "ClipCall", parameters: list[Tensor]) -> None:
        """The script is about to clip; the gradients are as they were."""

    def on_clipped(self, norm: Any) -> None:
        """The clip that `on_clip` announced is done; ``norm`` is what it returned."""

    def on_scale(self, loss: Any, scaled: Any) -> None:
        """A GradScaler turned ``loss`` into ``scaled``."""

    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """A GradScaler updated its scale: a smaller one means that a step was skipped."""


@contextmanager
def patched(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of every backward pass, clip and loss scale until the block ends."""
    with (
        patch.object(Tensor, "backward", _backward(Tensor.backward, listener)),
        patch.object(torch.amp.GradScaler, "scale", _scale(torch.amp.GradScaler.scale, listener)),
        patch.object(torch.amp.GradScaler, "update", _update(torch.amp.GradScaler.update, listener)),
        _patched_clips(listener),
    ):
        yield


@contextmanager
def _patched_clips(listener: Listener) -> Iterator[None]:
    homes = [torch.nn.utils, torch.nn.utils.clip_grad, sys.modules["gradguard"]]
    originals = [(home, name, getattr(home, name)) for home in homes for name in _CALLS if hasattr(home, name)]
    try:
        for home, name, original in originals:
            setattr(home, name, _clip(original, _CALLS[name], listener))
        yield
    finally:
        for home, name, original in originals:
            setattr(home, name, original)


@dataclass(frozen=True, slots=True)
class ClipCall:
    """What a call of a clipping function says.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``.
        threshold: Its threshold.
        norm_type: The order of its norm.
        norm: The norm that it was given, if it does not take one itself.
    """

    rule: str
    threshold: Any
    norm_type: float = 2.0
    norm: Any = None


def _clip(original: Callable, read: Callable[..., ClipCall], listener: Listener) -> Callable:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        try:
            tracing = torch.compiler.is_compiling()
            key = next((name for name in ("parameters", "model") if name in kwargs), None)
            parameters, rest = (kwargs[key], args) if key else (args[0], args[1:])
            call = None if tracing else read(*rest, **{name: value for name, value in kwargs.items() if name != key})
        except (TypeError, ValueError, IndexError):  # a wrong call: the original says so
            return original(*args, **kwargs)
        if call is None:
            return original(*args, **kwargs)
        parameters, seen = _reusable(parameters)
        listener.on_clip(call, tensors_of(seen))
        result = original(*rest, **{**kwargs, key: parameters}) if key else original(parameters, *rest, **kwargs)
        listener.on_clipped(result if isinstance(result, Tensor) else None)
        return result

    return clip


def _reusable(parameters: Any) -> tuple[Any, Any]:
    """The same parameters twice: for the original call, still a generator if it was one, and to look at."""
    if isinstance(parameters, types.GeneratorType):
        listed = list(parameters)
        return (p for p in listed), listed
    if isinstance(parameters, Iterator):
        parameters = list(parameters)
    return parameters, parameters


_CALLS: dict[str, Callable[..., ClipCall]] = {
    "clip_grad_norm_": lambda max_norm, norm_type=2.0, *_, **__: ClipCall("norm", max_norm, float(norm_type)),
    "clip_grads_with_norm_": lambda max_norm, total_norm, *_, **__: ClipCall("norm", max_norm, norm=total_norm),
    "clip_grad_value_": lambda clip_value, *_, **__: ClipCall("value", clip_value),
    "clip_grad_adaptive_": lambda clipping_threshold=0.01, **_: ClipCall("adaptive", clipping_threshold),
    "apply_gradient_clipping": lambda clipping_type, clipping_threshold, **_: ClipCall(
        clipping_type, clipping_threshold
    ),
}
"""Clipping functions, and how to read what follows the parameters in a call."""


def tensors_of(parameters: Any) -> list[Tensor]:
    """Return the tensors in whatever a clipping function takes; what cannot be one is left for the call to refuse."""
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    entries = parameters.values() if isinstance(parameters, Mapping) else parameters
    if not isinstance(entries, Iterable):
        return []
    plain = [entry[-1] if isinstance(entry, tuple) and entry else entry for entry in entries]
    return [entry for entry in plain if isinstance(entry, Tensor)]


def _backward(original: Callable, listener: Listener) -> Callable:
    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            listener.on_backward(self)
        return original(self, *args, **kwargs)

    return backward


def _scale(original: Callable, listener: Listener) -> Callable:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        listener.on_scale(outputs, scaled)
        return scaled

    return scale


def _update(original: Callable, listener: Listener) -> Callable:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = None if self._scale is None else self._scale.clone()
        result = original(self, *args, **kwargs)
        listener.on_scale_update(before, None if self._scale is None else self._scale.clone())
        return result

    return update
