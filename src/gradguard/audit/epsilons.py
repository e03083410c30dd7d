"""An epsilon beside a norm, in its root or below it is no fault; of a reported one nobody knows which it is."""

import math
from collections.abc import Iterable

from gradguard.audit.audit_report import NormFinding

LARGEST_EPSILON = 1e-5
"""A larger norm of gradients that are zero is no epsilon: probes have norms of 1 and more, which it does not change."""

_USUAL = [10.0**-k for k in range(6, 17)]
_IN_SQUARES = [10.0**-k for k in range(12, 17)]


def with_epsilon(true: float, epsilon: float) -> tuple[float, ...]:
    """Return a norm without an epsilon, and with one beside it, below it, and in its root."""
    return (true, true + epsilon, max(true, epsilon), math.hypot(true, epsilon)) if epsilon else (true,)


def is_one_of(norm: float, expected: Iterable[float], tolerance: float) -> bool:
    """Tell whether a norm is one of these, to a relative tolerance and never an absolute one."""
    return any(math.isclose(norm, e, rel_tol=tolerance) for e in expected)


def epsilon_finding(what: str, came: float, true: float, tolerance: float) -> NormFinding | None:
    """Return the doubt whether a usual epsilon makes a norm larger than the true one; None if none does."""
    made = [x for e in _USUAL for x in with_epsilon(true, e)] + [math.sqrt(true * true + e) for e in _IN_SQUARES]
    if not came > true or not is_one_of(came, made, tolerance):
        return None
    said = (
        f"{what} {came:.6g} where {true:.6g} is true, which an epsilon beside the norm, in its root or below it makes, "
        "and a fault may: pass the norm function as norm=, or gradients times a loss scale"
    )
    return NormFinding("epsilon", said)
