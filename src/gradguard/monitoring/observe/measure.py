"""Measuring gradients: the norm of each at every step, and costlier numbers now and then.

The norm of a gradient costs one read of memory: by the compiled kernels where there are some, else by `tensor_norms`.

The diagnostics (largest element, share of zeros, weight and update norms, a histogram) are of the gradients as the
optimizer gets them, after any clip, without a loss scale.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.placements import refuse_sharded
from gradguard.tensors.layout import are_readable, readable_values
from gradguard.tensors.norms import norms_at_once, tensor_norms

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

SAMPLE = 1 << 16
"""The histogram looks at about so many elements of each tensor."""

LOWEST, HIGHEST, BINS = -20.0, 10.0, 60
"""The histogram's range of log10, and its number of bins; zeros have no logarithm and are in ``zeros``."""

_SMALL_PRIMES = 2 * 3 * 5 * 7 * 11 * 13


@dataclass(slots=True)
class Diagnostics:
    """One measurement; arrays have one entry for each parameter of the step, in its order.

    Attributes:
        max: Largest magnitude of each gradient.
        zeros: Share of exact zeros.
        zero_rows: Share of rows, along the first dimension, that hold nothing but zeros; NaN for a vector.
        weight: 2-norm of each parameter before the step.
        counts: Number of elements in each bin of log10 of the magnitude, all gradients together; None if not counted.
        update: 2-norm of what the step changed; None if not measured.
        scale: Loss scale that ``max`` and ``counts`` still contain.
        before: The weights, until `measure_update`.
    """

    max: Norms
    zeros: Norms
    zero_rows: Norms
    weight: Norms
    counts: Norms | None = None
    update: Norms | None = None
    scale: Any = None
    before: list[Tensor] | None = None


@torch.no_grad()
def measure_diagnostics(parameters: Sequence[Tensor], scale: Tensor | None = None) -> Diagnostics:
    """Measure the gradients and weights of ``parameters``, all of which have a gradient, just before the step."""
    gradients = [readable_values(p.grad, modulus=True) for p in parameters if p.grad is not None]
    weights = [p.detach() for p in parameters]
    small = sum(w.numel() * w.element_size() for w in weights) <= MOST_BYTES
    largest, zero_rows = zip(*[_by_rows(g, p) for g, p in zip(gradients, parameters, strict=True)], strict=True)
    return Diagnostics(
        max=_numbers(largest),
        zero_rows=_numbers(zero_rows),
        zeros=_numbers([_zero_share(g, p.numel()) for g, p in zip(gradients, parameters, strict=True)]),
        weight=gradient_norms(weights),
        counts=_histogram(gradients),
        scale=scale,
        before=[w.clone() for w in weights] if small else None,
    )


@torch.no_grad()
def measure_update(diagnostics: Diagnostics, parameters: Sequence[Tensor]) -> None:
    """Add the norms of what the step did to ``parameters``, and let go of the copies."""
    before, diagnostics.before = diagnostics.before, None
    if before is not None:
        diagnostics.update = gradient_norms([old.sub_(p.detach()) for old, p in zip(before, parameters, strict=True)])


def histogram_of(counts: Sequence[float], scale: float = 1.0) -> dict[str, list] | None:
    """Return ``counts`` as ``{"edges": ..., "counts": ...}`` of log10, without empty ends; None if all are empty.

    Example:
        >>> histogram_of([0.0] * 40 + [2.0, 3.0] + [0.0] * 18)
        {'edges': [0.0, 0.5, 1.0], 'counts': [2, 3]}
    """
    filled = [k for k, count in enumerate(counts) if count > 0]
    if not filled:
        return None
    first, end = filled[0], filled[-1] + 1
    width, shift = (HIGHEST - LOWEST) / BINS, math.log10(scale) if scale > 0 else 0.0
    edges = [LOWEST + width * k - shift for k in range(first, end + 1)]
    return {"edges": edges, "counts": [round(count) for count in counts[first:end]]}


def _numbers(scalars: list[Tensor] | tuple[Tensor, ...]) -> Norms:
    stacked = torch.stack(scalars)
    return stacked.tolist() if are_readable(stacked) else stacked


def _by_rows(gradient: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude, and the share of rows of zeros: what a dead unit leaves in the gradient of its weight."""
    if not gradient.numel():  # a sparse gradient of nothing too
        zero_rows = 1.0 if parameter.dim() > 1 and parameter.numel() else math.nan
        return torch.zeros((), device=gradient.device), torch.full((), zero_rows, device=gradient.device)
    if gradient.dim() < 2 or gradient.dim() != parameter.dim():
        low, high = torch.aminmax(gradient)
        largest = torch.maximum(low.abs(), high.abs()).float()  # -low would be -0.0
        return largest, torch.full_like(largest, math.nan)
    rows = gradient.flatten(1)
    largest = torch.maximum(rows.amax(1).abs(), rows.amin(1).abs())  # by rows `aminmax` is 50 times slower
    return largest.amax().float(), 1 - torch.count_nonzero(largest).float() / parameter.shape[0]


def _zero_share(gradient: Tensor, elements: int) -> Tensor:
    return 1 - torch.count_nonzero(gradient).float() / max(elements, 1)


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


def _histogram(gradients: Sequence[Tensor]) -> Norms | None:
    if torch.are_deterministic_algorithms_enabled() and any(g.is_cuda for g in gradients):
        return None  # its CUDA kernel adds up in any order, and raises then
    total = None
    for sample, every in _samples(gradients):
        logarithms = sample.float().abs_().log10_() if sample.dtype != torch.float32 else sample.abs().log10_()
        counts = torch.histc(logarithms, bins=BINS, min=LOWEST, max=HIGHEST) * every
        total = counts if total is None else total + counts.to(total.device)
    return total if total is None or not are_readable(total) else total.tolist()


def _samples(gradients: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Yield every k-th element of each gradient and k; the short ones of a device and dtype come together."""
    short: dict[tuple, list[Tensor]] = {}
    for gradient in gradients:
        flat, every = gradient.reshape(-1), every_so_many(gradient.numel(), SAMPLE)
        if every > 1:
            yield flat[::every], every
        elif gradient.numel():
            short.setdefault((flat.device, flat.dtype), []).append(flat)
    for together in short.values():
        yield torch.cat(together), 1
