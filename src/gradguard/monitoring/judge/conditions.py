"""Conditions on a record, such as ``exploding`` or ``faulty_steps>0``, which let a build fail on an unhealthy run."""

import difflib
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from gradguard.errors import CommandError
from gradguard.monitoring.judge.diagnosis import weighed_findings
from gradguard.monitoring.judge.health import KINDS, lock_in_share
from gradguard.monitoring.judge.judgement import Verdict, verdict
from gradguard.monitoring.judge.norm_statistics import drift_ratio
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.step_rows import by_optimizer, nonfinite_on, skipped_on, usable_norms

QUANTITIES = {
    "faulty_steps": "steps whose gradients held NaN or infinity, without those that a GradScaler skipped",
    "nonfinite_steps": "steps whose gradients held NaN or infinity",
    "skipped_steps": "steps that a loss scaler or a guard skipped",
    "clip_share": "share of the steps on which clipping bound",
    "max_norm": "largest norm before clipping, infinite where one was not finite",
    "median_norm": "median norm before clipping",
    "spike_share": "share of the steps whose norm stands out from those around it",
    "drift": "largest over smallest median norm of ten windows",
    "lock_in_share": "share of the steps in lock-in: bound on more than half of 100 steps at one threshold",
    "final_loss": "mean loss of the last steps, infinite where it was not finite",
    "overhead_share": "share of the run's time that observing took",
    "errors": "health findings of severity error",
    "warnings": "health findings of severity warning",
}
"""The quantities that a condition can compare with a number; they are keys of ``--json``. The number of findings of
each kind can be compared, too."""

_COUNTED = frozenset([*KINDS, "errors", "warnings"])
"""Quantities that count findings of a kind or a severity."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_CONDITION = re.compile(r"\s*(\w+)\s*(?:(>=|<=|==|!=|>|<)\s*([^\s%<>=!]+)\s*(%?)\s*)?")


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison such as ``clip_share>0.5``, or the name of a kind of finding, which holds if the run has one.

    Attributes:
        quantity: A key of `QUANTITIES`, or a kind of findings.
        comparison: ``>``, ``>=``, ``<``, ``<=``, ``==`` or ``!=``.
        value: The number to compare the quantity with.
        alone: Whether the condition was written without a comparison, which means ``>0``.
    """

    quantity: str
    comparison: str = ">"
    value: float = 0.0
    alone: bool = False

    def holds(self, measured: float) -> bool:
        """Return whether the condition holds for a measured number.

        Args:
            measured: The measured number.
        """
        return _OPERATORS[self.comparison](measured, self.value)

    def __str__(self) -> str:
        return self.quantity if self.alone else f"{self.quantity}{self.comparison}{self.value:g}"


def parse_conditions(text: str) -> list[Condition]:
    """Return the conditions in a text such as ``"exploding, dead_layer>2, clip_share>50%"``.

    Args:
        text: Kinds of findings, or comparisons, separated by commas; a number may be a percentage.

    Returns:
        At least one condition.

    Raises:
        CommandError: If a part is neither, or names an unknown quantity or finding.

    Example:
        >>> [str(condition) for condition in parse_conditions("exploding, faulty_steps>0, clip_share > 50%")]
        ['exploding', 'faulty_steps>0', 'clip_share>0.5']
    """
    return [_parse(part) for part in text.split(",")]


def holding(conditions: list[Condition], record: Record) -> list[str]:
    """Return the conditions that hold for a record, each with the measured value.

    Norms and clipping are judged for each optimizer separately. A condition holds if it holds for one of them.

    Args:
        conditions: Conditions, as `parse_conditions` returns them.
        record: The record of a run.

    Returns:
        Sentences such as ``"faulty_steps>0: faulty_steps is 3"``; empty where no condition holds.

    Raises:
        CommandError: If a quantity was not measured. A condition on it would otherwise be false silently.
    """
    said = []
    for condition in conditions:
        said += (_of_findings if condition.quantity in _COUNTED else _of_quantity)(condition, record)
    return said


