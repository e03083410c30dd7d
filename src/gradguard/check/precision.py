"""Gradients in float32, bfloat16 or float16, or from several backends, against one in float64.

Two gradients of low precision may differ by what rounding of the inputs alone does to the exact one, and that is the
unit here: how much the float64 gradient moves when inputs and cotangent move by one unit in the last place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradguard.check.function import Function
from gradguard.check.report import Finding

_PERTURBATIONS = 8
_UNITS = 20.0


class Conditioning:
    """The float64 gradient at a point that a low dtype can hold, and how far rounding moves it."""

    def __init__(self, exact: Function, low: Function, generator: torch.Generator) -> None:
        self.exact, self.low = exact, low
        self.eps = max(torch.finfo(o.dtype).eps for o in low.outputs)
        self.eps = max(self.eps, *(torch.finfo(one.value.dtype).eps for one in low.inputs))
        drawn = torch.randn(exact.size, generator=generator, dtype=torch.float64)
        usable = torch.isfinite(exact.values(low.point))
        self.cotangent = low.flatten(low.shaped(torch.where(usable, drawn, 0.0)))
        self.gradient = exact.gradient(low.point, self.cotangent)
        spread = torch.zeros_like(self.gradient)
        for _ in range(_PERTURBATIONS):
            moved = exact.gradient(self._nudged(low.point, generator), self._nudged(self.cotangent, generator))
            spread = torch.maximum(spread, (moved - self.gradient).abs().nan_to_num(0.0, 0.0, 0.0))
        size = self.gradient.abs().nan_to_num(0.0, 0.0, 0.0)
        self.allowed = _UNITS * (spread + _mean(spread) + self.eps * (size + _mean(size)))

    def compare(self, found: Tensor, other: Tensor, who: str, kind: str, times: float = 1.0) -> Finding | None:
        """Return what is wrong where two gradients are further apart than rounding explains."""
        both = found.isfinite() & other.isfinite() & self.gradient.isfinite()
        wrong = both & ((found - other).abs() > times * self.allowed)
        wrong |= ~found.isfinite() & self.gradient.isfinite() & (self.gradient.abs() < 1 / self.eps)
        if not bool(wrong.any()):
            return None
        excess = torch.where(wrong, ((found - other).abs() / self.allowed).nan_to_num(torch.inf, torch.inf), -1.0)
        position = int(excess.argmax())
        name, index = self.exact.name_of(position)
        units = f"{float(excess[position]) * _UNITS:.3g} units of input rounding apart (20 are allowed)"
        values = float(found[position]), float(other[position]), float(self.allowed[position]) / _UNITS
        return Finding(kind, f"{who}, {units}, {int(wrong.sum())} of {wrong.numel()} elements", name, index, *values)

    def _nudged(self, vector: Tensor, generator: torch.Generator) -> Tensor:
        signs = torch.randint(0, 2, vector.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return vector * (1 + self.eps * signs)


def compare_backends(exact: Function, backends: dict[str, Function], generator: torch.Generator) -> list[Finding]:
    """Compare the gradient of each backend with the float64 one, and with each other's."""
    findings, gradients = [], {}
    units = {name: Conditioning(exact, low, generator.clone_state()) for name, low in backends.items()}
    for name, low in backends.items():
        gradients[name] = low.gradient(None, units[name].cotangent).to(units[name].gradient.device)
        found = units[name].compare(gradients[name], units[name].gradient, f"{name} against float64", "backends")
        findings += [found] if found is not None else []
    names = list(backends)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            coarse = max(units[first], units[second], key=lambda one: one.eps)
            found = coarse.compare(gradients[first], gradients[second], f"{first} against {second}", "backends", 2.0)
            findings += [found] if found is not None else []
    return findings


def _mean(values: Tensor) -> Tensor:
    return values.mean() if values.numel() else torch.zeros((), dtype=values.dtype)
