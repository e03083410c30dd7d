"""Buffers that a forward writes, as BatchNorm does: a step that is skipped leaves them as they were before it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.placements import local_part
from gradguard.state.copies import PlainCopy, Restorer, UndoCopier
from gradguard.tensors.layout import are_readable, grouped, move
from gradguard.torch_private import buffer_slots, foreach_copy_, version_of


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
            _KeptBuffers(buffer_slots(module), name) for module in model.modules() for name in buffer_slots(module)
        ]
        self._hook = model.register_load_state_dict_post_hook(lambda module, keys: self.keep())

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the buffers as they are now: the step is over."""
        simple, others = self._written()
        _copy([one.kept for one in simple], [one.now for one in simple])
        for one in simple:
            one.count()
        for one in others:
            one.keep()

    @torch.no_grad()
    def put_back(self, skipped: Tensor | bool) -> None:
        """Give back what `keep` has kept if the step was ``skipped``, 0-dim bool on any device."""
        on_device = skipped.bool() if isinstance(skipped, Tensor) and not are_readable(skipped) else None
        if on_device is None and not skipped:
            return
        simple, others = self._written()
        if on_device is None:
            others += simple
        else:
            chosen = [torch.where(move(on_device, one.now.device), one.kept, one.now) for one in simple]
            _copy([one.now for one in simple], chosen)
        for one in others:
            if bool(skipped):
                one.put_back()

    def _written(self) -> tuple[list["_KeptBuffers"], list["_KeptBuffers"]]:
        """Return the buffers that were written: those that multi-tensor operations can copy, and the others."""
        written = [one for one in self._kept if one.is_written()]
        simple = [one for one in written if one.is_simple()]
        return simple, [one for one in written if not one.is_simple()]

    def remove(self) -> None:
        """Let go of all copies."""
        self._hook.remove()
        self._kept = []


_UNCOUNTED = ("running_mean", "running_var")
"""Buffers that batch and instance norms write without torch's count of writes going up."""


class _KeptBuffers:
    """One buffer, and a copy of what it held."""

    def __init__(self, slots: dict[str, Tensor | None], name: str) -> None:
        self._slots, self._name = slots, name
        self.keep()

    @property
    def now(self) -> Any:
        return self._slots.get(self._name)

    def keep(self) -> None:
        self._live = live = self.now
        self._copy: Any = UndoCopier().copy(live)
        local = None if live is None else local_part(live)
        self._counted = None if local is None or local.is_inference() or self._name in _UNCOUNTED else local
        self.count()

    @property
    def kept(self) -> Tensor:
        """The copy of a simple one."""
        return self._copy.memory

    def count(self) -> None:
        """Note how often it has been written until now."""
        self._writes = 0 if self._counted is None else version_of(self._counted)

    def is_written(self) -> bool:
        if self.now is not self._live:
            return True
        return self._live is not None and (self._counted is None or version_of(self._counted) != self._writes)

    def is_simple(self) -> bool:
        """Whether the copy can be written into the buffer by an operation for many."""
        is_plain = isinstance(self._copy, PlainCopy) and self.kept.layout is torch.strided
        return is_plain and self.now is self._live and self._copy.fits(self._live)

    def put_back(self) -> None:
        own = self._live if self.now is self._live else None  # what else stands there now is somebody else's
        self._slots[self._name] = Restorer().restored(self._copy, own)


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for places in grouped(into).values():
        foreach_copy_([into[i] for i in places], [values[i] for i in places])
