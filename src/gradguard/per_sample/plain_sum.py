r"""The samples' gradients must add up to the plain gradient, which autograd computed in the same backward.

A value that reached the loss on another way than through what was tapped is a part of the plain gradient and of no
sample's, whatever it is: an attribute, a list, a closure, a hook, a parameter that was handed on.

.. math:: \Bigl\lVert \sum_i g_i - P \Bigr\rVert \le c\,\varepsilon \Bigl(\sum_i \lVert g_i \rVert + s\Bigr)

with :math:`\varepsilon` of the coarsest dtype that was computed in, and s the size of gradients beside it: a gradient
that is zero but for rounding (that of a key's bias) is measured by what it was added up from.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from gradguard.per_sample.contributions import Contribution, Outer, TableRows, Tied, real_parts, wide
from gradguard.tensors.layout import wide_dtype
from gradguard.tensors.norms import total_norm


class Leaves:
    """Stand-ins for a module's parameters in one call, so that autograd adds up the call's own gradient.

    The tensors know of this object and not the other way round: a cycle through a tensor's hook would never be freed.

    Args:
        module: The module that is called.
        reached: Called with this object when a gradient has come to any of them.

    Attributes:
        plain: The gradients that have come, by name.
    """

    def __init__(self, module: nn.Module, reached: "Callable[[Leaves], None]") -> None:
        self.module, self._reached = module, reached
        self.plain: dict[str, Tensor] = {}

    def of(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the leaves, by name, of detached parameters."""
        for name, value in values.items():
            value.requires_grad_().register_post_accumulate_grad_hook(partial(self._take, name))
        return dict(values)

    def _take(self, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:  # none came where the loss left a result out
            self.add(name, gradient)
            self._reached(self)

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a gradient that came to a parameter."""
        self.plain[name] = self.plain[name] + gradient if name in self.plain else gradient


def not_adding_up(found: Mapping[str, Contribution], leaves: Leaves, precision: float, size: Tensor | float) -> str:
    """Return the name of a parameter whose samples' gradients do not add up to its plain one, "" if all do.

    Args:
        found: The per-sample gradients of each parameter.
        leaves: Autograd's own gradients; one that did not come is zero.
        precision: Machine epsilon of the coarsest dtype that was computed in.
        size: Norm of what else the same call was given and gave.
    """
    errors, steps = list[Tensor](), 1.5 if precision > 1e-4 else 64.0
    for name, contribution in found.items():
        own, plain = magnitude(contribution), leaves.plain.get(name)
        total = contribution.weighted_sum(torch.ones(contribution.batch_size, device=own.device))
        off = total if plain is None else total.sub_(dense(plain).view(total.shape))
        # As a multiple of what rounding explains; one that is not finite says nothing.
        error = total_norm([off]) / (steps * precision * (own + size) + 1e-300)
        errors.append(torch.where(error.isfinite(), error, 0.0))
    each = torch.stack(errors).tolist() if errors else []  # one look at the device
    return next((name for name, error in zip(found, each, strict=True) if error > 1), "")


def magnitude(contribution: Contribution) -> Tensor:
    """Return the sum of the norms of what the samples' gradients are added up from, as far as that is known."""

    def lengths(values: Tensor) -> Tensor:  # in float64: squares of what is tiny in float32 are zero there
        return torch.linalg.vector_norm(values, dim=-1, dtype=wide_dtype(values.device))

    if isinstance(contribution, Outer):
        return (lengths(contribution.left) * lengths(contribution.right)).double().sum()
    if isinstance(contribution, TableRows):
        return lengths(contribution.values).double().sum()
    if isinstance(contribution, Tied):
        return magnitude(contribution.looked_up) + magnitude(contribution.multiplied)
    return contribution.squared_norms().sqrt().sum()


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient without sparsity, at least float32, a complex one as pairs of real values."""
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return wide(real_parts(gradient))
