"""Collect the losses that a script calls backward on, before the scaling by a GradScaler."""

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
    """Store the loss of each backward by thread: a number on the CPU, a copy on a device.

    A step takes the losses of its own thread. If that thread has none, for example because it leaves backward to
    workers, the step takes the losses of threads that have made no step. If both have losses, the step gets none.
    """

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self._unclaimed: dict[int, deque[Any]] = {}  # the losses of threads that have made no step
        self.scales = False  # whether a GradScaler has scaled a loss
        self._scaled: deque[tuple[weakref.ref, Tensor]] = deque(maxlen=MOST_SCALED)  # the last scaled losses

    def add(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> bool:
        """Store the loss of a backward: the weighted sum of its roots. Store nothing if one of them is unknown.

        Returns:
            Whether the loss is known to be finite; False under a GradScaler.
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
            if len(self._unclaimed) > MOST_LOSSES:  # many threads have ended without a step
                self._unclaimed.pop(next(iter(self._unclaimed)), None)

    def _number(self, loss: Tensor, weight: Tensor | None) -> Any:
        """Return the weighted loss before its scaling by a GradScaler; None if it is unknown or no scalar."""
        plain: Tensor | None = loss
        if self.scales:
            plain = next((its for scaled, its in self._scaled if scaled() is loss), None)
        if plain is None or weight is None or plain.numel() != 1:
            return None
        if type(plain) is not Tensor or type(weight) is not Tensor:
            if is_sharded(plain) and (not placement_of(plain).is_whole or is_partial(plain)):
                return None  # reading a sharded loss would need every process
            plain, weight = local_part(plain), local_part(weight)
        if are_readable(plain, weight):
            return plain.item() * weight.item()
        return plain.detach().reshape(()) * weight.detach().reshape(())

    def scaled(self, loss: Any, scaled: Any) -> None:
        """Store which loss a scaled loss came from."""
        self.scales = True
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._scaled.append((weakref.ref(scaled), loss.detach()))
        elif isinstance(loss, list | tuple):
            for one, its_scaled in zip(loss, scaled, strict=True):
                self.scaled(one, its_scaled)

    @property
    def waiting(self) -> bool:
        """Whether a stored loss has had no step yet."""
        return any((self._of_thread.losses, *self._unclaimed.values()))

    def keep_last(self) -> None:
        """Discard all losses but the last: the others had no step."""
        for loss in self.clear()[-1:]:
            self._keep(loss)

    def take(self) -> list[Any]:
        """Return and remove the losses of the step that this thread makes."""
        thread = self._of_thread
        thread.steps = True
        self._unclaimed.pop(id(thread.losses), None)
        return self.clear()

    def clear(self) -> list[Any]:
        """Return and remove the losses that this thread's next step would take."""
        own = self._of_thread.losses
        others = [self._unclaimed.pop(key, own) for key in list(self._unclaimed) if key != id(own)]
        of_own, *rest = [[losses.popleft() for _ in range(len(losses))] for losses in (own, *others)]
        of_others = list(chain(*rest))
        if of_own and of_others:  # the step could belong to either
            return []
        return of_own or of_others


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.losses, self.steps = deque[Any](maxlen=MOST_LOSSES), False
