"""The losses that a script called ``backward`` on since the last step, without the loss scale of a GradScaler."""

import weakref
from collections import deque
from typing import Any

from torch import Tensor

from gradguard.distributed.placements import is_sharded, local_part, placement_of
from gradguard.tensors.layout import are_readable

MOST_LOSSES = 1000
MOST_SCALED = 16


class Losses:
    """What backward was called on; numbers on the CPU, copies on a device."""

    def __init__(self) -> None:
        self._losses: deque[Any] = deque(maxlen=MOST_LOSSES)
        self._scales = False  # whether a GradScaler is at work, and the last losses that it scaled
        self._scaled: deque[tuple[weakref.ref, Tensor]] = deque(maxlen=MOST_SCALED)

    def add(self, loss: Tensor) -> None:
        """Keep ``loss``, as it was before a GradScaler scaled it; one that nothing is known of is left out."""
        plain = loss
        if self._scales:
            plain = next((its for scaled, its in self._scaled if scaled() is loss), None)
        if plain is not None and is_sharded(plain):  # to read parts would need every process
            plain = local_part(plain) if placement_of(plain).is_whole and not _is_partial(plain) else None
        if plain is not None and plain.numel() == 1:
            self._losses.append(plain.item() if are_readable(plain) else plain.detach().reshape(()).clone())

    def scaled(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled one came from."""
        self._scales = True
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._scaled.append((weakref.ref(scaled), loss.detach()))
        elif isinstance(loss, list | tuple):
            for one, its_scaled in zip(loss, scaled, strict=True):
                self.scaled(one, its_scaled)

    def keep_last(self) -> None:
        """Forget all but the last: the step of the others never came."""
        while len(self._losses) > 1:
            self._losses.popleft()

    def take(self) -> list[Any]:
        """Return all and forget them."""
        found = list(self._losses)
        self._losses.clear()
        return found

    clear = take


def _is_partial(tensor: Any) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)
