"""Signs of numbers that stopped being finite: by the data, by the range of a type, or because they had grown."""

import statistics
from itertools import groupby

from gradguard.monitoring.judge.cause import Evidence, Sign
from gradguard.monitoring.judge.causes.rate import lower_rate
from gradguard.monitoring.judge.findings import named
from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.judge.signals import RunSignals
from gradguard.words import counted

GROWN = 3.0
"""Norms or losses so many times the recent ones, just before numbers were lost, had grown."""

FAR_GROWN = 30.0
"""Norms had grown by this factor just before numbers were lost, where the loss was below its recent level."""

_BEFORE = 10  # steps in which growth must end
_LAST = 3  # steps on which numbers that grow are at their largest
_PAST = 60  # steps before these that say what was usual
_NEVER_OVERFLOW = ("LogSoftmax", "Softmax", "")  # what is not finite in the result of the first two was so before
_SMALL_TYPE = "float16"


def lost(by: str, signals: RunSignals) -> Sign | None:
    """Return whether numbers were lost for one reason.

    Args:
        by: ``"data"``, ``"growth"``, ``"leap"``, ``"small type"``, ``"exponential"`` or ``"batch"``.
        signals: The signals of the run.
    """
    place = signals.first_lost
    if place is None or _reason(signals, place) != by:
        return None
    return _by_growth(signals, place, by) if by in ("growth", "leap") else _at_once(signals, place, by)


def scale_collapses(signals: RunSignals) -> Sign | None:
    """Return whether the loss scale fell and fell: gradients overflow whatever it is."""
    if signals.first_lost is not None or signals.finding("amp_scale_collapse") is None:
        return None
    longest = max((len(list(run)) for searched, run in groupby(signals.searched) if searched), default=0)
    words = f"The loss scale was halved {longest} times in a row, and every one of these steps was skipped."
    return Sign((signals.seen(words),))


def _reason(signals: RunSignals, place: int) -> str:
    """Why numbers were lost at a place: growth is judged against the recent past, and not the first norms."""
    operation, dtype = _origin(signals, place)
    if operation == "data":
        return "data"
    at_first = 0 < place <= 2 and signals.rates[place - 1] != 0  # right after the first update, if a rate made one
    if _growth(signals, place)[0] <= GROWN:
        is_small = dtype == _SMALL_TYPE
        if operation in _NEVER_OVERFLOW:  # what is not finite there was so before
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
    """How far losses and norms had grown when numbers were lost; norms alone grow where learning begins."""
    best, seen = 0.0, ()
    for name, series in (("loss", signals.loss), ("gradient norm", signals.norm)):
        before = [(k, value) for k, value in enumerate(series.values[:place]) if value > 0]
        recent = [value for k, value in before if place - _LAST <= k]
        if not recent:
            continue
        past = [value for k, value in before if place - _BEFORE - _PAST <= k < place - _BEFORE]
        past = [max(past[k : k + _LAST]) for k in range(len(past) - _LAST + 1)]  # as of the last ones: losses in turns
        usual = statistics.median(past) if len(past) >= _PAST // 2 else min(value for _, value in before[:3])
        times = max(recent) / usual
        if times > best and not (seen and best < 1 and times < FAR_GROWN):
            steps = signals.named(max(0, place - _BEFORE)), signals.named(place - 1)
            words = f"The {name} had grown from {number(usual)} to {number(max(recent))} within {_BEFORE} steps."
            best, seen = times, (Evidence(steps, words),)
    return best, seen


def _origin(signals: RunSignals, place: int) -> tuple[str, str]:
    """Where the forward first had a number that is not finite, and its type; empty where the record does not say."""
    origins = [one for one in signals.record.steps.column("origin")[: place + 2] if one]
    return origins[-1] if origins and len(origins[-1]) == 2 else ("", "")


def _first_seen(signals: RunSignals, place: int) -> Evidence:
    """Where numbers were lost first, and in which parameters."""
    finding, step = signals.finding("nonfinite"), signals.named(place)
    params = () if finding is None else finding.params
    where = f", in {named(params)}" if params else ""
    steps = counted(sum(signals.lost), "step")
    words = f"The loss or gradients were NaN or infinite on {steps}, first on step {step}{where}."
    return Evidence((step, signals.span[1] if signals.ends_lost else step), words, params)


def _at_once(signals: RunSignals, place: int, by: str) -> Sign:
    """Numbers that were lost while nothing had grown: the sign names the operation that made the first one."""
    step, (operation, dtype) = signals.named(place), _origin(signals, place)
    made = {
        "data": "The data themselves held a number that is not finite.",
        "weights": "The weights were not finite before the forward began.",
        "": "Losses and norms were as usual before.",
    }.get(operation, f"The operation that first had such a number is {operation}, in {dtype}.")
    learned = " while the run was learning" if signals.curve_until(place).has_fallen else ""
    seen = Evidence((max(signals.span[0], step - _BEFORE), step), made)
    sure = "certain" if by == "small type" and operation else ""
    return Sign((_first_seen(signals, place), seen), {"step": step, "learned": learned}, sure)


def _by_growth(signals: RunSignals, place: int, by: str) -> Sign:
    """Numbers that grew until they were lost; a step that leapt out of calm leaves open what made it."""
    fix, (times, growth) = lower_rate(signals, place), _growth(signals, place)
    sure = times > 10 * GROWN and place > _BEFORE and by == "growth"
    return Sign(
        (_first_seen(signals, place), *(growth if times > 1 else ())),
        {"step": signals.named(place), "advice": fix.advice},
        "certain" if sure else "likely",
        fix.factor,
        fix.threshold,
    )
