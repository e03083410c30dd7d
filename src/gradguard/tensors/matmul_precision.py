"""The precision of float32 products: 24 bits, or the 11 of TF32 or 8 of bfloat16 if PyTorch is allowed to use these."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch

Kind = Literal["product", "convolution", "recurrent"]
"""The kind of computation: products of matrices, convolutions, or recurrent layers of cuDNN."""

TF32_EPSILON = 2.0**-10
"""The distance from 1 to the next number in TF32."""


def is_tf32_allowed(device: torch.device, *kinds: Kind) -> bool:
    """Tell whether operations of one of these kinds may round float32 to TF32 on ``device``.

    cuDNN may round convolutions and recurrent layers by default; products are rounded only if the user allows it.

    Args:
        device: The device on which the operations run.
        kinds: The kinds of the operations.

    Returns:
        Whether an operation of one of the kinds may be rounded; False on devices other than CUDA.
    """
    if device.type != "cuda":
        return False
    backends: Any = torch.backends
    switches = {
        "product": (backends.cuda.matmul, backends),
        "convolution": (backends.cudnn.conv, backends.cudnn, backends),
        "recurrent": (backends.cudnn.rnn, backends.cudnn, backends),
    }
    for kind in kinds:
        said = [switch.fp32_precision for switch in switches[kind]]  # the first one that is set counts
        if next((one for one in said if one != "none"), "ieee") != "ieee":
            return True
    return False


def outside_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast; a free one if autocast is off already."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


_FULL = ("none", "ieee")
_NAMES: dict[Kind, tuple[str, str]] = {
    "product": ("matmul", "cuda"),
    "convolution": ("conv", "cudnn"),
    "recurrent": ("rnn", "cudnn"),
}
"""For each kind, the name of its switch and the CUDA backend that has it."""

_Said = TypeVar("_Said")


def full_float32(*kinds: Kind) -> AbstractContextManager[object]:
    """Compute float32 products, convolutions and recurrent layers in float32 in a block, whatever the program allows.

    Args:
        kinds: The computations of the block; all kinds if none is given. PyTorch does not round products by default, so
            a block of products alone writes no switch; cuDNN rounds convolutions.

    Returns:
        A context; a free one if nothing is rounded.

    PyTorch has an older switch for products and one for cuDNN, and newer ones in a tree: a switch that is not set
    follows its parent. If only newer ones were set, reading an older one raises, and the older one is not written.
    Otherwise the older ones are set to float32 too, so that code in the block may read them.

    **Guarantees.** Afterwards each switch has its former value, and a switch that followed its parent follows it again.
    The exception is cuDNN's own default of TF32, which cannot be restored as a default: it is then set explicitly.
    Nothing is written if nothing is rounded. Switches of CUDA are read only if there is a GPU.
    """
    has_gpu = torch.cuda.is_available()
    switches = [one for kind in kinds or _NAMES for one in _switches_of(kind, has_gpu)]
    return nullcontext() if all([one.fp32_precision in _FULL for one in switches]) else _all_full(has_gpu)


@contextmanager
def _all_full(has_gpu: bool) -> Iterator[None]:
    """Compute in float32 in a block, and restore each switch."""
    backends: Any = torch.backends
    of_kinds = [_switches_of(kind, has_gpu) for kind in _NAMES]
    switches = [one for each in zip(*of_kinds, strict=True) for one in each]
    above = [backends, backends.cudnn] if has_gpu else [backends]
    products = _older(torch.get_float32_matmul_precision)
    convolutions = has_gpu and _older(lambda: backends.cudnn.allow_tf32)
    changed = []
    for switch in above:  # from the top down; "ieee" is either this switch's value or its parent's
        if (said := switch.fp32_precision) != "ieee":
            changed.append((switch, said))
            switch.fp32_precision = "ieee"
    said = [switch.fp32_precision for switch in switches]  # "ieee" now means that the switch follows its parent
    own = ["none" if one == "ieee" else one for one in said]
    try:
        if products not in (None, "highest"):
            torch.set_float32_matmul_precision("highest")
        if convolutions:
            backends.cudnn.allow_tf32, own[-2:] = False, ["tf32", "tf32"]
        for i, switch in enumerate(switches):
            if switch.fp32_precision not in _FULL:
                switch.fp32_precision = "none"
                own[i] = "none" if switch.fp32_precision == said[i] else own[i]  # its parent cannot be written
                switch.fp32_precision = "ieee"
        yield
    finally:
        if products not in (None, "highest"):
            torch.set_float32_matmul_precision(products)
        if convolutions:
            backends.cudnn.allow_tf32 = True
        for switch, before, value in zip(switches, said, own, strict=True):
            if switch.fp32_precision != before:
                switch.fp32_precision = value
        for switch, value in reversed(changed):
            switch.fp32_precision = value


def _switches_of(kind: Kind, has_gpu: bool) -> tuple[Any, ...]:
    """Return the switch of the CPU, followed by that of CUDA if there is a GPU."""
    name, of_cuda = _NAMES[kind]
    of_cpu = getattr(torch.backends.mkldnn, name)
    return (of_cpu, getattr(getattr(torch.backends, of_cuda), name)) if has_gpu else (of_cpu,)


def _older(read: Callable[[], _Said]) -> _Said | None:
    """Return the value of an older switch, or None if only newer ones were set."""
    try:
        return read()
    except RuntimeError:
        return None
