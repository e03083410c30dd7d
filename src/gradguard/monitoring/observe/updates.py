"""By how much a step moves each tensor of the weights, from some of their elements.

A tensor of more than `ELEMENTS` is judged by about so many, evenly spread, and a sharded one by this process's part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gradguard.distributed.placements import local_part
from gradguard.monitoring.judge.detectors.update_sizes import ELEMENTS
from gradguard.monitoring.observe.measure import Norms, every_so_many, gradient_norms
from gradguard.tensors.layout import flat, is_dense

SHARE = 0.01
"""The largest share of the run's time that these measurements may take."""

FREE = 0.1
"""Seconds of them that no share limits."""

_ORDINARY = (Tensor, Parameter)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Moved(NamedTuple):
    """The change that a step made to the weights, in the elements that are looked at.

    Attributes:
        update: 2-norm of what it changed, for each parameter.
        weight: 2-norm of these elements before the step.
        counts: How many elements are looked at; 0 where none can be.
        sizes: How many elements there are.
        rates: The learning rate of each group of the optimizer.
    """

    update: Norms
    weight: Norms
    counts: list[int]
    sizes: list[int]
    rates: list[Any]


class Moving:
    """A sample of the weights that a step is about to change; of weights on several devices, those on the first.

    Args:
        optimizer: Whose step it is.
        parameters: Those that have a gradient, at least one.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        device = parameters[0].device
        self._samples = [_sample(p, device) for p in parameters]
        self._sizes = [p.numel() for p in parameters]
        rates = [group.get("lr") for group in optimizer.param_groups]
        self._rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self._before = torch.cat(self._samples)  # in the widest of their dtypes

    @torch.no_grad()
    def moved(self) -> Moved:
        """Return what the step has done."""
        counts = [sample.numel() for sample in self._samples]
        change = torch.cat(self._samples).sub_(self._before)
        update, weight = (gradient_norms(whole.split(counts)) for whole in (change, self._before))
        return Moved(update, weight, counts, self._sizes, self._rates)


def _sample(parameter: Tensor, device: torch.device) -> Tensor:
    """Return some elements of a parameter as one dimension that shares its memory; none where that is not possible."""
    local = local_part(parameter)
    values = torch.view_as_real(local) if local.is_complex() and not local.is_conj() else local
    known = type(values) in _ORDINARY and values.dtype in _DTYPES and values.device == device
    if not known or values.is_meta or not is_dense(values):
        return torch.empty(0, device=device)
    elements = values.numel()
    values = flat(values)
    return values if elements <= ELEMENTS else values[:: every_so_many(elements, ELEMENTS)]
