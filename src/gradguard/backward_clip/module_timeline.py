"""Find the module that recorded an operation: autograd numbers nodes in order, and a module's forward is a range."""

import threading
from bisect import bisect_right
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradguard.module_hooks import ForwardHook
from gradguard.torch_private import next_sequence_number, sequence_number_of

_LONGEST = 200_000
_LEAVES = 2**63
"""Leaves have sequence numbers from here on."""


class ModuleTimeline:
    """A record of the node numbers at which each submodule's forward begins and ends, for each thread."""

    def __init__(self, model: nn.Module) -> None:
        self._starts: dict[int, list[int]] = defaultdict(list)
        self._names: dict[int, list[str]] = defaultdict(list)
        self._within: dict[int, list[str]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            if name:
                before, after = ForwardHook(self._enter, name), ForwardHook(self._leave)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def module_of(self, node: Node) -> str:
        """Return the name of the innermost module that recorded ``node``, or the name of a parameter; else ""."""
        number, thread = sequence_number_of(node), threading.get_ident()
        if number >= _LEAVES:
            return self._parameters.get(id(getattr(node, "variable", None)), "")
        found = bisect_right(self._starts[thread], number) - 1
        return self._names[thread][found] if found >= 0 else ""

    def _enter(self, name: str, module: nn.Module, args: Any, options: Any) -> None:
        if not torch.compiler.is_compiling():
            self._within[threading.get_ident()].append(name)
            self._from_here(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            within = self._within[threading.get_ident()]
            del within[-1:]
            self._from_here(within[-1] if within else "")

    def _from_here(self, name: str) -> None:
        thread = threading.get_ident()
        starts, names = self._starts[thread], self._names[thread]
        starts.append(next_sequence_number())
        names.append(name)
        if len(starts) > _LONGEST:
            del starts[: _LONGEST // 2], names[: _LONGEST // 2]
