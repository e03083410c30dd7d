"""The slow twin: every rule in float64 on one flat vector, a few lines each. What is fast is compared with this."""

import math

import torch
from torch import Tensor

EPSILON = 1e-6


def flatten(tensors: list[Tensor]) -> Tensor:
    """All elements of all tensors as one float64 (or complex128) vector."""
    dense = [t.to_dense() if t.layout is not torch.strided else t for t in tensors]
    wide = torch.complex128 if any(t.is_complex() for t in dense) else torch.float64
    return torch.cat([t.detach().cpu().to(wide).reshape(-1) for t in dense]) if dense else torch.zeros(0).double()


def total_norm(tensors: list[Tensor], p: float = 2.0) -> float:
    """The p-norm, by Python's exactly rounded sum of powers of elements divided by the largest."""
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
    """AGC on the elements of one unit."""
    weight_norm = math.sqrt(math.fsum(w * w for w in weight))
    gradient_norm = math.sqrt(math.fsum(g * g for g in gradient))
    bound = threshold * max(weight_norm, eps)
    return [g * bound / gradient_norm for g in gradient] if gradient_norm > bound else list(gradient)


def clip_adaptive(weight: Tensor, gradient: Tensor, units: list[Tensor], threshold: float, eps: float = 1e-3) -> Tensor:
    """AGC on one tensor; ``units`` are boolean masks that together cover it."""
    result = gradient.detach().double().clone()
    for mask in units:
        unit = clip_unit(weight[mask].double().tolist(), gradient[mask].double().tolist(), threshold, eps)
        result[mask] = torch.tensor(unit, dtype=torch.float64)
    return result
