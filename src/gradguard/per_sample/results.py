"""What a clipper gives back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from gradguard.per_sample.arithmetic import joint_norm
from gradguard.per_sample.clipping_rule import layer_of
from gradguard.per_sample.noise_scale import NoiseScale


class PreStep(NamedTuple):
    """What `PerSampleGradientClipper.pre_step` returns.

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
        names: Of the trained parameters.
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
    """Norms and factors of one mini-batch. They are **not private**: no accounting covers who looks at them.

    Attributes:
        norms: Norm of each sample's gradient over all parameters, float64 ``[B]``; NaN or inf where it is not finite.
        parameter_norms: Norm of each sample's gradient of each parameter, float64 ``[B]``, by the parameter's name.
        groups: Names of the parameters that have a norm together, one group for each of ``factors``.
        factors: What the gradients of a group were multiplied by, ``[B]`` each; 0 for a sample that is not finite.
        noise_scale: `PerSampleGradientClipper.noise_scale`, of whole steps; None where it is not measured.
    """

    norms: Tensor
    parameter_norms: Mapping[str, Tensor]
    groups: Sequence[Sequence[str]]
    factors: list[Tensor]
    noise_scale: NoiseScale | None = None

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
