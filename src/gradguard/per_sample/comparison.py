"""Comparison of a sample's gradient with another computation of it, parameter by parameter, each with its own bound."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradguard.per_sample.contributions import Contribution, wide
from gradguard.tensors.norms import total_norm


@dataclass(frozen=True)
class Comparison:
    """The worst difference between per-sample gradients of a batch and of samples that ran alone.

    Attributes:
        largest: The error of the worst parameter's gradient in one sample, relative to that gradient's norm, or to a
            hundredth of the norm of the sample's whole gradient where that is larger.
        parameter: The name of the worst parameter.
        excess: The error as a multiple of the difference that rounding may explain.
    """

    largest: float
    parameter: str
    excess: float


@dataclass(frozen=True)
class SampleGradient:
    """The gradient of a sample that ran alone.

    Attributes:
        parts: The gradient of each parameter, by name.
    """

    parts: Mapping[str, Tensor]

    @cached_property
    def norms(self) -> dict[str, float]:
        """The norm of each parameter's gradient."""
        return {name: _norm(part) for name, part in self.parts.items()}

    @cached_property
    def whole(self) -> float:
        """The norm of the whole gradient."""
        return math.hypot(*self.norms.values())

    def compare(
        self,
        found: Mapping[str, Contribution],
        sample: int,
        precision: float,
        factor: float = 1.0,
        rounding: Callable[[], Mapping[str, float]] = dict,
    ) -> Comparison:
        """Compare with the sample's gradient in a batch, parameter by parameter, each relative to its own norm.

        Args:
            found: The per-sample gradients of the batch.
            sample: The index of the sample in the batch.
            precision: Machine epsilon of the coarsest dtype of the computation.
            factor: Number by which the gradients of the batch are multiplied first.
            rounding: Measures how far rounding may move the gradient of each parameter. Called only where a gradient
                differs by more than is usual.

        Returns:
            The comparison of the parameter with the largest ``excess``, which is infinite where an error is not finite.
        """
        worst, measured = Comparison(0.0, "", 0.0), None
        for name in dict.fromkeys([*self.parts, *found]):
            own = self.norms.get(name, 0.0)
            if name not in found:
                error = own
            elif name not in self.parts:
                error = _norm(found[name].rows(sample, sample + 1)) * abs(factor)
            else:
                error = _distance(wide(self.parts[name]), found[name], sample, factor)
            judged = judge(name, error, own, self.whole, precision)
            if judged.excess > 1 and math.isfinite(error):
                measured = rounding() if measured is None else measured
                judged = judge(name, error, own, self.whole, precision, measured.get(name, 0.0))
            worst = max(worst, judged, key=lambda c: c.excess)
        return worst

    def share_in(self, found: Mapping[str, Contribution], sample: int) -> float:
        """Return the multiple of this gradient that is closest to the sample's gradient in a batch."""
        square = math.fsum(float(part.double().square().sum()) for part in self.parts.values())
        product = math.fsum(
            float((found[name].rows(sample, sample + 1)[0] * part).double().sum())
            for name, part in self.parts.items()
            if name in found
        )
        return product / square if square else 0.0


def judge(name: str, error: float, own: float, whole: float, precision: float, measured: float = 0.0) -> Comparison:
    """Compare one parameter's error in one sample with the rounding of its own and of the sample's whole gradient.

    Args:
        name: The name of the parameter.
        error: Norm of the difference.
        own: Norm of the parameter's gradient.
        whole: Norm of the sample's gradient.
        precision: Machine epsilon of the coarsest dtype of the computation.
        measured: How far rounding may move the gradient, if that was measured.

    Returns:
        The relative error, and the error as a multiple of the allowed one.
    """
    # The two computations sum in different orders, through many layers. Rounding in the whole gradient also reaches
    # parameters whose own gradient cancels to zero, such as the bias of an attention key.
    of_own, of_whole = (16, 4) if precision > 1e-4 else (1e4, 1e2)
    error = math.inf if math.isnan(error) else error  # no comparison with NaN is true
    allowed = of_own * precision * own + of_whole * precision * whole + measured
    return Comparison(error / max(own, 1e-2 * whole, 1e-200), name, error / max(allowed, 1e-200))


def _norm(values: Tensor) -> float:
    """Return the 2-norm of ``values``, accumulated in a wider dtype."""
    return float(total_norm([values]))


def _distance(expected: Tensor, found: Contribution, sample: int, factor: float = 1.0) -> float:
    """Return the 2-norm of ``expected`` minus ``factor`` times a sample's gradient, piece by piece.

    A difference as large as a large layer's gradient would need fresh memory from the system, which costs more time
    than the arithmetic.
    """
    pieces = list[float]()
    expected, start = expected.flatten(), 0
    for piece in found.pieces(sample):
        stop = start + piece.numel()
        pieces.append(_norm(torch.sub(expected[start:stop], piece, alpha=factor)))
        start = stop
    return math.hypot(*pieces)
