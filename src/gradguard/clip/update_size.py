"""How far a step moves the weights: found before it by a rehearsal on copies, or after it by comparison."""

from collections import defaultdict
from collections.abc import Sequence
from inspect import unwrap

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.clip.gradients import Gradients
from gradguard.distributed.placements import local_part
from gradguard.tensors.norms import norm_of_norms, tensor_norms
from gradguard.tensors.scaling import scale_


@torch.no_grad()
def rehearsed_update(optimizer: Optimizer, coefficient: Tensor) -> Tensor:
    r"""Return the 2-norm of what the next step of a stock optimizer takes from the weights; nothing changes.

    .. math:: \lVert \theta_t - \mathrm{step}(\theta_t, c\,g) \rVert_2

    Each tensor is stepped by itself, as a copy with copies of its gradient and of its state, so that memory is that of
    the largest tensor. No hook runs.

    Args:
        optimizer: An optimizer of `torch.optim` that treats each tensor by itself.
        coefficient: c, what the clip multiplies gradients by.

    Returns:
        0-dim, on the device of the gradients.
    """
    norms: list[Tensor] = []
    step = unwrap(type(optimizer).step)  # without what calls hooks
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            moved = parameter.detach().clone().requires_grad_()
            moved.grad = parameter.grad.detach().clone()
            scale_([moved.grad], coefficient)
            known = optimizer.state.get(parameter, {})
            state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in known.items()}
            rehearsal = object.__new__(type(optimizer))
            vars(rehearsal).update(vars(optimizer))
            rehearsal.param_groups = [{**group, "params": [moved]}]
            rehearsal.state = defaultdict(dict, {moved: state} if state else {})
            step(rehearsal)
            norms.append(tensor_norms([moved.detach() - parameter.detach()]))
    return norm_of_norms(torch.cat(norms)) if norms else torch.zeros_like(coefficient)


class UpdateSize:
    """The size of a step that is about to be taken, known after it; memory of the weights of this process.

    Args:
        parameters: Those of the optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._before = {id(p): local_part(p).detach().clone() for p in parameters}

    @torch.no_grad()
    def measure(self, grads: Gradients) -> Tensor:
        """Return the 2-norm of what has been taken from the weights of ``grads``, on all processes; 0-dim.

        Args:
            grads: The gradients of the step.
        """
        moved: list[Tensor] = []
        for parameter, gradient in zip(grads.parameters, grads.gradients, strict=True):
            before = self._before.get(id(parameter))  # None of one that another pipeline stage has
            moved.append(gradient[:0] if before is None else local_part(parameter).detach() - before)
        norms = tensor_norms(moved)
        return norm_of_norms(norms if grads.reduction is None else grads.reduction.add_up((norms, 2.0))[0])
