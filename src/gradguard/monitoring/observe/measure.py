"""Measure gradients: the norm of each gradient at every step, and costlier diagnostics at some steps.

A norm costs one read of the gradient's memory, by the compiled kernels if they are available, else by `tensor_norms`.

The diagnostics are the norms of the weights and of their change by a step.
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
"""Norms as numbers if Python can read them without a host sync (on the CPU), else as a vector on the device."""


def total(norms: Norms) -> Tensor | float:
    """Return the 2-norm of all gradients, given the 2-norm of each."""
    return torch.linalg.vector_norm(norms) if isinstance(norms, Tensor) else math.hypot(*norms)


def unscaled(norms: Any, scale: Any) -> Any:
    """Return norms divided by the loss scale of a fused optimizer, which unscales in its step; unchanged if None."""
    if scale is None:
        return norms
    return [norm / float(scale) for norm in norms] if isinstance(norms, list) else norms / scale


def gradient_norms(tensors: Sequence[Tensor]) -> Norms:
    """Return the 2-norm of each tensor.

    A norm is non-finite only if an element of the tensor is, or if the norm exceeds float64.

    Raises:
        UnsupportedGradientError: If a tensor is a shard: its norm would be plausible but wrong.

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
"""The largest total size of weights that are copied to measure their update; a copy must not exhaust the memory."""

_SMALL_PRIMES = 2 * 3 * 5 * 7 * 11 * 13


class Diagnostics(NamedTuple):
    """One full measurement; its arrays have one entry for each parameter of the step, in the step's order.

    Attributes:
        weight: The 2-norm of each parameter before the step.
        update: The 2-norm of each parameter's change by the step; None if it was not measured.
        before: Each parameter and a copy of it from before the step, until `measure_update`.
        seconds: The time that the measurement took.
    """

    weight: Norms
    update: Norms | None = None
    before: Sequence[tuple[Tensor, Tensor]] = ()
    seconds: float = 0.0


@torch.no_grad()
def measure_diagnostics(parameters: Sequence[Tensor]) -> Diagnostics:
    """Measure the norms of ``parameters``, which all have gradients, just before the step."""
    weights = [p.detach() for p in parameters]
    small = sum(w.numel() * w.element_size() for w in weights) <= MOST_BYTES
    return Diagnostics(
        weight=gradient_norms(weights),
        before=[(w, w.clone()) for w in weights] if small else (),
    )


@torch.no_grad()
def measure_update(diagnostics: Diagnostics) -> Diagnostics:
    """Return the diagnostics with the norms of the parameters' changes, and without the copies."""
    if not diagnostics.before:
        return diagnostics
    return diagnostics._replace(update=gradient_norms([old.sub_(now) for now, old in diagnostics.before]), before=())


@lru_cache
def every_so_many(elements: int, wanted: int) -> int:
    """Return a stride that samples at most ``wanted`` of ``elements`` elements; 1 if there are no more than that.

    The stride is coprime to the usual row lengths: a sample then has elements of every column.

    Args:
        elements: The number of elements.
        wanted: The largest number of samples.

    Example:
        >>> every_so_many(4096, 4096), every_so_many(768 * 768, 4096)
        (1, 149)
    """
    every = math.ceil(elements / wanted)
    while every > 1 and math.gcd(every, _SMALL_PRIMES) > 1:
        every += 1
    return max(every, 1)
