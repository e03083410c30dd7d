"""How far an optimizer moves the weights for each unit of a gradient, if that is known before the step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.clip.clipper import Clipper
from gradguard.clip.gradients import Gradients
from gradguard.distributed.placements import local_part
from gradguard.tensors.layout import move
from gradguard.tensors.norms import norm_of_norms, tensor_norms


@dataclass(frozen=True, slots=True)
class Reach:
    r"""The distance that a step moves each parameter, for each unit of the norm of its gradient.

    Attributes:
        groups: The optimizer's parameter groups.
        rates: The distance for each group.
    """

    groups: Sequence[Mapping[str, Any]]
    rates: Sequence[float | Tensor]

    def longest_gradient(self, grads: Gradients, order: float = 2.0) -> Tensor:
        r"""Return the norm up to which gradients move the weights by no more than the weights' own norm.

        .. math:: \frac{\lVert (w_i)_{i:\, r_i > 0} \rVert}{\max_i r_i}

        The result is infinite if no rate is above 0, or if all weights are 0 or one is not finite: a share of their
        norm then means nothing. For sharded gradients this is one all-reduce, in which all ranks must take part.
        0-dim, float64.

        Args:
            grads: The gradients, with their parameters.
            order: The order of the norms.
        """
        weights = [local_part(p) if g.numel() else g for p, g in zip(grads.parameters, grads.gradients, strict=True)]
        norms = tensor_norms(weights, order)
        rates = [
            move(rate.detach(), norms.device, norms.dtype).reshape(())
            if isinstance(rate, Tensor)
            else torch.full((), rate, dtype=norms.dtype, device=norms.device)
            for rate in self.rates
        ]
        if len(rates) > 1:  # exclude weights with a rate of 0 or of another stage: this step does not move them
            rate_of = {id(p): rate for group, rate in zip(self.groups, rates, strict=True) for p in group["params"]}
            nothing = torch.zeros_like(rates[0])
            own = torch.stack([rate_of.get(id(p), nothing) for p in grads.parameters])
            norms = torch.where(own > 0, norms, 0.0)
        length = norm_of_norms(grads.added_up(norms, order), order) / torch.stack(rates).max()
        return torch.where((length > 0) & length.isfinite(), length, math.inf)


def with_reach(grads: Gradients, clipper: Clipper, optimizer: Optimizer) -> Gradients:
    """Return ``grads`` with the reach of ``optimizer``, whose step follows, if a rule of ``clipper`` uses it."""
    if any(leaf.uses_reach for leaf in clipper.leaves()):
        return replace(grads, reach=reach_of(optimizer))
    return grads


def reach_of(optimizer: Optimizer) -> Reach | None:
    r"""Return the reach of ``optimizer`` with the rates of this step; None if it is not known.

    SGD moves the weights by :math:`\eta g` and, with momentum :math:`\beta` and dampening d, also by a sum of earlier
    gradients. For gradients that are independent of each other, the root mean square of its steps is

    .. math:: r = \frac{\eta (1 - d)}{\sqrt{1 - \beta^2}}

    This value is between that for equal gradients and that for gradients of alternating sign. It is at least
    :math:`\eta`, because the first step takes its gradient undamped.

    Args:
        optimizer: The optimizer.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return None
    rates: list[float | Tensor] = []
    for group in optimizer.param_groups:
        rate, momentum = group["lr"], group["momentum"]
        if momentum:
            left = 1 - momentum**2
            if not left > 0:
                return None
            rate = rate * max(1.0, (1 - group["dampening"]) / math.sqrt(left))
        rates.append(rate)
    return Reach(optimizer.param_groups, rates)
