"""Buffers that a forward writes, such as BatchNorm's statistics: restore them after a skipped step."""

from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.placements import local_part
from gradguard.state.copies import PlainCopy, Restorer, UndoCopier
from gradguard.tensors.layout import are_readable, move
from gradguard.torch_private import buffer_slots, version_of


class StepBuffers:
    """Keeps the buffers of a module from step to step, and restores them after a skipped step.

    Only buffers that were written since are compared, by torch's count of writes. Running statistics are not counted,
    so they are treated as written at each step. Writes by custom kernels are not counted and not detected. On an
    accelerator there is no host sync, except for a buffer that was replaced or is not a plain tensor.

    Args:
        model: The module. Values from its ``load_state_dict`` are kept, not treated as written by a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            _KeptBuffer(buffer_slots(module), name) for module in model.modules() for name in buffer_slots(module)
        ]
        self._hook = model.register_load_state_dict_post_hook(lambda module, keys: self.keep())

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the present buffers, at the end of a step."""
        for one in filter(_KeptBuffer.is_written, self._kept):
            one.keep()

    @torch.no_grad()
    def put_back(self, skipped: Tensor | bool) -> None:
        """Restore the buffers of the last `keep` if the step was ``skipped``, a 0-dim bool on any device."""
        for one in filter(_KeptBuffer.is_written, self._kept):
            one.put_back(skipped)

    def remove(self) -> None:
        """Drop all copies."""
        self._hook.remove()
        self._kept = []


_UNCOUNTED = ("running_mean", "running_var")
"""Buffers that batch and instance norms write without increasing torch's count of writes."""


class _KeptBuffer:
    """One buffer, and a copy of its values."""

    def __init__(self, slots: dict[str, Tensor | None], name: str) -> None:
        self._slots, self._name = slots, name
        self._live: Any = None
        self._copy: Any = None
        self.keep()

    def keep(self) -> None:
        """Copy the buffer, and store its present count of writes."""
        now: Any = self._slots.get(self._name)
        if self._is_plain(now):
            self._copy.memory.copy_(now)  # reuses the memory of the previous copy
        else:
            self._live, self._copy = now, UndoCopier().copy(now)
        self._writes = self._count()

    def _is_plain(self, now: Any) -> bool:
        """Tell whether the buffer is still the same plain tensor."""
        copy = self._copy
        is_strided = isinstance(copy, PlainCopy) and copy.memory.layout is torch.strided
        return is_strided and now is self._live and copy.fits(now)

    def _count(self) -> int | None:
        """Return torch's count of writes to the buffer; None if they are not counted."""
        if self._live is None:
            return 0
        local = local_part(self._live)
        return None if local.is_inference() or self._name in _UNCOUNTED else version_of(local)

    def is_written(self) -> bool:
        """Tell whether the buffer may have been written since."""
        if self._slots.get(self._name) is not self._live:
            return True
        count = self._count()
        return count is None or count != self._writes

    def put_back(self, skipped: Tensor | bool) -> None:
        """Write the copy into the buffer if the step was skipped."""
        now: Any = self._slots.get(self._name)
        if isinstance(skipped, Tensor) and not are_readable(skipped) and self._is_plain(now):
            now.copy_(torch.where(move(skipped.bool(), now.device), self._copy.memory, now))
        elif skipped:
            own = now if now is self._live else None  # a tensor that replaced the buffer must not be overwritten
            self._slots[self._name] = Restorer().restored(self._copy, own)
