"""The 2-norm of each gradient, at the price of one read of memory: the one measurement that every step pays for.

It is right to about 2e-5, where `gradguard.tensors.norms.tensor_norms` is right to 2e-6 for three times the time: a
record keeps four digits. Wherever the short way could be wrong by more (overflow, underflow, half precision, a long
tensor, another layout), the number comes from `tensor_norms`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.placements import refuse_sharded
from gradguard.tensors.layout import are_readable
from gradguard.tensors.norms import tensor_norms
from gradguard.torch_private import foreach_norm

Norms = Tensor | list[float]
"""Numbers where Python may look at them at no cost (on the CPU); else a vector on the device, to be read later."""

SHORT = 1 << 14
"""Tensors up to this length are measured by one multi-tensor kernel, which adds up in a few float32 accumulators."""

MEDIUM = 1 << 20
"""Tensors up to this length are measured by a dot product: more accumulators, and several threads."""

_TRUSTED_ABOVE = 1e-12
"""A float32 norm below may have lost squares to underflow; it is measured again."""

_PLAIN = {torch.float32, torch.float64}


def total(norms: Norms) -> Tensor | float:
    """Return the 2-norm of all gradients, from that of each."""
    return torch.linalg.vector_norm(norms) if isinstance(norms, Tensor) else math.hypot(*norms)


def unscaled(norms: Any, scale: Any) -> Any:
    """Return a norm, or several, without the loss scale that a fused optimizer takes off itself, if there is one."""
    if scale is None:
        return norms
    return [norm / float(scale) for norm in norms] if isinstance(norms, list) else norms / scale


@torch.no_grad()
def gradient_norms(tensors: Sequence[Tensor]) -> Norms:
    """Return the 2-norm of each of ``tensors``; not finite only if an element is not, or the norm exceeds float64.

    Raises:
        UnsupportedGradientError: If one is a shard, whose own norm would be plausible and wrong.

    Example:
        >>> gradient_norms([torch.tensor([3.0, 4.0]), torch.zeros(2)])
        [5.0, 0.0]
    """
    if not are_readable(*tensors):
        refuse_sharded(tensors)
        return tensor_norms(tensors)
    if not all([t.dtype in _PLAIN and t.layout is torch.strided and t.is_contiguous() for t in tensors]):
        refuse_sharded(tensors)
        return tensor_norms(tensors).tolist()
    return _readable_norms(tensors)


def _readable_norms(tensors: Sequence[Tensor]) -> list[float]:
    norms = [0.0] * len(tensors)
    sizes = [t.numel() for t in tensors]
    short = [i for i, size in enumerate(sizes) if 0 < size <= SHORT]
    if short:
        found = foreach_norm([tensors[i] for i in short], 2)
        for i, norm in zip(short, torch.stack(found).tolist(), strict=True):
            norms[i] = norm
    medium = [i for i, size in enumerate(sizes) if SHORT < size <= MEDIUM]
    if medium:
        flat = [tensors[i].view(-1) for i in medium]
        for i, square in zip(medium, torch.stack([torch.dot(x, x) for x in flat]).tolist(), strict=True):
            norms[i] = square**0.5
    again = [i for i, norm in enumerate(norms) if sizes[i] and not _TRUSTED_ABOVE < norm < 1e300]
    if again:
        for i, norm in zip(again, tensor_norms([tensors[i] for i in again]).tolist(), strict=True):
            norms[i] = abs(norm)  # 0 may come as -0.0
    return norms
