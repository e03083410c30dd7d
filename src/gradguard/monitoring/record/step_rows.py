"""Reading the steps of a record: whether clipping bound, which steps count, and whose optimizer they are."""

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
    """Whether clipping changed the gradients of this step.

    Args:
        step: A step of a record.

    Returns:
        True where the coefficient is below 1.
    """
    coefficient = step.get("coefficient")
    return coefficient is not None and coefficient < BINDS_BELOW


def is_nonfinite(step: dict[str, Any]) -> bool:
    """Whether the gradients of this step held NaN or infinity.

    Args:
        step: A step of a record.

    Returns:
        True where elements were counted as non-finite, or the norm was measured and was not finite.
    """
    return bool(step.get("nonfinite")) or ("norm" in step and not is_finite(step["norm"]))


def is_finite(number: float | None) -> bool:
    """Tell whether a number is finite: a record has None, a line that was not written yet NaN or infinity."""
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
    """Return for each step whether the optimizer left it out.

    Args:
        steps: Steps of a record.
    """
    return list(map(bool, steps.column("skipped")))


def in_order(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record as they were written: each step, then what belongs to it.

    Lines of per-tensor numbers and events without a step come last, such as skips before a step that never came.

    Args:
        record: The record of a run, whose steps and lines of per-tensor numbers ascend.
    """
    numbers, late = set(record.steps.column("i")), []
    events = sorted(record.events, key=itemgetter("i"))
    # one dictionary at a time: a long record has more lines of per-tensor numbers than memory for dictionaries
    for line in heapq.merge(record.steps, record.tensors, events, key=itemgetter("i")):
        if line["i"] in numbers:
            yield line
        else:
            late.append(line)
    yield from late


@once
def taken_steps(record: Record) -> Lines:
    """Steps with finite gradients that the optimizer took: what a clip share is a share of.

    Args:
        record: The record of a run.

    Returns:
        The steps in their order.
    """
    left_out = map(or_, skipped_on(record.steps), nonfinite_on(record.steps))
    return record.steps.where(list(map(not_, left_out)))


@once
def usable_steps(record: Record) -> Lines:
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
    left_out = map(or_, skipped_on(later), map(bool, later.column("nonfinite")))
    return later.where([bool(norm) and not out for norm, out in zip(later.column("norm"), left_out, strict=True)])


@once
def usable_norms(record: Record) -> Sequence[float]:
    """Pre-clip norms of the `usable_steps`.

    Args:
        record: The record of a run.

    Returns:
        The norms in the order of the steps, all above 0.
    """
    return usable_steps(record).column("norm")


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


OTHER_LOSSES = "other_losses"
"""In the meta of a part: whether backward was called anew before the steps of the other optimizers."""


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """The steps of one optimizer in a run.

    Attributes:
        index: Its place in ``meta.optimizers``; None where the record has one optimizer, or does not say which it was.
        label: Its name: ``"optimizer 1 (Adam)"``, or an empty text where there is only one.
        record: The record without the steps of the others.
    """

    index: int | None
    label: str
    record: Record


@once
def by_optimizer(record: Record) -> list[OptimizerSteps]:
    """Return one part for each optimizer that stepped, in their order; the record itself where it was one.

    **Edge cases**: a record without steps is one part, and so is one with several optimizers of which one stepped;
    steps that do not say which optimizer they are of are those of the first one, from before another came; an event
    belongs to the optimizer whose step has its number; an optimizer whose steps tell no loss has that of the last step
    of another one since its own, as of one backward for Muon and AdamW.

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
    """Return what to call an optimizer: its place, its class, and the module or the parameter that it trains.

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
    index = index or 0  # the first one has no number as long as it is alone
    if index >= len(record.meta.get("optimizers") or [0]):
        return f"optimizer {index} (that came later)"
    said = ", ".join(filter(None, [_name_of(record, index), _trains(record, index)]))
    return f"optimizer {index} ({said})" if said else f"optimizer {index}"


def _trains(record: Record, index: int) -> str:
    """The deepest module that holds all parameters of an optimizer; the first parameter, where there is none."""
    own = (parameter.get("optimizer") == index for parameter in record.meta.get("params", []))
    names = list(compress(record.names, own))
    modules = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, modules))
    return shared or (names[0] if len(names) == 1 else f"{names[0]} ..." if names else "")


def _name_of(record: Record, index: int | None) -> str | None:
    names: list[Any] = record.meta.get("optimizers", [])
    return str(names[index]) if index is not None and 0 <= index < len(names) else None


def _meta_of(record: Record, index: int | None) -> dict[str, Any]:
    """The first line, as if this were the only optimizer."""
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
    """The steps of one optimizer with the losses of others since its last step: one backward was for all of them."""
    loss = None
    for step, is_mine in zip(steps, mine, strict=True):
        if is_mine:
            yield step | {"loss": loss}
            loss = None
        else:
            loss = step.get("loss", loss)
