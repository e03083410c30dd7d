"""The summary of a run for machines: one JSON object, whose keys are always there and mean the same in every release.

``docs/report.md`` has the table of its keys. One may be added; `SCHEMA` grows where one goes or changes its meaning.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradguard.monitoring.judge.acting_clips import ActingClip
from gradguard.monitoring.judge.diagnosis import Cause, Diagnosis, diagnose, weighed_findings
from gradguard.monitoring.judge.health import Finding
from gradguard.monitoring.judge.recommend import Recommendation, recommend
from gradguard.monitoring.judge.verdict import verdict
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import by_optimizer
from gradguard.monitoring.show.report.summary import counts_of, notes, numbers_of

SCHEMA = 1
"""The version of what the keys mean."""


def json_summary(records: Sequence[Record]) -> str:
    """The summary as JSON: an object, or a list of them for several records.

    **Guarantees**: strict JSON in ASCII; every key is there, null for what was not measured or was not finite; numbers
    are those of the text, not rounded.

    Args:
        records: At least one record.

    Returns:
        The text, indented, without a newline at its end.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 2.0} for i in range(9)]
        >>> record = Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False)
        >>> json.loads(json_summary([record]))["median_norm"]
        2.0
    """
    found = [_of_record(record) for record in records]
    return json.dumps(_finite(found[0] if len(found) == 1 else found), indent=2, allow_nan=False)


def _of_record(record: Record) -> dict[str, Any]:
    parts, found = by_optimizer(record), weighed_findings(record)
    severities = Counter(one.severity for one in found)
    return {
        "schema": SCHEMA,
        "record": str(record.path),
        **_judged(record),
        "errors": severities["error"],
        "warnings": severities["warning"],
        "findings": [_finding(one) for one in found],
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
        "decision": _decision(recommend(record)),
        "regime": judged.regime,
        **counts_of(judged),
        "recovery": None if judged.recovery is None else asdict(judged.recovery),
        **numbers_of(record, judged),
        "diverged": judged.diverged,
        "clips": [_clip(clip) for clip in judged.clips],
    }


def _diagnosis(found: Diagnosis) -> dict[str, Any]:
    evidence = [
        {"steps": list(one.steps), "params": list(one.params), "words": one.words} for one in found.cause.evidence
    ]
    return {
        **_cause(found.cause),
        "sentence": found.sentence,
        "evidence": evidence,
        "rules_out": list(found.cause.rules_out),
        "others": [_cause(cause) for cause in found.causes[1:]],
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "cause": cause.key,
        "certainty": cause.certainty,
        "sentence": cause.sentence,
        "advice": cause.advice,
    }


def _decision(made: Recommendation) -> dict[str, Any]:
    return {
        "kind": made.kind,
        "threshold": made.threshold,
        "rule": made.rule,
        "rate_factor": made.rate_factor,
        "experiment": made.experiment,
        "headline": made.headline,
        "reason": made.reason,
    }


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "severity": found.severity,
        "confidence": found.confidence,
        "first_step": found.first_step,
        "last_step": found.last_step,
        "params": list(found.params),
        "message": found.message,
        "advice": found.advice,
        "value": found.value,
        "optimizer": found.optimizer,
    }


def _clip(clip: ActingClip) -> dict[str, Any]:
    return {"name": clip.name, "threshold": clip.threshold, "acted_steps": clip.acted, "bound_steps": clip.bound}


def _finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
