"""Whether weights changed between two steps: by a fault, a bit flip, or code that is no optimizer."""

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.distributed.placements import is_sharded
from gradguard.optimizer_hooks import parameters_of
from gradguard.tensors.layout import are_readable
from gradguard.tensors.norms import total_norm
from gradguard.torch_private import versions_of


class WeightWatch:
    """Compares the weights before a step with those after the one before.

    It compares the norm of all weights, and how often torch has written each. So a change that neither alters the norm
    nor is one of torch's own writes, such as a flipped sign through ``.data``, is not seen. On an accelerator the
    host does not wait.

    Args:
        optimizer: Whose parameters are compared.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        every = parameters_of(optimizer)
        self._sharded = [p for p in every if is_sharded(p)]
        self._whole = _readable([p for p in every if not is_sharded(p)])
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Note the weights as they are: what was done to them until now is in order."""
        weights = self._weights()
        self._writes, self._norm = versions_of(weights), total_norm(weights)

    @torch.no_grad()
    def were_written(self) -> bool:
        """Return whether torch has written one of them since; that costs next to nothing."""
        return versions_of(self._weights()) != self._writes

    @torch.no_grad()
    def changed(self) -> Tensor | bool:
        """Return whether they have changed since; a bool, or a 0-dim tensor where only the device knows."""
        if self.were_written():
            return True
        norm, then = total_norm(self._weights()), self._norm
        differs = ~((norm == then) | (norm.isnan() & then.isnan()))
        return bool(differs) if are_readable(differs) else differs

    def _weights(self) -> list[Tensor]:
        """The weights, of sharded ones the part of this process."""
        if not self._sharded:
            return self._whole
        return [*self._whole, *_readable([p.to_local() for p in self._sharded])]  # type: ignore[attr-defined]


def _readable(weights: list[Tensor]) -> list[Tensor]:
    return [p for p in weights if p.is_floating_point() and p.layout is torch.strided and not p.is_meta]
