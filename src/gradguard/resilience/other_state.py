"""What a snapshot keeps besides modules and optimizers: schedulers, scalers, generators, guards."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.resilience.saved_snapshot import Packer, Unpacker
from gradguard.state.copies import Copier, Restorer


class OtherState:
    """An object with ``state_dict`` and ``load_state_dict``, or a generator."""

    def __init__(self, thing: Any) -> None:
        self.thing, self._kept = thing, None

    def take(self, copier: Copier) -> None:
        """Keep its state."""
        generator = isinstance(self.thing, torch.Generator)
        self._kept = copier.copy(self.thing.get_state() if generator else self.thing.state_dict())

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors whose devices count: none."""
        return iter(())

    def packed(self, packer: Packer) -> Any:
        """Return what was kept, for a file."""
        return packer.restored(self._kept)

    def unpack(self, packed: Any, unpacker: Unpacker) -> None:
        """Take what `packed` has returned."""
        self._kept = unpacker.copy(packed)

    def check(self) -> None:
        """Nothing to compare: the object itself refuses a state that is not its own."""

    def restore(self, restorer: Restorer) -> None:
        """Hand the state back."""
        del restorer  # its tensors are the run's; what is loaded may be kept by the object, so it is a copy
        load = self.thing.set_state if isinstance(self.thing, torch.Generator) else self.thing.load_state_dict
        load(Restorer().restored(self._kept))


def optimizer_of(thing: Any) -> Optimizer | None:
    """Return which optimizer a scheduler drives; None of anything else."""
    inner = getattr(thing, "scheduler", thing)  # of a trainer's wrapper
    optimizer = getattr(inner, "optimizer", None)
    is_scheduler = hasattr(inner, "get_last_lr") or isinstance(inner, torch.optim.lr_scheduler.LRScheduler)
    return optimizer if is_scheduler and isinstance(optimizer, Optimizer) else None
