r"""p-norms of many tensors as one vector, :math:`\bigl(\sum_i |x_i|^p\bigr)^{1/p}`, right for every magnitude.

Three engines return the same number. Each first computes the norm of every tensor:

* **Compiled kernels** on the CPU, if they are built and accept all tensors (`gradguard.tensors.kernels`).
* **Triton kernels** on an NVIDIA GPU, for orders 2 and infinity (`gradguard.tensors.cuda_blocks`).
* **PyTorch** otherwise: one multi-tensor launch for each dtype, accumulated in float64, which holds the square of every
  float32. On the CPU Python reads each norm. A norm that overflowed, or is so small that powers were lost (of float64,
  or above p = 6), is computed again from elements divided by the largest. On an accelerator there is no host sync, so
  powers above p = 8 can leave float64. MPS has no float64: float32 squares limit its norms to between 1e-18 and 1e18.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gradguard.tensors.cuda_blocks import CudaBlocks
from gradguard.tensors.kernels import Blocks
from gradguard.tensors.layout import (
    LONGEST,
    are_readable,
    each_plain,
    flat,
    grouped,
    is_dense,
    meeting_device,
    move,
    public_dtype,
    readable_values,
    wide_dtype,
)
from gradguard.torch_private import foreach_norm

CONVERTED = 1 << 24
"""The number of elements that are converted to float64 at a time."""

_FAST = (1.0, 2.0, math.inf)
"""Orders with a multi-tensor kernel; for other orders torch copies what it converts."""

_ROOM = 1e7
"""A sum of powers is trusted if it is at least this many times what its underflowed terms can add up to."""


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """Return the p-norm of all elements of all ``tensors``.

    Args:
        tensors: Any mix of shapes, dtypes, layouts and devices. Empty tensors contribute nothing; no tensors give 0.
        p: Order of the norm: above 0, or infinite.

    Returns:
        A 0-dim float64 tensor (float32 on MPS): NaN if any element is NaN, else inf if any is infinite.
    """
    if (blocks := Blocks.of(tensors, p)) is not None:
        return torch.tensor(blocks.norm(p), dtype=torch.float64, device="cpu")
    cuda = CudaBlocks.of(tensors, p=p)
    if cuda is not None and tensors[0].dtype is not torch.float64:  # squares of float64 norms may leave its range
        return cuda.norm(p)
    values = each_plain(tensors, partial(readable_values, modulus=p != 2))
    if are_readable(*values):
        return norm_of_norms(_host_norms(values, p), p)
    device = meeting_device(values)
    # Few passes over the list in Python: a launch takes no longer than ten reads of an attribute.
    here = [x for x in values if are_readable(x)] if any([x.is_cpu for x in values]) else []
    there = [x for x in values if not are_readable(x)] if here else values
    norms = _device_norms(there, p, device)
    if here:
        norms = torch.cat([norms, move(_host_norms(here, p), device, wide_dtype(device))])
    if len(norms) and public_dtype(values) is not torch.float64:  # squares of float64 norms may leave its range
        return torch.linalg.vector_norm(norms, p)
    return norm_of_norms(norms, p)


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """Return the p-norm of each tensor as a vector of ``len(tensors)``, on the tensors' `meeting_device`.

    Arguments, dtype and accuracy are those of `total_norm`, whose result is the p-norm of this vector.
    """
    if (blocks := Blocks.of(tensors, p)) is not None:
        return blocks.norms(p)
    if (cuda := CudaBlocks.of(tensors, p=p)) is not None:
        return cuda.norms(p)
    values = each_plain(tensors, partial(readable_values, modulus=p != 2))
    if are_readable(*values):
        return _host_norms(values, p)
    return _device_norms(values, p, meeting_device(values))


@torch.no_grad()
def norm_of_norms(norms: Tensor, p: float = 2.0) -> Tensor:
    """Return the p-norm of all elements from the p-norm of each tensor: 0-dim, no overflow, no underflow."""
    if not len(norms):
        return norms.sum()
    # As few operations as possible, each a launch. NaN stays NaN, and an infinite norm over the largest number is inf.
    range_ = torch.finfo(norms.dtype)
    divisor = norms.max().clamp(range_.tiny, range_.max)
    return divisor * torch.linalg.vector_norm(norms / divisor, p)


def joined_norms(norms: Tensor, at: Tensor, count: int, order: float = 2.0) -> Tensor:
    """Return ``count`` norms of a finite order from norms of parts; part i belongs to the norm ``at[i]``."""
    none = norms.new_zeros(count)
    largest = none.scatter_reduce(0, at, norms, "amax")
    divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)  # keeps every power within the range
    return divisor * none.index_add(0, at, (norms / divisor[at]) ** order) ** (1 / order)


def _device_norms(tensors: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Return one norm for each tensor, on ``device``, without a host sync."""
    norms: list[Tensor] = [torch.zeros((), dtype=wide_dtype(device), device=device)] * len(tensors)
    sizes = [x.numel() for x in tensors]
    for (where, _), group in grouped(tensors).items():
        if (blocks := CudaBlocks.of([tensors[i] for i in group], p=p)) is not None:
            found = move(blocks.norms(p), device, wide_dtype(device))
            if len(group) == len(tensors):
                return found
            for i, norm in zip(group, found.unbind(), strict=True):
                norms[i] = norm
            continue
        at_once = LONGEST if p in _FAST and where.type != "cpu" else CONVERTED
        short = [i for i in group if 0 < sizes[i] <= at_once]
        # A single tensor that is not a block of memory would make torch convert copies of all of them, which is slow.
        dense = [tensors[i] if is_dense(tensors[i]) else flat(tensors[i]).contiguous() for i in short]
        results = foreach_norm(dense, p, wide_dtype(where)) if short else ()
        if short and where != device:  # one transfer for all
            results = move(torch.stack(results), device, wide_dtype(device)).unbind()
        for i, norm in zip(short, results, strict=True):
            norms[i] = norm
        for i in (i for i in group if sizes[i] > at_once):
            pieces = flat(tensors[i]).split(at_once)
            parts = torch.stack(foreach_norm(pieces, p, wide_dtype(where)))
            norms[i] = move(norm_of_norms(parts, p), device)
    return torch.stack(norms) if norms else torch.zeros(0, dtype=wide_dtype(device), device=device)


def _host_norms(tensors: Sequence[Tensor], p: float) -> Tensor:
    """Return one norm for each tensor: float64, right for every magnitude."""
    if (blocks := Blocks.of(tensors, p)) is not None:  # views of sparse or complex tensors may be blocks by now
        return blocks.norms(p)
    norms = _device_norms(tensors, p, torch.device("cpu"))
    most = max([x.numel() for x in tensors], default=0)
    # In a norm above this floor, underflowed powers cannot matter.
    floor = 0.0 if math.isinf(p) else (most * torch.finfo(torch.float64).tiny * _ROOM) ** (1 / p)
    for i in (~((norms > floor) & norms.isfinite())).nonzero().flatten().tolist():
        norms[i] = _scaled_norm(tensors[i], p)
    return norms


def _scaled_norm(tensor: Tensor, p: float) -> float:
    """Return the norm in float64 from elements divided by the largest: slower, and safe for every magnitude."""
    largest = float(torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float64)) if tensor.numel() else 0.0
    if math.isinf(p) or largest == 0 or not math.isfinite(largest):
        return largest
    powers = 0.0
    for block in flat(tensor).split(CONVERTED):
        powers += float((block.double() / largest).abs_().pow_(p).sum())
    try:
        return largest * powers ** (1 / p)
    except OverflowError:  # for tiny p the norm itself exceeds float64
        return math.inf
