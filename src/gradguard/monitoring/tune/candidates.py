"""Chooses the rules to try on a script if the user named none: the one its record recommends, and three constants."""

import math
import statistics

from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.step_rows import usable_steps

NONE = "none"
"""The name of the unchanged script among the rules."""

OTHERWISE = "median"
"""The rule to try if the record recommends none."""

HABIT = "norm=1"
"""The constant of most published recipes, which a rule has to beat."""

_TROUBLE = 10.0  # times the smallest norm so far: from the first norm above it on, a run diverges


def candidates(record: Record, diverged: bool) -> list[str]:
    """Return the rules to try beside the unchanged script.

    They are the recommended rule (`median` if there is none) and three constants: the 90th percentile of the norms,
    which cuts only large ones; a tenth of their median, which makes all steps equally long; and 1, the habitual value.
    If the run diverged, the first two constants are a third and a thirtieth of the median norm before that.

    Args:
        record: The record of the unchanged script.
        diverged: Whether that run diverged.

    Returns:
        Rules in the syntax of ``--clip``, the recommended one first, without duplicates.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 1.0 + i / 100} for i in range(101)]
        >>> candidates(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False), False)
        ['median', 'norm=1.9', 'norm=0.15', 'norm=1']
    """
    return list(dict.fromkeys([recommended(record) or OTHERWISE, *_constants(record, diverged), HABIT]))


def recommended(record: Record) -> str | None:
    """Return the rule that a record recommends; None if it recommends none, or the script's own clip."""
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
    """Return the norm after the script's own clip, which is the norm that a tried rule compares."""
    post = step.get("post_norm")
    return step["norm"] if post is None else post
