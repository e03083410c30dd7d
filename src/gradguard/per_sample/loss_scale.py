"""Notices when a GradScaler scales a loss, so that a clipper that was not told of it can refuse."""

import functools
import weakref
from typing import Any

import torch

_SCALERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Scalers that have scaled a loss since the last look."""


def watch_scalers() -> None:
    """Let every `torch.amp.GradScaler` be noticed from now on; calling it again does nothing."""
    kind = torch.amp.GradScaler
    if getattr(kind.scale, "_noticed_by_gradguard", False):
        return
    original = kind.scale

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            _SCALERS.add(self)
        return original(self, outputs)

    scale._noticed_by_gradguard = True  # type: ignore[attr-defined]
    kind.scale = scale  # type: ignore[method-assign]


def scalers_at_work() -> set[Any]:
    """Return the scalers that have scaled a loss since the last call."""
    found = set(_SCALERS)
    _SCALERS.clear()
    return found
