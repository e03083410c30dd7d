"""Devices by name, for backends that are called like one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradguard.torch_private import tree_map


def device_called(name: str) -> torch.device | None:
    """Return the device of that name, None if the name is that of no device."""
    try:
        return torch.device(name)
    except RuntimeError:
        return None


def is_here(device: torch.device) -> bool:
    """Tell whether something can be computed there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products in float32 meanwhile.

    cuDNN's convolutions round to TF32, 10 bits, unless told otherwise; both sides of a comparison would, and differ.
    """
    products, convolutions = _products_round(), _convolutions_round()
    of: Any = torch.backends
    kinds = (of.cuda.matmul, of.cudnn.conv, of.cudnn.rnn, of.mkldnn.matmul)
    precisions = [kind.fp32_precision for kind in kinds]
    # torch has an older and a newer switch for each, and no function that looks should find them at odds.
    if products is not None:
        torch.set_float32_matmul_precision("highest")
    if convolutions:
        torch.backends.cudnn.allow_tf32 = False
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions:
            torch.backends.cudnn.allow_tf32 = True
        for kind, precision in zip(kinds, precisions, strict=True):
            kind.fp32_precision = precision


def _products_round() -> str | None:
    """Return the older switch of products of matrices; None where only the newer one has been used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _convolutions_round() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return False


def moved(values: Any, device: torch.device) -> Any:
    """Return nested values with their tensors on ``device``."""
    return tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, values)
