"""The words of page and text about health and events, ready to be shown."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradguard.monitoring.judge.diagnosis import weighed_findings
from gradguard.monitoring.judge.findings import SEVERITIES, Finding
from gradguard.monitoring.judge.numbers import capital
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.show.report.figure import steps_between
from gradguard.words import listed

_MOST_EVENTS = 30
_NAMED_AT_MOST = 10


@dataclass(frozen=True)
class Shown:
    """A finding in words.

    Attributes:
        severity: ``"error"``, ``"warning"`` or ``"info"``.
        kind: Such as ``"dead_layer"``.
        where: The steps, in words.
        message: What was seen.
        advice: What to do.
        params: The parameters that it is about, in words; empty if it is about none.
        confidence: ``"high"`` or ``"medium"``, as a `Finding` has it.
    """

    severity: str
    kind: str
    where: str
    message: str
    advice: str
    params: str
    confidence: str = "high"


@dataclass(frozen=True)
class Events:
    """The events that a page lists.

    Attributes:
        shown: The gravest ones, in the order of the steps.
        more: How many are left out.
        counts: How many there are of each kind, where there are many.
    """

    shown: list[dict[str, Any]]
    more: int
    counts: str


def findings_of(record: Record, optimizer: int | None = None) -> list[Shown]:
    """The findings of a run, the gravest first.

    Args:
        record: The whole record, with all its optimizers.
        optimizer: Only what is about this one, and what is about none.

    Returns:
        The findings.
    """
    found = weighed_findings(record)
    return [_in_words(item) for item in found if optimizer is None or item.optimizer in (optimizer, None)]


def severities(shown: Iterable[Shown]) -> str:
    """How many findings there are.

    Args:
        shown: The findings.

    Returns:
        For example ``"1 error, 2 warnings"``.

    Example:
        >>> severities([Shown("warning", "lock_in", "", "", "", "")] * 2)
        '2 warnings'
    """
    found = Counter(item.severity for item in shown)
    words = {"error": "error", "warning": "warning", "info": "remark"}
    return ", ".join(
        f"{found[severity]} {word}{'s' * (found[severity] != 1)}" for severity, word in words.items() if found[severity]
    )


def untold(events: Sequence[dict[str, Any]], found: Sequence[Shown]) -> list[dict[str, Any]]:
    """Return the events that no finding tells already: what is found in a whole record, the watcher told as it came.

    Args:
        events: The event lines of a record.
        found: What health says about it.
    """
    kinds = {item.kind for item in found}
    return [event for event in events if event.get("kind") not in kinds]


def shown_events(events: Sequence[dict[str, Any]]) -> Events:
    """Choose the events that a page has room for.

    Args:
        events: The event lines of a record.

    Returns:
        The gravest of them, in the order of the steps.
    """
    kept = sorted(events, key=lambda event: SEVERITIES.index(event.get("severity", "info")))[:_MOST_EVENTS]
    kinds = Counter(str(event.get("kind", "event")) for event in events)
    counts = ", ".join(f"{kind}: {count:,}" for kind, count in kinds.most_common())
    return Events(
        shown=sorted(kept, key=lambda event: event["i"]),
        more=len(events) - len(kept),
        counts=counts if len(events) > _MOST_EVENTS else "",
    )


def _in_words(item: Finding) -> Shown:
    return Shown(
        severity=item.severity,
        kind=item.kind,
        where=steps_between(item.first_step, item.last_step),
        message=item.message if item.message.startswith(item.params) else _sentence(item.message),
        advice=_sentence(item.advice),
        params=listed(item.params, _NAMED_AT_MOST),
        confidence=item.confidence,
    )


def _sentence(text: str) -> str:
    is_whole = not text or text[-1] in ".!?" or text.endswith("()")  # a point is no part of a call
    return capital(text) if is_whole else f"{capital(text)}."