def _parse(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise CommandError(
            f"--fail-on {text.strip()!r}: expected a finding, as in exploding, or a quantity, one of the comparisons "
            f"{' '.join(_OPERATORS)}, and a number, as in faulty_steps>0. {_KNOWN}"
        )
    quantity, comparison, digits, percent = found.groups()
    if quantity not in QUANTITIES and quantity not in KINDS:
        near = difflib.get_close_matches(quantity, [*QUANTITIES, *KINDS], n=1, cutoff=0.5)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise CommandError(f"--fail-on {text.strip()!r}: unknown quantity or finding {quantity!r}.{meant} {_KNOWN}")
    if comparison is None:
        if quantity not in _COUNTED:
            raise CommandError(f"--fail-on {text.strip()!r}: expected a number to compare it with, as in {quantity}>0.")
        return Condition(quantity, alone=True)
    try:
        value = float(digits)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CommandError(f"--fail-on {text.strip()!r}: expected a finite number, came {digits!r}. {_KNOWN}")
    return Condition(quantity, comparison, value / 100 if percent else value)


_KNOWN = f"Known quantities: {', '.join(QUANTITIES)}. Known findings: {', '.join(KINDS)}."


def _of_quantity(condition: Condition, record: Record) -> list[str]:
    """Return a sentence for each optimizer, or for the run, if a condition on a quantity holds there."""
    quantity, judged = condition.quantity, verdict(record)
    parts = [("", record, judged)]
    if judged.parts and quantity in _OF_EACH:
        pairs = zip(by_optimizer(record), judged.parts, strict=True)
        parts = [(f" of {label}", part.record, one) for part, (label, one) in pairs]
    measured = [(whose, _measured(quantity, part, one)) for whose, part, one in parts]
    known = [(whose, value) for whose, value in measured if value is not None]
    if not known:
        raise CommandError(_not_measured(condition, QUANTITIES[quantity], record))
    return [f"{condition}: {quantity}{whose} is {value:.4g}" for whose, value in known if condition.holds(value)]


_COUNTS = frozenset(["faulty_steps", "nonfinite_steps", "skipped_steps"])
"""Counts of steps. In a record without steps they are unknown, not 0."""

_OF_EACH = frozenset(["clip_share", "max_norm", "median_norm", "spike_share", "drift", "lock_in_share"])
"""Quantities that are measured for each optimizer separately."""


def _measured(quantity: str, record: Record, judged: Verdict) -> float | None:
    steps = record.steps
    if quantity == "drift":
        return drift_ratio(usable_norms(record))
    if quantity == "lock_in_share":
        return lock_in_share(record)
    # a step whose gradients were not finite and that was not skipped
    if quantity == "max_norm" and any(map(operator.gt, nonfinite_on(steps), skipped_on(steps))):
        return math.inf
    value = getattr(judged, quantity)
    if quantity == "final_loss" and value is None and steps.has_any("loss"):
        return math.inf
    return value if steps or quantity not in _COUNTS else None


def _of_findings(condition: Condition, record: Record) -> list[str]:
    """Return a sentence if a condition on a number of findings holds."""
    needed, measured = _NEEDED.get(condition.quantity, _STEPS)
    if not measured(record):  # without the measurements, an absent finding is no sign of health
        raise CommandError(_not_measured(condition, needed, record))
    findings = weighed_findings(record)
    found = [one for one in findings if condition.quantity in (one.kind, f"{one.severity}s")]
    if not condition.holds(len(found)):
        return []
    if not condition.alone:
        return [f"{condition}: {condition.quantity} is {len(found)}"]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return [f"{condition}: {found[0].message}{more}"]


_STEPS = ("steps", lambda record: bool(record.steps))
_NORMS = ("norms to find it in", lambda record: record.steps.has_any("norm") or record.steps.has_any("nonfinite"))
_NEEDED: dict[str, tuple[str, Callable[[Record], bool]]] = {
    "dead_layer": ("norms of each parameter to find it in", lambda record: bool(record.tensors)),
    **dict.fromkeys(("exploding", "vanishing", "nonfinite"), _NORMS),
}
"""The measurements that a kind of finding needs: their name, and whether a record has them."""


def _not_measured(condition: Condition, what: str, record: Record) -> str:
    return (
        f"--fail-on {condition}: {record.path} has no {condition.quantity} ({what}): it was not measured, or the run "
        "was too short, so the condition is neither true nor false. Leave the condition out, or record the run again."
    )
