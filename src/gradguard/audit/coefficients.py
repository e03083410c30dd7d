"""Compare a clip's factor on each gradient with min(1, max / norm)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradguard.audit.audit_report import NormFinding


@dataclass(frozen=True, slots=True)
class Applied:
    """The factor that a clip applied to one gradient.

    Attributes:
        name: The name of the parameter.
        coefficient: The factor, by least squares over the elements.
        residual: Norm of the difference between the gradient and ``coefficient`` times the gradient before, relative
            to the gradient before.
        tolerance: The relative error of the gradient's dtype.
        computed: The norm that the gradient's process computed.
    """

    name: str
    coefficient: float
    residual: float
    tolerance: float
    computed: float


def expected_coefficient(max_norm: float, norm: float) -> float:
    """Return min(1, max / norm)."""
    return min(1.0, max_norm / norm) if norm > 0 else 1.0


def coefficient_findings(
    applied: Sequence[Applied], max_norm: float | None, true: float, loss_scale: float, tolerance: float = 0.0
) -> list[NormFinding]:
    """Return a finding for each way in which the factors of all processes' gradients are wrong.

    Args:
        applied: Factor on each gradient that is not zero.
        max_norm: Threshold; None if it is not known: then all factors should be equal.
        true: The true norm, without the loss scale.
        loss_scale: Factor that gradients still contain.
        tolerance: The relative error of the norm.
    """
    if not applied:
        return []
    applied = [replace(one, tolerance=max(one.tolerance, tolerance)) for one in applied]
    if max_norm is not None:
        right = expected_coefficient(max_norm, true)
    else:
        finest = min(one.tolerance for one in applied)  # factors of 16-bit gradients are rounded
        precise = sorted(one.coefficient for one in applied if one.tolerance == finest)
        right = precise[len(precise) // 2]
    known = {"the norm is computed, but the gradient is never scaled": 1.0, "it is scaled twice": right * right}
    other = "most others are multiplied by another number"
    if max_norm is not None:
        other = "no known mistake explains this number"
        if 0 < true < max_norm:
            stretched = "min(1, ...) is missing, so gradients shorter than max are scaled up to it"
            known[stretched] = max_norm / true
        if loss_scale != 1:
            scaled = expected_coefficient(max_norm, true * loss_scale)
            known["it is clipped before the loss scale is divided out"] = scaled
    wrong: dict[str, list[Applied]] = {}
    for one in applied:
        is_close = partial(math.isclose, one.coefficient, rel_tol=one.tolerance, abs_tol=one.tolerance * 1e-3)
        if max_norm is not None:
            computed = expected_coefficient(max_norm, one.computed)
            known["it is right for the norm that was computed, but not for the true one"] = computed
        if one.residual > 3 * one.tolerance:
            wrong.setdefault("its elements are not all multiplied by one number", []).append(one)
        elif not is_close(right):
            why = next((words for words, value in known.items() if is_close(value)), other)
            wrong.setdefault(why, []).append(one)
    found = []
    for why, ones in wrong.items():
        names, numbers = tuple(dict.fromkeys(one.name for one in ones)), [one.coefficient for one in ones]
        low, high = min(numbers), max(numbers)
        near = math.isclose(low, high, rel_tol=1e-3)
        came = f"{low:.6g}" if near else f"{low:.6g} to {high:.6g}"
        factor = low / right if near and right else None
        found.append(NormFinding("coefficient", f"multiplied by {came}, expected {right:.6g}: {why}", names, factor))
    return found
