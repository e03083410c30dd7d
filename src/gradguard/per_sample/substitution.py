"""Puts other tensors in the places of a module's parameters and buffers, for a block."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def substituted(tensors: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Let each tensor stand in for the parameter (or buffer) that a module holds under a name.

    Args:
        tensors: By module and attribute.
    """
    before = [(module, slot, _home(module, slot)[slot]) for module, slot in tensors]
    cached = _flat_weights(tensors)
    try:
        for (module, slot), tensor in tensors.items():
            _home(module, slot)[slot] = tensor
        for module in cached:
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        yield
    finally:
        for module, slot, original in before:
            _home(module, slot)[slot] = original
        for module, weights in cached.items():
            module._flat_weights = weights


def _home(module: nn.Module, slot: str) -> dict[str, Any]:
    """The dictionary of ``module`` that holds ``slot``."""
    parameters: dict[str, Any] = module._parameters
    buffers: dict[str, Any] = module._buffers
    return parameters if slot in parameters else buffers


def _flat_weights(tensors: Mapping[tuple[nn.Module, str], Tensor]) -> dict[Any, list[Any]]:
    """Recurrent layers hold their parameters in a list as well."""
    layers = {module for module, _ in tensors if isinstance(module, nn.RNNBase)}
    return {layer: layer._flat_weights for layer in layers}
