"""By how much a step moves each tensor of the weights, from some of their elements.

A tensor of more than `ELEMENTS` is judged by about so many, evenly spread, and a sharded one by this process's part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

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


class Movements:
    """Keeps where the samples of each optimizer's weights are, as long as these stay where they are in memory."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Optimizer, tuple[list[int], list[Tensor], list[int]]] = WeakKeyDictionary()

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> "Moving":
        """Take a sample of the weights that a step is about to change; of several devices, those on the first.

        Args:
            optimizer: Whose step it is.
            parameters: Those that have a gradient, at least one.

        Returns:
            The sample.
        """
        ordinary = all(kind in _ORDINARY for kind in set(map(type, parameters)))
        places = list(map(Tensor.data_ptr, parameters)) if ordinary else []
        known, samples, sizes = self._last.get(optimizer) or ([], [], [])
        if not ordinary or known != places:
            samples = [_sample(p, parameters[0].device) for p in parameters]
            sizes = [p.numel() for p in parameters]
            self._last[optimizer] = places, samples, sizes
        rates = [group.get("lr") for group in optimizer.param_groups]
        rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]
        return Moving(samples, sizes, rates, torch.cat(samples))


class Moving(NamedTuple):
    """A sample of the weights before a step.

    Attributes:
        samples: Some elements of each parameter, which share its memory.
        sizes: How many elements each has.
        rates: The learning rate of each group of the optimizer.
        before: Copies of the samples, in the widest of their dtypes.
    """

    samples: list[Tensor]
    sizes: list[int]
    rates: list[Any]
    before: Tensor

    @torch.no_grad()
    def moved(self) -> Moved:
        """Return what the step has done."""
        counts = [sample.numel() for sample in self.samples]
        change = torch.cat(self.samples).sub_(self.before)
        update, weight = (gradient_norms(whole.split(counts)) for whole in (change, self.before))
        return Moved(update, weight, counts, self.sizes, self.rates)


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
