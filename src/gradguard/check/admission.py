"""Refuse tensors that cannot be checked: only dense tensors with values can. Applies to inputs and outputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.errors import InvalidTypeError, InvalidValueError

WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
"""Each dtype that can be checked, and the dtype in which its differences are computed."""

_KNOWN = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIDE)
_ORDINARY = [Tensor.__torch_dispatch__]  # pyright: ignore[reportAttributeAccessIssue]
_PLAIN = {"DTensor": "{}.full_tensor()", "MaskedTensor": "{}.to_tensor(0)"}


def refuse_empty(values: Mapping[str, Any]) -> None:
    """Refuse tensors without values, even if they are not to be checked.

    Args:
        values: The arguments of the call by name, including a module's own tensors.

    Raises:
        InvalidTypeError: If a tensor is on the meta device, or has no shape before the first call of its module.
    """
    for name, value in values.items():
        if nn.parameter.is_lazy(value):
            raise InvalidTypeError(
                f"input {name!r} has no shape before the first call of its module: call the module once first."
            )
        if isinstance(value, Tensor) and value.is_meta:
            refuse_unfit(f"input {name!r}", value, name)


def refuse_unfit(what: str, value: Tensor, name: str) -> None:
    """Refuse a tensor whose elements cannot be moved and compared one by one.

    Args:
        what: The tensor's description in the message.
        value: The tensor.
        name: A Python expression for the tensor.

    Raises:
        InvalidTypeError: If the tensor is nested, on the meta device, not strided, or of a dtype without arithmetic, or
            if it wraps other tensors, as a DTensor does.
    """
    kind: Any = type(value)
    if value.is_nested:
        fault = f"is nested: expected a dense tensor, such as torch.nested.to_padded_tensor({name}, 0.0)"
    elif kind.__torch_dispatch__ not in _ORDINARY:
        plain = _PLAIN.get(kind.__name__, "{}.clone() before it was wrapped").format(name)
        fault = f"is a {kind.__name__}: expected a plain tensor, such as {plain}"
    elif value.is_meta:
        fault = "is on the meta device, which holds no numbers: expected a tensor with values, on another device"
    elif value.layout is not torch.strided:
        fault = f"is {value.layout}: expected a dense tensor, such as {name}.to_dense()"
    elif value.dtype not in WIDE:
        fault = f"is {value.dtype}: expected one of {_KNOWN}"
    else:
        return
    raise InvalidTypeError(f"{what} {fault}.")


def refuse_unless(is_usable: Tensor, what: str, value: Tensor, instead: str) -> None:
    """Refuse a tensor with an unusable element; the message names the first one.

    Args:
        is_usable: The mask of usable elements.
        what: The tensor's description in the message.
        value: The tensor.
        instead: The end of the message: the expected value, or what to do instead.

    Raises:
        InvalidValueError: If an element is not usable.
    """
    if not bool(is_usable.all()):
        bad = tuple((~is_usable).nonzero()[0].tolist())
        raise InvalidValueError(f"{what} is {value[bad].item()} at index {list(bad)}: {instead}.")
