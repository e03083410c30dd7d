"""Wrappers round the calls through which a script shows its loss, its own clipping and its loss scale.

Each wrapper tells the listeners and then does exactly what the original did, with the same arguments and result.
"""

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradguard.grad_scaler import listen_to_scale


class Listener(Protocol):
    """Hears of the backwards and clips of a script."""

    def on_backward(self, loss: Tensor) -> Callable[[], None] | None:
        """``loss.backward()`` is about to run; what this returns is called when it is done."""

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
    """Tell ``listener`` of every backward pass, clip and loss scale until the block ends.

    Blocks may end in any order. What has kept a wrapper beyond the end (a class of the script, somebody else's wrapper)
    tells those who listen then: nobody, or the next watch.
    """
    global _listeners
    end_of_scale = listen_to_scale(listener.on_scale, listener.on_scale_update)
    with _lock:
        if not _listeners:
            _restore.append(_replace())
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        end_of_scale()
        with _lock:
            _listeners = tuple(one for one in _listeners if one is not listener)
            if not _listeners:
                _restore.pop()()


_listeners: tuple[Listener, ...] = ()
_restore: list[Callable[[], None]] = []  # puts back what was there before the first of them
_lock = threading.Lock()


def _replace() -> Callable[[], None]:
    """Put the wrappers in place, and return what takes away those that are still there."""
    backward, fsdp = Tensor.backward, _FsdpMethod()
    its_wrapper = Tensor.backward = _backward(backward, fsdp.look)
    wrappers = _clip_wrappers()
    _exchange({id(original): (original, wrapper) for original, wrapper in wrappers})

    def restore() -> None:
        if Tensor.backward is its_wrapper:
            Tensor.backward = backward
        fsdp.restore()
        _exchange({id(wrapper): (wrapper, original) for original, wrapper in wrappers})

    return restore


def _clip_wrappers() -> list[tuple[Callable, Callable]]:
    """The clipping functions where they are defined, and a wrapper of each."""
    found: dict[int, tuple[Callable, Callable]] = {}
    for home in ("torch.nn.utils.clip_grad", "torch.nn.utils"):
        for name, original in vars(sys.modules[home]).items() if home in sys.modules else ():
            if name in _CALLS:
                found[id(original)] = original, _clip(original, _CALLS[name], name)
    return list(found.values())


def _exchange(functions: Mapping[int, tuple[Callable, Callable]]) -> None:
    """Replace functions, by identity, wherever a module has them: scripts import them by name, at any time."""
    for module in [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]:
        if str(vars(module).get("__name__")).startswith("gradguard."):
            continue
        for name in _CALLS.keys() & vars(module).keys():
            old, new = functions.get(id(vars(module)[name]), (None, None))
            if old is not None:
                with suppress(Exception):  # a module of a kind of its own
                    setattr(module, name, new)


class _Running(threading.local):
    """The calls of this thread that listeners know of: a wrapper round a wrapper is silent."""

    def __init__(self) -> None:
        self._calls: list[Any] = []

    def begin(self, call: Any) -> Sequence[Listener]:
        """Return those to tell of ``call``, until `end`: nobody if a wrapper round this one has told them."""
        listeners = () if call in self._calls else _listeners
        self._calls.append(call)
        return listeners

    def end(self) -> None:
        """The last call is done."""
        self._calls.pop()


_running = _Running()


class _FsdpMethod:
    """Replaces the method by which FSDP1 clips, as soon as the script has imported FSDP1."""

    def __init__(self) -> None:
        self._kind, self._original, self._wrapper = None, None, None

    def look(self) -> None:
        """Replace it if it is there; at each backward pass, so this must cost nothing."""
        if self._kind is None and "torch.distributed.fsdp" in sys.modules:
            kind: Any = vars(sys.modules["torch.distributed.fsdp"]).get("FullyShardedDataParallel")
            if kind is not None:
                self._kind, self._original = kind, kind.clip_grad_norm_
                self._wrapper = kind.clip_grad_norm_ = _clip(kind.clip_grad_norm_, _fsdp_call, "FSDP")

    def restore(self) -> None:
        """Put back what was there."""
        if self._kind is not None and self._kind.clip_grad_norm_ is self._wrapper:
            self._kind.clip_grad_norm_ = self._original


@dataclass(slots=True)
class ClipCall:
    """The arguments of a call of a clipping function.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``.
        threshold: Its threshold.
        norm_type: The order of its norm.
        norm: The norm that it was given, if it does not take one itself.
        whole: Whether the gradients are shards, so that nobody but the call itself knows their norm.
        again: Makes the call, untold of; None where nobody can.
    """

    rule: str
    threshold: Any
    norm_type: float = 2.0
    norm: Any = None
    whole: bool = False
    again: Callable[[], Any] | None = None


def _clip(original: Callable, read: Callable[..., ClipCall], name: str) -> Callable:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _listeners:
            return original(*args, **kwargs)
        named = dict(kwargs)
        key = next((name for name in ("parameters", "model") if name in kwargs), None)
        try:
            parameters, rest = (named.pop(key), args) if key else (args[0], args[1:])
            call = read(*rest, **named)
        except Exception:  # a wrong call: the original says so
            return original(*args, **kwargs)
        parameters, seen = _reusable(parameters)

        def act(given: Any) -> Any:
            return original(*rest, **named, **{key: given}) if key else original(given, *rest, **named)

        call.again = functools.partial(act, seen)
        tensors: list[Tensor] = []
        with suppress(Exception):  # of what the script passes anything may raise, at the second look
            tensors = tensors_of(seen)
        listeners = _running.begin(name)
        try:
            with ExitStack() as inside:
                for listener in listeners:
                    if (context := listener.on_clip(call, tensors)) is not None:
                        inside.enter_context(context)
                result = act(parameters)
        finally:
            _running.end()
        for listener in listeners:
            listener.on_clipped(result if isinstance(result, Tensor) else None)
        return result

    return clip


def _reusable(parameters: Any) -> tuple[Any, Any]:
    """Return the parameters twice: for the original call (a generator stays one), and as a list."""
    if isinstance(parameters, types.GeneratorType):
        listed = list(parameters)
        return (p for p in listed), listed
    if isinstance(parameters, Iterator):
        parameters = list(parameters)
    return parameters, parameters


def _torch_norm(max_norm: Any, norm_type: float = 2.0, *_: Any, **__: Any) -> ClipCall:
    return ClipCall("norm", max_norm, float(norm_type))


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
    entries = list(entries)
    if all(issubclass(kind, Tensor) for kind in set(map(type, entries))):  # one by one it takes longer
        return entries
    plain = [entry[-1] if isinstance(entry, tuple) and entry else entry for entry in entries]
    return [entry for entry in plain if isinstance(entry, Tensor)]


def _backward(original: Callable, look: Callable[[], None]) -> Callable:
    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _listeners:
            return original(self, *args, **kwargs)
        listeners = _running.begin(id(self))
        try:
            look()
            ends = [end for listener in listeners if (end := listener.on_backward(self)) is not None]
            result = original(self, *args, **kwargs)
        finally:
            _running.end()
        for end in ends:
            end()
        return result

    return backward
