"""Undo a step of an optimizer that cannot be told not to take it: a foreign one, or LBFGS in the middle of a search."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


class Snapshot:
    """What an optimizer will be set back to.

    Args:
        optimizer: The optimizer, before its step.
        whole: Keep copies of the weights and of all state. Otherwise only of numbers: enough for a step that is taken
            without gradients, which touches no tensor but may count itself.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer, whole: bool) -> None:
        self.whole = whole
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._weights = [p.detach().clone() for p in self._parameters] if whole else []
        # The vectors that LBFGS keeps in lists are replaced and never written, so they need no copies.
        in_lists = whole and not isinstance(optimizer, torch.optim.LBFGS)
        inside = [
            value for value in vars(optimizer).values() if isinstance(value, Optimizer)
        ]  # ZeroRedundancyOptimizer
        self._undo = [_kept(one.state, whole, in_lists) for one in (optimizer, *inside)]
        self._undo += [_kept(group, False, False) for one in (optimizer, *inside) for group in one.param_groups]
        self._gradients: list[Tensor | None] | None = None

    def hide_gradients(self) -> None:
        """Take the gradients away, so that an optimizer finds nothing to do."""
        if self._gradients is None:
            self._gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Set weights, state, groups and gradients back, bit by bit."""
        for parameter, weight in zip(self._parameters, self._weights, strict=False):  # no weights: none was touched
            parameter.copy_(weight)
        for undo in self._undo:
            undo()
        for parameter, gradient in zip(self._parameters, self._gradients or [], strict=False):
            parameter.grad = gradient


def _kept(value: Any, whole: bool, in_lists: bool) -> Callable[[], Any]:
    """Return a function that gives back ``value`` as it is now: the same objects with the same contents."""
    if isinstance(value, Tensor):
        if isinstance(value, torch.nn.Parameter) or (value.numel() > 1 and not whole):
            return lambda: value
        return _kept_tensor(value, value.detach().clone())
    if isinstance(value, dict):
        return _kept_dict(value, {key: _kept(entry, whole, in_lists) for key, entry in value.items()})
    if isinstance(value, list):
        return _kept_list(value, [_kept(entry, in_lists, in_lists) for entry in value])
    return lambda: value


def _kept_tensor(tensor: Tensor, copy: Tensor) -> Callable[[], Any]:
    def restore() -> Tensor:
        tensor.detach().copy_(copy)
        return tensor

    return restore


def _kept_dict(container: dict, entries: dict[Any, Callable[[], Any]]) -> Callable[[], Any]:
    def restore() -> dict:
        contents = {key: entry() for key, entry in entries.items()}
        container.clear()
        container.update(contents)
        return container

    return restore


def _kept_list(container: list, entries: list[Callable[[], Any]]) -> Callable[[], Any]:
    def restore() -> list:
        container[:] = [entry() for entry in entries]
        return container

    return restore
