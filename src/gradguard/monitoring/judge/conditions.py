"""Conditions on a record, such as ``nonfinite>0``, that let a build fail on an unhealthy run."""

import difflib
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from gradguard.errors import CommandError
from gradguard.monitoring.judge.health import findings, lock_in_share
from gradguard.monitoring.judge.norm_statistics import drift_ratio
from gradguard.monitoring.judge.verdict import Verdict, verdict
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import Part, by_optimizer, is_nonfinite, usable_norms

QUANTITIES = {
    "nonfinite": "steps whose gradients held NaN or infinity",
    "skipped": "steps that a loss scaler or a guard left out",
    "clip_fraction": "share of the steps on which clipping bound",
    "max_norm": "largest norm before clipping, infinite where one was not finite",
    "median_norm": "median norm before clipping",
    "spike_fraction": "share of the steps above the median times exp(6 robust deviations)",
    "drift": "largest over smallest median norm of ten windows",
    "lock_in": "share of the steps in lock-in: bound on more than half of 100 steps at one threshold",
    "final_loss": "mean loss of the last steps, infinite where it was not finite",
    "overhead": "share of the time that observing took",
    "errors": "health findings of severity error",
    "warnings": "health findings of severity warning",
}
"""What a condition can be about, and what it is."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*([^\s%<>=!]+)\s*(%?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison, as in ``clip_fraction>0.5``.

    Attributes:
        quantity: A key of `QUANTITIES`.
        comparison: ``>``, ``>=``, ``<``, ``<=``, ``==`` or ``!=``.
        value: The number that it is compared with.
    """

    quantity: str
    comparison: str
    value: float

    def holds(self, measured: float) -> bool:
        """Return whether it holds of a measured number.

        Args:
            measured: The number.
        """
        return _OPERATORS[self.comparison](measured, self.value)

    def __str__(self) -> str:
        return f"{self.quantity}{self.comparison}{self.value:g}"


def parse_conditions(text: str) -> list[Condition]:
    """Return the conditions in a text such as ``"nonfinite>0, clip_fraction>50%"``.

    Args:
        text: Comparisons with commas between them; a number may be a percentage.

    Returns:
        At least one condition.

    Raises:
        CommandError: If one is no comparison, or names a quantity that is not known.

    Example:
        >>> [str(condition) for condition in parse_conditions("nonfinite>0, clip_fraction > 50%")]
        ['nonfinite>0', 'clip_fraction>0.5']
    """
    return [_parse(part) for part in text.split(",")]


def holding(conditions: list[Condition], record: Record) -> list[str]:
    """Return the conditions that hold of a record, each with what was measured.

    Norms and clipping are judged for each optimizer by itself, and a condition holds if it holds for one of them.

    Args:
        conditions: What `parse_conditions` returned.
        record: The record of a run.

    Returns:
        Words such as ``"nonfinite>0: nonfinite is 3"``; empty where none holds.

    Raises:
        CommandError: If a quantity was not measured: a condition on it would be false without a word.
    """
    parts, judged = by_optimizer(record), verdict(record)
    verdicts = [judged] if len(parts) == 1 else [one for _, one in judged.parts]
    said = []
    for condition in conditions:
        measured = _measured(condition.quantity, record, judged, list(zip(parts, verdicts, strict=True)))
        if not measured:
            raise CommandError(_not_measured(condition, record))
        for label, value in measured:
            if condition.holds(value):
                of = f" of {label}" if label else ""
                said.append(f"{condition}: {condition.quantity}{of} is {value:.4g}")
    return said


def _parse(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise CommandError(
            f"--fail-on {text.strip()!r}: expected a quantity, one of {' '.join(_OPERATORS)}, and a number, as in "
            f"nonfinite>0. {_KNOWN}"
        )
    quantity, comparison, digits, percent = found.groups()
    if quantity not in QUANTITIES:
        near = difflib.get_close_matches(quantity, QUANTITIES, n=1, cutoff=0.5)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise CommandError(f"--fail-on {text.strip()!r}: unknown quantity {quantity!r}.{meant} {_KNOWN}")
    try:
        value = float(digits)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CommandError(f"--fail-on {text.strip()!r}: expected a finite number, came {digits!r}. {_KNOWN}")
    return Condition(quantity, comparison, value / 100 if percent else value)


_KNOWN = f"Known quantities: {', '.join(QUANTITIES)}."

Judged = list[tuple[Part, Verdict]]


def _measured(quantity: str, record: Record, whole: Verdict, parts: Judged) -> list[tuple[str, float]]:
    """The quantity with the label of its optimizer, for each that has it."""
    if quantity in _OF_WHOLE:
        found = _OF_WHOLE[quantity](record, whole)
        return [] if found is None else [("", float(found))]
    each = [(part.label, _OF_PART[quantity](part.record, judged)) for part, judged in parts]
    return [(label, float(value)) for label, value in each if value is not None]


def _not_measured(condition: Condition, record: Record) -> str:
    return (
        f"--fail-on {condition}: {record.path} has no {condition.quantity} ({QUANTITIES[condition.quantity]}): it was "
        "not measured, or the run was too short, so the condition is neither true nor false. Leave it out, or record "
        "the run again."
    )


def _largest_norm(record: Record, judged: Verdict) -> float | None:
    if any(is_nonfinite(step) and not step.get("skipped") for step in record.steps):
        return math.inf
    return judged.max_norm


def _final_loss(record: Record, judged: Verdict) -> float | None:
    if judged.final_loss is None and any("loss" in step for step in record.steps):
        return math.inf
    return judged.final_loss


def _with_steps(value: Callable[[Record, Verdict], float | None]) -> Callable[[Record, Verdict], float | None]:
    """A count of nothing is not 0 where nothing was recorded."""
    return lambda record, judged: value(record, judged) if record.steps else None


def _severity(severity: str) -> Callable[[Record, Verdict], float | None]:
    return _with_steps(lambda record, _: sum(found.severity == severity for found in findings(record)))


_Measure = Callable[[Record, Verdict], float | None]
_OF_WHOLE: dict[str, _Measure] = {
    "nonfinite": _with_steps(lambda _, judged: judged.nonfinite_steps),
    "skipped": _with_steps(lambda _, judged: judged.skipped_steps),
    "final_loss": _final_loss,
    "overhead": lambda _, judged: judged.overhead_share,
    "errors": _severity("error"),
    "warnings": _severity("warning"),
}
_OF_PART: dict[str, _Measure] = {
    "clip_fraction": _with_steps(lambda _, judged: judged.clip_share),
    "max_norm": _largest_norm,
    "median_norm": lambda _, judged: judged.median_norm,
    "spike_fraction": lambda _, judged: judged.spike_share,
    "drift": lambda record, _: drift_ratio(usable_norms(record)),
    "lock_in": lambda record, _: lock_in_share(record),
}
