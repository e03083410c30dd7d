"""How far an optimizer moves the weights for each unit of a gradient, where that is known before it steps."""

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
        rates: The distance for each of them.
    """

    groups: Sequence[Mapping[str, Any]]
    rates: Sequence[float | Tensor]

    def longest_gradient(self, grads: Gradients, order: float = 2.0) -> Tensor:
        r"""Return the largest norm of the gradients for which no step moves the weights by more than their own norm.

        .. math:: \frac{\lVert (w_i)_{i:\, r_i > 0} \rVert}{\max_i r_i}

        It is infinite if no rate is above 0, and where all
        weights are 0 or one is not finite: then a share of their norm means nothing. Where processes hold parts of
        the gradients this is one all-reduce, in which all of them take part. 0-dim, float64.

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
        if len(rates) > 1:  # weights that stand still are no part of what moves, nor are those of another stage
            rate_of = {id(p): rate for group, rate in zip(self.groups, rates, strict=True) for p in group["params"]}
            nothing = torch.zeros_like(rates[0])
            own = torch.stack([rate_of.get(id(p), nothing) for p in grads.parameters])
            norms = torch.where(own > 0, norms, 0.0)
        length = norm_of_norms(grads.added_up(norms, order), order) / torch.stack(rates).max()
        return torch.where((length > 0) & length.isfinite(), length, math.inf)


def with_reach(grads: Gradients, clipper: Clipper, optimizer: Optimizer) -> Gradients:
    """Return ``grads``, which are about to be clipped for a step of ``optimizer``, with its reach if a rule uses it."""
    if any(leaf.uses_reach for leaf in clipper.leaves()):
        return replace(grads, reach=reach_of(optimizer))
    return grads


def reach_of(optimizer: Optimizer) -> Reach | None:
    r"""Return the reach of ``optimizer`` with the rates of this step; None where it is not known.

    SGD moves the weights by :math:`\eta g` and, with momentum :math:`\beta` and dampening d, by a sum of earlier
    gradients besides. Of gradients that do not depend on each other the root of the mean square of its steps is

    .. math:: r = \frac{\eta (1 - d)}{\sqrt{1 - \beta^2}}

    which lies between the value for gradients that are all equal and that for gradients whose sign alternates. It is
    :math:`\eta` at least: the first step takes its gradient undamped.

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
