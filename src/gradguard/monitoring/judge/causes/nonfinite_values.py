"""Searches for the reason why values became non-finite: the data, the range of a dtype, or growth."""

import statistics
from itertools import groupby

from gradguard.monitoring.judge.cause import Evidence, Sign
from gradguard.monitoring.judge.causes.rate import lower_rate
from gradguard.monitoring.judge.findings import named
from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.judge.signals import RunSignals
from gradguard.words import counted

GROWN = 3.0
"""Norms or losses count as grown if they were this many times the recent ones just before values became non-finite."""

FAR_GROWN = 30.0
"""Times the recent norms, if the loss was below its recent level: norms alone must have grown this far."""

_BEFORE = 10  # steps before the first non-finite one in which growth must have happened
_LAST = 3  # last steps before it, on which growing values are largest
_PAST = 60  # steps before those _BEFORE, which show what was usual
_NEVER_OVERFLOW = ("LogSoftmax", "Softmax", "")  # a softmax does not overflow: its input was non-finite already
_SMALL_TYPE = "float16"


def lost(by: str, signals: RunSignals) -> Sign | None:
    """Return a sign if values became non-finite for the given reason.

    Args:
        by: The reason: ``"data"``, ``"growth"``, ``"leap"``, ``"small type"``, ``"exponential"`` or ``"batch"``.
        signals: The signals of the run.
    """
    place = signals.first_lost
    if place is None or _reason(signals, place) != by:
        return None
    return _by_growth(signals, place, by) if by in ("growth", "leap") else _at_once(signals, place, by)


def scale_collapses(signals: RunSignals) -> Sign | None:
    """Return a sign if the loss scale collapsed: gradients overflow at every scale."""
    if signals.first_lost is not None or signals.finding("amp_scale_collapse") is None:
        return None
    longest = max((len(list(run)) for searched, run in groupby(signals.searched) if searched), default=0)
    words = f"The loss scale was halved {longest} times in a row, and each of these steps was skipped."
    return Sign((signals.seen(words),))


def _reason(signals: RunSignals, place: int) -> str:
    """Return the reason for the first non-finite values; growth is measured against the recent past."""
    operation, dtype = _origin(signals, place)
    if operation == "data":
        return "data"
    at_first = 0 < place <= 2 and signals.rates[place - 1] != 0  # right after the first updates
    if _growth(signals, place)[0] <= GROWN:
        is_small = dtype == _SMALL_TYPE
        if operation in _NEVER_OVERFLOW:  # its dtype says nothing: look for float16 anywhere in the run
            stored = {parameter.get("dtype") for parameter in signals.params}
            in_use = stored.union(signals.record.meta.get("compute", ()))
            is_small = signals.record.steps.has_any("amp_scale") or _SMALL_TYPE in in_use
        if is_small:
            return "small type"
        if operation == "Exp":
            return "exponential"
        if not at_first:
            return "batch"
    leapt = any(map(signals.leaps_out_of_calm, range(max(0, place - _BEFORE), place)))
    return "leap" if leapt else "growth"


def _growth(signals: RunSignals, place: int) -> tuple[float, tuple[Evidence, ...]]:
    """Return the growth before the first non-finite step, with evidence; norms alone also grow as learning begins."""
    best, seen = 0.0, ()
    for name, series in (("loss", signals.loss), ("gradient norm", signals.norm)):
        before = [(k, value) for k, value in enumerate(series.values[:place]) if value > 0]
        recent = [value for k, value in before if place - _LAST <= k]
        if not recent:
            continue
        past = [value for k, value in before if place - _BEFORE - _PAST <= k < place - _BEFORE]
        # maxima of _LAST values, comparable with max(recent): losses of different sizes may take turns
        past = [max(past[k : k + _LAST]) for k in range(len(past) - _LAST + 1)]
        usual = statistics.median(past) if len(past) >= _PAST // 2 else min(value for _, value in before[:3])
        times = max(recent) / usual
        if times > best and not (seen and best < 1 and times < FAR_GROWN):
            steps = signals.named(max(0, place - _BEFORE)), signals.named(place - 1)
            words = f"The {name} had grown from {number(usual)} to {number(max(recent))} within {_BEFORE} steps."
            best, seen = times, (Evidence(steps, words),)
    return best, seen


def _origin(signals: RunSignals, place: int) -> tuple[str, str]:
    """Return the forward operation with the first non-finite result, and its dtype; empty if not recorded."""
    origins = [one for one in signals.record.steps.column("origin")[: place + 2] if one]
    return origins[-1] if origins and len(origins[-1]) == 2 else ("", "")


def _first_seen(signals: RunSignals, place: int) -> Evidence:
    """Return the evidence of the first non-finite step, with the parameters affected."""
    finding, step = signals.finding("nonfinite"), signals.named(place)
    params = () if finding is None else finding.params
    where = f", in {named(params)}" if params else ""
    steps = counted(sum(signals.lost), "step")
    words = f"The loss or gradients were NaN or infinite on {steps}, first on step {step}{where}."
    return Evidence((step, signals.span[1] if signals.ends_lost else step), words, params)


def _at_once(signals: RunSignals, place: int, by: str) -> Sign:
    """Return the sign of values that became non-finite without growth; it names the first such operation."""
    step, (operation, dtype) = signals.named(place), _origin(signals, place)
    made = {
        "data": "The data themselves held NaN or infinity.",
        "weights": "The weights were not finite before the forward pass began.",
        "": "Losses and norms were as usual before.",
    }.get(operation, f"The first operation whose result was not finite is {operation}, in {dtype}.")
    learned = " while the run was learning" if signals.curve_until(place).has_fallen else ""
    seen = Evidence((max(signals.span[0], step - _BEFORE), step), made)
    sure = "certain" if by == "small type" and operation else ""
    return Sign((_first_seen(signals, place), seen), {"step": step, "learned": learned}, sure)


def _by_growth(signals: RunSignals, place: int, by: str) -> Sign:
    """Return the sign of values that grew until they became non-finite; after a leap out of calm it is only likely."""
    fix, (times, growth) = lower_rate(signals, place), _growth(signals, place)
    sure = times > 10 * GROWN and place > _BEFORE and by == "growth"
    return Sign(
        (_first_seen(signals, place), *(growth if times > 1 else ())),
        {"step": signals.named(place), "advice": fix.advice},
        "certain" if sure else "likely",
        fix.factor,
        fix.threshold,
    )
