"""Measuring gradients: the norm of each at every step, and costlier numbers now and then.

The norm of a gradient costs one read of memory: by the compiled kernels where there are some, else by `tensor_norms`.

The diagnostics are the norms of the weights and of what a step changes.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradguard.distributed.placements import refuse_sharded
from gradguard.tensors.kernels import norms_at_once
from gradguard.tensors.layout import are_readable
from gradguard.tensors.norms import tensor_norms

Norms = Tensor | list[float]
"""Numbers where Python may look at them at no cost (on the CPU); else a vector on the device, to be read later."""


def total(norms: Norms) -> Tensor | float:
    """Return the 2-norm of all gradients, from that of each."""
    return torch.linalg.vector_norm(norms) if isinstance(norms, Tensor) else math.hypot(*norms)


def unscaled(norms: Any, scale: Any) -> Any:
    """Return a norm, or several, without the loss scale that a fused optimizer takes off itself, if there is one."""
    if scale is None:
        return norms
    return [norm / float(scale) for norm in norms] if isinstance(norms, list) else norms / scale


def gradient_norms(tensors: Sequence[Tensor]) -> Norms:
    """Return the 2-norm of each of ``tensors``; not finite only if an element is not, or the norm exceeds float64.

    Raises:
        UnsupportedGradientError: If one is a shard, whose own norm would be plausible and wrong.

    Example:
        >>> gradient_norms([torch.tensor([3.0, 4.0]), torch.zeros(2)])
        [5.0, 0.0]
    """
    if (known := norms_at_once(tensors)) is not None:
        return known
    refuse_sharded(tensors)
    norms = tensor_norms(tensors)
    return norms.tolist() if are_readable(*tensors) else norms


MOST_BYTES = 256 * 2**20
"""Weights beyond this are not copied, so their update has no norm: watching must not run a device out of memory."""

_SMALL_PRIMES = 2 * 3 * 5 * 7 * 11 * 13


class Diagnostics(NamedTuple):
    """One measurement; arrays have one entry for each parameter of the step, in its order.

    Attributes:
        weight: 2-norm of each parameter before the step.
        update: 2-norm of what the step changed; None if not measured.
        before: The parameters and copies of them, until `measure_update`.
        seconds: How long it took.
    """

    weight: Norms
    update: Norms | None = None
    before: Sequence[tuple[Tensor, Tensor]] = ()
    seconds: float = 0.0


@torch.no_grad()
def measure_diagnostics(parameters: Sequence[Tensor]) -> Diagnostics:
    """Measure the weights of ``parameters``, all of which have a gradient, just before the step."""
    weights = [p.detach() for p in parameters]
    small = sum(w.numel() * w.element_size() for w in weights) <= MOST_BYTES
    return Diagnostics(
        weight=gradient_norms(weights),
        before=[(w, w.clone()) for w in weights] if small else (),
    )


@torch.no_grad()
def measure_update(diagnostics: Diagnostics) -> Diagnostics:
    """Return it with the norms of what the step did to the parameters, and without the copies."""
    if not diagnostics.before:
        return diagnostics
    return diagnostics._replace(update=gradient_norms([old.sub_(now) for now, old in diagnostics.before]), before=())


@lru_cache
def every_so_many(elements: int, wanted: int) -> int:
    """Return the k for which every k-th of some elements is about as many as ``wanted``; 1 where there are no more.

    It is coprime to the usual row lengths, so that no column is left out.

    Args:
        elements: How many there are.
        wanted: How many are wanted at most.

    Example:
        >>> every_so_many(4096, 4096), every_so_many(768 * 768, 4096)
        (1, 149)
    """
    every = math.ceil(elements / wanted)
    while every > 1 and math.gcd(every, _SMALL_PRIMES) > 1:
        every += 1
    return max(every, 1)
