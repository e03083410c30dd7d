"""torchtitan: where its trainers look up the function that they clip by."""

from collections.abc import Callable
from typing import Any

from gradguard.distributed.engines.engine import Engine
from gradguard.replacements import Replacement


class Torchtitan(Engine):
    """torchtitan, whose tensors are DTensors."""

    name = "torchtitan"

    def replacements(self, clip: Callable[..., Any], step: Callable[..., Any]) -> list[Replacement]:
        """Return what replaces the function that its trainers clip by."""
        return [Replacement("torchtitan.distributed.utils", "clip_grad_norm_", clip)]
