"""Sums over samples that lose nothing: at least float32 for every dtype, float64 where rows are long."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradguard.tensors.layout import wide_dtype

ROW = 1024
"""Elements that are summed in float32 before float64 takes over."""


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 as float32 in a block: TF32 or bfloat16, where a user allows them, would break the bound."""
    backends: Any = torch.backends
    settings = [backends.mkldnn.matmul, backends.mkldnn.conv]
    if torch.cuda.is_available():
        settings += [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    above = (backends.fp32_precision, backends.mkldnn.fp32_precision)
    before = [setting.fp32_precision for setting in settings]
    if {*before, *above} <= {"none", "ieee"}:  # the usual case on the CPU
        yield
        return
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def wide(values: Tensor) -> Tensor:
    """Return ``values`` in the dtype that is computed with: float32 for half precision, else its own."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def real_parts(values: Tensor) -> Tensor:
    """Return complex ``values`` as pairs of real ones, ``[..., 2]``, which have the same norm; others as they are."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def with_parts_of(values: Tensor, parameter: Tensor) -> Tensor:
    """Return pairs of real values as complex ones where ``parameter`` is complex; others as they are."""
    return torch.view_as_complex(values.contiguous()) if parameter.is_complex() else values


def row_squares(values: Tensor) -> Tensor:
    """Return the squared 2-norm of each row of ``values``, shape ``[B, ...]``, as float64 of shape ``[B]``.

    On the CPU the sums run in float32 over `ROW` elements and in float64 above, which is as fast as one flat float32
    sum and off by less than one part in 1e6; rows that left the range of float32 are summed again in
    float64. Accelerators accumulate in float64 at once, because looking at the result would make the host wait.
    """
    rows = wide(values).reshape(len(values), -1) if values.numel() else values.new_zeros(len(values), 0)
    if not rows.is_cpu or rows.dtype is torch.float64:
        return torch.linalg.vector_norm(rows, dim=1, dtype=wide_dtype(rows.device)).square()
    squares = _row_squares_in_float32(rows)
    doubtful = ~((squares > rows.shape[1] * 1e-30) & squares.isfinite())
    if doubtful.any():
        squares[doubtful] = torch.linalg.vector_norm(rows[doubtful], dim=1, dtype=torch.float64).square()
    return squares


def joint_norm(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of parts together, from the norms of the parts."""
    return norms[0] if len(norms) == 1 else torch.stack(list(norms)).square().sum(0).sqrt()


def _row_squares_in_float32(rows: Tensor) -> Tensor:
    length = rows.shape[1]
    if length <= ROW:
        return torch.linalg.vector_norm(rows, dim=1).double().square_()
    whole = length // ROW * ROW
    parts = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, ROW)), dim=2).double().square_().sum(1)
    if whole < length:
        parts += torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square_()
    return parts


def scale_rows(values: Tensor, factors: Tensor, bad: Tensor | None) -> Tensor:
    """Return ``values * factors`` row by row, at least float32; rows of ``bad`` become 0 whatever they hold."""
    values = wide(values)
    shape = (-1, *[1] * (values.dim() - 1))
    scaled = values * factors.to(values.dtype).view(shape)
    return scaled if bad is None else scaled.masked_fill_(bad.view(shape), 0)


def blank_rows(values: Tensor, bad: Tensor | None) -> Tensor:
    """Return ``values``, at least float32, with the rows of ``bad`` set to 0: 0 times NaN would be NaN."""
    values = wide(values)
    return values if bad is None else values.masked_fill(bad.view(-1, *[1] * (values.dim() - 1)), 0)
