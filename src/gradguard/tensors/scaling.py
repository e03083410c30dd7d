r"""Clip coefficients, and the two in-place writes: multiply and clamp."""

import math
from collections.abc import Iterator, Sequence
from itertools import compress

import torch
from torch import Tensor

from gradguard.tensors.cuda_blocks import CudaBlocks, coefficients_on_device
from gradguard.tensors.kernels import Blocks, representable
from gradguard.tensors.layout import (
    HALVES,
    are_readable,
    each_plain,
    grouped,
    meeting_device,
    move,
    parts_of_conjugates,
    split_long,
    writable_values,
)
from gradguard.torch_private import foreach_clamp_, foreach_copy_, foreach_mul_, foreach_norm

EPSILON = 1e-6
"""Added to the norm before the division, as in PyTorch."""

SMALL = 1 << 20
"""16-bit tensors on an accelerator up to this length are scaled together: reading one takes less than a launch."""

TOGETHER = 1 << 24
"""How many elements of such tensors are copied at a time."""

LEAST = torch.finfo(torch.float32).tiny
"""The smallest positive number that float32 holds with all digits."""


@torch.no_grad()
def clip_coefficient(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    r"""Return :math:`c = \min\bigl(1,\; m / (n + 10^{-6})\bigr)`, 0-dim, in the dtype and on the device of ``norm``.

    Args:
        norm: n, 0-dim.
        max_norm: m, at least 0. If it is infinite the result is 1 whatever the norm, so logging changes nothing.
    """
    if not isinstance(max_norm, Tensor):  # a Python number needs no copy to the device, and can be graph-captured
        if math.isinf(max_norm):
            return torch.ones_like(norm)
        if (found := coefficients_on_device(norm, max_norm)) is not None:
            return found
        return torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    limit = move(max_norm.detach(), norm.device, norm.dtype)
    return torch.where(limit.isposinf(), 1.0, torch.clamp(limit / (norm + EPSILON), max=1.0))


def is_below(coefficients: Tensor, least: float) -> bool:
    """Tell whether an entry is smaller than ``least``; NaN is not. The host reads the entries."""
    return float(coefficients) < least if coefficients.dim() == 0 else bool((coefficients < least).any())


@torch.no_grad()
def scale_(tensors: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply every element of ``tensors`` by a 0-dim ``coefficient``, rounding once, in place.

    The product is computed in float32. It is computed in float64 if the tensor is float64, or if the host can read that
    the coefficient is below 1.2e-38, where float32 loses digits. A coefficient of 1 that the host can read writes
    nothing.
    """
    if are_readable(coefficient) and float(coefficient) == 1.0:
        return
    blocks = Blocks.of(tensors) if are_readable(coefficient) else None
    if blocks is not None:
        blocks.scale_(float(coefficient))
        return
    if (cuda := CudaBlocks.of(tensors, writes=True)) is not None:
        cuda.scale_(coefficient)
        return
    values = each_plain(tensors, writable_values)
    values.reverse()  # the tensors that the norm read last are still in the cache
    for (device, dtype), group in grouped(values).items():
        alike = values if len(group) == len(values) else [values[i] for i in group]
        if (cuda := CudaBlocks.of(alike, writes=True)) is not None:
            cuda.scale_(coefficient)
            continue
        factor = move(coefficient, device, torch.float64 if dtype is torch.float64 else torch.float32)
        if dtype is not torch.float64 and are_readable(coefficient) and 0 < float(coefficient) < LEAST:
            for tensor in alike:
                tensor.copy_(tensor.double().mul_(coefficient))
        elif dtype in HALVES and not are_readable(*alike):
            _scale_halves_(alike, factor)
        else:  # the CPU would round a Python number to float16, but not a 0-dim tensor
            together, alone = _for_kernels(alike)
            if together:
                foreach_mul_(split_long(together), factor)
            for tensor in alone:
                tensor.mul_(factor)


def _scale_halves_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply 16-bit tensors on an accelerator by a float32 factor; many small ones in one launch.

    Multi-tensor kernels round the factor to 16 bits first. So does a product with a 0-dim tensor; with a tensor of
    shape [1] the product is promoted.
    """
    factor, together = factor.view(1), []
    for tensor in tensors:
        if torch.compiler.is_compiling() or tensor.numel() > SMALL or not tensor.is_contiguous() or tensor.is_neg():
            (tensor if tensor.dim() else tensor[None]).mul_(factor)
        else:
            together.append(tensor.view(-1))
    for part in _up_to(together, TOGETHER):
        if len(part) == 1:
            part[0].mul_(factor)
            continue
        product = torch.cat(part).mul_(factor)
        foreach_copy_(part, product.split([one.numel() for one in part]))


def _up_to(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Cut a list into parts of at most ``most`` elements together; no tensor may be longer."""
    part: list[Tensor] = []
    count = 0
    for tensor in tensors:
        if count + tensor.numel() > most:
            yield part
            part, count = [], 0
        part.append(tensor)
        count += tensor.numel()
    if part:
        yield part


@torch.no_grad()
def clamp_(tensors: Sequence[Tensor], low: float | Tensor, high: float | Tensor) -> None:
    """Clamp every element of ``tensors`` to ``[low, high]`` in place; NaN stays NaN.

    On the CPU nothing is written if nothing exceeds the bounds. Real and imaginary parts of a complex tensor are
    clamped separately. Sparse tensors must be coalesced, because only then is a stored value an element.
    """
    numbers = _numbers(low, high)
    blocks = Blocks.of(tensors) if numbers is not None else None
    if numbers is not None and blocks is not None and blocks.clamp_(*numbers):
        return
    if numbers is not None and (cuda := CudaBlocks.of(tensors, writes=True)) is not None:
        cuda.clamp_(*(representable(x, tensors[0].dtype) for x in numbers))
        return
    values = [x for x in each_plain(parts_of_conjugates(tensors), writable_values) if x.numel()]
    for (device, dtype), group in grouped(values).items():
        alike = values if len(group) == len(values) else [values[i] for i in group]
        if numbers is None:
            limits = [_bound_tensor(x, device, dtype) for x in (low, high)]
            for tensor in alike:
                tensor.clamp_(*limits)
            continue
        bounds = [representable(x, dtype) for x in numbers]
        if (cuda := CudaBlocks.of(alike, writes=True)) is not None:
            cuda.clamp_(*bounds)
            continue
        if are_readable(*alike):
            smallest, largest = _extremes(alike, symmetric=False)
            # A tensor with NaN counts as outside: its other elements may be.
            inside = (smallest >= bounds[0]) & (largest <= bounds[1])
            alike = list(compress(alike, (~inside).tolist()))
        together, alone = _for_kernels(alike)
        if together:
            foreach_clamp_(together, *bounds)
        for tensor in alone:
            tensor.clamp_(*bounds)


def _for_kernels(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split tensors into those that multi-tensor kernels accept, and lazily negated ones, which they refuse."""
    if torch.compiler.is_compiling():  # the compiler makes negation functional first
        return list(tensors), []
    negated = [t.is_neg() for t in tensors]
    return [t for t, is_neg in zip(tensors, negated, strict=True) if not is_neg], list(compress(tensors, negated))


def _numbers(low: float | Tensor, high: float | Tensor) -> tuple[float, float] | None:
    return None if isinstance(low, Tensor) or isinstance(high, Tensor) else (low, high)


@torch.no_grad()
def exceeds(tensors: Sequence[Tensor], low: float | Tensor, high: float | Tensor) -> Tensor:
    """Return a 0-dim bool tensor: whether any element is outside ``[low, high]``. NaN does not count as outside.

    Sparse tensors must be coalesced.
    """
    if (numbers := _numbers(low, high)) is not None and (blocks := Blocks.of(tensors)) is not None:
        found = blocks.exceed(*numbers)
        if found is not None:
            return torch.tensor(found, device="cpu")
    values = [x for x in each_plain(parts_of_conjugates(tensors), writable_values) if x.numel()]
    device = meeting_device(values)
    if not values:
        return torch.zeros((), dtype=torch.bool, device="cpu")
    outside: list[Tensor] = []
    for (where, dtype), group in grouped(values).items():
        smallest, largest = _extremes(
            [values[i] for i in group], symmetric=numbers is not None and numbers[0] == -numbers[1]
        )
        limits = [_bound_tensor(x, where, dtype) if isinstance(x, Tensor) else x for x in (low, high)]
        outside.append(move(((smallest < limits[0]) | (largest > limits[1])).any(), device))
    return torch.stack(outside).any()


def _extremes(tensors: list[Tensor], symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element of each tensor; one kernel for all if the bounds are symmetric."""
    if symmetric and not are_readable(*tensors):  # on the CPU this kernel is ten times slower
        largest = torch.stack(foreach_norm(tensors, math.inf))
        return -largest, largest
    smallest, largest = zip(*map(torch.aminmax, tensors), strict=True)
    return torch.stack(smallest), torch.stack(largest)


def _bound_tensor(bound: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not isinstance(bound, Tensor):
        return torch.full((), representable(bound, dtype), dtype=dtype, device=device)
    bound, largest = bound.detach(), torch.finfo(dtype).max
    if torch.finfo(bound.dtype).max > largest:
        bound = torch.where(bound.isinf(), bound, bound.clamp(-largest, largest))
    return move(bound, device, dtype)
