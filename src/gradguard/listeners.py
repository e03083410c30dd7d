"""Events of a training run and their listeners: a clip does not know whether it is watched.

A clip calls `announce` before it writes, and `tell` when it is done; `tell_of` reports every other event. Without
listeners each call only tests an empty tuple. A script's own clips report the same two events as long as
`gradguard.script_events.clips_are_heard`. A listener is called for events of all threads, in the thread of the event.
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
    """A clip that is about to act. For a clip of gradguard's, `ClipEvent` carries the details when the clip is done.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``; "" for a clip of gradguard's.
        threshold: The clip's threshold.
        norm_type: The order of its norm.
        norm: The norm that the caller passed, if the clip does not measure one itself.
        whole: Whether the gradients are shards and only the call itself computes the norm of the whole.
        tells_norms: Whether the clip's `ClipEvent` will hold the norm of each gradient.
        again: Repeats the call without events; None if the call cannot be repeated.
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
    """One finished clip. Its tensors belong to the clip and stay on its device: copy any that are read later.

    Attributes:
        rule: ``"norm"``, ``"value"``, ``"adaptive"``, or the class name of any other clipper.
        parameters: The parameters whose gradients were clipped.
        threshold: The bound; None if the rule has no single number.
        norm: Norm of all gradients before the clip, divided by the loss scale if the optimizer unscales; None if not
            measured.
        coefficient: The norm after the clip over the norm before; None if not known.
        norms: 2-norm of each gradient before, in the order of ``parameters``; None if not known.
        optimizer: The optimizer whose step is running, for a clip that acts within the step.
        skipped: Whether that step is skipped: a bool, or a 0-dim tensor if only the device holds the answer.
        skip_reason: Why the step is skipped: ``"grad_scaler"`` if a GradScaler found infinity or NaN, which lowers its
            scale; ``"nonfinite"`` if the clip itself found them; ``"spike"`` if the gradients were finite and stood
            out. None if the clip cannot skip a step.
        norm_type: The order of ``norm``.
        elements: For an error clip, the number of elements in all the gradients that it received; an error clip has no
            parameters, norm or coefficient. None for clips of parameters' gradients.
        spike: Whether the step is skipped as a finite spike, whatever ``skip_reason`` says: a bool, or a 0-dim tensor
            if only the device holds the answer.
        clipped_elements: How many of ``elements`` changed: an int, or a 0-dim tensor if only the device holds it.
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
    """A recovery from loss spikes, after an optimizer's step.

    Attributes:
        optimizer: The optimizer that stepped.
        kind: ``"burst"`` (several spikes in a row were accepted), ``"rolled_back"``, or ``"data_shift"`` (the burst was
            a lasting change of the data).
        message: A description in words.
        lost: Steps whose work no weight contains any more, skipped steps included; None if not known yet.
        recovery: Steps from the first spike until the end of the recovery; None as long as the recovery lasts.
        slowed_down: Whether the learning rate is lowered for a while.
    """

    optimizer: "Optimizer"
    kind: RecoveryKind
    message: str
    lost: int | None = None
    recovery: int | None = None
    slowed_down: bool = False


class Listener:
    """Receives the events of a training run; each method does nothing unless a subclass overrides it.

    A method must not write to a gradient. It must not raise either, except to end the script. `listen` reports clips
    and recoveries; `gradguard.script_events.listening` reports all of these events.
    """

    def on_begin(self) -> None:
        """`listening` begins."""

    def on_end(self) -> None:
        """`listening` ends."""

    def on_backward(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Callable[[], object] | None:
        """A backward begins; the function that this method returns is called when the backward is done.

        Args:
            losses: The tensors that the backward starts from; none if it starts from edges of the graph.
            weights: The initial gradient of each loss: ones, or the tensor that the script passed; None for a tensor
                that needs no gradient.
        """

    def on_clip(self, call: ClipCall, parameters: Sequence[Tensor]) -> AbstractContextManager | None:
        """A clip is about to act and the gradients are unchanged. A script's clip runs inside the returned context.

        A clip within an optimizer's step is not announced, nor is an error clip.
        """

    def on_clipped(self, event: ClipEvent) -> None:
        """A clip is done: the last one that `on_clip` announced in this thread, or a clip that was not announced.

        For a clip of a script, the event holds the arguments of the call, and as ``norm`` the tensor that it returned.
        """

    def on_step(self, optimizer: "Optimizer", evaluation: int) -> None:
        """The gradients of a step are complete; ``evaluation`` counts the calls of its closure, from 0."""

    def on_stepped(self, optimizer: "Optimizer") -> None:
        """A step is done."""

    def on_scaler_step(self, optimizer: "Optimizer", step: "ScalerStep") -> None:
        """A GradScaler's ``step(optimizer)`` begins, whether or not the optimizer will step."""

    def on_scaler_stepped(self, optimizer: "Optimizer", step: "ScalerStep") -> None:
        """``scaler.step(optimizer)`` has returned or raised."""

    def on_scale(self, loss: Any, scaled: Any) -> None:
        """A GradScaler scaled ``loss``; the result is ``scaled``."""

    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """A GradScaler updated its scale; a smaller scale means that a step was skipped."""

    def on_recover(self, event: RecoveryEvent) -> None:
        """A burst of spikes was accepted, rolled back, or turned out to be a lasting change of the data."""

    def on_empty_batches(self, count: Tensor) -> None:
        """``count`` of the batches that the next step accumulates contribute nothing to its gradient."""

    def on_logits(self, name: str, largest: Tensor) -> None:
        """A `LogitWatch` measured one call of the attention ``name``; ``largest`` is the largest logit of each head."""


