"""What the steps of a record say: whether clipping bound, what counts, and which optimizer each is of."""

import math
from dataclasses import dataclass, replace
from typing import Any

from gradguard.monitoring.record.file import Record, once

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


def is_search_of_scale(step: dict[str, Any]) -> bool:
    """Whether a GradScaler left this step out: an overflow now and then is how it finds its scale.

    Args:
        step: A step of a record.

    Returns:
        True where a step with a loss scale was skipped.
    """
    return bool(step.get("skipped")) and "amp_scale" in step


@once
def taken_steps(record: Record) -> list[dict[str, Any]]:
    """Steps with finite gradients that the optimizer took: what a clip share is a share of.

    Args:
        record: The record of a run.

    Returns:
        The steps in their order.
    """
    return [step for step in record.steps if not step.get("skipped") and not is_nonfinite(step)]


@once
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


@once
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


@dataclass(frozen=True, slots=True)
class Part:
    """What one optimizer did in a run.

    Attributes:
        index: Its place in ``meta.optimizers``; None where the record has one optimizer, or does not say which it was.
        label: What to call it: ``"optimizer 1 (Adam)"``, or an empty text where there is only one.
        record: The record without the steps of the others.
    """

    index: int | None
    label: str
    record: Record


@once
def by_optimizer(record: Record) -> list[Part]:
    """Return one part for each optimizer that stepped, in their order; the record itself where it was one.

    **Edge cases**: a record without steps is one part, and so is one with several optimizers of which one stepped;
    steps that do not say which optimizer they are of make a part of their own, the last; an event belongs to the
    optimizer whose step has its number.

    Args:
        record: The record of a run.

    Returns:
        At least one part.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 1.0, "optimizer": i % 2} for i in range(3)]
        >>> record = Record(Path("gan.jsonl"), {"t": "meta", "optimizers": ["Adam", "SGD"]}, steps, [], [], None, False)
        >>> [(part.label, len(part.record.steps)) for part in by_optimizer(record)]
        [('optimizer 0 (Adam)', 2), ('optimizer 1 (SGD)', 1)]
    """
    found = {step.get("optimizer") for step in record.steps}
    if len(found) <= 1:
        alone = _name_of(record, next(iter(found), None))
        return [Part(None, "", record if alone is None else replace(record, meta=_meta_of(record, alone)))]
    order = sorted(found, key=lambda index: (index is None, index or 0))
    return [Part(index, label_of(record, index), _only(record, index)) for index in order]


def label_of(record: Record, index: int | None) -> str:
    """Return what to call an optimizer: its place and its class.

    Args:
        record: The record of a run.
        index: The ``optimizer`` of a step.
    """
    name = _name_of(record, index)
    if index is None:
        return "an optimizer that came later"
    return f"optimizer {index} ({name})" if name else f"optimizer {index}"


def _name_of(record: Record, index: int | None) -> str | None:
    names: list[Any] = record.meta.get("optimizers") or []
    return str(names[index]) if index is not None and 0 <= index < len(names) else None


def _meta_of(record: Record, name: str | None) -> dict[str, Any]:
    return record.meta | {"optimizers": [name] if name else []}


def _only(record: Record, index: int | None) -> Record:
    steps = [step for step in record.steps if step.get("optimizer") == index]
    numbers, name = {step["i"] for step in steps}, _name_of(record, index)
    return replace(
        record,
        meta=_meta_of(record, name),
        steps=steps,
        tensors=[line for line in record.tensors if line.get("i") in numbers],
        events=[event for event in record.events if event["i"] in numbers],
    )
