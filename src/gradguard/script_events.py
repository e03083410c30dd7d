"""Events of a script that does not use gradguard: its backwards, clips, steps and loss scales, for listeners.

The clipping functions of PyTorch and of other engines are replaced as long as there are listeners. A replacement
reports the call to the listeners and then calls the original, with the same arguments and result.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from gradguard.distributed.engines.megatron import CLIP_BY_GIVEN_NORM
from gradguard.distributed.engines.zero import CLIP_OF_FLOAT32
from gradguard.grad_scaler import listen_to_scale, listen_to_steps
from gradguard.listeners import ClipCall, ClipEvent, Listener, announced, is_heard, is_muted, listen, tell
from gradguard.optimizer_hooks import EveryStep
from gradguard.replacements import Replacement, once, place_waiting
from gradguard.torch_private import Backward, call_before_backwards, current_graph_task


@contextmanager
def listening(*listeners: Listener) -> Iterator[None]:
    """Report everything that a script does to ``listeners`` until the block ends; each event in their order.

    Blocks may end in any order. A class of the script, or another package's wrapper, may hold a replacement after the
    block has ended. Such a replacement reports to the listeners of the moment: none, or those of the next block.

    Args:
        *listeners: The receivers of the events.
    """
    with ExitStack() as ends:
        for listener in listeners:
            listener.on_begin()
            ends.callback(listener.on_end)
            ends.callback(EveryStep(listener.on_step, listener.on_stepped).remove)
            ends.callback(listen(listener))
            ends.callback(listen_to_steps(listener.on_scaler_step, listener.on_scaler_stepped))
            ends.callback(listen_to_scale(listener.on_scale, listener.on_scale_update))
            ends.callback(call_before_backwards(functools.partial(_tell_backward, listener)))
            ends.callback(clips_are_heard())
        yield


def clips_are_heard() -> Callable[[], None]:
    """Report the clips of scripts and engines to the listeners of `listen`, too, from now on.

    Returns:
        A function that ends the reporting; further calls do nothing.
    """
    return once(*[clip.use() for clip in _CLIPS])


def _tell_backward(listener: Listener, backward: Backward) -> Callable[[], object] | None:
    place_waiting()
    # A running graph task means that this backward is a checkpoint's, within another backward.
    if not backward.accumulates or current_graph_task() != -1 or is_muted():
        return None
    if not all(isinstance(root, Tensor) for root in backward.roots):
        return listener.on_backward((), ())
    return listener.on_backward(backward.roots, backward.gradients)


Reader = Callable[..., ClipCall]
"""Reads the arguments that follow the parameters in a call."""


def clips_by(read: Reader, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a script's clipping function, and report the call to the listeners.

    Args:
        read: Reads the arguments after the parameters.
        original: The clipping function.
        *args: Its arguments; the first is the parameters or a module.
        **kwargs: Its keyword arguments.

    Returns:
        The result of ``original``.
    """
    if not is_heard():
        return original(*args, **kwargs)
    named = dict(kwargs)
    try:
        parameters, *rest = args or [named.pop("parameters")]
        call = read(*rest, **named)
    except Exception:  # the arguments are wrong: let the original raise its own error
        return original(*args, **kwargs)
    repeatable = parameters
    if isinstance(parameters, Iterator):  # it can be read only once; torch warns about an empty generator as such
        repeatable = list(parameters)
        parameters = repeatable or parameters
    call.again = functools.partial(original, repeatable, *rest, **named)
    tensors: list[Tensor] = []
    with suppress(Exception):  # reading a script's own iterable a second time may raise anything
        tensors = tensors_of(repeatable)
    with announced(call, tensors):
        result = original(parameters, *rest, **named)
    norm = result if isinstance(result, Tensor) else None
    tell(ClipEvent(call.rule, tensors, call.threshold, norm, norm_type=call.norm_type))
    return result


def tensors_of(parameters: Any) -> list[Tensor]:
    """Return the tensors in any argument that a clipping function accepts; skip what is not a tensor."""
    if isinstance(parameters, Tensor):
        return [parameters]
    entries: list[Any] = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    if all(issubclass(kind, Tensor) for kind in set(map(type, entries))):  # faster than one check for each entry
        return entries
    return [entry for entry in entries if isinstance(entry, Tensor)]


def by_norm(max_norm: Any, norm_type: float = 2.0, *_: Any, whole: bool = False, **__: Any) -> ClipCall:
    """Read the arguments of PyTorch's ``clip_grad_norm_``."""
    return ClipCall("norm", max_norm, float(norm_type), whole=whole)


def by_given_norm(max_norm: Any, total_norm: Any, *_: Any, **__: Any) -> ClipCall:
    """Read the arguments of PyTorch's ``clip_grads_with_norm_``, which include the norm."""
    return ClipCall("norm", max_norm, norm=total_norm)


def by_value(clip_value: Any, *_: Any, **__: Any) -> ClipCall:
    """Read the arguments of PyTorch's ``clip_grad_value_``."""
    return ClipCall("value", clip_value)


def _heard(home: str, name: str, read: Reader, everywhere: bool = True) -> Replacement:
    """Return the replacement of a clipping function; clips by norm that call one another report one event."""
    one_call = "by value" if read is by_value else "by norm"
    return Replacement(home, name, functools.partial(clips_by, read), everywhere=everywhere, one_call=one_call)


_READERS: dict[str, Reader] = {
    "clip_grad_norm_": by_norm,
    "clip_grads_with_norm_": by_given_norm,  # torch defines it under a private name
    "clip_grad_value_": by_value,
}

_CLIPS = [
    *(_heard("torch.nn.utils", name, read) for name, read in _READERS.items()),
    *(_heard("torch.nn.utils.clip_grad", getattr(nn.utils, name).__name__, read) for name, read in _READERS.items()),
    _heard(*CLIP_BY_GIVEN_NORM, by_given_norm),
    _heard(
        "torch.distributed.fsdp",
        "FullyShardedDataParallel.clip_grad_norm_",
        functools.partial(by_norm, whole=True),
        everywhere=False,
    ),
    _heard(*CLIP_OF_FLOAT32, by_norm, everywhere=False),
]
"""The clipping functions of PyTorch and of other engines, each in the module that defines it."""
