"""A block that runs a model and leaves no trace of it."""

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gradguard.distributed.fully_sharded import GatheredLayers
from gradguard.torch_private import dropouts

_MOST = 100_000
"""Containers that are looked into."""

TOO_RARE = 1e-30
"""A rate at which nothing is dropped; code that reads a layer's rate, to drop by itself, is still seen to do so."""


@contextmanager
def undisturbed(module: nn.Module, drop_rate: float | None = 0.0) -> Iterator[Callable[[], None]]:
    """Run a block that calls ``module``; afterwards random generators, buffers, hooks and attributes are as before.

    Args:
        module: The model.
        drop_rate: What layers of dropout drop in the block, of those that drop any; None: what they do.

    Yields:
        What puts the module back at once, for several calls from one state; not torch's generators.
    """
    before = Snapshot(module)

    def reset() -> None:
        before.restore()
        if drop_rate is not None:
            _set_drop_rate(module, drop_rate)

    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # a reentrant checkpoint
        torch.backends.mha.set_fastpath_enabled(False)
        reset()
        try:
            yield reset
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            before.restore()


def _set_drop_rate(module: nn.Module, rate: float) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            layer.dropout = 0.0
        elif isinstance(layer, dropouts()) and layer.p:
            layer.p = rate


class Snapshot:
    """A module as it is: its buffers, its attributes and those of the modules in it, and the generators beside torch's.

    Hooks are among the attributes: a model that puts hooks on its layers the first time it is asked for hidden states
    must not keep them from a run that never was. So are layers, which a model may replace in its first forward.

    Args:
        module: The module.
        buffers: Keep the values of buffers.
    """

    def __init__(self, module: nn.Module, buffers: bool = True) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()] if buffers else []
        self._gathered = GatheredLayers(module)
        self._generators = generators()
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

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in the same containers and buffers."""
        restore_generators(self._generators)
        self._gathered.shard_again()  # before its parameters are put back, which it would not notice
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        for buffer, value in self._buffers:
            if buffer.shape == value.shape and not torch.equal(buffer, value):
                buffer.copy_(value)


def generators() -> tuple[Any, Any]:
    """Return the states of Python's generator and of NumPy's, in a program that uses NumPy; they can be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, key, *rest = numpy.random.get_state()
    return random.getstate(), (name, tuple(key.tolist()), *rest)


def restore_generators(states: tuple[Any, Any]) -> None:
    """Put them into ``states``."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def seed_generators(seed: int) -> None:
    """Seed torch's generators, Python's, and NumPy's in a program that uses NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
