"""Recompute the steps of `torch.optim`'s rules, divided by the learning rate, for a sample of the elements.

A rule is called after the step with the optimizer's new state: it computes the step from that state without updating
the state again.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Muon, Optimizer


class Taken(NamedTuple):
    """The sampled elements of one parameter at a step.

    Attributes:
        group: The settings of the parameter group.
        state: The optimizer's state after the step.
        gradient: The gradient.
        weight: The weight before the step.
        shape: The shape of the whole parameter.
    """

    group: Mapping[str, Any]
    state: Mapping[str, Any]
    gradient: Tensor
    weight: Tensor
    shape: torch.Size

    @property
    def decay(self) -> Tensor:
        """The weight decay, which is added to the gradient, or to the step if it is decoupled."""
        return self.group["weight_decay"] * self.weight

    @property
    def decayed(self) -> Tensor:
        """The gradient of the minimised loss, plus weight decay."""
        return (-self.gradient if self.group["maximize"] else self.gradient) + self.decay


Rule = Callable[[Taken], Tensor | None]


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule of an optimizer of a known class or its subclass; a subclass may use another rule."""
    return next((rule for kind, rule in _RULES.items() if isinstance(optimizer, kind)), None)


def _adam(taken: Taken) -> Tensor:
    group, state = taken.group, taken.state
    first, second = ((1 - beta ** state["step"]) for beta in group["betas"])
    squares = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    step = state["exp_avg"] / first / ((squares / second).sqrt() + group["eps"])
    return step + taken.decay if group["decoupled_weight_decay"] else step


def _sgd(taken: Taken) -> Tensor:
    momentum = taken.group["momentum"]
    if not momentum:
        return taken.decayed
    mean = taken.state["momentum_buffer"]
    return taken.decayed + momentum * mean if taken.group["nesterov"] else mean


def _muon(taken: Taken) -> Tensor | None:
    group, (rows, columns) = taken.group, taken.shape
    if taken.weight.numel() != rows * columns:
        return None  # an orthogonalisation needs the whole matrix
    mean = taken.state["momentum_buffer"]
    mean = taken.gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
    matrix = mean.view(rows, columns).bfloat16()
    matrix = matrix.T if rows > columns else matrix
    matrix = matrix / matrix.norm().clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    matrix = matrix.T if rows > columns else matrix
    by_size = 0.2 * math.sqrt(max(rows, columns)), math.sqrt(max(1, rows / columns))
    ratio = by_size[group["adjust_lr_fn"] != "match_rms_adamw"]
    return ratio * matrix.reshape(-1).to(taken.weight.dtype) + taken.decay


_RULES: dict[type[Optimizer], Rule] = {Adam: _adam, SGD: _sgd, Muon: _muon}
