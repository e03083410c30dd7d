"""Recognise the epsilon that a norm function adds; an epsilon is not a mistake.

An epsilon may be added to the norm, be its lower bound, or stand in its root. A reported number alone does not show it.
"""

import math
from collections.abc import Iterable

from gradguard.audit.audit_report import NormFinding

LARGEST_EPSILON = 1e-5
"""Largest norm of zero gradients that passes as an epsilon; probes have norms of 1 and more, so it does not matter."""

_USUAL = [10.0**-k for k in range(6, 17)]
_IN_SQUARES = [10.0**-k for k in range(12, 17)]


def with_epsilon(true: float, epsilon: float) -> tuple[float, ...]:
    """Return a norm without an epsilon, with it added, with it as lower bound, and with its square in the root."""
    return (true, true + epsilon, max(true, epsilon), math.hypot(true, epsilon)) if epsilon else (true,)


def is_one_of(norm: float, expected: Iterable[float], tolerance: float) -> bool:
    """Tell whether a norm equals one of ``expected`` within a relative tolerance."""
    return any(math.isclose(norm, e, rel_tol=tolerance) for e in expected)


def epsilon_finding(what: str, came: float, true: float, tolerance: float) -> NormFinding | None:
    """Return a finding if a usual epsilon could explain a norm larger than the true one, else None."""
    made = [x for e in _USUAL for x in with_epsilon(true, e)] + [math.sqrt(true * true + e) for e in _IN_SQUARES]
    if not came > true or not is_one_of(came, made, tolerance):
        return None
    said = (
        f"{what} {came:.6g}, the true norm is {true:.6g}: an epsilon added to the norm, in its root or below it could "
        "make this difference, and so could a mistake: pass the norm function as norm=, or gradients times a loss scale"
    )
    return NormFinding("epsilon", said)
