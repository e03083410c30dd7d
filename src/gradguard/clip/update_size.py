"""How far a step moves the weights: measured before the step on copies, or after it by comparison."""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.clip.gradients import Gradients
from gradguard.distributed.placements import local_part
from gradguard.errors import InvalidTypeError
from gradguard.tensors.norms import norm_of_norms, tensor_norms
from gradguard.tensors.scaling import scale_


@torch.no_grad()
def rehearsed_update(optimizer: Optimizer, coefficient: Tensor) -> Tensor:
    r"""Return the 2-norm of the update that the next step of a `torch.optim` optimizer makes; nothing changes.

    .. math:: \lVert \theta_t - \mathrm{step}(\theta_t, c\,g) \rVert_2

    Each tensor is stepped separately, on copies of the tensor, its gradient and its state, so the extra memory is that
    of the largest tensor. No hook runs.

    Args:
        optimizer: An optimizer of `torch.optim` that updates each tensor independently.
        coefficient: c, the clip's factor of the gradients.

    Returns:
        0-dim, on the device of the gradients.
    """
    norms: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.detach().clone()
            scale_([gradient], coefficient)
            known = optimizer.state.get(parameter, {})
            state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in known.items()}
            moved, rehearsal = _alone(optimizer, group, parameter, gradient, state)
            _step(rehearsal)
            norms.append(tensor_norms([moved.detach() - parameter.detach()]))
    return norm_of_norms(torch.cat(norms)) if norms else torch.zeros_like(coefficient)


def _alone(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Any]
) -> tuple[Tensor, Optimizer]:
    """Return a copy of a parameter, with this gradient, and an optimizer for that copy alone."""
    moved = parameter.detach().clone().requires_grad_()
    moved.grad = gradient
    rehearsal = object.__new__(type(optimizer))
    vars(rehearsal).update(vars(optimizer))
    rehearsal.param_groups = [{**group, "params": [moved]}]
    rehearsal.state = defaultdict(dict, {moved: state} if state else {})
    return moved, rehearsal


def _step(rehearsal: Optimizer) -> None:
    unwrap(type(rehearsal).step)(rehearsal)  # the undecorated step runs no hooks


def _settled(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, size: float) -> Tensor:
    """Return the sum of steps 11 to 21 on a copy of the parameter, with gradients whose elements are all ``size``."""
    moved, rehearsal = _alone(optimizer, group, parameter, torch.full_like(parameter, size), {})
    for name, value in vars(optimizer).items():  # a step may write to attributes of the optimizer, too
        if isinstance(value, dict | list) and name not in ("param_groups", "state"):
            setattr(rehearsal, name, copy(value))
    for _ in range(10):
        _step(rehearsal)
    before = moved.detach().clone()
    for _ in range(11):
        _step(rehearsal)
    return moved.detach() - before


@torch.no_grad()
def scale_sensitive_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    r"""Return the parameter groups of ``optimizer`` whose step depends on the size of gradients; nothing changes.

    .. math:: \lVert \mathrm{step}(2 g) - \mathrm{step}(g) \rVert > \tfrac{1}{10} \lVert \mathrm{step}(g) \rVert

    Steps are measured, not inferred from a name. For each group, a tensor of ones with the shape of the group's
    smallest tensor takes steps with gradients of 1 and of 2. Each series starts from a fresh state, without weight
    decay and at a learning rate of 1. Steps 11 to 21 are compared, because RAdam begins as SGD does. A constant factor
    of all gradients doubles the steps of SGD but does not change those of Adam, Adafactor, Lion or Muon. A clip of only
    a *few* steps changes their steps too, through their averages: this function shows where a clip bounds the step
    itself.

    Args:
        optimizer: The optimizer; its step must not require a closure.

    Returns:
        The entries of ``optimizer.param_groups``, for `Groups`; possibly none.

    Raises:
        InvalidTypeError: If steps on one tensor of ones are not possible, or move nothing.

    Example:
        >>> import gradguard as gg, torch
        >>> first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        >>> optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.9}], lr=0.1)
        >>> len(gg.scale_sensitive_groups(optimizer)), gg.scale_sensitive_groups(torch.optim.AdamW([first]))
        (2, [])
        >>> clip = gg.Groups([(gg.scale_sensitive_groups(optimizer), gg.ClipByGlobalNorm(1.0))], rest=None)
    """
    found = []
    for group in optimizer.param_groups:
        smallest = min(filter(Tensor.numel, group["params"]), key=Tensor.numel, default=None)
        if smallest is None:
            continue
        settings = {**group, "lr": 1.0, "weight_decay": 0.0}
        ones = torch.ones(smallest.shape, dtype=smallest.dtype, device=smallest.device)
        try:
            once, twice = (_settled(optimizer, settings, ones, size) for size in (1.0, 2.0))
            change = float(torch.linalg.vector_norm(twice - once)) / float(torch.linalg.vector_norm(once))
        except Exception as error:
            raise InvalidTypeError(
                f"a trial step of this {type(optimizer).__name__} on one tensor of ones is not possible, or moves "
                f"nothing: {error}. Name the groups that a clip is to act on, "
                "gg.Groups([(optimizer.param_groups[0], ...)], rest=None)."
            ) from error
        if change > 0.1:
            found.append(group)
    return found


class UpdateSize:
    """Measures the norm of a step's update after the step, from a copy of this rank's weights.

    Args:
        parameters: The parameters of the optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._before = {id(p): local_part(p).detach().clone() for p in parameters}

    @torch.no_grad()
    def measure(self, grads: Gradients) -> Tensor:
        """Return the 2-norm of the update of the weights of ``grads``, over all ranks; 0-dim.

        Args:
            grads: The gradients of the step.
        """
        moved: list[Tensor] = []
        for parameter, gradient in zip(grads.parameters, grads.gradients, strict=True):
            before = self._before.get(id(parameter))  # None for a parameter of another pipeline stage
            moved.append(gradient[:0] if before is None else local_part(parameter).detach() - before)
        return norm_of_norms(grads.added_up(tensor_norms(moved)))
