"""Read the steps of a record: whether clipping bound, which steps count, and which optimizer made them."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, takewhile
from operator import itemgetter, not_, or_
from typing import Any

from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.record_lines import Lines

BINDS_BELOW = 1 - 1e-9
_GUARD_BELOW, _NORMALISING_ABOVE = 0.05, 0.5


def binds(step: dict[str, Any]) -> bool:
    """Return whether clipping changed the gradients of a step.

    Args:
        step: A step of a record.

    Returns:
        Whether the coefficient is below 1.
    """
    coefficient = step.get("coefficient")
    return coefficient is not None and coefficient < BINDS_BELOW


def is_nonfinite(step: dict[str, Any]) -> bool:
    """Return whether the gradients of a step contained NaN or infinity.

    Args:
        step: A step of a record.

    Returns:
        Whether the step has a count of non-finite gradients, or a measured norm that is not finite.
    """
    return bool(step.get("nonfinite")) or ("norm" in step and not is_finite(step["norm"]))


def is_finite(number: float | None) -> bool:
    """Return whether a number is finite; a record has None for NaN and infinity, an unwritten line has the floats."""
    return number is not None and math.isfinite(number)


def bound_on(steps: Lines) -> list[bool]:
    """Return for each step whether it `binds`.

    Args:
        steps: Steps of a record.
    """
    return [value is not None and value < BINDS_BELOW for value in steps.column("coefficient")]


def nonfinite_on(steps: Lines) -> list[bool]:
    """Return for each step whether it `is_nonfinite`.

    Args:
        steps: Steps of a record.
    """
    known = zip(steps.column("nonfinite"), steps.column("norm"), steps.has("norm"), strict=True)
    return [bool(count) or (there and norm is None) for count, norm, there in known]


def skipped_on(steps: Lines) -> list[bool]:
    """Return for each step whether it was skipped.

    Args:
        steps: Steps of a record.
    """
    return list(map(bool, steps.column("skipped")))


def in_order(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record in written order: each step, then its ``tensors`` line and its events.

    ``tensors`` lines and events without a step come last, such as skips before a step that was never made.

    Args:
        record: The record of a run, whose ``step`` and ``tensors`` lines ascend.
    """
    numbers, late = set(record.steps.column("i")), []
    events = sorted(record.events, key=itemgetter("i"))
    # make one dictionary at a time: all dictionaries of a long record would not fit into memory
    for line in heapq.merge(record.steps, record.tensors, events, key=itemgetter("i")):
        if line["i"] in numbers:
            yield line
        else:
            late.append(line)
    yield from late


@once
def taken_steps(record: Record) -> Lines:
    """Return the steps with finite gradients that the optimizer took, the denominator of every clip share.

    Args:
        record: The record of a run.

    Returns:
        The steps in their order.
    """
    left_out = map(or_, skipped_on(record.steps), nonfinite_on(record.steps))
    return record.steps.where(list(map(not_, left_out)))


@once
def usable_steps(record: Record) -> Lines:
    """Return the steps whose norm before clipping represents ordinary training.

    The function leaves out the warm-up (the first 10 % of a run below 1,000 steps, else the larger of 2 % and 100
    steps), skipped steps, norms that are not finite, and zero norms, which have no logarithm.

    Args:
        record: The record of a run.

    Returns:
        The steps in their order.
    """
    count = len(record.steps)
    warm_up = count // 10 if count < 1000 else max(count // 50, 100)
    later = record.steps[warm_up:]
    left_out = map(or_, skipped_on(later), map(bool, later.column("nonfinite")))
    return later.where([bool(norm) and not out for norm, out in zip(later.column("norm"), left_out, strict=True)])


@once
def usable_norms(record: Record) -> Sequence[float]:
    """Return the norms of the `usable_steps` before clipping.

    Args:
        record: The record of a run.

    Returns:
        The norms in the order of the steps, all above 0.
    """
    return usable_steps(record).column("norm")


