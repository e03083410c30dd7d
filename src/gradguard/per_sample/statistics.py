"""What the last mini-batch's clipping did, read from numbers that were computed anyway."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PerSampleStatistics:
    """Norms and factors of one mini-batch. They are **not private**: publishing them spends no accounted budget.

    Attributes:
        norms: Norm of each sample's gradient over all parameters, float64 ``[B]``; NaN or inf where it is not finite.
        layer_norms: Norm of each sample's gradient of each parameter, float64 ``[B]``, by the parameter's name.
        factors: What gradients were multiplied by: one ``[B]``, or one for each parameter.
    """

    norms: Tensor
    layer_norms: Mapping[str, Tensor]
    factors: list[Tensor]

    @property
    def clip_fraction(self) -> float:
        """The part of factors that are below 1; reads the device."""
        clipped = [float((factor < 1).sum()) for factor in self.factors]
        return sum(clipped) / max(1, sum(factor.numel() for factor in self.factors))

    @property
    def nonfinite(self) -> int:
        """Number of samples whose gradient is not finite; they contributed zero. Reads the device."""
        return int((~self.norms.isfinite()).sum())
