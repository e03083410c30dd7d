"""Events of a run that goes back, or adopts spikes as a shift of the data, for its watchers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer

RecoveryKind = Literal["burst", "rolled_back", "data_shift"]


@dataclass(frozen=True, slots=True)
class RecoveryEvent:
    """Something that was done about spikes, after the step of an optimizer.

    Attributes:
        optimizer: Whose step.
        kind: ``"burst"`` (spikes in a row were adopted), ``"rolled_back"`` or ``"data_shift"`` (the burst was what the
            data are like now).
        message: What was done, in words.
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


_listeners: tuple[Callable[[RecoveryEvent], object], ...] = ()


def listen_to_recoveries(listener: Callable[[RecoveryEvent], object]) -> Callable[[], None]:
    """Let ``listener`` hear of every recovery from now on; it must not raise.

    Args:
        listener: A function of one event.

    Returns:
        What ends it; calling it again does nothing.

    Example:
        >>> end = listen_to_recoveries(lambda event: print(event.kind, event.lost))
        >>> tell_recovery(RecoveryEvent(None, "rolled_back", "went back by 14 steps", lost=14))
        rolled_back 14
        >>> end()
    """
    global _listeners
    heard = lambda event: listener(event)  # noqa: E731  # a bound method is another object each time
    _listeners = (*_listeners, heard)

    def end() -> None:
        global _listeners
        _listeners = tuple(one for one in _listeners if one is not heard)

    return end


def tell_recovery(event: RecoveryEvent) -> None:
    """Say what was done."""
    for listener in _listeners:
        listener(event)
