"""What is too dear for every step: largest element, share of zeros, weight and update norms, a histogram.

All are of the gradients as the optimizer gets them, after any clip, without a loss scale.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradguard.monitoring.observe.measure import Norms, gradient_norms
from gradguard.tensors.layout import are_readable, readable_values

MOST_BYTES = 256 * 2**20
"""Weights beyond this are not copied, so their update has no norm: watching must not run a device out of memory."""

SAMPLE = 1 << 16
"""The histogram looks at about so many elements of each tensor."""

LOWEST, HIGHEST, BINS = -20.0, 10.0, 60
"""The histogram's range of log10, and its number of bins; zeros have no logarithm and are in ``zeros``."""

_SMALL_PRIMES = 2 * 3 * 5 * 7 * 11 * 13


@dataclass(slots=True)
class Extras:
    """One measurement; arrays have one entry for each parameter of the step, in its order.

    Attributes:
        max: Largest magnitude of each gradient.
        zeros: Share of exact zeros.
        weight: 2-norm of each parameter before the step.
        counts: Number of elements in each bin of log10 of the magnitude, all gradients together; None if not counted.
        update: 2-norm of what the step changed; None if not measured.
        scale: Loss scale that ``max`` and ``counts`` still contain.
        before: The weights, until `measure_update`.
    """

    max: Norms
    zeros: Norms
    weight: Norms
    counts: Norms | None = None
    update: Norms | None = None
    scale: Any = None
    before: list[Tensor] | None = None


@torch.no_grad()
def measure_extras(parameters: Sequence[Tensor], scale: Tensor | None = None) -> Extras:
    """Measure the gradients and weights of ``parameters``, all of which have a gradient, just before the step."""
    gradients = [readable_values(p.grad, modulus=True) for p in parameters if p.grad is not None]
    weights = [p.detach() for p in parameters]
    small = sum(w.numel() * w.element_size() for w in weights) <= MOST_BYTES
    return Extras(
        max=_numbers([_largest(g) for g in gradients]),
        zeros=_numbers([_zero_share(g, p.numel()) for g, p in zip(gradients, parameters, strict=True)]),
        weight=gradient_norms(weights),
        counts=_histogram(gradients),
        scale=scale,
        before=[w.clone() for w in weights] if small else None,
    )


@torch.no_grad()
def measure_update(extras: Extras, parameters: Sequence[Tensor]) -> None:
    """Add the norms of what the step did to ``parameters``, and let go of the copies."""
    before, extras.before = extras.before, None
    if before is not None:
        extras.update = gradient_norms([old.sub_(p.detach()) for old, p in zip(before, parameters, strict=True)])


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


def _numbers(scalars: list[Tensor]) -> Norms:
    stacked = torch.stack(scalars)
    return stacked.tolist() if are_readable(stacked) else stacked


def _largest(gradient: Tensor) -> Tensor:
    if not gradient.numel():
        return torch.zeros((), device=gradient.device)
    low, high = torch.aminmax(gradient)
    return torch.maximum(low.abs(), high.abs()).float()  # -low would be -0.0


def _zero_share(gradient: Tensor, elements: int) -> Tensor:
    return 1 - torch.count_nonzero(gradient).float() / max(elements, 1)


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
    """Yield every k-th element of each gradient and k, coprime to the usual row lengths, so that no column is left out.

    The short ones of a device and dtype come together.
    """
    short: dict[tuple, list[Tensor]] = {}
    for gradient in gradients:
        flat, every = gradient.reshape(-1), math.ceil(gradient.numel() / SAMPLE)
        while every > 1 and math.gcd(every, _SMALL_PRIMES) > 1:
            every += 1
        if every > 1:
            yield flat[::every], every
        elif every:
            short.setdefault((flat.device, flat.dtype), []).append(flat)
    for together in short.values():
        yield torch.cat(together), 1
