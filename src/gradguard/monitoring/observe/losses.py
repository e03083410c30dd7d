"""The losses that a script calls backward on, as they were before a GradScaler scaled them."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from gradguard.distributed.placements import is_partial, is_sharded, local_part, placement_of
from gradguard.tensors.layout import are_readable

MOST_LOSSES = 1000
MOST_SCALED = 16


class Losses:
    """The losses of the backwards by the thread that called them: numbers on the CPU, copies on a device.

    A step gets those of its own thread. A thread that has none, such as one that leaves backward to workers, gets those
    of threads that have made no step; where it could be either, nobody gets any.
    """

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self._unclaimed: dict[int, deque[Any]] = {}  # of the threads that have made no step
        self.scales = False  # whether a GradScaler is at work, and the last losses that it scaled
        self._scaled: deque[tuple[weakref.ref, Tensor]] = deque(maxlen=MOST_SCALED)

    def add(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> bool:
        """Keep the loss of a backward: the weighted sum of those that it starts from; left out if one is not known.

        Returns:
            Whether each of them is known to be finite, as no GradScaler has scaled them.
        """
        numbers = list(map(self._number, losses, weights))
        if not numbers or any([number is None for number in numbers]):
            return False
        loss = sum(numbers[1:], start=numbers[0])
        self._keep(loss)
        return not self.scales and type(loss) is float and math.isfinite(loss)

    def _keep(self, loss: Any) -> None:
        thread = self._of_thread
        thread.losses.append(loss)
        if not thread.steps:
            self._unclaimed[id(thread.losses)] = thread.losses
            if len(self._unclaimed) > MOST_LOSSES:  # threads that are gone
                self._unclaimed.pop(next(iter(self._unclaimed)), None)

    def _number(self, loss: Tensor, weight: Tensor | None) -> Any:
        """Return ``loss`` as it was before a GradScaler scaled it, weighted; None if that is not known or no scalar."""
        plain: Tensor | None = loss
        if self.scales:
            plain = next((its for scaled, its in self._scaled if scaled() is loss), None)
        if plain is None or weight is None or plain.numel() != 1:
            return None
        if type(plain) is not Tensor or type(weight) is not Tensor:
            if is_sharded(plain) and (not placement_of(plain).is_whole or is_partial(plain)):
                return None  # to read parts of it would need every process
            plain, weight = local_part(plain), local_part(weight)
        if are_readable(plain, weight):
            return plain.item() * weight.item()
        return plain.detach().reshape(()) * weight.detach().reshape(())

    def scaled(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled one came from."""
        self.scales = True
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._scaled.append((weakref.ref(scaled), loss.detach()))
        elif isinstance(loss, list | tuple):
            for one, its_scaled in zip(loss, scaled, strict=True):
                self.scaled(one, its_scaled)

    @property
    def waiting(self) -> bool:
        """Whether a loss is kept whose step has not come."""
        return any((self._of_thread.losses, *self._unclaimed.values()))

    def keep_last(self) -> None:
        """Forget all but the last: the step of the others never came."""
        for loss in self.clear()[-1:]:
            self._keep(loss)

    def take(self) -> list[Any]:
        """Return the losses of the step that this thread makes, and forget them."""
        thread = self._of_thread
        thread.steps = True
        self._unclaimed.pop(id(thread.losses), None)
        return self.clear()

    def clear(self) -> list[Any]:
        """Return the losses of the next step of this thread, and forget them."""
        own = self._of_thread.losses
        others = [self._unclaimed.pop(key, own) for key in list(self._unclaimed) if key != id(own)]
        mine, *rest = [[losses.popleft() for _ in range(len(losses))] for losses in (own, *others)]
        theirs = list(chain(*rest))
        return [] if mine and theirs else mine or theirs


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.losses, self.steps = deque[Any](maxlen=MOST_LOSSES), False
