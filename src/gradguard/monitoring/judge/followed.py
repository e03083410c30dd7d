"""Compares a run with an earlier one whose advice it followed, to tell whether the advice helped."""

import math
import statistics
from typing import Any

from gradguard.monitoring.judge.cause import Cause
from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.judge.signals import RunSignals, signals_of
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.record_lines import known_fields, without_none


def facts_of(record: Record, cause: Cause, rule: str | None) -> dict[str, Any]:
    """Return the facts about this run that the record of a following run stores.

    Args:
        record: The record of the earlier run.
        cause: The first cause of its diagnosis.
        rule: The clip that the report recommends; None where it recommends none.
    """
    signals = signals_of(record)
    curve, parts = signals.curve, record.path.parts
    facts = {
        "record": "/".join(parts[-2:] if record.path.is_absolute() else parts[-3:]),
        "cause": cause.key,
        "advice": cause.advice,
        "rule": rule,
        "rate_factor": cause.rate_factor,
        "rate": signals.rate,
        "steps": signals.count,
        "lost": signals.ends_lost or None,
        "loss": curve.final if curve.is_known and not signals.ends_lost else None,
        "error": curve.error if curve.is_known else None,
    }
    return known_fields(facts)


def helped(signals: RunSignals) -> str:
    """Return one sentence on whether the advice that this run followed has helped; empty where it followed none.

    The losses of both runs are compared at the same step, and their difference with the noise of both.

    Args:
        signals: The signals of the run.
    """
    before = signals.record.meta.get("followed", {})
    if before.get("cause") in (None, "healthy", "unknown") or not signals.count:
        return ""
    cause = str(before["cause"]).replace("_", " ")
    whose = f"{before.get('record', 'the run before')}, which was sick ({cause})"
    if signals.ends_lost:
        again = " again" if before.get("lost") else ""
        return f"Compared with {whose}, the advice did not help: the loss or gradients are not finite{again}."
    place = min(signals.count, int(before.get("steps") or signals.count))
    curve, loss = signals.curve_until(place), before.get("loss")
    if not curve.is_known or signals.takes_turns:
        return ""
    if before.get("lost"):
        return f"Compared with {whose}, the advice helped: the loss is finite and ends at {signals.ends_at}."
    if loss is None:
        return ""
    noise = math.hypot(curve.error, before.get("error") or 0.0)
    difference = loss - curve.final
    ends = f"the loss is {number(curve.final)} at step {signals.named(place - 1)} in place of {number(loss)}"
    gap = f"a difference of {number(abs(difference))} ± {number(noise)}"
    if abs(difference) <= max(noise, 0.01 * abs(loss)):
        return f"Compared with {whose}, the advice made no measurable difference: {ends}, {gap}."
    return f"Compared with {whose}, the advice {'helped' if difference > 0 else 'did harm'}: {ends}, {gap}."


def follows_clip(signals: RunSignals) -> bool:
    """Return whether the clip in use is the one that the report of the earlier run recommended."""
    rule = str(signals.record.meta.get("followed", {}).get("rule"))
    used = without_none(signals.record.steps.column("threshold"))
    name, _, value = rule.partition("=")
    if name != "norm" or not used:
        return False
    try:
        return math.isclose(float(value), statistics.median(used), rel_tol=0.02)
    except ValueError:
        return False
