"""Results of a clipper, and the sums over the mini-batches of a step that they are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradguard.errors import InvalidValueError
from gradguard.per_sample.clipping_rule import layer_of
from gradguard.per_sample.contributions import joint_norm, with_parts_of
from gradguard.tensors.layout import HALVES


class PreStep(NamedTuple):
    """The result of `PerSampleGradientClipper.pre_step`.

    Attributes:
        max_norm: float64, one entry for each trained parameter: the L2 norm of the clipper's thresholds, which bounds
            what one sample adds to the sum over all parameters, and which noise is scaled by.
        batch_size: Number of samples in the whole batch.
    """

    max_norm: Tensor
    batch_size: int


@dataclass(frozen=True)
class ClippedSums:
    """The clipped per-sample gradients of a whole batch, summed.

    Attributes:
        names: The names of the trained parameters.
        parameters: The trained parameters.
        sums: For each, the sum of its clipped per-sample gradients: float32, or float64 for a float64 parameter.
        batch_size: Number of samples.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    sums: list[Tensor]
    batch_size: int


@dataclass(frozen=True)
class PerSampleStatistics:
    """Norms and factors of one mini-batch. They are **not private**: no accounting covers a look at them.

    Attributes:
        norms: Norm of each sample's gradient over all parameters, float64 ``[B]``; NaN or inf where it is not finite.
        parameter_norms: Norm of each sample's gradient of each parameter, float64 ``[B]``, by the parameter's name.
        groups: Names of the parameters that have a norm together, one group for each of ``factors``.
        factors: Factors of the gradients of a group, ``[B]`` each; 0 for a sample that is not finite.
    """

    norms: Tensor
    parameter_norms: Mapping[str, Tensor]
    groups: Sequence[Sequence[str]]
    factors: list[Tensor]

    @property
    def layer_norms(self) -> dict[str, Tensor]:
        """Norm of each sample's gradient of each layer, by the name of the module that holds its parameters."""
        layers: dict[str, list[Tensor]] = {}
        for name, norms in self.parameter_norms.items():
            layers.setdefault(layer_of(name), []).append(norms)
        return {layer: joint_norm(norms) for layer, norms in layers.items()}

    @property
    def clip_fraction(self) -> float:
        """The part of factors that are below 1; reads the device."""
        clipped = [float((factor < 1).sum()) for factor in self.factors]
        return sum(clipped) / max(1, sum(factor.numel() for factor in self.factors))

    @property
    def nonfinite(self) -> int:
        """Number of samples whose gradient is not finite; they contributed zero. Reads the device."""
        return int((~self.norms.isfinite()).sum())


class Accumulation:
    """Sums for each parameter, and the number of samples in them.

    The sums are held divided by ``unit``, the size of the first mini-batch: where a step is one mini-batch, its average
    is there without another pass over memory.

    Attributes:
        batch_size: Number of samples so far; None if nothing was added since the last `take`.
        mini_batches: Number of mini-batches so far.
        unit: Divisor of the sums.
        sensitivities: How far one sample can move the sum, by the thresholds of each mini-batch of private training.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.mini_batches = 0
        self.sensitivities: set[float] = set()
        self.unit = 1.0
        self._sums: dict[str, Tensor] = {}

    def drop(self) -> None:
        """Forget what was added."""
        self._sums, self.batch_size, self.mini_batches, self.sensitivities = {}, None, 0, set()

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

    def take(self, parameters: Mapping[str, Tensor], factor: float | Tensor | None) -> dict[str, Tensor]:
        """Return the sums times ``factor``, zeros for what no sample used, and start anew; they are complex again.

        Without a factor they stay divided by ``unit``.
        """
        sums = self._sums
        self.drop()
        factor = 1.0 if factor is None else factor * self.unit
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
