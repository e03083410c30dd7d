"""torchtitan: where its trainers look up the function that they clip by."""

from collections.abc import Callable
from typing import Any

from gradguard.replacements import Replacement

NAME = "torchtitan"


def replacements(clip: Callable[..., Any]) -> list[Replacement]:
    """Return what replaces the function that its trainers clip by.

    Args:
        clip: Called in its place with that function, the parameters, ``max_norm`` and the rest.
    """
    return [Replacement("torchtitan.distributed.utils", "clip_grad_norm_", clip)]
