"""The memory layout of gradients: which tensors the host can read without a sync, and views that the kernels accept."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import sparse_values

HALVES = (torch.float16, torch.bfloat16)
"""Dtypes whose arithmetic is done in float32."""

# A multi-tensor CUDA kernel fails on tensors of more than 2^31 elements (pytorch#169930), so longer ones are split.
LONGEST = 1 << 30

_ORDINARY = Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
_SPARSE_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def are_readable(*tensors: Tensor) -> bool:
    """Tell whether Python may read ``tensors`` without a host sync: they are on the CPU, and nothing is traced."""
    return (
        all([tensor.is_cpu for tensor in tensors])
        and all(kind.__torch_dispatch__ is _ORDINARY for kind in set(map(type, tensors)))
        and not torch.compiler.is_compiling()
    )


def each_plain(tensors: Sequence[Tensor], otherwise: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return ``tensors`` with ``otherwise`` applied to those that are not contiguous blocks of real numbers.

    The code makes passes over the whole list, because it runs at each step and thousands of small tensors are common.

    Raises:
        UnsupportedGradientError: If a tensor is nested.
    """
    if any([t.is_nested for t in tensors]):
        raise UnsupportedGradientError("a nested tensor cannot be clipped: expected a strided or sparse tensor.")
    in_order = [t.layout is torch.strided and t.is_contiguous() for t in tensors]
    if all(in_order) and not any(dtype.is_complex for dtype in {t.dtype for t in tensors}):
        return list(tensors)
    return [t if plain and not t.is_complex() else otherwise(t) for t, plain in zip(tensors, in_order, strict=True)]


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which norms are accumulated on ``device``: float64 if the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def move_state(state: dict[str, Tensor], device: torch.device | str) -> None:
    """Move the tensors of ``state`` to ``device``, the floating-point ones as `wide_dtype` there.

    The new tensors are ordinary ones: later steps may write to them with or without inference mode.
    """
    device = torch.device(device)
    with torch.inference_mode(False):
        for name, tensor in state.items():
            state[name] = tensor.to(device, wide_dtype(device) if tensor.is_floating_point() else tensor.dtype)


def public_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of a norm that a user receives: float32, or float64 if any tensor is float64 or complex128."""
    wide = {torch.float64, torch.complex128}
    return torch.float64 if wide.intersection([t.dtype for t in tensors]) else torch.float32


def readable_values(tensor: Tensor, modulus: bool) -> Tensor:
    """Return every element of ``tensor`` as a dense real tensor with the same p-norm.

    Args:
        tensor: Any gradient. Duplicate indices of a sparse one are summed first (coalesced).
        modulus: Whether to replace complex elements by their modulus. Otherwise they become (real, imaginary) pairs,
            which have the same 2-norm and need no copy.
    """
    if tensor.layout is not torch.strided:
        tensor = _sparse_values(tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor)
    if tensor.is_complex():
        # In the dtype of its parts, a modulus may overflow.
        tensor = tensor.to(torch.complex128).abs() if modulus else torch.view_as_real(tensor.resolve_conj())
    return tensor


def writable_values(tensor: Tensor) -> Tensor:
    """Return a dense real view that holds each stored element of ``tensor`` once, for elementwise linear writes."""
    if tensor.layout is not torch.strided:
        tensor = _sparse_values(tensor)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:  # an expanded dimension is one element in memory: write it once
            tensor = tensor.narrow(dim, 0, 1)
    if tensor.is_complex():  # write a lazily conjugated gradient through its conjugate, which shares its memory
        return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor


def parts_of_conjugates(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``tensors`` with each lazily conjugated one replaced by views of its real and its imaginary part.

    Memory holds the negated imaginary part; the view negates it lazily.
    """
    if not any([t.is_complex() and t.is_conj() for t in tensors]):
        return tensors
    return [part for t in tensors for part in ((t.real, t.imag) if t.is_conj() else (t,))]


def coalesce_(tensor: Tensor) -> None:
    """Sum the duplicate indices of a sparse COO tensor in place; leave any other tensor unchanged."""
    if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
        tensor.copy_(tensor.coalesce())


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as one dimension in memory order; a view if one exists."""
    if tensor.dim() == 1:
        return tensor
    if tensor.is_contiguous():
        return tensor.view(-1)
    return _in_memory_order(tensor).reshape(-1)


def is_dense(tensor: Tensor) -> bool:
    """Tell whether `flat` is a view: the elements fill a block of memory, in any order of dimensions."""
    return tensor.is_contiguous() or _in_memory_order(tensor).is_contiguous()


def grouped(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], Sequence[int]]:
    """Return the positions of ``tensors``, grouped by device and dtype, in order of first appearance."""
    if not tensors:
        return {}
    devices = {tensors[0].device} if all([t.is_cpu for t in tensors]) else {t.device for t in tensors}
    dtypes = {t.dtype for t in tensors}
    if len(devices) == len(dtypes) == 1:
        return {(devices.pop(), dtypes.pop()): range(len(tensors))}
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return dict(groups)


def split_long(tensors: list[Tensor]) -> list[Tensor]:
    """Cut dense tensors of more than ``LONGEST`` elements into views that multi-tensor kernels accept."""
    if all([t.numel() <= LONGEST for t in tensors]):
        return tensors
    return [part for t in tensors for part in (flat(t).split(LONGEST) if t.numel() > LONGEST else (t,))]


def move(scalar: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``scalar`` on ``device``; this is a host sync only if the device is the CPU.

    A non-blocking copy *to* the CPU would be read before it has arrived (torchrec#4421).
    """
    return scalar.to(device, dtype or scalar.dtype, non_blocking=device.type != "cpu")


def meeting_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device on which scalars of all ``tensors`` are combined: the first accelerator, else the CPU."""
    return next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))


def _sparse_values(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.sparse_coo:
        return sparse_values(tensor)
    if tensor.layout in _SPARSE_COMPRESSED:
        return tensor.values()
    raise UnsupportedGradientError(
        f"a gradient of layout {tensor.layout} cannot be clipped: expected a strided or sparse tensor."
    )


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
