r"""The samples' gradients must add up to the plain gradient, which autograd computed in the same backward.

A value that reached the loss on another way than through what was tapped is a part of the plain gradient and of no
sample's, whatever it is: an attribute, a list, a closure, a hook, a parameter that was handed on.

.. math:: \Bigl\lVert \sum_i g_i - P \Bigr\rVert \le c\,\varepsilon \Bigl(\sum_i \lVert g_i \rVert + s\Bigr)

with :math:`\varepsilon` of the coarsest dtype that was computed in, and s the size of gradients beside it: a gradient
that is zero but for rounding (that of a key's bias) is measured by what it was added up from.

Some kernels add up the plain gradient of a bias one number after the other: over a million positions that is wrong by a
per cent, in which a small value beside the outputs would hide. So the bar does not grow with the number of positions.
Where the sums differ, the layer runs again by itself, in the dtype it ran in and in float64: the difference of the two
is the kernel's own rounding, and is taken off the plain gradient before that is compared once more. It is no larger
than so many roundings explain, and a hundredth; a layer that computes something else in another dtype is refused.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.per_sample.call_arguments import Arguments, promoted, promoted_type, tensor_leaves
from gradguard.per_sample.contributions import Contribution, Outer, TableRows, Tied, real_parts, wide
from gradguard.per_sample.layers.call import LayerCall
from gradguard.per_sample.rerun import substituted
from gradguard.tensors.layout import wide_dtype
from gradguard.tensors.matmul_precision import full_float32, outside_autocast
from gradguard.tensors.norms import total_norm
from gradguard.torch_private import buffer_slots, parameter_slots


class Leaves:
    """Stand-ins for a module's parameters in one call, so that autograd adds up the call's own gradient.

    The tensors know of this object and not the other way round: a cycle through a tensor's hook would never be freed.

    Args:
        module: The module that is called.
        reached: Called with this object when a gradient has come to any of them.

    Attributes:
        plain: The gradients that have come, by name.
        values: The parameters, by name.
    """

    def __init__(self, module: nn.Module, reached: "Callable[[Leaves], None]") -> None:
        self.module, self.reached = module, reached
        self.plain: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    @property
    def are_complete(self) -> bool:
        """Whether a gradient has come to each of them."""
        return self.plain.keys() >= self.values.keys()

    def of(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the leaves, by name, of detached parameters."""
        for name, value in values.items():
            value.requires_grad_().register_post_accumulate_grad_hook(partial(self._take, name))
            self.values[name] = value.detach()
        return dict(values)

    def _take(self, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:  # none came where the loss left a result out
            self.add(name, gradient)
            self.reached(self)

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a gradient that came to a parameter."""
        self.plain[name] = self.plain[name] + gradient if name in self.plain else gradient


Again = Callable[[torch.dtype | None], Mapping[str, Tensor]]
"""Computes the plain gradients that a layer gives by itself, as it ran or, if a dtype is given, at least in that."""


def not_adding_up(
    found: Mapping[str, Contribution],
    leaves: Leaves,
    precision: float,
    size: Tensor | float,
    again: Again | None = None,
    summands: float = math.inf,
) -> str:
    """Return the name of a parameter whose samples' gradients do not add up to its plain one, "" if all do.

    Args:
        found: The per-sample gradients of each parameter.
        leaves: Autograd's own gradients; one that did not come is zero.
        precision: Machine epsilon of the coarsest dtype that was computed in.
        size: Norm of what else the same call was given and gave.
        again: Asked for the kernels' own rounding where the sums differ; None where the call cannot be repeated.
        summands: How many numbers a kernel may add up to one.

    Raises:
        OutOfMemoryError: If memory runs out.
    """
    errors, steps = list[Tensor](), 1.5 if precision > 1e-4 else 64.0
    for name, contribution in found.items():
        own, plain = magnitude(contribution), leaves.plain.get(name)
        with outside_autocast(own.device), full_float32():  # as the clipped sum is
            total = contribution.weighted_sum(torch.ones(contribution.batch_size, device=own.device))
        off = total if plain is None else total.sub_(dense(plain).view(total.shape))
        # As a multiple of what rounding explains; one that is not finite says nothing.
        error = total_norm([off]) / (steps * precision * (own + size) + 1e-300)
        errors.append(torch.where(error.isfinite(), error, 0.0))
    each = torch.stack(errors).tolist() if errors else []  # one look at the device
    name = next((name for name, error in zip(found, each, strict=True) if error > 1), "")
    if not name or again is None:
        return name
    try:
        widest = wide_dtype(leaves.plain[name].device) if name in leaves.plain else torch.float64
        rounded, exact = again(None), again(widest)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the code of a layer says that cannot run by itself, or in float64
        return name
    corrected, bars = Leaves(leaves.module, leaves.reached), list[Tensor]()
    for key, plain in leaves.plain.items():
        correction = dense(exact[key]).to(widest) - dense(rounded[key])
        corrected.plain[key] = dense(plain).to(widest) + correction
        most = min(_MOST_ROUNDING, summands * precision) * (magnitude(found[key]) + size) if key in found else 0.0
        bars.append(total_norm([correction]) <= most + 1e-300)
    if bars and not bool(torch.stack(bars).all()):  # False for NaN
        return name
    return not_adding_up(found, corrected, precision, size)


_MOST_ROUNDING = 0.01
"""Of the samples' gradients: the most that a kernel's rounding is believed to be."""

Run = Callable[[Mapping[str, Tensor], Arguments, torch.dtype | None], Any]
"""Runs a layer again by itself: with values of its parameters, by name, and arguments; and, given a dtype, in that."""


def by_itself(call: LayerCall, run: Run, values: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Return the plain gradients of a layer's parameters when it runs again and gets the same gradient.

    Args:
        call: The call of the layer.
        run: Runs it.
        values: Its trained parameters, by their names in the layer.
        dtype: Compute at least in this; None: as it ran.
    """
    leaves = {n: v.detach().to(promoted_type(v, dtype), copy=True).requires_grad_() for n, v in values.items()}
    arguments = (call.args, call.kwargs)
    with torch.enable_grad():
        outputs = tensor_leaves(run(leaves, arguments if dtype is None else promoted(arguments, dtype), dtype))
    pairs = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, call.grads, strict=True) if grad is not None]
    roots, grads = zip(*pairs, strict=True)
    return [*torch.autograd.grad(roots, [*leaves.values()], grads, allow_unused=True, materialize_grads=True)]


def run_layer(
    module: nn.Module,
    autocast: tuple[str, torch.dtype] | None,
    values: Mapping[str, Tensor],
    arguments: Arguments,
    dtype: torch.dtype | None,
) -> Any:
    """Run a layer without its hooks, as `Run` says."""
    held = {
        f"{prefix}.{slot}".strip("."): ((part, slot), tensor)
        for prefix, part in module.named_modules()
        for slot, tensor in (parameter_slots(part) | buffer_slots(part)).items()
        if tensor is not None
    }
    copies = {place: t.detach().to(promoted_type(t, dtype), copy=True) for place, t in held.values()}
    copies |= {held[name][0]: value for name, value in values.items()}
    device = next(iter(values.values())).device
    with torch.autocast(*autocast) if autocast and dtype is None else outside_autocast(device), substituted(copies):
        return module.forward(*arguments[0], **arguments[1])


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
