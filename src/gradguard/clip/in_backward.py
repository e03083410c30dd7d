"""An optimizer that steps inside a backward pass: which clips are right there."""

from collections.abc import Sequence

from torch import Tensor

from gradguard.clip.clipper import Clipper
from gradguard.distributed.reduction_group import Stages
from gradguard.distributed.wrappers import refuse_wrapped_in_backward
from gradguard.errors import NonFiniteGradientError, UnsupportedGradientError
from gradguard.torch_private import current_graph_task

_ALONE = "ClipByNorm, ClipByRMS, ClipByValue, ClipAdaptive, AdaGC(absolute=float('inf'))"


def is_in_backward() -> bool:
    """Tell whether this thread is inside a backward pass: then other gradients may not be there yet."""
    return current_graph_task() != -1


def refuse_in_backward(clipper: Clipper, parameters: Sequence[Tensor], stages: Stages) -> None:
    """Check that ``clipper`` is right for the gradients of one optimizer while others are still to come.

    Raises:
        UnsupportedGradientError: If the rule needs all gradients.
    """
    if not clipper.is_per_tensor():
        raise UnsupportedGradientError(
            f"the optimizer steps inside a backward pass, where {type(clipper).__name__} would see the gradients of "
            "this optimizer and not those that are still to come: each tensor would be clipped by its own norm, and "
            f"not by that of all. Use a rule for each tensor ({_ALONE}), or step after backward()."
        )
    if stages.group is not None:
        raise UnsupportedGradientError(
            "the optimizer steps inside a backward pass, and pipeline stages run theirs at different times, so they "
            "cannot clip together there: step after backward(), or leave process_group= and mesh= away and use a rule "
            f"for each tensor ({_ALONE})."
        )
    refuse_wrapped_in_backward(parameters)


def tell_what_has_stepped(error: NonFiniteGradientError) -> None:
    """Add to an error from inside a backward that other optimizers may have stepped."""
    error.add_note("This came from inside a backward pass: optimizers that have stepped before in it stay stepped.")
