"""Results of a clipper, and the sums over the mini-batches of a step."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradguard.errors import InvalidValueError, UnsupportedVersionError
from gradguard.per_sample.clipping_rule import layer_of
from gradguard.per_sample.contributions import joint_norm, with_parts_of
from gradguard.tensors.layout import HALVES
from gradguard.torch_private import is_alone

_LARGE, _BESIDE_ACTIVATIONS = 1 << 20, 4
"""Bytes from which the memory of a sum is used again, and how many times the activations all such sums must take."""


class PreStep(NamedTuple):
    """The result of `PerSampleGradientClipper.pre_step`.

    Attributes:
        max_norm: float64, one entry for each trained parameter, all equal: the L2 norm of the clipper's thresholds. It
            bounds the norm, over all parameters, of one sample's part of the sum; scale the noise by it.
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
        sums: For each parameter, the sum of its clipped per-sample gradients: float32, or float64 for a float64
            parameter.
        batch_size: Number of samples.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    sums: list[Tensor]
    batch_size: int


@dataclass(frozen=True)
class PerSampleStatistics:
    """Norms and factors of one mini-batch. They are **not private**: no accounting covers their release.

    Attributes:
        norms: Norm of each sample's gradient over all parameters, float64 ``[B]``; NaN or inf where it is not finite.
        parameter_norms: Norm of each sample's gradient of each parameter, float64 ``[B]``, by the parameter's name.
        groups: Lists of the names of parameters that have one norm together, one list for each of ``factors``.
        factors: Factors of the gradients of each group, ``[B]`` each; 0 for a sample that is not finite.
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
        """The fraction of factors that are below 1; reading it is a host sync."""
        clipped = [float((factor < 1).sum()) for factor in self.factors]
        return sum(clipped) / max(1, sum(factor.numel() for factor in self.factors))

    @property
    def nonfinite(self) -> int:
        """Number of samples whose gradient is not finite, which contributed zero; reading it is a host sync."""
        return int((~self.norms.isfinite()).sum())


class Accumulation:
    """The clipped sum of each parameter's gradients, and the number of samples in it.

    The sums are stored divided by ``unit``. For an averaged loss this is the size of the first mini-batch, so the
    average over a step of one mini-batch needs no further pass over memory.

    Attributes:
        batch_size: Number of samples so far; None if nothing was added since the last `take`.
        mini_batches: Number of mini-batches so far.
        unit: Divisor of the sums.
        sensitivities: The sensitivities of the sum by the thresholds of each mini-batch, in private training.
        activations: The largest number of bytes that a backward of this step has freed in tapped layers.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.mini_batches = 0
        self.sensitivities: set[float] = set()
        self.unit = 1.0
        self.activations = 0
        self._sums: dict[str, Tensor] = {}
        self._rooms: dict[str, Tensor] = {}

    def drop(self) -> None:
        """Drop the sums and counts."""
        self._sums, self.batch_size, self.mini_batches, self.sensitivities = {}, None, 0, set()
        self.activations = 0

    def begin(self, unit: float) -> None:
        """Set the unit, unless there are sums already."""
        if not self._sums:
            self.unit = unit

    def add(self, name: str, total: Tensor) -> None:
        """Add a sum that is divided by ``unit``; this object keeps the tensor and may change it in place."""
        if name in self._sums:
            self._sums[name] += total
        else:
            self._sums[name] = total

    def room(self, name: str) -> Tensor | None:
        """Return the memory of the last step's sum if nothing else refers to it any more, and forget it."""
        room = self._rooms.pop(name, None)
        if room is None or name in self._sums or room.untyped_storage().nbytes() != room.nbytes:
            return None
        with suppress(UnsupportedVersionError):  # a torch that cannot tell
            return room if is_alone(room) else None
        return None

    def free(self) -> None:
        """Free the memory of the last step's sums."""
        self._rooms.clear()

    def _keep(self) -> None:
        """Keep the memory of large sums for the next step where activations are small beside them.

        The C library gives such memory back to the system when the gradients are freed together, and mapping it anew
        takes a fifth of the time of a step. The kept memory would raise the peak of a step whose activations are
        large, and is not kept there.
        """
        large = [total for total in self._sums.values() if total.is_cpu and total.nbytes >= _LARGE]
        held = [total for total in large if not total.is_inference()]  # nothing else may write to those
        if sum([total.nbytes for total in held]) < _BESIDE_ACTIVATIONS * self.activations:
            held = []
        kept = {id(total) for total in held}
        # Tensors of their own over the same memory: the program gets the others, and may free them.
        self._rooms = {name: total.data for name, total in self._sums.items() if id(total) in kept}

    def count(self, samples: int) -> None:
        """Add to the number of samples."""
        self.batch_size = (self.batch_size or 0) + samples
        self.mini_batches += 1

    def check(self, call: str) -> None:
        """Check that a mini-batch was counted since the last `take`.

        Raises:
            InvalidValueError: If none was.
        """
        if self.batch_size is None:
            raise InvalidValueError(
                f"{call}() found nothing to take: call clip_and_accumulate() first, once after the backward of each "
                "mini-batch."
            )

    def take(self, parameters: Mapping[str, Tensor], factor: float | Tensor | None) -> dict[str, Tensor]:
        """Return the sums times ``factor``, with zeros for parameters that no sample used, and reset the state.

        Without a factor the sums stay divided by ``unit``. Sums of complex parameters are complex again.
        """
        self._keep()
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
    """Return zeros ``[*rows, *shape]`` in the dtype of sums: at least float32."""
    dtype = torch.float32 if parameter.dtype in HALVES else parameter.dtype
    return torch.zeros((*rows, *parameter.shape), dtype=dtype, device=parameter.device)
