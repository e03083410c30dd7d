"""The engines with clips of their own that are looked for in a script; what belongs to one stands in its own file."""

from collections.abc import Callable
from typing import Any

from gradguard.distributed import deepspeed_layout, megatron, torchtitan
from gradguard.distributed.deepspeed_layout import clip_of_engine, holds_gradients_itself
from gradguard.distributed.megatron import CLIP_BY_GIVEN_NORM
from gradguard.replacements import Replacement

__all__ = ["CLIP_BY_GIVEN_NORM", "NAMES", "clip_of_engine", "holds_gradients_itself", "replacements"]

NAMES = (megatron.NAME, torchtitan.NAME, deepspeed_layout.NAME)
"""The names that users know them by."""


def replacements(clip: Callable[..., Any], step: Callable[..., Any]) -> list[Replacement]:
    """Return what replaces the functions that engines clip and step by.

    Args:
        clip: Called in place of a function of parameters, ``max_norm`` and perhaps ``norm_type``, with that first.
        step: Called in place of the step of an engine that holds gradients itself, with that and the engine.
    """
    return [*torchtitan.replacements(clip), *deepspeed_layout.replacements(clip, step)]
