"""Events of every clip of gradguard for its listeners: a clip does not know that it is watched.

A clip calls `announce` before it writes, and `tell` when it is done. Where nobody listens that is a look at an empty
tuple. Listeners hear the calls of all threads, each in the thread that clips.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

SkipReason = Literal["nonfinite", "grad_scaler", "spike"]


@dataclass(frozen=True, slots=True)
class ClipEvent:
    """One clip. Tensors are those of the clip, on its device: copy what is read later than at once.

    Attributes:
        rule: ``"norm"``, ``"value"``, ``"adaptive"``, or the class of a clipper that is none of these.
        parameters: The parameters whose gradients it clipped.
        threshold: What it compared with; None where there is not one number.
        norm: Norm of all gradients before, without a loss scale that the optimizer takes off; None if not measured.
        coefficient: The norm after over the norm before; None if not known.
        norms: 2-norm of each gradient before, in the order of ``parameters``; None if not known.
        optimizer: The optimizer whose step is running, for a clip that acts within it.
        skipped: Whether that step is left out: a bool, or a 0-dim tensor where only the device knows.
        skip_reason: Why, if it is left out: ``"grad_scaler"`` if a GradScaler found infinity or NaN, which lowers its
            scale, ``"nonfinite"`` if the clip itself did, ``"spike"`` if it was finite and stood out. None
            where no step can be left out.
        norm_type: The order of ``norm``.
        elements: Of an error clip, the number of elements of all gradients on their way that it looked at; it has no
            parameters, norm or coefficient. None for clips of parameters' gradients.
        spike: Whether it is left out as a finite spike, whatever ``skip_reason`` says: a bool, or a 0-dim tensor where
            only the device knows.
        clipped_elements: How many of these it changed: an int, or a 0-dim tensor where only the device knows.
    """

    rule: str
    parameters: Sequence[Tensor]
    threshold: float | Tensor | None = None
    norm: Tensor | None = None
    coefficient: float | Tensor | None = None
    norms: Tensor | None = None
    optimizer: "Optimizer | None" = None
    skipped: bool | Tensor = False
    norm_type: float = 2.0
    skip_reason: SkipReason | None = None
    elements: int | None = None
    clipped_elements: int | Tensor | None = None
    spike: bool | Tensor = False


class ClipListener(Protocol):
    """Who listens. It must not raise, nor write to a gradient."""

    def before_clip(self, parameters: Sequence[Tensor], tells_norms: bool) -> None:
        """A clip is about to act; gradients are as they were.

        Args:
            parameters: The parameters of the clip.
            tells_norms: Whether it will tell the norm of each gradient.
        """

    def after_clip(self, event: ClipEvent) -> None:
        """A clip is done: the one announced last in this thread, or one that is not announced.

        A clip within an optimizer's step is not announced, nor is an error clip, which has ``elements``.
        """


_listeners: tuple[ClipListener, ...] = ()


def listen(listener: ClipListener) -> Callable[[], None]:
    """Let ``listener`` hear of every clip from now on.

    Args:
        listener: Who listens.

    Returns:
        What ends it; calling it again does nothing.

    Example:
        >>> import gradguard as gg, torch
        >>> class Log:
        ...     def before_clip(self, parameters, tells_norms): pass
        ...     def after_clip(self, event): print(event.rule, event.threshold, float(event.norm))
        >>> end = listen(Log())
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> norm = gg.clip_grad_norm_(layer, 1.0)
        norm 1.0 5.0
        >>> end()
    """
    global _listeners
    _listeners = (*_listeners, listener)

    def end() -> None:
        global _listeners
        _listeners = tuple(one for one in _listeners if one is not listener)

    return end


def is_heard() -> bool:
    """Tell whether anybody listens; nobody does to code that is being compiled."""
    return bool(_listeners) and not torch.compiler.is_compiling()


def announce(parameters: Sequence[Tensor], *, tells_norms: bool = False) -> None:
    """Say that a clip is about to act on the gradients of ``parameters``.

    Args:
        parameters: The parameters.
        tells_norms: Whether its event will have the norm of each gradient.
    """
    for listener in _listeners:
        listener.before_clip(parameters, tells_norms)


def tell(event: ClipEvent) -> None:
    """Say what a clip did."""
    for listener in _listeners:
        listener.after_clip(event)


_on_the_way: list[str] = []


@contextmanager
def changing_on_the_way(what: str) -> Iterator[None]:
    """Let it be known in a block that ``what`` changes gradients on their way through a backward."""
    _on_the_way.append(what)
    try:
        yield
    finally:
        _on_the_way.remove(what)


def changes_on_the_way() -> str:
    """Return what changes gradients on their way through a backward now, or ""."""
    return _on_the_way[-1] if _on_the_way else ""


RULES = {"ClipByGlobalNorm": "norm", "ClipByValue": "value", "ClipAdaptive": "adaptive"}
"""The names that records have for the rules of these classes; any other goes by its class."""


def rule_of(clipper: Any) -> str:
    """Return the name of a clipper's rule."""
    kind = type(clipper).__name__
    return RULES.get(kind, kind)
