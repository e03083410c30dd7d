"""Clips of an optimizer that steps inside a backward pass: which rules are correct there."""

from collections.abc import Sequence

from torch import Tensor

from gradguard.clip.clipper import Clipper
from gradguard.distributed.reduction_group import Stages
from gradguard.distributed.wrappers import refuse_wrapped_in_backward
from gradguard.errors import NonFiniteGradientError, UnsupportedGradientError
from gradguard.torch_private import current_graph_task

_ALONE = "ClipByNorm, ClipByRMS, ClipByValue, ClipAdaptive, AdaGC(absolute=float('inf'))"


def is_in_backward() -> bool:
    """Tell whether this thread is inside a backward pass: then other gradients may be missing."""
    return current_graph_task() != -1


def refuse_in_backward(clipper: Clipper, parameters: Sequence[Tensor], stages: Stages) -> None:
    """Check that ``clipper`` is correct for the gradients of one optimizer before the others exist.

    Raises:
        UnsupportedGradientError: If the rule needs all gradients, or pipeline stages clip together.
    """
    if not clipper.is_per_tensor():
        raise UnsupportedGradientError(
            f"the optimizer steps inside a backward pass, where {type(clipper).__name__} has the gradients of this "
            "optimizer but not those that are still to come: each tensor would be clipped by its own norm, not by the "
            f"norm of all. Use a rule for each tensor ({_ALONE}), or step after backward()."
        )
    if stages.group is not None:
        raise UnsupportedGradientError(
            "the optimizer steps inside a backward pass, and pipeline stages run theirs at different times, so they "
            "cannot clip together there. Step after backward(), or omit process_group= and mesh= and use a rule for "
            f"each tensor ({_ALONE})."
        )
    refuse_wrapped_in_backward(parameters)


def tell_what_has_stepped(error: NonFiniteGradientError) -> None:
    """Add a note to an error from inside a backward pass: other optimizers may have stepped."""
    error.add_note("This error came from inside a backward pass: optimizers that stepped earlier in it stay stepped.")
