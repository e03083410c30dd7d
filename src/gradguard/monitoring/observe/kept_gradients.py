"""Whether gradients are cleared between one step and the next: looked at during the first steps of each optimizer.

A gradient was not cleared if nobody touched it in any pause of backward, from the step on until the next step: it is
the same tensor, written no more often, with the same numbers in it (``grad.data.zero_()`` is not counted as a write),
and a backward added to it. One gradient stands for all of its parameter group. Where a loop clears late (a GAN's
discriminator gets gradients from the generator's backward before its own ``zero_grad``), one of the pauses tells.
"""

import weakref
from contextlib import suppress
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradguard.monitoring.observe.shared_norms import is_captured
from gradguard.monitoring.record.record_lines import without_none
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import version_of

STEPS = 10
"""Steps of each optimizer after which nobody looks any more."""

SAMPLE = 256
"""Elements that are compared."""


class KeptGradients:
    """Follows one gradient of each parameter group through the first steps of its optimizer."""

    def __init__(self) -> None:
        self._followed: dict[int, list[_Followed]] = {}  # by the identity of an optimizer

    @property
    def looks(self) -> bool:
        """Whether any gradient is followed."""
        return bool(self._followed)

    def before_backward(self) -> None:
        """A pause ends: has anybody cleared?"""
        same = {key: [one for one in followed if one.compare()] for key, followed in self._followed.items()}
        self._followed = {key: followed for key, followed in same.items() if followed}

    def after_backward(self) -> None:
        """A pause begins."""
        for followed in chain(*self._followed.values()):
            followed.remember()

    def before_step(self, optimizer: Optimizer) -> Any:
        """Return whether gradients of this step contain those of the one before: a bool, or a 0-dim tensor."""
        followed = self._followed.pop(id(optimizer), ())
        kept = [one.kept for one in followed if one.was_added_to and one.kept is not None]
        return reduce(or_, kept) if kept else None

    def after_step(self, optimizer: Optimizer) -> None:
        """Follow a gradient of each parameter group until the next step of the optimizer."""
        lasts = (next(filter(_can_be_followed, reversed(group["params"])), None) for group in optimizer.param_groups)
        self._followed[id(optimizer)] = [_Followed(last) for last in without_none(lasts)]


class _Followed:
    def __init__(self, parameter: Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._gradient: weakref.ref | None = None
        self._version, self._sample = -1, torch.empty(0, device="cpu")
        self.kept: Any = None  # nothing is known before a backward
        self.was_added_to = False
        self.remember()
        self.was_added_to = False

    def compare(self) -> bool:
        """Return whether the gradient may be what it was, and take note."""
        gradient = self._current()
        if gradient is None or self._gradient is None or self._gradient() is not gradient:
            return False
        if version_of(gradient) != self._version:
            return False
        same = (_sample(gradient) == self._sample).all() & (self._sample != 0).any()
        if are_readable(same):
            self.kept = bool(same)
            return self.kept
        self.kept = same if self.kept is None else self.kept & same
        return True

    def remember(self) -> None:
        """Keep what the gradient is now."""
        gradient = self._current()
        if gradient is None:
            self._gradient = None
            return
        same = self._gradient is not None and self._gradient() is gradient
        self.was_added_to = self.was_added_to or not same or version_of(gradient) != self._version
        self._gradient, self._version = weakref.ref(gradient), version_of(gradient)
        self._sample = _sample(gradient).clone()

    def _current(self) -> Tensor | None:
        parameter = self._parameter()
        if parameter is None or is_captured(parameter):
            return None
        with suppress(Exception):  # of a tensor of a kind of its own
            gradient = parameter.grad
            return gradient if type(gradient) is Tensor else None
        return None


def _can_be_followed(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return type(gradient) is Tensor and gradient.layout is torch.strided and gradient.is_contiguous()


def _sample(gradient: Tensor) -> Tensor:
    return gradient.detach().reshape(-1)[:SAMPLE]
