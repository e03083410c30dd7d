"""The slow twin: every rule in float64 on one flat vector, a few lines each. Fast code is compared with it."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

EPSILON = 1e-6


def flatten(tensors: list[Tensor]) -> Tensor:
    """Return all elements of all tensors as one float64 (or complex128) vector."""
    dense = [t.to_dense() if t.layout is not torch.strided else t for t in tensors]
    wide = torch.complex128 if any(t.is_complex() for t in dense) else torch.float64
    return torch.cat([t.detach().cpu().to(wide).reshape(-1) for t in dense]) if dense else torch.zeros(0).double()


def total_norm(tensors: list[Tensor], p: float = 2.0) -> float:
    """Return the p-norm, by Python's exactly rounded sum of powers of elements divided by the largest."""
    magnitudes = flatten(tensors).abs().tolist()
    largest = max(magnitudes, default=0.0)
    if any(math.isnan(x) for x in magnitudes):
        return math.nan
    if largest == 0 or math.isinf(largest) or math.isinf(p):
        return largest
    return largest * math.fsum((x / largest) ** p for x in magnitudes) ** (1 / p)


def clip_norm(tensors: list[Tensor], max_norm: float, p: float = 2.0) -> list[Tensor]:
    coefficient = min(1.0, max_norm / (total_norm(tensors, p) + EPSILON))
    return [t.detach().double() * coefficient for t in tensors]


def clip_value(tensors: list[Tensor], low: float, high: float) -> list[Tensor]:
    return [t.detach().double().clamp(low, high) for t in tensors]


def clip_unit(weight: list[float], gradient: list[float], threshold: float, eps: float = 1e-3) -> list[float]:
    """Apply AGC to the elements of one unit."""
    weight_norm = math.sqrt(math.fsum(w * w for w in weight))
    gradient_norm = math.sqrt(math.fsum(g * g for g in gradient))
    bound = threshold * max(weight_norm, eps)
    return [g * bound / gradient_norm for g in gradient] if gradient_norm > bound else list(gradient)


def clip_adaptive(weight: Tensor, gradient: Tensor, units: list[Tensor], threshold: float, eps: float = 1e-3) -> Tensor:
    """Apply AGC to one tensor; ``units`` are boolean masks that together cover it."""
    result = gradient.detach().double().clone()
    for mask in units:
        unit = clip_unit(weight[mask].double().tolist(), gradient[mask].double().tolist(), threshold, eps)
        result[mask] = torch.tensor(unit, dtype=torch.float64)
    return result


def per_sample_gradients(
    model: nn.Module, loss_of: Callable[[Any], Tensor], samples: Iterable[Any]
) -> dict[str, Tensor]:
    """Return the gradient of each sample alone, ``[B, *shape]``, by plain autograd on microbatches of one.

    Tied parameters occur once, frozen ones not at all, and those that the loss does not use are zero.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for sample in samples:
        model.zero_grad(set_to_none=True)
        loss_of(sample).backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in named.values()]
        rows.append([g.detach().double() for g in found])
    model.zero_grad(set_to_none=True)
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(named)}


def sample_norms(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of each sample's gradient over all of these parameters, float64."""
    rows = torch.cat([g.double().reshape(len(g), -1) for g in gradients], dim=1)
    return torch.tensor([total_norm([row]) for row in rows], dtype=torch.float64)


def weigh_samples(gradients: dict[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    """Return each sample's gradient times its factor, still ``[B, *shape]``."""
    return {name: factors.view(-1, *[1] * (g.dim() - 1)) * g.double() for name, g in gradients.items()}


def clip_samples(gradients: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Clip flat: one factor min(1, C / norm) for all of a sample's gradients."""
    norms = sample_norms(gradients.values())
    return weigh_samples(gradients, torch.where(norms > max_norm, max_norm / norms, 1.0))


def clip_samples_per_parameter(gradients: dict[str, Tensor], max_norms: list[float]) -> dict[str, Tensor]:
    """Clip every parameter by itself."""
    clipped: dict[str, Tensor] = {}
    for (name, gradient), max_norm in zip(gradients.items(), max_norms, strict=True):
        clipped |= clip_samples({name: gradient}, max_norm)
    return clipped


def clip_samples_per_layer(gradients: dict[str, Tensor], max_norms: dict[str, float]) -> dict[str, Tensor]:
    """Clip every layer by itself: the parameters of one module together."""
    clipped: dict[str, Tensor] = {}
    for layer, max_norm in max_norms.items():
        own = {name: g for name, g in gradients.items() if name.rpartition(".")[0] == layer}
        clipped |= clip_samples(own, max_norm)
    return clipped


def clip_samples_automatically(gradients: dict[str, Tensor], max_norm: float, gamma: float = 0.01) -> dict[str, Tensor]:
    """Apply AUTO-S (Bu et al. 2023): C / (norm + gamma), without a threshold."""
    return weigh_samples(gradients, max_norm / (sample_norms(gradients.values()) + gamma))
