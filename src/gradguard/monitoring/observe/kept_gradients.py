"""Check during the first steps of each optimizer whether gradients are cleared between two steps.

A gradient was not cleared if a backward added to it and it did not change in any interval without a backward, from one
step to the next. Unchanged means the same tensor, the same version counter and the same numbers (``grad.data.zero_()``
does not raise the counter). One gradient represents its parameter group. All intervals are checked, because some loops
clear late: a GAN's discriminator gets gradients from the generator's backward before its own ``zero_grad``.
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
"""The number of an optimizer's steps after which the check ends."""

SAMPLE = 256
"""The number of elements that are compared."""


class KeptGradients:
    """Follow one gradient of each parameter group through the first steps of its optimizer."""

    def __init__(self) -> None:
        self._followed: dict[int, list[_Followed]] = {}  # by the id of an optimizer

    @property
    def looks(self) -> bool:
        """Whether any gradient is followed."""
        return bool(self._followed)

    def before_backward(self) -> None:
        """Compare the followed gradients at the end of an interval without a backward; drop the changed ones."""
        same = {key: [one for one in followed if one.compare()] for key, followed in self._followed.items()}
        self._followed = {key: followed for key, followed in same.items() if followed}

    def after_backward(self) -> None:
        """Copy the followed gradients at the beginning of an interval without a backward."""
        for followed in chain(*self._followed.values()):
            followed.remember()

    def before_step(self, optimizer: Optimizer) -> Any:
        """Return whether the step's gradients contain those of the step before: a bool or a 0-dim tensor.

        None if no followed gradient was both compared and added to.
        """
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
        self.kept: Any = None  # unknown before the first backward
        self.was_added_to = False
        self.remember()
        self.was_added_to = False

    def compare(self) -> bool:
        """Return False if the gradient has surely changed; store the result of the comparison in ``kept``."""
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
        """Store the gradient, its version and a copy of its first elements."""
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
        with suppress(Exception):  # a tensor subclass may refuse
            gradient = parameter.grad
            return gradient if type(gradient) is Tensor else None
        return None


def _can_be_followed(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return type(gradient) is Tensor and gradient.layout is torch.strided and gradient.is_contiguous()


def _sample(gradient: Tensor) -> Tensor:
    return gradient.detach().reshape(-1)[:SAMPLE]
