"""Replays clipping rules on the norms that a run recorded."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import and_
from typing import Any

from gradguard.monitoring.judge.numbers import median
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.record_lines import without_none
from gradguard.monitoring.record.step_rows import BINDS_BELOW, OptimizerSteps, by_optimizer, taken_steps, usable_steps
from gradguard.named_rules import replayed_rule
from gradguard.threshold_rules import LockInAlarm, PerTensor

COUNTERFACTUAL = (
    "Counterfactual without feedback: each rule is applied to the recorded norms. A run under that rule would have "
    "gone differently after its first clip."
)

_CONSTANTS = frozenset([0.5, 1.0, 2.0, 5.0])
_AUTOMATIC = ("median", "autoclip", "zclip=inf", "clip_fraction=0.05", "adagc=inf")
# zclip=inf and adagc=inf have no fixed ceiling: the default of 1.0 means nothing for a run of another scale


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The effect of one rule on the norms of one optimizer; the shares are None where it cannot be replayed.

    Attributes:
        rule: The rule as it was asked for, such as ``"norm=1"``.
        steps: The number of steps on which it is judged: finite, not skipped, and after the warm-up.
        clip_share: The share of these steps on which it would have bound.
        median_coefficient: The median coefficient where it would have bound; None if it never would.
        spikes: The number of steps that are spikes: norms that stand out from their neighbourhood.
        caught: The number of spikes on which it would have bound.
        largest_passed: The largest norm after the clip.
        lock_in: The share of the steps on which its lock-in alarm would have been on.
        note: Why the rule cannot be replayed; empty otherwise.
        optimizer: The index of the optimizer, where the record has several.
    """

    rule: str
    steps: int
    clip_share: float | None = None
    median_coefficient: float | None = None
    spikes: int = 0
    caught: int | None = None
    largest_passed: float | None = None
    lock_in: float | None = None
    note: str = ""
    optimizer: int | None = None


def what_if(record: Record, rules: Iterable[str] | None = None) -> list[WhatIf]:
    """Replay rules over the recorded norms before any clip. The replay is counterfactual: it has no feedback.

    **Guarantees**: the coefficients of each step equal those of the clipper of that name. Steps that were skipped or
    not finite do not enter a rule's state. The warm-up enters the state but is not judged.

    **Edge cases**: a record without usable steps gives rows with 0 steps and a note. `AdaGC` needs the norm of each
    tensor on every step, and its row has a note where these are missing. Each of several optimizers has its own rows,
    with fresh rules.

    Args:
        record: The record of a run, clipped or not.
        rules: Rules as in `replayed_rule`; None for a choice of fixed and automatic rules, with the recommended
            threshold.

    Returns:
        One row for each optimizer and rule, in that order.

    Raises:
        InvalidValueError: If a rule is not known or cannot be replayed from any record.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 50.0 if i == 90 else 1.0} for i in range(100)]
        >>> record = Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False)
        >>> for row in what_if(record, ["norm=0.5", "median"]):
        ...     print(row.rule, row.clip_share, f"{row.caught} of {row.spikes}", round(row.largest_passed, 2))
        norm=0.5 1.0 1 of 1 0.5
        median 0.2 1 of 1 1.35
    """
    asked = None if rules is None else list(rules)
    for rule in asked or ():
        replayed_rule(rule)
    return [row for part in by_optimizer(record) for row in _rows(part, asked)]


_NO_STEPS = "no usable norm before a clip in this record"
_TOO_LARGE = "the record has norms whose squares overflow float64, so the rule cannot be replayed"
_EVERY_STEP = "needs the norm of each tensor on every step: record the run with gradguard run --every 1"


def _rows(part: OptimizerSteps, rules: Sequence[str] | None) -> list[WhatIf]:
    if rules is None:
        constants = _CONSTANTS.union(without_none([recommend(part.record).threshold]))
        rules = [*(f"norm={constant:g}" for constant in sorted(constants)), *_AUTOMATIC]
    usable = usable_steps(part.record).column("i")
    spikes = {usable[place] for place in spikes_of(part.record)}
    judged = {number: number in spikes for number in usable}
    return [_row(part, rule, judged) for rule in rules]


def _row(part: OptimizerSteps, name: str, judged: dict[int, bool]) -> WhatIf:
    rule, unknown = replayed_rule(name)(), WhatIf(name, 0, optimizer=part.index)
    if not judged:
        return replace(unknown, note=_NO_STEPS)
    steps = _with_norm(part.record)
    norms: Any = [norm for _, norm in steps]
    if isinstance(rule, PerTensor):
        norms = _tensor_norms(part.record)
    if norms is None:
        return replace(unknown, note=_EVERY_STEP)
    try:
        coefficients, thresholds = zip(*[rule.step(norm) for norm in norms], strict=True)
    except OverflowError:
        return replace(unknown, note=_TOO_LARGE)
    binds = [coefficient < BINDS_BELOW for coefficient in coefficients]
    on = list(map(LockInAlarm().follow, binds, thresholds))
    spikes = [judged.get(number) for number, _ in steps]
    known = [spike is not None for spike in spikes]
    count, bound = sum(known), list(compress(coefficients, map(and_, known, binds)))
    passed = (norm * coefficient for (_, norm), coefficient in zip(steps, coefficients, strict=True))
    return replace(
        unknown,
        steps=count,
        clip_share=len(bound) / count,
        median_coefficient=median(bound),
        spikes=sum(filter(None, spikes)),
        caught=sum(compress(binds, spikes)),
        largest_passed=max(0.0, max(compress(passed, known), default=0.0)),
        lock_in=sum(compress(on, known)) / count,
    )


def _with_norm(record: Record) -> list[tuple[int, float]]:
    """Return the number and the norm of each finite step that was taken."""
    taken = taken_steps(record)
    pairs = zip(taken.column("i"), taken.column("norm"), strict=True)
    return [(number, norm) for number, norm in pairs if norm is not None]


def _tensor_norms(record: Record) -> Iterator[list[float]] | None:
    """Return the norms of all tensors on each step of `_with_norm`; None where a step lacks them."""
    norms, numbers = record.tensors.column("norm"), [number for number, _ in _with_norm(record)]
    wanted = set(numbers)
    places = {number: place for place, number in enumerate(record.tensors.column("i")) if number in wanted}
    if len(places) < len(wanted) or any(not norms[place] or None in norms[place] for place in places.values()):
        return None
    return (norms[places[number]] for number in numbers)
