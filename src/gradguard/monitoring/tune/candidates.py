"""Which rules are tried on a script, where nobody named them: what its record recommends, and three constants."""

import math
import statistics

from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.step_rows import usable_steps

NONE = "none"
"""The script as it is."""

OTHERWISE = "median"
"""Candidates for a record that recommends nothing."""

HABIT = "norm=1"
"""The constant of most published recipes, which a rule has to beat."""

_TROUBLE = 10.0  # norms of a run that diverges, from where one is so many times the smallest before


def candidates(record: Record, diverged: bool) -> list[str]:
    """Return the rules to try beside the script as it is.

    They are the recommended one (`median` where there is none) and three constants: the 90th percentile of the norms,
    which cuts what is large; a tenth of their median, which makes all steps equally long; and 1, the habit. Where the
    run diverged, the first two are a third and a thirtieth of the median norm before it did.

    Args:
        record: The record of the script as it is.
        diverged: Whether that run diverged.

    Returns:
        Rules as ``--clip`` takes them, the recommended one first, each once.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 1.0 + i / 100} for i in range(101)]
        >>> candidates(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False), False)
        ['median', 'norm=1.9', 'norm=0.15', 'norm=1']
    """
    return list(dict.fromkeys([recommended(record) or OTHERWISE, *_constants(record, diverged), HABIT]))


def recommended(record: Record) -> str | None:
    """Return the rule that a record recommends; None where it recommends none, or the clip that the script has."""
    found = recommend(record)
    return None if found.kind == "keep" else found.rule


def _constants(record: Record, diverged: bool) -> list[str]:
    steps = _before_trouble(record) if diverged else usable_steps(record)
    norms = [norm for norm in map(_norm, steps) if norm > 0]
    if not norms:
        return []
    middle = statistics.median(norms)
    thresholds = [middle / 3, middle / 30]
    if not diverged:
        high = statistics.quantiles(norms, n=10, method="inclusive")[-1] if len(norms) > 1 else middle
        thresholds = [high, middle / 10]
    return [f"norm={float(f'{threshold:.1e}'):g}" for threshold in thresholds]


def _before_trouble(record: Record) -> list[dict]:
    found, least = [], math.inf
    for step in record.steps:
        norm = step.get("norm", 0.0)
        if step.get("skipped") or norm == 0:
            continue
        if norm is None or norm > _TROUBLE * least:
            break
        found.append(step)
        least = min(least, _norm(step))
    return found


def _norm(step: dict) -> float:
    """Return the norm that a rule behind the script's own clip gets."""
    post = step.get("post_norm")
    return step["norm"] if post is None else post
