"""The identity that a value passes through so that its gradient can be read when backward comes by."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import current_graph_task

Receiver = Callable[[Sequence[Tensor], Sequence[Tensor | None], int], None]
"""Called in backward with the saved tensors, the gradient of each value (None where none came), and the number of the
outermost backward."""


def current_task() -> int:
    """Return the number of the backward that runs in this thread, or -1."""
    return current_graph_task()


_silent = threading.local()


@contextmanager
def silent_taps() -> Iterator[None]:
    """Let gradients pass unread in a backward of this thread that is not the user's."""
    before = getattr(_silent, "now", False)
    _silent.now = True
    try:
        yield
    finally:
        _silent.now = before


class Tap(torch.autograd.Function):
    """The identity; known to who reads the loss's graph by its name."""

    @staticmethod
    def forward(ctx: Any, receive: Receiver, saved: tuple[Tensor, ...], anchor: Tensor, *values: Tensor) -> Any:
        """Return the values; save what is to be handed back."""
        del anchor  # it requires grad, so that backward comes by even where nothing before this value is trained
        ctx.receive = receive
        ctx.made_in = current_task()  # a checkpoint that runs forward again in backward does this backward in its own
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)  # so a value that is changed in place later is autograd's own error
        results = [value.detach() for value in values]
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Hand the gradients over, and pass them on."""
        if getattr(_silent, "now", False):
            return None, None, None, *grads
        if torch.is_grad_enabled():
            raise UnsupportedGradientError(
                "a backward with create_graph=True went through a module whose per-sample gradients are clipped: a "
                "gradient of gradients also depends on the weights in ways that are not followed. Call "
                "clipper.detach() before it, or leave the gradient penalty away."
            )
        ctx.receive(ctx.saved_tensors, grads, current_task() if ctx.made_in == -1 else ctx.made_in)
        return None, None, None, *grads


def tap(receive: Receiver, saved: Sequence[Tensor], anchor: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Return ``values`` passed through an identity that calls ``receive`` in backward.

    Args:
        receive: What to call.
        saved: Tensors to hand back; autograd keeps them as it keeps what an operation saves, so checkpointing and
            the check for in-place changes work.
        anchor: A scalar that requires grad.
        values: Floating-point tensors.
    """
    results = Tap.apply(receive, tuple([tensor.detach() for tensor in saved]), anchor, *values)
    return list(results) if isinstance(results, tuple) else [results]
