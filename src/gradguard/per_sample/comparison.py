"""How far a sample's gradient may be from another computation of it: parameter by parameter, each by its own bar."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradguard.per_sample.contributions import Contribution, wide
from gradguard.tensors.norms import total_norm


@dataclass(frozen=True)
class Comparison:
    """How far the per-sample gradients are from those of single samples.

    Attributes:
        largest: Largest error of a parameter's gradient in one sample, relative to its own norm there; a hundred times
            smaller if it is small beside the sample's whole gradient.
        parameter: The name of the parameter where it is.
        excess: The error as a multiple of what rounding explains.
    """

    largest: float
    parameter: str
    excess: float


@dataclass(frozen=True)
class SampleGradient:
    """The gradient of a sample that ran by itself.

    Attributes:
        parts: The gradient of each parameter, by name.
    """

    parts: Mapping[str, Tensor]

    @cached_property
    def norms(self) -> dict[str, float]:
        """The norm of each part."""
        return {name: _norm(part) for name, part in self.parts.items()}

    @cached_property
    def whole(self) -> float:
        """The norm of all parts together."""
        return math.hypot(*self.norms.values())

    def compare(
        self, found: Mapping[str, Contribution], sample: int, precision: float, factor: float = 1.0
    ) -> Comparison:
        """Compare with what a batch has for the sample, parameter by parameter, each by its own norm.

        Args:
            found: The per-sample gradients of the batch.
            sample: The place of the sample in it.
            precision: Machine epsilon of the coarsest dtype that was computed in.
            factor: Number that what was found is multiplied by.

        Returns:
            The largest difference as a multiple of what rounding explains; infinite where one is not finite.
        """
        worst = Comparison(0.0, "", 0.0)
        for name in dict.fromkeys([*self.parts, *found]):
            own = self.norms.get(name, 0.0)
            if name not in found:
                error = own
            elif name not in self.parts:
                error = _norm(found[name].rows(sample, sample + 1)) * abs(factor)
            else:
                error = _distance(wide(self.parts[name]), found[name], sample, factor)
            worst = max(worst, judge(name, error, own, self.whole, precision), key=lambda c: c.excess)
        return worst

    def share_in(self, found: Mapping[str, Contribution], sample: int) -> float:
        """Return the multiple of this gradient that comes closest to what a batch has for the sample."""
        square = math.fsum(float(part.double().square().sum()) for part in self.parts.values())
        product = math.fsum(
            float((found[name].rows(sample, sample + 1)[0] * part).double().sum())
            for name, part in self.parts.items()
            if name in found
        )
        return product / square if square else 0.0


def judge(name: str, error: float, own: float, whole: float, precision: float) -> Comparison:
    """Judge one parameter of one sample by its own norm, and by what is rounding beside the whole gradient.

    Args:
        name: The name of the parameter.
        error: Norm of the difference.
        own: Norm of the parameter's gradient.
        whole: Norm of the sample's gradient.
        precision: Machine epsilon of the coarsest dtype that was computed in.

    Returns:
        How far off it is.
    """
    # Sums run in another order, through a network of some depth; rounding in the whole gradient also reaches parameters
    # whose own gradient cancels to zero, such as the bias of a key.
    of_own, of_whole = (16, 4) if precision > 1e-4 else (1e4, 1e2)
    error = math.inf if math.isnan(error) else error  # no comparison with NaN is true
    allowed = of_own * precision * own + of_whole * precision * whole
    return Comparison(error / max(own, 1e-2 * whole, 1e-200), name, error / max(allowed, 1e-200))


def _norm(values: Tensor) -> float:
    """Return the 2-norm of ``values``, summed widely."""
    return float(total_norm([values]))


def _distance(expected: Tensor, found: Contribution, sample: int, factor: float = 1.0) -> float:
    """Return the 2-norm of ``expected`` minus ``factor`` times a sample's gradient, piece by piece.

    What is as large as the gradient of a large layer would be made in memory that is fresh from the system, which takes
    longer than the arithmetic.
    """
    pieces = list[float]()
    expected, start = expected.flatten(), 0
    for piece in found.pieces(sample):
        stop = start + piece.numel()
        pieces.append(_norm(torch.sub(expected[start:stop], piece, alpha=factor)))
        start = stop
    return math.hypot(*pieces)
