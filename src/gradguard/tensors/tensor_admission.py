"""Which tensors can be clipped: checked before an engine measures or writes, so that all engines refuse the same."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from gradguard.errors import UnsupportedGradientError

DTYPES = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32,
})  # fmt: skip
"""Dtypes that are measured and written; not float8, which has no arithmetic, nor integers, bools, quantized numbers."""

LAYOUTS = frozenset({
    torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
})  # fmt: skip

_LEAST = sys.float_info.min
_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def check_admitted(tensors: Sequence[Tensor], name: Callable[[int], str], *, writes: bool) -> None:
    """Check that ``tensors`` are of a kind that can be clipped; passes over the whole list, for this runs each step.

    Layouts are not checked here, because the engines refuse those that they cannot take.

    Args:
        tensors: The gradients, or tensors to be measured.
        name: The name of the i-th in messages.
        writes: Whether they will be written.

    Raises:
        UnsupportedGradientError: Naming the first that is of no such kind.
    """
    frozen = writes and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
    if (
        DTYPES.issuperset([t.dtype for t in tensors])
        and MaskedTensor not in set(map(type, tensors))
        and not (frozen and any(map(Tensor.is_inference, tensors)))
    ):
        return
    refuse_others(tensors, name, frozen)


def refuse_others(tensors: Sequence[Tensor], name: Callable[[int], str], frozen: bool) -> None:
    """Refuse the first tensor that cannot be clipped.

    Args:
        tensors: As for `check_admitted`.
        name: As for `check_admitted`.
        frozen: Whether tensors of inference mode are refused too.

    Raises:
        UnsupportedGradientError: If a tensor cannot be clipped.
    """
    for i, tensor in enumerate(tensors):
        kind = _kind(tensor, frozen)
        if kind:
            raise UnsupportedGradientError(
                f"{name(i)}: the gradient is {kind}, and nothing was changed: expected a strided or sparse tensor of "
                "float32, float64, float16, bfloat16 or complex numbers."
            )


def _kind(tensor: Tensor, frozen: bool) -> str:
    """Return why ``tensor`` cannot be clipped, empty if it can."""
    if isinstance(tensor, MaskedTensor):
        return "a MaskedTensor (pass gradient.to_tensor(0))"
    if tensor.is_nested:
        return f"a nested tensor of layout {tensor.layout}"
    if tensor.dtype not in DTYPES:
        return f"of dtype {tensor.dtype}"
    if tensor.layout not in LAYOUTS:
        return f"of layout {tensor.layout}"
    if frozen and tensor.is_inference():
        return "made under torch.inference_mode(), outside of which nothing may write it (clip inside, or clone it)"
    return ""


def keeping_subnormals(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Return ``function``, during which this thread does not flush subnormal numbers to 0.

    Threads of torch's pool flush them or not, whatever `torch.set_flush_denormal` said, so that under it results would
    depend on which thread did what. The compiled kernels set this in each of their threads.
    """

    @wraps(function)
    def kept(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        if _LEAST * 0.5 != 0.0:
            return function(*args, **kwargs)
        torch.set_flush_denormal(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_flush_denormal(True)

    return kept
