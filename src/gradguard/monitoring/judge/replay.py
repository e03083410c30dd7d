"""What other clipping rules would have done to the norms that a run recorded."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradguard.errors import InvalidValueError
from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.judge.recommend import guard_threshold, recommend
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import BINDS_BELOW, Part, by_optimizer, label_of, taken_steps, usable_steps
from gradguard.monitoring.record.text import printable
from gradguard.threshold_rules import (
    FixedNorm,
    Fraction,
    LockInAlarm,
    Median,
    Percentile,
    PerTensor,
    Rule,
    TwiceTheMedian,
    ZScore,
)

if TYPE_CHECKING:
    from rich.console import Console

COUNTERFACTUAL = (
    "Counterfactual without feedback: each rule is shown the norms that were recorded. A run under that rule would "
    "have gone differently after its first clip."
)

DEFAULT_RULES: tuple[str, ...] = (
    "norm=0.5", "norm=1", "norm=2", "norm=5",
    "median", "autoclip", "zclip=inf", "clip_fraction=0.05", "icefall", "adagc=inf",
)  # fmt: skip
"""What is shown to somebody who named no rule, and the recommended threshold where there is one.

Without the fixed ceilings of 1.0 that ZClip and AdaGC have by default: those say nothing about a run of another scale.
"""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What one rule would have done to the norms of one optimizer; the shares are None where it cannot be replayed.

    Attributes:
        rule: The rule as it was asked for, such as ``"norm=1"``.
        steps: How many steps it is judged on: those after the warm-up, finite and not skipped.
        clip_share: The share of them on which it would have bound.
        median_coefficient: The median coefficient of those; None if there are none.
        spikes: How many of the steps are spikes: a norm above the median times exp(6 robust deviations).
        caught: On how many of the spikes it would have bound.
        largest_passed: The largest norm after the clip.
        lock_in: The share of the steps on which its lock-in alarm would have been on.
        note: Why it cannot be replayed, or what to know; empty if nothing.
        optimizer: Of which optimizer, where the record has several.
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
    """Replay rules over the recorded norms before any clip; there is no feedback, so it is counterfactual.

    **Guarantees**: coefficients are those of the clippers of these names, step by step. Steps that were skipped or
    not finite enter no rule's state. The warm-up enters the states and is not judged.

    **Edge cases**: no usable step gives rows with 0 steps and a note; `AdaGC` needs the norm of each tensor on every
    step, and its row says so where they are missing; several optimizers give rows of their own, each rule anew.

    Args:
        record: The record of a run, clipped or not.
        rules: As in `parse_rule`; None for a choice of fixed and automatic ones and the recommended threshold.

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
        median 0.011111111111111112 1 of 1 1.35
    """
    asked = None if rules is None else list(rules)
    for rule in asked or ():
        parse_rule(rule)
    return [row for part in by_optimizer(record) for row in _rows(part, asked)]


def parse_rule(text: str) -> "Callable[[], Rule | PerTensor]":
    """Return what makes the rule that ``text`` names, without a state.

    ============================  ====================================================================================
    text                          rule
    ============================  ====================================================================================
    ``norm=1.0``                  one threshold for the global norm (`ClipByGlobalNorm`)
    ``median``, ``median=6``      robust deviations above the running median (`ClipByMedian`)
    ``autoclip``, ``autoclip=10`` percentile of all norms so far (`AutoClip`)
    ``zclip``, ``zclip=inf``      z-score with the published ceiling of 1.0, or another, or none (`ZClip`)
    ``clip_fraction=0.05``        the threshold that clips this share of the steps (`ClipFraction`)
    ``icefall``, ``icefall=2``    so many times the median of the last 100 norms
    ``adagc``, ``adagc=inf``      moving averages of each tensor; λ_abs of 1.0, or another, or none (`AdaGC`)
    ============================  ====================================================================================

    Args:
        text: A name, with a number after ``=`` where the rule takes one.

    Returns:
        A constructor without arguments.

    Raises:
        InvalidValueError: If there is no such rule, it cannot be replayed, or the number is not one that it takes.

    Example:
        >>> parse_rule("value=0.5")
        Traceback (most recent call last):
        gradguard.errors.InvalidValueError: rule value=0.5: a clip by value looks at elements, ...
    """
    name, equals, given = text.strip().partition("=")
    if name in _NOT_REPLAYABLE:
        raise InvalidValueError(f"rule {text}: {_NOT_REPLAYABLE[name]} Replay norm=, median or zclip instead.")
    if name not in _RULES:
        raise InvalidValueError(f"rule {text}: unknown rule {name!r}; expected one of {', '.join(_SPELLINGS)}.")
    make, (low, high), needed = _RULES[name]
    if not equals and not needed:
        return make
    try:
        argument = float(given)
    except ValueError:
        argument = math.nan
    if not low <= argument <= high:
        bounds = f"a number from {low:g} to {high:g}" if high < math.inf else f"a number of at least {low:g}"
        raise InvalidValueError(f"rule {text}: expected {bounds} after {name}=, as in {_example(name)}.")
    return lambda: make(argument)


_LEAST = 1e-300  # thresholds are above 0
_RULES: dict[str, tuple[Callable[..., Rule | PerTensor], tuple[float, float], bool]] = {
    "norm": (FixedNorm, (0.0, math.inf), True),
    "median": (Median, (0.0, 1e6), False),
    "autoclip": (Percentile, (0.0, 100.0), False),
    "zclip": (ZScore, (_LEAST, math.inf), False),
    "clip_fraction": (Fraction, (1e-6, 1 - 1e-6), True),
    "icefall": (TwiceTheMedian, (_LEAST, 1e6), False),
    "adagc": (PerTensor, (_LEAST, math.inf), False),
}
_SPELLINGS = ("norm=1.0", "median", "autoclip", "zclip", "clip_fraction=0.05", "icefall", "adagc")
_NOT_REPLAYABLE = {
    "value": "a clip by value looks at elements, and a record holds norms, so it cannot be replayed.",
    "adaptive": "adaptive clipping looks at units and weights, and a record holds norms, so it cannot be replayed.",
}
_NO_STEPS = "no usable norm before a clip in this record"
_TOO_LARGE = "the record has norms whose squares are no floats any more, so the rule cannot be replayed"
_EVERY_STEP = "needs the norm of each tensor on every step: record the run with gradguard run --every 1"


def _example(name: str) -> str:
    return next((spelling for spelling in _SPELLINGS if spelling.startswith(f"{name}=")), f"{name}=1.0")


def _rows(part: Part, rules: Sequence[str] | None) -> list[WhatIf]:
    chosen = _default_rules(part.record) if rules is None else rules
    judged = {id(step) for step in usable_steps(part.record)}
    norms = [step["norm"] for step in part.record.steps if id(step) in judged]
    spike = guard_threshold(norms) if norms else math.inf
    return [_row(part, rule, judged, spike) for rule in chosen]


def _default_rules(record: Record) -> list[str]:
    recommended = recommend(record).threshold
    fixed = {float(rule.removeprefix("norm=")) for rule in DEFAULT_RULES if rule.startswith("norm=")}
    if recommended is not None:
        fixed.add(recommended)
    return [f"norm={value:g}" for value in sorted(fixed)] + [r for r in DEFAULT_RULES if not r.startswith("norm=")]


def _row(part: Part, name: str, judged: set[int], spike: float) -> WhatIf:
    rule = parse_rule(name)()
    if not judged:
        return WhatIf(name, 0, note=_NO_STEPS, optimizer=part.index)
    if isinstance(rule, PerTensor):
        inputs = _tensor_norms(part.record)
        if inputs is None:
            return WhatIf(name, 0, note=_EVERY_STEP, optimizer=part.index)
        decisions = ((step, *rule.step(norms)) for step, norms in inputs)
    else:
        decisions = ((step, *rule.step(step["norm"])) for step in _with_norm(part.record))
    try:
        return _tally(name, part.index, decisions, judged, spike)
    except OverflowError:
        return WhatIf(name, 0, note=_TOO_LARGE, optimizer=part.index)


def _tally(
    name: str,
    optimizer: int | None,
    decisions: Iterator[tuple[dict, float, float]],
    judged: set[int],
    spike: float,
) -> WhatIf:
    alarm, steps, spikes, caught, locked, largest = LockInAlarm(), 0, 0, 0, 0, 0.0
    coefficients: list[float] = []
    for step, coefficient, threshold in decisions:
        binds = coefficient < BINDS_BELOW
        on = alarm.follow(binds, threshold)
        if id(step) not in judged:
            continue
        norm = step["norm"]
        steps, locked = steps + 1, locked + on
        spikes, caught = spikes + (norm > spike), caught + (norm > spike and binds)
        largest = max(largest, norm * coefficient)
        if binds:
            coefficients.append(coefficient)
    return WhatIf(
        rule=name,
        steps=steps,
        clip_share=len(coefficients) / steps,
        median_coefficient=statistics.median(coefficients) if coefficients else None,
        spikes=spikes,
        caught=caught,
        largest_passed=largest,
        lock_in=locked / steps,
        optimizer=optimizer,
    )


def _with_norm(record: Record) -> list[dict]:
    return [step for step in taken_steps(record) if step.get("norm") is not None]


def _tensor_norms(record: Record) -> list[tuple[dict, list[float]]] | None:
    """The finite steps with the norm of each tensor, or None where one of them has none."""
    by_step = {line.get("i"): line["norm"] for line in record.tensors}
    found = [(step, by_step.get(step["i"])) for step in _with_norm(record)]
    complete = [(step, norms) for step, norms in found if norms and None not in norms]
    return complete if len(complete) == len(found) else None


def print_replay(record: Record, rows: Sequence[WhatIf], console: "Console | None" = None) -> None:
    """Print rows of `what_if` as a table, one for each optimizer, with the words that they are counterfactual.

    Args:
        record: The record that they are of.
        rows: What `what_if` returned.
        console: Where to print; standard output if None.
    """
    from rich.console import Console

    console = console or Console()
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        _print_table(console, record, [row for row in rows if row.optimizer == optimizer])
    console.print(COUNTERFACTUAL, markup=False, highlight=False)


def _print_table(console: "Console", record: Record, rows: Sequence[WhatIf]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    of = f"{label_of(record, rows[0].optimizer)}: " if rows[0].optimizer is not None else ""
    title = Text(f"{of}{max(row.steps for row in rows):,} usable steps of {printable(record.path)}")
    headings = ("binds on", "coefficient", "spikes cut", "largest", "locked in")
    columns = Column("rule", no_wrap=True), *(Column(text, justify="right", no_wrap=True) for text in headings)
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(Text(row.rule), *_cells(row))
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.rule}: {row.note}.", markup=False, highlight=False)


def _cells(row: WhatIf) -> list[str]:
    if row.clip_share is None or row.lock_in is None:
        return ["–"] * 5
    coefficient = "–" if row.median_coefficient is None else plain_threshold(float(f"{row.median_coefficient:.2g}"))
    caught = f"{row.caught:,} of {row.spikes:,}" if row.spikes else "no spikes"
    return [percent(row.clip_share), coefficient, caught, number(row.largest_passed), percent(row.lock_in)]
