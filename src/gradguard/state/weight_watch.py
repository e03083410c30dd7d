"""Detect weights that changed between two steps: by a fault, a bit flip, or code other than the optimizer."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.distributed.placements import is_sharded, local_part
from gradguard.optimizer_hooks import parameters_of
from gradguard.state.generators import seeded_normal
from gradguard.tensors.layout import are_readable, flat, grouped, meeting_device, move
from gradguard.tensors.sketch import hashed, in_chunks
from gradguard.torch_private import versions_of

_ROW = 1 << 14
"""Number of weights in one sum."""
_SHORT = 1 << 14
"""Largest length of tensors that are concatenated into one, so that many small ones take few operations."""
_AT_ONCE, _AT_ONCE_ON_DEVICES = 1 << 18, 1 << 24
"""Number of elements that are converted at a time."""


class WeightWatch:
    r"""Compares the weights before a step with those after the previous one.

    It compares torch's count of writes to each tensor, and checksums: for each 16,384 weights :math:`w_i` the sum
    :math:`\sum_i r_i w_i` with fixed random numbers :math:`r_i`, in float32 (float64 for float64 weights). A changed
    value, a flipped sign or exchanged weights change the sum, even if NumPy or another library wrote them. A change
    below the rounding of the sum, some 1e-5 of the size of the weights around it, is not detected. On an accelerator
    there is no host sync.

    Args:
        optimizer: The optimizer whose parameters are compared.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        every = parameters_of(optimizer)
        self._sharded = [p for p in every if is_sharded(p)]
        self._whole = _readable([p for p in every if not is_sharded(p)])
        self._factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Store the present weights' write counts and checksums as the reference."""
        weights = self._weights()
        self._writes, self._sums = versions_of(weights), self._sums_of(weights)

    @torch.no_grad()
    def were_written(self) -> bool:
        """Return whether torch has written any weight since `keep`; this costs almost nothing."""
        return versions_of(self._weights()) != self._writes

    @torch.no_grad()
    def changed(self) -> Tensor | bool:
        """Return whether any weight has changed since `keep`; a bool, or a 0-dim tensor if only the device has it."""
        if self.were_written():
            return True
        now, then = self._sums_of(self._weights()), self._sums
        differ = (~((now == then) | (now.isnan() & then.isnan()))).any()
        return bool(differ) if are_readable(differ) else differ

    def _sums_of(self, weights: Sequence[Tensor]) -> Tensor:
        home, sums = meeting_device(weights), [torch.zeros(1, device="cpu")]
        for (device, dtype), places in grouped(weights).items():
            key = device, torch.float64 if dtype is torch.float64 else torch.float32
            if key not in self._factors:
                self._factors[key] = seeded_normal((_ROW,), key[1], device)
            factors = self._factors[key]
            lines = [flat(weights[i].detach()) for i in places]
            short = [line for line in lines if len(line) <= _SHORT]
            for line in [*(line for line in lines if len(line) > _SHORT), *([torch.cat(short)] if short else [])]:
                for block in line.split(_AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_DEVICES):
                    block = block.to(factors.dtype)
                    whole = len(block) // _ROW * _ROW
                    sums.append(block[:whole].view(-1, _ROW) @ factors)
                    sums.append((block[whole:] @ factors[: len(block) - whole])[None])
        return torch.cat([move(one, home, sums[-1].dtype) for one in sums])

    def _weights(self) -> list[Tensor]:
        """Return the weights; of sharded ones, this process' part."""
        if not self._sharded:
            return self._whole
        return [*self._whole, *_readable(list(map(local_part, self._sharded)))]


def _readable(weights: list[Tensor]) -> list[Tensor]:
    return [p for p in weights if p.is_floating_point() and p.layout is torch.strided and not p.is_meta]


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number that depends on every bit of the elements of plain tensors; a host sync."""
    total = 0
    for tensor in tensors:
        kind = _INTEGERS.get(tensor.dtype.itemsize, torch.int8)
        sums = [(values.view(kind).long() * hashed(places)).sum() for values, places in in_chunks(tensor)]
        total = total * 31 + int(sum(sums))
    return total
