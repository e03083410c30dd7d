"""Which tensors can be clipped: checked before any engine measures or writes, so all engines refuse the same ones."""

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
"""Dtypes that can be measured and written; not float8, which has no arithmetic, nor integers, bools, quantized ones."""

LAYOUTS = frozenset({
    torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
})  # fmt: skip

_LEAST = sys.float_info.min
_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def check_admitted(tensors: Sequence[Tensor], name: Callable[[int], str], *, writes: bool) -> None:
    """Check that ``tensors`` are of a kind that can be clipped, in passes over the whole list: this runs at each step.

    Layouts are not checked here, because the engines refuse those that they do not support.

    Args:
        tensors: The gradients, or tensors to be measured.
        name: Returns the name of the i-th tensor, for messages.
        writes: Whether they will be written.

    Raises:
        UnsupportedGradientError: If one cannot be clipped; the message names the first.
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
        frozen: Whether to refuse inference tensors too.

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
    """Return why ``tensor`` cannot be clipped; empty if it can."""
    if isinstance(tensor, MaskedTensor):
        return "a MaskedTensor (pass gradient.to_tensor(0))"
    if tensor.is_nested:
        return f"a nested tensor of layout {tensor.layout}"
    if tensor.dtype not in DTYPES:
        return f"of dtype {tensor.dtype}"
    if tensor.layout not in LAYOUTS:
        return f"of layout {tensor.layout}"
    if frozen and tensor.is_inference():
        return "an inference tensor, which cannot be written outside torch.inference_mode() (clip inside, or clone it)"
    return ""


def keeping_subnormals(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Return ``function`` wrapped so that this thread does not flush subnormal numbers to 0.

    The threads of torch's pool may or may not flush them, whatever `torch.set_flush_denormal` set, so results would
    depend on which thread did the work. The compiled kernels set this in each of their threads.
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
