"""Which tensors can be checked: dense ones that hold numbers. Asked once for every input to check and every output."""

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
"""The dtypes that can be checked, each with that in which its differences are taken."""

_KNOWN = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIDE)
_ORDINARY = [Tensor.__torch_dispatch__]  # pyright: ignore[reportAttributeAccessIssue]
_PLAIN = {"DTensor": "{}.full_tensor()", "MaskedTensor": "{}.to_tensor(0)"}


def refuse_empty(values: Mapping[str, Any]) -> None:
    """Refuse tensors that hold no numbers, whether they are checked or not.

    Args:
        values: The arguments of the call by name, a module's own tensors among them.

    Raises:
        InvalidTypeError: If a tensor is on the meta device, or has no shape before the first call of its module.
    """
    for name, value in values.items():
        if nn.parameter.is_lazy(value):
            raise InvalidTypeError(f"input {name!r} has no shape before the first call of its module: call that first.")
        if isinstance(value, Tensor) and value.is_meta:
            refuse_unfit(f"input {name!r}", value, name)


def refuse_unfit(what: str, value: Tensor, name: str) -> None:
    """Refuse a tensor whose elements cannot be moved and compared one by one.

    Args:
        what: The tensor's description in the message.
        value: The tensor.
        name: The expression that a person would type for the tensor.

    Raises:
        InvalidTypeError: If it is nested, on the meta device, of another layout or of a dtype without arithmetic, or
            if it wraps other tensors, as a DTensor does.
    """
    kind: Any = type(value)
    if value.is_nested:
        said = f"is nested: expected a dense tensor, such as torch.nested.to_padded_tensor({name}, 0.0)"
    elif kind.__torch_dispatch__ not in _ORDINARY:
        plain = _PLAIN.get(kind.__name__, "{}.clone() before it was wrapped").format(name)
        said = f"is a {kind.__name__}: expected a plain tensor, such as {plain}"
    elif value.is_meta:
        said = "is on the meta device, which holds no numbers: expected some to check"
    elif value.layout is not torch.strided:
        said = f"is {value.layout}: expected a dense tensor, such as {name}.to_dense()"
    elif value.dtype not in WIDE:
        said = f"is {value.dtype}: expected one of {_KNOWN}"
    else:
        return
    raise InvalidTypeError(f"{what} {said}.")


def refuse_unless(is_usable: Tensor, what: str, value: Tensor, instead: str) -> None:
    """Refuse a tensor of which an element cannot be used.

    Args:
        is_usable: Which elements can.
        what: The tensor's description in the message.
        value: The tensor.
        instead: The expectation, as the end of the message.

    Raises:
        InvalidValueError: If there is such an element.
    """
    if not bool(is_usable.all()):
        bad = tuple((~is_usable).nonzero()[0].tolist())
        raise InvalidValueError(f"{what} is {value[bad].item()} at index {list(bad)}: {instead}.")
