"""Buffers that a forward writes, as BatchNorm does: a step that is skipped leaves them as they were before it."""

from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.placements import local_part
from gradguard.state.copies import PlainCopy, Restorer, UndoCopier
from gradguard.tensors.layout import are_readable, move
from gradguard.torch_private import buffer_slots, version_of


class StepBuffers:
    """Keeps the buffers of a module from step to step, and gives them back where a step was skipped.

    Only those that were written since are looked at: torch counts the writes to a tensor, but for running statistics,
    which count as written at each step, and those of kernels of one's own, which are not seen. On an accelerator the
    host does not wait, but for a buffer that has become another tensor or is no ordinary one.

    Args:
        model: The module. What ``load_state_dict`` writes to it is kept, and taken for no step's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            _KeptBuffer(buffer_slots(module), name) for module in model.modules() for name in buffer_slots(module)
        ]
        self._hook = model.register_load_state_dict_post_hook(lambda module, keys: self.keep())

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the buffers as they are now: the step is over."""
        for one in filter(_KeptBuffer.is_written, self._kept):
            one.keep()

    @torch.no_grad()
    def put_back(self, skipped: Tensor | bool) -> None:
        """Give back what `keep` has kept if the step was ``skipped``, 0-dim bool on any device."""
        for one in filter(_KeptBuffer.is_written, self._kept):
            one.put_back(skipped)

    def remove(self) -> None:
        """Let go of all copies."""
        self._hook.remove()
        self._kept = []


_UNCOUNTED = ("running_mean", "running_var")
"""Buffers that batch and instance norms write without torch's count of writes going up."""


class _KeptBuffer:
    """One buffer, and a copy of its numbers."""

    def __init__(self, slots: dict[str, Tensor | None], name: str) -> None:
        self._slots, self._name = slots, name
        self._live: Any = None
        self._copy: Any = None
        self.keep()

    def keep(self) -> None:
        """Copy it, and note how often it has been written until now."""
        now: Any = self._slots.get(self._name)
        if self._is_plain(now):
            self._copy.memory.copy_(now)  # of the copy before, whose memory is used again
        else:
            self._live, self._copy = now, UndoCopier().copy(now)
        self._writes = self._count()

    def _is_plain(self, now: Any) -> bool:
        """Whether it is the ordinary tensor that it was."""
        copy = self._copy
        is_strided = isinstance(copy, PlainCopy) and copy.memory.layout is torch.strided
        return is_strided and now is self._live and copy.fits(now)

    def _count(self) -> int | None:
        """Return how often torch has written it; None where that is not counted."""
        if self._live is None:
            return 0
        local = local_part(self._live)
        return None if local.is_inference() or self._name in _UNCOUNTED else version_of(local)

    def is_written(self) -> bool:
        """Tell whether it may have been written since."""
        if self._slots.get(self._name) is not self._live:
            return True
        count = self._count()
        return count is None or count != self._writes

    def put_back(self, skipped: Tensor | bool) -> None:
        """Write the copy into it if the step was skipped."""
        now: Any = self._slots.get(self._name)
        if isinstance(skipped, Tensor) and not are_readable(skipped) and self._is_plain(now):
            now.copy_(torch.where(move(skipped.bool(), now.device), self._copy.memory, now))
        elif skipped:
            own = now if now is self._live else None  # another tensor in this place is somebody else's
            self._slots[self._name] = Restorer().restored(self._copy, own)
