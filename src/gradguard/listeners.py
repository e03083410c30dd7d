"""Events of a training, and who listens to them: a clip does not know that it is watched.

A clip calls `announce` before it writes, and `tell` when it is done; `tell_of` tells what else happens. Where nobody
listens that is a look at an empty tuple. A script's own clips do the same while
`gradguard.script_events.clips_are_heard`. Listeners hear the calls of all threads, each in the thread that makes it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gradguard.replacements import once

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gradguard.grad_scaler import ScalerStep

SkipReason = Literal["nonfinite", "grad_scaler", "spike"]
RecoveryKind = Literal["burst", "rolled_back", "data_shift"]


@dataclass(slots=True)
class ClipCall:
    """A clip that is about to act. One of gradguard's says the rest when it is done.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``; "" for a clip of gradguard's.
        threshold: Its threshold.
        norm_type: The order of its norm.
        norm: The norm that it was given, if it does not take one itself.
        whole: Whether the gradients are shards, so that only the call itself knows their norm.
        tells_norms: Whether its `ClipEvent` will have the norm of each gradient.
        again: Makes the call, which no listener hears of; None where it cannot be repeated.
    """

    rule: str = ""
    threshold: Any = None
    norm_type: float = 2.0
    norm: Any = None
    whole: bool = False
    tells_norms: bool = False
    again: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class ClipEvent:
    """One clip. Tensors are those of the clip, on its device: copy what is read later than at once.

    Attributes:
        rule: ``"norm"``, ``"value"``, ``"adaptive"``, or the class of a clipper that is none of these.
        parameters: The parameters whose gradients it clipped.
        threshold: The bound that it compared with; None where there is not one number.
        norm: Norm of all gradients before, without a loss scale that the optimizer takes off; None if not measured.
        coefficient: The norm after over the norm before; None if not known.
        norms: 2-norm of each gradient before, in the order of ``parameters``; None if not known.
        optimizer: The optimizer whose step is running, for a clip that acts within it.
        skipped: Whether that step is left out: a bool, or a 0-dim tensor where only the device knows.
        skip_reason: Why, if it is left out: ``"grad_scaler"`` if a GradScaler found infinity or NaN, which lowers its
            scale, ``"nonfinite"`` if the clip itself did, ``"spike"`` if it was finite and stood out. None
            where no step can be left out.
        norm_type: The order of ``norm``.
        elements: For an error clip, the number of elements of all gradients on their way that it looked at; it has no
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


@dataclass(frozen=True, slots=True)
class RecoveryEvent:
    """Something that was done about spikes, after the step of an optimizer.

    Attributes:
        optimizer: Whose step.
        kind: ``"burst"`` (spikes in a row were adopted), ``"rolled_back"`` or ``"data_shift"`` (the burst was what the
            data are like now).
        message: A description in words.
        lost: Steps whose work is in no weight any more, skipped ones included; None if it is not known yet.
        recovery: Steps from the first spike until the matter ended; None while it goes on.
        slowed_down: Whether the learning rate is lower for a while.
    """

    optimizer: "Optimizer"
    kind: RecoveryKind
    message: str
    lost: int | None = None
    recovery: int | None = None
    slowed_down: bool = False


