"""Devices by name, for backends that are called like one."""

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


def moved(values: Any, device: torch.device) -> Any:
    """Return nested values with their tensors on ``device``."""
    return tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, values)
