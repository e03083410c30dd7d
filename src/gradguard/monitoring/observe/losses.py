"""The losses that a script calls backward on, as they were before a GradScaler scaled them."""

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradguard.distributed.placements import is_partial, is_sharded, local_part, placement_of
from gradguard.tensors.layout import are_readable

MOST_LOSSES = 1000
MOST_SCALED = 16


class Losses:
    """The losses of the backwards: numbers on the CPU, copies on a device."""

    def __init__(self) -> None:
        self._losses: deque[Any] = deque(maxlen=MOST_LOSSES)
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
        self._losses.append(loss)
        return not self.scales and type(loss) is float and math.isfinite(loss)

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
        return bool(self._losses)

    def keep_last(self) -> None:
        """Forget all but the last: the step of the others never came."""
        self._losses = deque(list(self._losses)[-1:], maxlen=MOST_LOSSES)

    def take(self) -> list[Any]:
        """Return all and forget them."""
        found = list(self._losses)
        self._losses.clear()
        return found

    clear = take
