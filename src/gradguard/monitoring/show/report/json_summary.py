"""Summarise a run for programs: as one JSON object, or as lines of text, with keys that are stable across releases.

``docs/report.md`` has the table of the keys. A release may add keys. `SCHEMA` grows if a key is removed or changes its
meaning.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradguard.json_values import jsonable
from gradguard.monitoring.judge.diagnosis import Cause, Diagnosis, diagnose, weighed_findings
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.step_rows import by_optimizer
from gradguard.monitoring.record.text import printable
from gradguard.monitoring.show.report.summary import counts_of, fields_of, notes, numbers_of

SCHEMA = 1
"""The version of the keys' meaning."""

_DECISION = ("kind", "threshold", "rule", "rate_factor", "experiment", "headline", "reason")
_FINDING = (
    "kind", "severity", "confidence", "first_step", "last_step", "params", "message", "advice", "value", "optimizer",
)  # fmt: skip


def json_summary(records: Sequence[Record]) -> str:
    """Return the summary as JSON: an object, or a list of objects for several records.

    **Guarantees**: The result is strict JSON in ASCII. Every key is present, with null for a quantity that was not
    measured or was not finite. Numbers equal those of `text_summary`, without rounding.

    Args:
        records: At least one record.

    Returns:
        The indented text, without a newline at its end.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 2.0} for i in range(9)]
        >>> record = Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False)
        >>> json.loads(json_summary([record]))["median_norm"]
        2.0
    """
    found = [_of_record(record) for record in records]
    return json.dumps(jsonable(found[0] if len(found) == 1 else found), indent=2, allow_nan=False)


def text_summary(record: Record) -> str:
    """Return the summary as ``key: value`` lines, one fact per line, for logs and for scripts without a JSON parser.

    A nested key is joined to its parent, as in ``decision_kind``. Entries of lists are counted from 1, as in
    ``findings_1_message``. A quantity that was not measured has no line.

    Args:
        record: The record of a run.

    Returns:
        The lines, each with a newline.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 2.0} for i in range(9)]
        >>> record = Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False)
        >>> print([line for line in text_summary(record).splitlines() if "decision" in line][0])
        decision_kind: unknown
    """
    return "".join(f"{key}: {printable(value)}\n" for key, value in _flat("", jsonable(_of_record(record))))


def _flat(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every plain value below a key, with its full joined key."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value, start=1)
    elif value is not None:
        yield key, f"{value:.4g}" if isinstance(value, float) else str(value)
    for name, part in parts:
        yield from _flat(f"{key}_{name}" if key else str(name), part)


def _of_record(record: Record) -> dict[str, Any]:
    parts, found = by_optimizer(record), weighed_findings(record)
    severities = Counter(one.severity for one in found)
    return {
        "schema": SCHEMA,
        "record": str(record.path),
        **_judged(record),
        "errors": severities["error"],
        "warnings": severities["warning"],
        "findings": [fields_of(one, *_FINDING) for one in found],
        "events": len(record.events),
        "notes": notes(record),
        "optimizers": [
            {"optimizer": part.index, "name": part.label, **_judged(part.record)} for part in parts if part.label
        ],
    }


def _judged(record: Record) -> dict[str, Any]:
    judged = verdict(record)
    return {
        "verdict": judged.sentence,
        "diagnosis": _diagnosis(diagnose(record)),
        "decision": fields_of(recommend(record), *_DECISION),
        "regime": judged.regime,
        **counts_of(judged),
        "recovery": None if judged.recovery is None else asdict(judged.recovery),
        **numbers_of(record, judged),
        "diverged": judged.diverged,
        "clips": [
            {**fields_of(clip, "name", "threshold"), "acted_steps": clip.acted, "bound_steps": clip.bound}
            for clip in judged.clips
        ],
    }


def _diagnosis(found: Diagnosis) -> dict[str, Any]:
    return {
        **_cause(found.cause),
        "sentence": found.sentence,
        "evidence": [fields_of(one, "steps", "params", "words") for one in found.cause.evidence],
        "rules_out": found.cause.rules_out,
        "others": [_cause(cause) for cause in found.causes[1:]],
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {"cause": cause.key, **fields_of(cause, "certainty", "sentence", "advice")}
