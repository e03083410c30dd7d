"""Compare gradients in float32, bfloat16 or float16, or from several backends, with the float64 gradient.

In bfloat16 and float16, the bar of an element is its scatter under random rounding (`rounding`). A second bar, for the
size of an input's whole gradient, detects a common error of all elements much earlier.

In float32, and for a kernel whose operations are hidden, the bar is measured by rounding the inputs alone. It is a
multiple of the change of the float64 gradient when inputs and cotangent move by one unit in the last place. A float32
gradient outside of this bar is compared under the scatter too: where a function saturates, rounding its results
matters, and rounding its inputs does not.

Last, the values of a kernel may be coarser than float32, as in cuDNN's recurrent layers with their fast tanh. Its
gradient cannot be finer than its values, so the bar widens with the error of the values. Values as coarse as TF32 do
not widen the bar.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from gradguard.check.flat_vectors import finite, joined, largest, normal, signs, zeros
from gradguard.check.function import Function
from gradguard.check.gradient_report import GradientFinding, Power
from gradguard.check.rounding import Scatter

_PERTURBATIONS = 8
_UNITS = 20.0
_DEVIATIONS = 6.0
_OF_VALUES = 4.0
"""The allowed relative error of a gradient over the relative error of the values, both relative to the largest."""
_COARSE = 2.0**-14
"""A larger error of the values, relative to the largest, is an error of the kernel. The error of TF32 is larger."""
_HALF = 1e-4
"""The machine epsilons of bfloat16 and float16 are above this."""


class Conditioning:
    """The float64 gradient at a point representable in a low dtype, and the changes that rounding causes."""

    def __init__(
        self,
        exact: Function,
        low: Function,
        generator: torch.Generator,
        rtol: float = 0.0,
        looks_inside: bool | None = None,
    ) -> None:
        self.exact, self.low = exact, low
        coarsest = max((one.value.dtype for one in [*low.outputs, *low.inputs]), key=lambda d: torch.finfo(d).eps)
        self.dtype, self.eps = str(coarsest).removeprefix("torch."), torch.finfo(coarsest).eps
        drawn = normal([exact.size], generator)
        usable = torch.isfinite(exact.values(low.point))
        self.cotangent = joined(low.shaped(torch.where(usable, drawn, 0.0)))
        self.gradient = exact.gradient(low.point, self.cotangent)
        self._finite = finite(self.gradient)
        looks_inside = self.eps > _HALF if looks_inside is None else looks_inside
        scatter = Scatter(exact, low.point, self.cotangent, coarsest, generator) if looks_inside else None
        if scatter is not None and scatter.is_seen:
            off = finite(scatter.gradients - self.gradient)
            self.unit = off.square().mean(0).sqrt() + self.eps / _DEVIATIONS * self._finite.abs()
            self.units, self.what = _DEVIATIONS, "standard deviations of rounding"
            self.in_all = []
            for part, own in zip(*map(self._parts, (off, self._finite)), strict=True):
                # The relative change of the size of one input's gradient by rounding; each row holds one run's errors.
                moved = float((part @ own / (own @ own)).square().mean().sqrt()) if own.any() else 1.0
                self.in_all.append(self.eps / 2 + _DEVIATIONS * moved)
        else:
            self.unit = self._spread_of_inputs(generator)
            self.units, self.what = _UNITS, "units of input rounding"
            sizes = zip(*map(self._parts, (self.unit, self._finite)), strict=True)
            self.in_all = [_UNITS * float(unit.norm() / own.norm()) if own.any() else 1.0 for unit, own in sizes]
        self.unit += rtol / self.units * (self._finite.abs() + _mean(self._finite.abs()))
        self.in_all = [rtol + one for one in self.in_all]
        self.allowed = self.units * self.unit
        self.is_coarse = False  # whether the bars were widened because the values are coarse

    @property
    def power(self) -> Power:
        """The smallest relative errors of a wrong gradient that would have been detected."""
        size = self._finite.abs()
        relative = (self.allowed / size)[size > 0]
        return Power(self.dtype, float(relative.median()) if relative.numel() else 1.0, max(self.in_all, default=1.0))

    def compare(self, found: Tensor, other: Tensor, who: str, kind: str, times: float = 1.0) -> list[GradientFinding]:
        """Return a finding if two gradients differ by more than ``times`` the effect of rounding."""
        both = found.isfinite() & other.isfinite() & self.gradient.isfinite()
        wrong = both & ((found - other).abs() > times * self.allowed)
        wrong |= ~found.isfinite() & self.gradient.isfinite() & (self.gradient.abs() < 1 / self.eps)
        if not bool(wrong.any()):
            # The elements of an input may all be a little too large, or too small, by the same factor.
            parts = zip(*(self._parts(torch.where(both, one, 0.0)) for one in (found, other)), strict=True)
            for one, bar, (part, expected) in zip(self.exact.inputs, self.in_all, parts, strict=True):
                ratio = float(part @ expected / (expected @ expected)) if expected.any() else 1.0
                if abs(ratio - 1) > times * bar:
                    message = f"{who}, {ratio:.4g} times as large in all, where rounding explains 1 ± {times * bar:.2g}"
                    return [GradientFinding(kind, message, one.name)]
            return []
        excess = torch.where(wrong, ((found - other).abs() / self.allowed).nan_to_num(torch.inf, torch.inf), -1.0)
        position = int(excess.argmax())
        name, index = self.exact.name_of(position)
        units = f"{float(excess[position]) * self.units:.3g} {self.what} apart ({self.units:g} are allowed)"
        values = float(found[position]), float(other[position]), float(self.unit[position])
        message = f"{who}, {units}, {int(wrong.sum())} of {wrong.numel()} elements"
        return [GradientFinding(kind, message, name, index, *values)]

    def judge(self, found: Tensor, who: str, kind: str) -> list[GradientFinding]:
        """Compare a gradient with the float64 one; if they differ, allow for values that are coarser than the dtype.

        Args:
            found: The gradient.
            who: The description of ``found``.
            kind: The kind of the finding.

        Returns:
            The finding; empty if the gradient is right.
        """
        wrong = self.compare(found, self.gradient, who, kind)
        if not wrong:
            return []
        values, expected = self.low.values(self.low.point), self.exact.values(self.low.point)
        size = largest(expected)
        coarse = largest(values - expected) / size if size else 0.0
        if self.eps > _HALF or not 4 * self.eps < coarse <= _COARSE:
            return wrong
        # Allow each element an error of 4 times the values' relative error, relative to the input's largest gradient.
        self.is_coarse, share = True, _OF_VALUES * coarse
        wider = [torch.full_like(part, share * largest(part)) for part in self._parts(self._finite)]
        self.allowed = self.allowed + torch.cat(wider)
        self.in_all = [one + share for one in self.in_all]
        return self.compare(found, self.gradient, who, kind)

    def remarks(self, name: str) -> list[GradientFinding]:
        """Return a note if the values were coarser than their dtype and the bars were widened; empty otherwise."""
        who = f"{name}: " if name else ""
        message = f"{who}values in {self.dtype} are coarser than {self.dtype}: gradients were compared under wider bars"
        return [GradientFinding("precision", message)] if self.is_coarse else []

    def _spread_of_inputs(self, generator: torch.Generator) -> Tensor:
        spread = torch.zeros_like(self.gradient)
        for _ in range(_PERTURBATIONS):
            vectors = (self.low.point, self.cotangent)
            moved = self.exact.gradient(*(v * (1 + self.eps * signs(v.shape, generator)) for v in vectors))
            spread = torch.maximum(spread, finite(moved - self.gradient).abs())
        size = self._finite.abs()
        return spread + _mean(spread) + self.eps * (size + _mean(size))

    def _parts(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Split a vector, or each row of a matrix, into one part per input."""
        return vectors.split(self.exact.sizes, dim=-1)


def compare_backends(
    exact: Function, backends: dict[str, Function], generator: torch.Generator, rtol: float = 0.0
) -> tuple[list[GradientFinding], list[GradientFinding]]:
    """Compare each backend's gradient with the float64 one and with the other backends; return findings and notes."""
    findings, gradients = [], {}
    units = {name: Conditioning(exact, low, generator.clone_state(), rtol) for name, low in backends.items()}
    for name, low in backends.items():
        gradients[name] = low.gradient(None, units[name].cotangent).to(units[name].gradient.device)
        findings += units[name].judge(gradients[name], f"{name} against float64", "backends")
    for first, second in combinations(backends, 2):
        coarse = max(units[first], units[second], key=lambda one: (one.eps, one.is_coarse))
        findings += coarse.compare(gradients[first], gradients[second], f"{first} against {second}", "backends", 2.0)
    return findings, [note for name, one in units.items() for note in one.remarks(name)]


def _mean(values: Tensor) -> Tensor:
    return values.mean() if values.numel() else zeros()
