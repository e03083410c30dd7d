"""A block that runs a model and leaves no trace of it."""

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gradguard.torch_private import dropouts

_MOST = 100_000
"""Containers that are looked into."""


@contextmanager
def undisturbed(module: nn.Module, dropout: bool = False) -> Iterator[Callable[[], None]]:
    """Run a block that calls ``module``; afterwards random generators, buffers, hooks and attributes are as before.

    Args:
        module: The model.
        dropout: Leave dropout on; otherwise it is switched off in the block.

    Yields:
        What sets the buffers back at once, for several calls from one state.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    @torch.no_grad()
    def reset() -> None:
        for buffer, value in buffers:
            if buffer.shape == value.shape and not torch.equal(buffer, value):
                buffer.copy_(value)

    state = _State(module)
    generators = _generators()
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # a reentrant checkpoint
        torch.backends.mha.set_fastpath_enabled(False)
        if not dropout:
            _switch_dropout_off(module)
        try:
            yield reset
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            _restore_generators(generators)
            state.restore()
            reset()


def _switch_dropout_off(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            layer.dropout = 0.0
        elif isinstance(layer, dropouts()):
            layer.p = 0.0


class _State:
    """The attributes of all modules in ``module``, and what the lists, dicts and sets among them hold.

    Hooks are in such a dict: a model that puts hooks on its layers the first time it is asked for hidden states must
    not keep them from a run that never was.
    """

    def __init__(self, module: nn.Module) -> None:
        self._contents: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        waiting: list[Any] = [vars(m) for m in module.modules()]
        while waiting and len(seen) < _MOST:
            container = waiting.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            self._contents.append((container, container.copy()))
            held = container.values() if isinstance(container, dict) else container
            waiting += [one for one in held if isinstance(one, dict | list | set)]

    def restore(self) -> None:
        """Put everything back, in the same containers."""
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)


def _generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def _restore_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