class Listener:
    """Hears of a training; each method does nothing unless a subclass overrides it.

    A method must not write to a gradient, nor raise, unless it is to end the script. `listen` brings clips and
    recoveries, `gradguard.script_events.listening` all of these.
    """

    def on_begin(self) -> None:
        """`listening` begins."""

    def on_end(self) -> None:
        """`listening` ends."""

    def on_backward(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Callable[[], object] | None:
        """A backward begins; what this returns is called when it is done.

        Args:
            losses: The tensors that it starts from; none where it starts from edges of a graph.
            weights: The factor of each in the sum that it differentiates: 1, or what the script gave.
        """

    def on_clip(self, call: ClipCall, parameters: Sequence[Tensor]) -> AbstractContextManager | None:
        """A clip is about to act; gradients are as they were. One of a script runs inside what this returns.

        A clip within an optimizer's step is not announced, nor is an error clip.
        """

    def on_clipped(self, event: ClipEvent) -> None:
        """A clip is done: the one that `on_clip` announced last in this thread, or one that was not announced.

        Of a clip of a script the event has what the call said, and as ``norm`` the tensor that it returned.
        """

    def on_step(self, optimizer: "Optimizer", evaluation: int) -> None:
        """The gradients of a step are complete; ``evaluation`` counts the calls of its closure, from 0."""

    def on_stepped(self, optimizer: "Optimizer") -> None:
        """A step is done."""

    def on_scaler_step(self, optimizer: "Optimizer", step: "ScalerStep") -> None:
        """A GradScaler's ``step(optimizer)`` begins, whether or not the optimizer will step."""

    def on_scaler_stepped(self, optimizer: "Optimizer", step: "ScalerStep") -> None:
        """It has ended, or raised."""

    def on_scale(self, loss: Any, scaled: Any) -> None:
        """A GradScaler turned ``loss`` into ``scaled``."""

    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """A GradScaler updated its scale: a smaller one means that a step was skipped."""

    def on_recover(self, event: RecoveryEvent) -> None:
        """Something was done about spikes."""

    def on_empty_batches(self, count: Tensor) -> None:
        """Of the batches that the next step accumulates, so many add nothing to its gradient."""

    def on_logits(self, name: str, largest: Tensor) -> None:
        """A `LogitWatch` has seen a call of the attention ``name``: its largest logit for each head."""


_listeners: tuple[Listener, ...] = ()


def listen(listener: Listener) -> Callable[[], None]:
    """Let ``listener`` hear of every clip and every recovery from now on; of a script's own clips while they are heard.

    Args:
        listener: Who listens.

    Returns:
        A function that ends it; calling it again does nothing.

    Example:
        >>> import gradguard as gg, torch
        >>> class Log(Listener):
        ...     def on_clipped(self, event): print(event.rule, event.threshold, float(event.norm))
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

    return once(end)


class _Muted(threading.local):
    def __init__(self) -> None:
        self.blocks = 0


_muted = _Muted()


@contextmanager
def muted() -> Iterator[None]:
    """Let no listener hear of what this thread does in the block: a clip that is made to see what it does."""
    _muted.blocks += 1
    try:
        yield
    finally:
        _muted.blocks -= 1


def is_muted() -> bool:
    """Tell whether this thread runs in a block of `muted`."""
    return _muted.blocks > 0


def is_heard() -> bool:
    """Tell whether anybody listens; nobody does to code that is being compiled."""
    return bool(_listeners) and not torch.compiler.is_compiling() and not _muted.blocks


def announce(parameters: Sequence[Tensor], *, tells_norms: bool = False) -> None:
    """Say that a clip of gradguard's is about to act on the gradients of ``parameters``.

    Args:
        parameters: The parameters.
        tells_norms: Whether its event will have the norm of each gradient.
    """
    call = ClipCall(tells_norms=tells_norms)
    for listener in _listeners:
        listener.on_clip(call, parameters)


def announced(call: ClipCall, parameters: Sequence[Tensor]) -> AbstractContextManager:
    """Say that a clip of a script's is about to act; it runs inside what is returned.

    Args:
        call: The clip.
        parameters: The parameters whose gradients it clips.

    Returns:
        The contexts of those who listen.
    """
    contexts = [context for one in _listeners if (context := one.on_clip(call, parameters)) is not None]
    if not contexts:  # as nearly always
        return nullcontext()
    with ExitStack() as inside:
        for context in contexts:
            inside.enter_context(context)
        return inside.pop_all()


def tell(event: ClipEvent) -> None:
    """Say what a clip did."""
    for listener in _listeners:
        listener.on_clipped(event)


def tell_of(method: Callable[..., None], *facts: Any) -> None:
    """Call a method of every listener.

    Args:
        method: A method of `Listener`, such as ``Listener.on_recover``; each listener's own is called.
        *facts: Its arguments.

    Example:
        >>> class Log(Listener):
        ...     def on_recover(self, event): print(event.kind, event.lost)
        >>> end = listen(Log())
        >>> tell_of(Listener.on_recover, RecoveryEvent(None, "rolled_back", "went back by 14 steps", lost=14))
        rolled_back 14
        >>> end()
    """
    for listener in _listeners:
        getattr(listener, method.__name__)(*facts)


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
