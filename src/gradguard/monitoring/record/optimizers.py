"""A record with several optimizers, as in a GAN, taken apart: their norms are not one distribution."""

from dataclasses import dataclass, replace
from typing import Any

from gradguard.monitoring.record.file import Record


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
