"""Puts other tensors in the places of a module's parameters and buffers, for a block."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gradguard.torch_private import buffer_slots, parameter_slots, renew_recurrent_weights


@contextmanager
def substituted(tensors: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Let each tensor stand in for the parameter (or buffer) that a module holds under a name.

    Args:
        tensors: By module and attribute.
    """
    before = [(module, slot, _home(module, slot)[slot]) for module, slot in tensors]
    recurrent = {module for module, _ in tensors if isinstance(module, nn.RNNBase)}
    try:
        for (module, slot), tensor in tensors.items():
            _home(module, slot)[slot] = tensor
        for layer in recurrent:
            renew_recurrent_weights(layer)
        yield
    finally:
        for module, slot, original in before:
            _home(module, slot)[slot] = original
        for layer in recurrent:
            renew_recurrent_weights(layer)


def _home(module: nn.Module, slot: str) -> dict[str, Any]:
    """The dictionary of ``module`` that holds ``slot``."""
    parameters: dict[str, Any] = parameter_slots(module)
    buffers: dict[str, Any] = buffer_slots(module)
    return parameters if slot in parameters else buffers
