"""A model of the zoo: how it is built, what it is called with, and what is minimised."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

MODES = ("eval", "train", "float32", "bfloat16")
"""Float64 in evaluation and in train mode; evaluation in float32, and in float32 under bfloat16 autocast."""

B = 4
"""Samples in the batch; no other size in the zoo is 4 on purpose."""


@dataclass
class ZooCase:
    """One model.

    Attributes:
        build: Makes it in float32; called under a fixed seed.
        inputs: Makes what it is called with, samples in front.
        call: Runs it on the inputs.
        loss: Computes the mean over samples of each sample's own loss, where that is not a projection of the outputs.
        modes: Those that make sense for it.
        perturbed: Add noise to the weights.
        clippers: Modes of the clipper that are tried; "exact" shows each gradient, "fast" is what people use.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    call: Callable[[nn.Module, Any], Any] = lambda model, inputs: model(*inputs)
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    modes: tuple[str, ...] = MODES
    perturbed: bool = True
    clippers: tuple[str, ...] = ("exact", "fast")


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs with floating-point tensors in ``dtype``."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, inputs)


def samples(inputs: Any, start: int, stop: int) -> Any:
    """Some samples."""
    return tree_map(lambda t: t[start:stop] if isinstance(t, Tensor) else t, inputs)
