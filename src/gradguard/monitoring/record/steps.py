"""What a single step of a record says: whether clipping bound, whether gradients were finite, whether it counts."""

import math
from typing import Any

from gradguard.monitoring.record.file import Record

BINDS_BELOW = 1 - 1e-9
_GUARD_BELOW, _NORMALISING_ABOVE = 0.05, 0.5


def binds(step: dict[str, Any]) -> bool:
    """Whether clipping changed the gradients of this step.

    Args:
        step: A step of a record.

    Returns:
        True where the coefficient is below 1.
    """
    coefficient = step.get("coefficient")
    return coefficient is not None and coefficient < BINDS_BELOW


def threshold_of(step: dict[str, Any]) -> float | None:
    """What clipping compared with on this step.

    Args:
        step: A step of a record.

    Returns:
        Infinity for a rule that had no threshold yet, which a record writes as null; None without a clip.
    """
    if "threshold" not in step:
        return None
    return math.inf if step["threshold"] is None else step["threshold"]


def is_nonfinite(step: dict[str, Any]) -> bool:
    """Whether the gradients of this step held NaN or infinity.

    Args:
        step: A step of a record.

    Returns:
        True where elements were counted as non-finite, or the norm was measured and was not finite.
    """
    return bool(step.get("nonfinite")) or ("norm" in step and step["norm"] is None)


def taken_steps(record: Record) -> list[dict[str, Any]]:
    """Steps with finite gradients that the optimizer took: what a clip share is a share of.

    Args:
        record: The record of a run.

    Returns:
        The steps in their order.
    """
    return [step for step in record.steps if not step.get("skipped") and not is_nonfinite(step)]


def usable_steps(record: Record) -> list[dict[str, Any]]:
    """Steps whose pre-clip norm says something about ordinary training.

    Left out: the warm-up (the first 10 % of a run below 1,000 steps, else the larger of 2 % and 100 steps),
    skipped steps, norms that are not finite, and zeros, which have no logarithm.

    Args:
        record: The record of a run.

    Returns:
        The steps in their order.
    """
    count = len(record.steps)
    warm_up = count // 10 if count < 1000 else max(count // 50, 100)
    later = record.steps[warm_up:]
    return [step for step in later if step.get("norm") and not step.get("skipped") and not step.get("nonfinite")]


def usable_norms(record: Record) -> list[float]:
    """Pre-clip norms of the `usable_steps`.

    Args:
        record: The record of a run.

    Returns:
        The norms in the order of the steps, all above 0.
    """
    return [step["norm"] for step in usable_steps(record)]


def regime_of(clip_share: float) -> str:
    """The word for a share of steps on which clipping binds.

    Args:
        clip_share: A share in [0, 1].

    Returns:
        ``"never"``, ``"guard"``, ``"shaping"`` or ``"normalising"``.

    Example:
        >>> [regime_of(share) for share in (0, 0.01, 0.05, 0.5, 0.51)]
        ['never', 'guard', 'shaping', 'shaping', 'normalising']
    """
    if clip_share == 0:
        return "never"
    if clip_share < _GUARD_BELOW:
        return "guard"
    return "shaping" if clip_share <= _NORMALISING_ABOVE else "normalising"
