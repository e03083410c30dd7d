"""Bounds on the rounding of sums in a gradient, and backward passes whose sums round differently."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradguard.replacements import Replacement

TERMS = 512
"""Most kernels split a longer sum over a batch into blocks of about this many terms, and then add the blocks."""

SINGLE = torch.finfo(torch.float32).eps / 2
"""Half a unit in the last place of float32, in which kernels accumulate 16-bit numbers."""


def rounding_of_sums(rounding: float, calls: int) -> float:
    r"""Return the least error of storing and accumulating a gradient, relative to its norm.

    A sum of terms :math:`t_j` with the partial sums :math:`S_j` has the error :math:`u \sqrt{\sum_j S_j^2}`, if its
    roundings are independent: :math:`u \sqrt{n/2}` of itself where n terms are random.

    Args:
        rounding: Half a unit in the last place of the gradient's dtype, relative.
        calls: The number of micro-batches.

    Example:
        >>> rounding_of_sums(2.0**-24, calls=1) / 2.0**-24, rounding_of_sums(2.0**-9, calls=8) / 2.0**-9
        (16.01..., 2.0)
    """
    of_batch = min(rounding, SINGLE) * math.sqrt((TERMS + calls) / 2)
    return max(of_batch, rounding * math.sqrt(max(2, calls) / 2))


def most_of_sums(rounding: float, calls: int) -> float:
    """Return the error of accumulating micro-batches if all roundings go to one side, relative to the gradient's norm.

    Repeated addition of one number rounds this way: the partial sums are 1, 2 ... n parts of n.

    Example:
        >>> most_of_sums(2.0**-24, calls=1) / 2.0**-24, most_of_sums(2.0**-24, calls=201) / 2.0**-24
        (0.0, 100.5)
    """
    return rounding * calls / 2 if calls > 1 else 0.0


@dataclass
class Backwards:
    """The backward passes of this thread inside a block.

    Attributes:
        scale: The factor on the gradient at the loss.
        count: The number of backward passes; a backward within another one does not count.
    """

    scale: float
    count: int = 0


def _backward(original: Callable[..., Any], tensors: Any, gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
    watched: Backwards | None = getattr(_thread, "watched", None)
    gradients = kwargs.pop("grad_tensors", gradients)
    if watched is not None:
        watched.count += 1
        if gradients is None and watched.scale != 1:
            tensors = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
            # PyTorch refuses tensors that are not a loss; leave them unchanged.
            if all(isinstance(one, Tensor) and one.numel() == 1 and one.is_floating_point() for one in tensors):
                preserved = torch.preserve_format
                gradients = [torch.full_like(loss, watched.scale, memory_format=preserved) for loss in tensors]
    return original(tensors, gradients, *args, **kwargs)


_thread = threading.local()
_BACKWARD = Replacement("torch.autograd", "backward", _backward, one_call="a backward pass")


@contextmanager
def backwards(scale: float = 1.0) -> Iterator[Backwards]:
    """Count the backward passes of a block, and multiply the initial gradient of each at its loss.

    A backward with given gradients (a pipeline stage, a checkpoint) is not scaled: they come from a scaled backward.

    Args:
        scale: The factor.

    Yields:
        The counter, which is updated inside the block.
    """
    before, end = getattr(_thread, "watched", None), _BACKWARD.use()
    _thread.watched = watched = Backwards(scale)
    try:
        yield watched
    finally:
        _thread.watched = before
        end()
