"""Rules of `torch.optim`: the step over the learning rate, of some elements, from a state and a gradient.

A rule is called after the step, with the state that this has left, so that only what became of it is computed again.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Muon, Optimizer, RMSprop

Rule = Callable[[Mapping[str, Any], Mapping[str, Any], Tensor, Tensor, torch.Size], Tensor | None]
"""Called with the group, the state after the step, the gradient, the weight before the step, and the parameter's shape;
all but the shape in the elements that are looked at. None where these are too few."""


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule of an optimizer of these classes, or of a subclass, which may do something else."""
    return next((rule for kind, rule in _RULES.items() if isinstance(optimizer, kind)), None)


def _adam(
    group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor, weight: Tensor, shape: torch.Size
) -> Tensor:
    del gradient, shape
    first, second = ((1 - beta ** state["step"]) for beta in group["betas"])
    squares = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    step = state["exp_avg"] / first / ((squares / second).sqrt() + group["eps"])
    return step + group["weight_decay"] * weight if group["decoupled_weight_decay"] else step


def _sgd(
    group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor, weight: Tensor, shape: torch.Size
) -> Tensor:
    del shape
    gradient = _decayed(group, gradient, weight)
    if not group["momentum"]:
        return gradient
    mean = state["momentum_buffer"]
    return gradient + group["momentum"] * mean if group["nesterov"] else mean


def _rmsprop(
    group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor, weight: Tensor, shape: torch.Size
) -> Tensor:
    del shape
    if group["momentum"] > 0:
        return state["momentum_buffer"]
    squares = state["square_avg"] - state["grad_avg"].square() if group["centered"] else state["square_avg"]
    return _decayed(group, gradient, weight) / (squares.sqrt() + group["eps"])


def _muon(
    group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor, weight: Tensor, shape: torch.Size
) -> Tensor | None:
    if weight.numel() != shape.numel():
        return None  # an orthogonalisation needs the whole matrix
    mean = state["momentum_buffer"]
    mean = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
    matrix = mean.view(shape).bfloat16()
    matrix = matrix.T if shape[0] > shape[1] else matrix
    matrix = matrix / matrix.norm().clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    matrix = matrix.T if shape[0] > shape[1] else matrix
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(shape))
    else:
        ratio = math.sqrt(max(1, shape[0] / shape[1]))
    return ratio * matrix.reshape(-1).to(weight.dtype) + group["weight_decay"] * weight


def _decayed(group: Mapping[str, Any], gradient: Tensor, weight: Tensor) -> Tensor:
    return (-gradient if group["maximize"] else gradient) + group["weight_decay"] * weight


_RULES: dict[type[Optimizer], Rule] = {Adam: _adam, SGD: _sgd, RMSprop: _rmsprop, Muon: _muon}
