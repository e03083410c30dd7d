"""Rounding of sums in a gradient, at least and at most; and steps whose sums round in another way."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

TERMS = 512
"""Of a longer sum over a batch, most kernels add up blocks of about so many terms, and then these."""

SINGLE = torch.finfo(torch.float32).eps / 2
"""Kernels add up 16-bit numbers in float32."""


def rounding_of_sums(rounding: float, calls: int) -> float:
    r"""Return what storing a gradient and adding it up does to it at least, relative to its norm.

    A sum of terms :math:`t_j` with the partial sums :math:`S_j` has the error :math:`u \sqrt{\sum_j S_j^2}`, if its
    roundings are independent: :math:`u \sqrt{n/2}` of itself where n terms are random.

    Args:
        rounding: Half a unit in the last place of its dtype, relative.
        calls: How many micro-batches add to it.

    Example:
        >>> rounding_of_sums(2.0**-24, calls=1) / 2.0**-24, rounding_of_sums(2.0**-9, calls=8) / 2.0**-9
        (16.01..., 2.0)
    """
    of_batch = min(rounding, SINGLE) * math.sqrt((TERMS + calls) / 2)
    return max(of_batch, rounding * math.sqrt(max(2, calls) / 2))


def most_of_sums(rounding: float, calls: int) -> float:
    """Return what adding up micro-batches does to a gradient if all roundings go to one side, relative to its norm.

    So they do where one number is added over and over: the partial sums are 1, 2 ... n parts of n.

    Example:
        >>> most_of_sums(2.0**-24, calls=1) / 2.0**-24, most_of_sums(2.0**-24, calls=201) / 2.0**-24
        (0.0, 100.5)
    """
    return rounding * calls / 2 if calls > 1 else 0.0


class Backwards:
    """The backward passes of this thread inside a block.

    Attributes:
        scale: What the gradient at the loss is multiplied by.
        count: How many there were.
    """

    def __init__(self, scale: float) -> None:
        self.scale, self.count, self._inside = scale, 0, False

    def run(self, backward: Callable[..., Any], tensors: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one; where a backward pass begins another one, only the first is counted and scaled."""
        if self._inside:
            return backward(tensors, gradients, *args, **kwargs)
        self.count += 1
        self._inside = True
        try:
            return backward(tensors, self._scaled(tensors) if gradients is None else gradients, *args, **kwargs)
        finally:
            self._inside = False

    def _scaled(self, tensors: Any) -> Any:
        """The gradient at each loss; None, which is 1, where PyTorch must refuse what is no loss."""
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        tensors_are_losses = all(
            isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() for loss in losses
        )
        if self.scale == 1 or not tensors_are_losses:
            return None
        return [torch.full_like(loss, self.scale, memory_format=torch.preserve_format) for loss in losses]


@contextmanager
def backwards(scale: float = 1.0) -> Iterator[Backwards]:
    """Count the backward passes of a block, and multiply the gradient with which each begins at its loss.

    One that is given its gradients (a pipeline stage, a checkpoint) goes on as it is: they come from one that began.

    Args:
        scale: By what it is multiplied.

    Yields:
        What was counted.
    """
    before = _thread.__dict__.get("watched")
    _thread.watched = watched = Backwards(scale)
    _enter()
    try:
        yield watched
    finally:
        _leave()
        _thread.watched = before


_thread = threading.local()
_lock = threading.Lock()
_blocks: list[tuple[Callable, Callable]] = []  # for each block the function that is replaced, and what stands for it


def _enter() -> None:
    with _lock:
        if not _blocks:
            original = torch.autograd.backward

            def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
                watched = _thread.__dict__.get("watched")
                if watched is None:
                    return original(tensors, grad_tensors, *args, **kwargs)
                return watched.run(original, tensors, grad_tensors, *args, **kwargs)

            torch.autograd.backward = backward
            _blocks.append((original, backward))
        else:
            _blocks.append(_blocks[0])


def _leave() -> None:
    with _lock:
        original, ours = _blocks.pop()
        if not _blocks and torch.autograd.backward is ours:
            torch.autograd.backward = original
