r"""Check that the samples' gradients add up to the plain gradient that autograd computed in the same backward.

If a value reached the loss other than through a tapped output, the plain gradient contains its part and no sample's
gradient does. Such a value may be an attribute, a list, a closure, a hook, or a parameter that was passed on.

.. math:: \Bigl\lVert \sum_i g_i - P \Bigr\rVert \le c\,\varepsilon \Bigl(\sum_i \lVert g_i \rVert + s\Bigr)

with :math:`\varepsilon` of the coarsest dtype of the computation, and s the size of other gradients in the same call.
A gradient that is zero except for rounding (such as of the bias of an attention key) is thus compared with the size of
its summands.

Some kernels sum the plain gradient of a bias one number after the other. Over a million positions this sum is wrong by
one per cent, which could hide a small value that bypasses the outputs. The bound therefore does not grow with the
number of positions. If the sums differ, the layer runs again alone, in its original dtype and in float64. The
difference of the two is the kernel's own rounding, and is subtracted from the plain gradient before a second
comparison. This correction may be no larger than the rounding of so many summands explains, and at most a hundredth of
the gradients;
a layer that computes something else in another dtype is refused.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.per_sample.call_arguments import Arguments, promoted, promoted_type, tensor_leaves
from gradguard.per_sample.contributions import Contribution, Outer, TableRows, Tied, real_parts, row_norms, wide
from gradguard.per_sample.layers.call import LayerCall
from gradguard.per_sample.rerun import substituted
from gradguard.tensors.layout import wide_dtype
from gradguard.tensors.matmul_precision import full_float32, outside_autocast
from gradguard.tensors.norms import total_norm
from gradguard.torch_private import buffer_slots, parameter_slots


class Leaves:
    """Leaf tensors in the places of a module's parameters, in which autograd accumulates the gradient of one call.

    The leaves refer to this object, and this object stores no leaf: a cycle through a tensor's hook is never freed.

    Args:
        module: The module that is called.
        reached: Called with this object whenever a leaf has got a gradient.

    Attributes:
        plain: The gradients so far, by name.
        values: The parameters' values, by name.
    """

    def __init__(self, module: nn.Module, reached: "Callable[[Leaves], None]") -> None:
        self.module, self.reached = module, reached
        self.plain: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    @property
    def are_complete(self) -> bool:
        """Whether every leaf has got a gradient."""
        return self.plain.keys() >= self.values.keys()

    def of(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn detached parameters into leaves; return them by name."""
        for name, value in values.items():
            value.requires_grad_().register_post_accumulate_grad_hook(partial(self._take, name))
            self.values[name] = value.detach()
        return dict(values)

    def _take(self, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:  # autograd calls the hook without a gradient for results that the loss does not use
            self.add(name, gradient)
            self.reached(self)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to those of parameter ``name``."""
        self.plain[name] = self.plain[name] + gradient if name in self.plain else gradient


Again = Callable[[torch.dtype | None], Mapping[str, Tensor]]
"""Computes the plain gradients of a layer that runs alone: as it ran before, or in at least the given dtype."""


def not_adding_up(
    found: Mapping[str, Contribution],
    leaves: Leaves,
    precision: float,
    size: Tensor | float,
    again: Again | None = None,
    summands: float = math.inf,
    rounding: Mapping[str, Tensor] | None = None,
) -> str:
    """Return the name of a parameter whose samples' gradients do not add up to its plain gradient, or "".

    Args:
        found: The per-sample gradients of each parameter.
        leaves: Autograd's own gradients; a missing one counts as zero.
        precision: Machine epsilon of the coarsest dtype of the computation.
        size: Size of the other gradients in the same call.
        again: Repeats the call, to measure the kernels' own rounding if the sums differ; None if it cannot be repeated.
        summands: The largest number of values that a kernel may sum into one.
        rounding: How far rounding may move each plain gradient, if that was measured.

    Raises:
        OutOfMemoryError: If memory runs out.
    """
    errors, steps = list[Tensor](), 1.5 if precision > 1e-4 else 64.0
    for name, contribution in found.items():
        own, plain = magnitude(contribution), leaves.plain.get(name)
        with outside_autocast(own.device), full_float32():  # as the clipped sum is
            total = contribution.weighted_sum(torch.ones(contribution.batch_size, device=own.device))
        off = total if plain is None else total.sub_(dense(plain).view(total.shape))
        # As a multiple of the bound; an error that is not finite proves nothing.
        moved = 0.0 if rounding is None else rounding.get(name, 0.0)
        error = total_norm([off]) / (steps * precision * (own + size) + moved + 1e-300)
        errors.append(torch.where(error.isfinite(), error, 0.0))
    each = torch.stack(errors).tolist() if errors else []  # one host sync
    name = next((name for name, error in zip(found, each, strict=True) if error > 1), "")
    if not name or again is None:
        return name
    try:
        widest = wide_dtype(leaves.plain[name].device) if name in leaves.plain else torch.float64
        rounded, exact = again(None), again(widest)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the layer's code may be unable to run alone, or in float64
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
"""The largest rounding of a kernel that is accepted, relative to the samples' gradients."""

Run = Callable[[Mapping[str, Tensor], Arguments, torch.dtype | None], Any]
"""Runs a layer again alone, with parameter values by name and with arguments, in at least the given dtype if any."""


def by_itself(call: LayerCall, run: Run, values: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Return the plain gradients of a layer's parameters from a second run that gets the same output gradients.

    Args:
        call: The call of the layer.
        run: Runs it.
        values: Its trained parameters, by their names in the layer.
        dtype: The least dtype of the computation; None for the original one.
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
    """Run a layer again without its hooks; see `Run`."""
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
    """Return the sum of the norms of the summands of the samples' gradients, or of the gradients themselves."""

    def lengths(values: Tensor) -> Tensor:  # in float64, because squares of tiny values are zero in float32
        return row_norms([values.flatten(0, -2)])[0]

    if isinstance(contribution, Outer):
        return (lengths(contribution.left) * lengths(contribution.right)).sum()
    if isinstance(contribution, TableRows):
        return lengths(contribution.values).sum()
    if isinstance(contribution, Tied):
        return magnitude(contribution.looked_up) + magnitude(contribution.multiplied)
    return contribution.squared_norms().sqrt().sum()


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor, at least float32, and a complex one as pairs of real values."""
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return wide(real_parts(gradient))