def regime_of(clip_share: float) -> str:
    """Return the name of the regime for a share of steps on which clipping binds.

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


OTHER_LOSSES = "other_losses"
"""The key in a part's ``meta``: whether both this optimizer's steps and the steps of the others have own losses."""


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """The steps of one optimizer in a run.

    Attributes:
        index: The optimizer's index in ``meta.optimizers``; None if only one optimizer stepped.
        label: The optimizer's name, such as ``"optimizer 1 (Adam)"``; empty if only one optimizer stepped.
        record: The record without the steps of the other optimizers.
    """

    index: int | None
    label: str
    record: Record


@once
def by_optimizer(record: Record) -> list[OptimizerSteps]:
    """Return one part of the record for each optimizer that stepped, in their order.

    **Edge cases**: A record without steps is one part, and so is a record in which only one optimizer stepped. Steps
    without an optimizer index belong to the first optimizer, before a second one was created. An event belongs to the
    optimizer whose step has the event's number. A step of an optimizer without losses gets the last loss of the other
    optimizers since its own last step: one backward serves both Muon and AdamW, for example.

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
    found = set(record.steps.column("optimizer"))
    if len(found) <= 1:
        index = next(iter(found), None)
        alone = _name_of(record, index)
        same = alone is None or record.meta.get("optimizers") == [alone]
        return [OptimizerSteps(None, "", record if same else replace(record, meta=_meta_of(record, index)))]
    order = sorted({index or 0 for index in found})
    return [OptimizerSteps(index, label_of(record, index), _only(record, index)) for index in order]


def label_of(record: Record, index: int | None) -> str:
    """Return the label of an optimizer: its index, its class, and the module or the parameter that it trains.

    Args:
        record: The record of a run.
        index: The ``optimizer`` of a step.

    Example:
        >>> from pathlib import Path
        >>> params = [{"name": f"actor.{name}", "optimizer": 1} for name in ("weight", "bias")]
        >>> meta = {"t": "meta", "optimizers": ["SGD", "Adam"], "params": params}
        >>> label_of(Record(Path("run.jsonl"), meta, [], [], [], None, False), 1)
        'optimizer 1 (Adam, actor)'
    """
    index = index or 0  # the first optimizer has no index while it is the only one
    if index >= len(record.meta.get("optimizers") or [0]):
        return f"optimizer {index} (that came later)"
    said = ", ".join(filter(None, [_name_of(record, index), _trains(record, index)]))
    return f"optimizer {index} ({said})" if said else f"optimizer {index}"


def _trains(record: Record, index: int) -> str:
    """Return the deepest module that holds all parameters of an optimizer, else the name of its first parameter."""
    own = (parameter.get("optimizer") == index for parameter in record.meta.get("params", []))
    names = list(compress(record.names, own))
    modules = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, modules))
    return shared or (names[0] if len(names) == 1 else f"{names[0]} ..." if names else "")


def _name_of(record: Record, index: int | None) -> str | None:
    names: list[Any] = record.meta.get("optimizers", [])
    return str(names[index]) if index is not None and 0 <= index < len(names) else None


def _meta_of(record: Record, index: int | None) -> dict[str, Any]:
    """Return the first line with only this optimizer."""
    own = {}
    for key in ("optimizers", "eps"):
        of_each: list[Any] = record.meta.get(key, [])
        own[key] = [of_each[index]] if index is not None and index < len(of_each) else []
    return record.meta | own


def _only(record: Record, index: int) -> Record:
    mine = [(optimizer or 0) == index for optimizer in record.steps.column("optimizer")]
    steps, others = record.steps.where(mine), record.steps.where(list(map(not_, mine)))
    numbers = set(steps.column("i"))
    has_own = steps.has_any("loss")
    if not has_own and others.has_any("loss"):
        steps = Lines(_with_shared_losses(record.steps, mine))
    return replace(
        record,
        meta=_meta_of(record, index) | {OTHER_LOSSES: has_own and 10 * sum(others.has("loss")) > len(others)},
        steps=steps,
        tensors=record.tensors.where([number in numbers for number in record.tensors.column("i")]),
        events=[event for event in record.events if event["i"] in numbers],
    )


def _with_shared_losses(steps: Lines, mine: Sequence[bool]) -> Iterator[dict[str, Any]]:
    """Yield the steps of one optimizer, each with the last loss of the others since its own last step."""
    loss = None
    for step, is_mine in zip(steps, mine, strict=True):
        if is_mine:
            yield step | {"loss": loss}
            loss = None
        else:
            loss = step.get("loss", loss)
