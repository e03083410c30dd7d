"""Knows which backward started from a loss that a GradScaler scaled, so that a clipper not told of it can refuse."""

import functools
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from gradguard.errors import InvalidValueError
from gradguard.per_sample.tap import current_task
from gradguard.torch_private import tree_leaves

_REMEMBERED = 64

_scaled: "OrderedDict[int, int]" = OrderedDict()
"""The ``id`` of the scaler, by the number of the backward; of the last backwards only."""


def watch_scalers() -> None:
    """Let every `torch.amp.GradScaler` be noticed from now on; calling it again does nothing."""
    kind = torch.amp.GradScaler
    if getattr(kind.scale, "_noticed_by_gradguard", False):
        return
    original = kind.scale

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if self.is_enabled():
            for tensor in tree_leaves(scaled):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(functools.partial(_note, id(self)))
        return scaled

    scale._noticed_by_gradguard = True  # type: ignore[attr-defined]
    kind.scale = scale  # type: ignore[method-assign]


def refuse_other_scaler(task: int, scaler: Any) -> None:
    """Check that the loss of backward number ``task`` was scaled by ``scaler`` or by none.

    Raises:
        InvalidValueError: If not.
    """
    found = _scaled.get(task)
    if found is not None and found != id(scaler):
        raise InvalidValueError(
            "a GradScaler scaled the loss, so every per-sample gradient is as much too large. Tell the clipper: "
            "PerSampleGradientClipper(..., scaler=scaler). Nothing was clipped."
        )


def _note(scaler: int, grad: Tensor) -> None:
    del grad
    _scaled[current_task()] = scaler
    while len(_scaled) > _REMEMBERED:
        _scaled.popitem(last=False)
