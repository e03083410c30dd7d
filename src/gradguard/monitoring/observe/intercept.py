"""Wrappers round the calls through which a script shows its loss, its own clipping and its loss scale.

Each wrapper tells a listener and then does exactly what the original did, with the same arguments and result.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gradguard.grad_scaler import listen_to_scale


class Listener(Protocol):
    """What is told."""

    def on_backward(self, loss: Tensor) -> None:
        """``loss.backward()`` is about to run."""

    def on_clip(self, call: "ClipCall", parameters: list[Tensor]) -> AbstractContextManager | None:
        """The script is about to clip; the gradients are as they were. The clip runs inside what this returns."""

    def on_clipped(self, norm: Any) -> None:
        """The clip that `on_clip` announced is done; ``norm`` is what it returned."""

    def on_scale(self, loss: Any, scaled: Any) -> None:
        """A GradScaler turned ``loss`` into ``scaled``."""

    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """A GradScaler updated its scale: a smaller one means that a step was skipped."""


@contextmanager
def patched(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of every backward pass, clip and loss scale until the block ends."""
    fsdp = _FsdpMethod(listener)
    with (
        _at_the_end(fsdp.restore),
        patch.object(Tensor, "backward", _backward(Tensor.backward, listener, fsdp.look)),
        _at_the_end(listen_to_scale(listener.on_scale, listener.on_scale_update)),
        _patched_clips(listener),
    ):
        yield


@contextmanager
def _patched_clips(listener: Listener) -> Iterator[None]:
    """Replace the clipping functions where they are defined, and where they have been imported by name already."""
    homes = ("torch.nn.utils.clip_grad", "torch.nn.utils")
    wrappers: dict[int, tuple[str, Callable, Callable]] = {}
    for home in homes:
        for name, original in vars(sys.modules[home]).items() if home in sys.modules else ():
            if name in _CALLS:
                wrappers[id(original)] = name, original, _clip(original, _CALLS[name], listener)
    names = {name for name, _, _ in wrappers.values()}
    replaced = []
    try:
        for module in [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]:
            if str(vars(module).get("__name__")).startswith("gradguard."):
                continue
            for name in names.intersection(vars(module)):
                _, original, wrapper = wrappers.get(id(vars(module)[name]), (name, None, None))
                if original is not None:
                    with suppress(Exception):  # a module of a kind of its own
                        setattr(module, name, wrapper)
                        replaced.append((module, name, original))
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


class _FsdpMethod:
    """Replaces the method by which FSDP1 clips, as soon as the script has imported FSDP1."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._kind, self._original = listener, None, None

    def look(self) -> None:
        """Replace it if it is there; at each backward pass, so this must cost nothing."""
        if self._kind is None and "torch.distributed.fsdp" in sys.modules:
            kind: Any = vars(sys.modules["torch.distributed.fsdp"]).get("FullyShardedDataParallel")
            if kind is not None:
                self._kind, self._original = kind, kind.clip_grad_norm_
                kind.clip_grad_norm_ = _clip(kind.clip_grad_norm_, _fsdp_call, self._listener)

    def restore(self) -> None:
        """Put back what was there."""
        if self._kind is not None:
            self._kind.clip_grad_norm_ = self._original


@dataclass(frozen=True, slots=True)
class ClipCall:
    """What a call of a clipping function says.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``.
        threshold: Its threshold.
        norm_type: The order of its norm.
        norm: The norm that it was given, if it does not take one itself.
        measures: Whether it takes the norm of each gradient by PyTorch's `torch._foreach_norm`.
        whole: Whether the gradients are shards, so that nobody but the call itself knows their norm.
    """

    rule: str
    threshold: Any
    norm_type: float = 2.0
    norm: Any = None
    measures: bool = False
    whole: bool = False


def _clip(original: Callable, read: Callable[..., ClipCall], listener: Listener) -> Callable:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        try:
            tracing = torch.compiler.is_compiling()
            key = next((name for name in ("parameters", "model") if name in kwargs), None)
            parameters, rest = (kwargs[key], args) if key else (args[0], args[1:])
            call = None if tracing else read(*rest, **{name: value for name, value in kwargs.items() if name != key})
        except Exception:  # a wrong call: the original says so
            return original(*args, **kwargs)
        if call is None:
            return original(*args, **kwargs)
        parameters, seen = _reusable(parameters)
        tensors: list[Tensor] = []
        with suppress(Exception):  # of what the script passes anything may raise, at the second look
            tensors = tensors_of(seen)
        inside = listener.on_clip(call, tensors)
        with inside or nullcontext():
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


def _torch_norm(max_norm: Any, norm_type: float = 2.0, *_: Any, **__: Any) -> ClipCall:
    return ClipCall("norm", max_norm, float(norm_type), measures=True)


def _fsdp_call(max_norm: Any, norm_type: float = 2.0, *_: Any, **__: Any) -> ClipCall:
    return ClipCall("norm", max_norm, float(norm_type), whole=True)


_CALLS: dict[str, Callable[..., ClipCall]] = {
    "clip_grad_norm_": _torch_norm,
    "clip_grads_with_norm_": lambda max_norm, total_norm, *_, **__: ClipCall("norm", max_norm, norm=total_norm),
    "clip_grad_value_": lambda clip_value, *_, **__: ClipCall("value", clip_value),
}
"""PyTorch's clipping functions, and how to read what follows the parameters in a call."""


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


@contextmanager
def _at_the_end(call: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        call()


def _backward(original: Callable, listener: Listener, look: Callable[[], None]) -> Callable:
    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            look()
            listener.on_backward(self)
        return original(self, *args, **kwargs)

    return backward