_listeners: tuple[Listener, ...] = ()


def listen(listener: Listener) -> Callable[[], None]:
    """Report every clip and recovery to ``listener`` from now on.

    A script's own clips are reported only as long as `gradguard.script_events.clips_are_heard`.

    Args:
        listener: The receiver of the events.

    Returns:
        A function that ends the listening; further calls do nothing.

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
    """Report nothing that this thread does in the block, such as a clip that is repeated only to measure its effect."""
    _muted.blocks += 1
    try:
        yield
    finally:
        _muted.blocks -= 1


def is_muted() -> bool:
    """Tell whether this thread is inside a block of `muted`."""
    return _muted.blocks > 0


def is_heard() -> bool:
    """Tell whether an event would reach a listener; never in code that is being compiled."""
    return bool(_listeners) and not torch.compiler.is_compiling() and not _muted.blocks


def announce(parameters: Sequence[Tensor], *, tells_norms: bool = False) -> None:
    """Report that a clip of gradguard's is about to act on the gradients of ``parameters``.

    Args:
        parameters: The parameters.
        tells_norms: Whether the clip's event will hold the norm of each gradient.
    """
    call = ClipCall(tells_norms=tells_norms)
    for listener in _listeners:
        listener.on_clip(call, parameters)


def announced(call: ClipCall, parameters: Sequence[Tensor]) -> AbstractContextManager:
    """Report that a script's clip is about to act, and return the context to run it in.

    Args:
        call: The clip.
        parameters: The parameters whose gradients it clips.

    Returns:
        The contexts of all listeners, as one.
    """
    contexts = [context for one in _listeners if (context := one.on_clip(call, parameters)) is not None]
    if not contexts:  # the usual case
        return nullcontext()
    with ExitStack() as inside:
        for context in contexts:
            inside.enter_context(context)
        return inside.pop_all()


def tell(event: ClipEvent) -> None:
    """Report a finished clip to every listener."""
    for listener in _listeners:
        listener.on_clipped(event)


def tell_of(method: Callable[..., None], *facts: Any) -> None:
    """Call one method of every listener.

    Args:
        method: A method of `Listener`, such as ``Listener.on_recover``; a listener's override is called.
        *facts: The arguments of the call.

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
    """Declare that ``what`` changes gradients during a backward, as long as the block lasts."""
    _on_the_way.append(what)
    try:
        yield
    finally:
        _on_the_way.remove(what)


def changes_on_the_way() -> str:
    """Return the innermost declaration of `changing_on_the_way`, or "" if there is none."""
    return _on_the_way[-1] if _on_the_way else ""


RULES = {"ClipByGlobalNorm": "norm", "ClipByValue": "value", "ClipAdaptive": "adaptive"}
"""The rule names that records use for these classes; any other clipper is recorded under its class name."""


def rule_of(clipper: Any) -> str:
    """Return the name of a clipper's rule, as records store it."""
    kind = type(clipper).__name__
    return RULES.get(kind, kind)
