"""The sum of clipped gradients over the mini-batches of one step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradguard.errors import InvalidValueError
from gradguard.per_sample.arithmetic import with_parts_of
from gradguard.tensors.layout import HALVES


class Accumulation:
    """Sums for each parameter, and the number of samples in them.

    The sums are held divided by ``unit``, the size of the first mini-batch: where a step is one mini-batch, its average
    is there without another pass over memory.

    Attributes:
        batch_size: Number of samples so far; None if nothing was added since the last `take`.
        mini_batches: Number of mini-batches so far.
        unit: What the sums are divided by.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.mini_batches = 0
        self.unit = 1.0
        self._sums: dict[str, Tensor] = {}

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """The sums so far, divided by ``unit``; a parameter that no sample used has none."""
        return self._sums

    def drop(self) -> None:
        """Forget what was added."""
        self._sums, self.batch_size, self.mini_batches = {}, None, 0

    def begin(self, unit: float) -> None:
        """Take note of the unit, if no sum is there yet."""
        if not self._sums:
            self.unit = unit

    def add(self, name: str, total: Tensor) -> None:
        """Add a sum that is divided by ``unit``; the tensor is taken over."""
        if name in self._sums:
            self._sums[name] += total
        else:
            self._sums[name] = total

    def count(self, samples: int) -> None:
        """Add to the number of samples."""
        self.batch_size = (self.batch_size or 0) + samples
        self.mini_batches += 1

    def check(self, call: str) -> None:
        """Check that there is something to take.

        Raises:
            InvalidValueError: If not.
        """
        if self.batch_size is None:
            raise InvalidValueError(
                f"{call}() found nothing to take: call clip_and_accumulate() first, once after the backward of each "
                "mini-batch."
            )

    def take(self, parameters: Mapping[str, Tensor], factor: float | Tensor) -> dict[str, Tensor]:
        """Return the sums times ``factor``, zeros for what no sample used, and start anew; they are complex again."""
        sums = self._sums
        self.drop()
        factor = factor * self.unit
        for name, parameter in parameters.items():
            if name not in sums:
                sums[name] = zeros_like_rows(parameter)
            else:
                if isinstance(factor, Tensor) or factor != 1:
                    sums[name] *= factor
                sums[name] = with_parts_of(sums[name], parameter)
        return sums


def zeros_like_rows(parameter: Tensor, *rows: int) -> Tensor:
    """Return zeros ``[*rows, *shape]`` in the dtype that sums have: at least float32."""
    dtype = torch.float32 if parameter.dtype in HALVES else parameter.dtype
    return torch.zeros((*rows, *parameter.shape), dtype=dtype, device=parameter.device)
