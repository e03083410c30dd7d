"""Numbers that stopped being finite: by the data, by the range of a type, or because they had grown."""

import statistics
from itertools import groupby

from gradguard.monitoring.judge.cause import Cause, Evidence
from gradguard.monitoring.judge.findings import named
from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.judge.rates import lower_rate
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


def nonfinite(signals: RunSignals) -> Cause | None:
    """Return why gradients or losses were not finite, if some were not.

    Growth is judged against the recent past: a run that has learned has norms far from its first ones, either way.
    """
    place = signals.first_lost
    if place is None:
        return _scale_collapse(signals)
    step = signals.named(place)
    finding = signals.finding("nonfinite")
    params = () if finding is None else finding.params
    where = f", in {named(params)}" if params else ""
    words = (
        f"The loss or gradients were NaN or infinite on {counted(sum(signals.lost), 'step')}, first on step "
        f"{step}{where}."
    )
    seen = Evidence((step, signals.span[1] if signals.ends_lost else step), words, params)
    times, growth = _growth(signals, place)
    origin = _origin(signals, place)
    if origin[0] == "data":
        return _by_data(signals, step, seen, "certain", "The data themselves held a number that is not finite.")
    if times > GROWN:
        return _by_growth(signals, place, seen, times, growth)
    small = _is_small(signals, origin)
    if small or origin[0] == "Exp":
        return _by_range(signals, step, seen, small, origin)
    if 0 < place <= 2 and signals.rates[place - 1]:  # right after the first update, which the rate makes
        return _by_growth(signals, place, seen, times, growth)
    return _by_data(signals, step, seen, "likely", _made_by(origin))


def _growth(signals: RunSignals, place: int) -> tuple[float, tuple[Evidence, ...]]:
    """How far losses and norms had grown when numbers were lost; norms alone grow where learning begins."""
    best, seen = 0.0, ()
    for name, values in (("loss", signals.losses), ("norm", signals.norms)):
        before = [(k, value) for k, value in enumerate(values[:place]) if value is not None and value > 0]
        if not before:
            continue
        recent = [value for k, value in before if place - _LAST <= k]
        past = [value for k, value in before if place - _BEFORE - _PAST <= k < place - _BEFORE]
        past = [max(past[k : k + _LAST]) for k in range(len(past) - _LAST + 1)]  # as of the last ones: losses in turns
        usual = statistics.median(past) if len(past) >= _BEFORE else min(value for _, value in before[:3])
        if not recent:
            continue
        times = max(recent) / usual
        if seen and best < 1 and times < FAR_GROWN:
            continue
        if times > best:
            steps = signals.named(max(0, place - _BEFORE)), signals.named(place - 1)
            what = "gradient norm" if name == "norm" else "loss"
            words = f"The {what} had grown from {number(usual)} to {number(max(recent))} within {_BEFORE} steps."
            best, seen = times, (Evidence(steps, words),)
    return best, seen


def _origin(signals: RunSignals, place: int) -> tuple[str, str]:
    """Where the forward first had a number that is not finite, and its type; empty where the record does not say."""
    origins = [one for one in signals.record.steps.column("origin")[: place + 2] if one]
    return origins[-1] if origins and len(origins[-1]) == 2 else ("", "")


def _is_small(signals: RunSignals, origin: tuple[str, str]) -> bool:
    """Whether numbers may have left the range of the type of 16 bits."""
    if origin[0] not in _NEVER_OVERFLOW:
        return origin[1] == _SMALL_TYPE
    stored = {parameter.get("dtype") for parameter in signals.params}
    in_use = stored.union(signals.record.meta.get("compute", ()))
    return signals.record.steps.has_any("amp_scale") or _SMALL_TYPE in in_use


def _made_by(origin: tuple[str, str]) -> str:
    if origin[0] == "weights":
        return "The weights were not finite before the forward began."
    return origin[0] and f"The operation that first had such a number is {origin[0]}, in {origin[1]}."


def _by_data(signals: RunSignals, step: int, seen: Evidence, certainty: str, why: str) -> Cause:
    calm = Evidence((max(signals.span[0], step - _BEFORE), step), why or "Losses and norms were as usual before.")
    return Cause(
        "nonfinite_data",
        certainty,
        f"At step {step} the loss or a gradient became NaN or infinite, and nothing had grown before: it comes from "
        "the batch or an operation on it.",
        f"Look at the batch of step {step} for NaN, infinity, an empty or corrupt sample, and for a logarithm, root or "
        "division of 0: `gradguard explain nan` finds the sample, the operation and its line. To leave such steps out "
        'until then, use gg.Guard(optimizer, nonfinite="skip").',
        (seen, calm),
        ("Neither a lower learning rate nor a clip keeps this away: nothing had grown before.",),
    )


def _by_range(signals: RunSignals, step: int, seen: Evidence, small: bool, origin: tuple[str, str]) -> Cause:
    made = (Evidence((step, step), _made_by(origin)),) if origin[0] else ()
    curve = signals.curve_until(signals.lost.index(True))
    learned = " while the run was learning" if curve is not None and curve.has_fallen else ""
    if small:
        sentence = f"A number left the range of float16, above 65,504, at step {step}{learned}."
        advice = (
            "Use bfloat16 in place of float16, which has the range of float32; or compute what overflows in float32: "
            "the logits and the loss with .float(), inside torch.autocast(enabled=False)."
        )
    else:
        sentence = f"An exponential left the range of float32 at step {step}{learned}."
        advice = (
            "Compute it in a stable form: torch.logsumexp, log_softmax, softplus or cross_entropy in place of exp, or "
            "subtract the largest value before exp."
        )
    return Cause(
        "nonfinite_range",
        "certain" if made else "likely",
        sentence,
        advice,
        (seen, *made),
        ("The learning rate is not the cause: losses and norms were at their usual level before.",),
    )


def _by_growth(signals: RunSignals, place: int, seen: Evidence, times: float, growth: tuple[Evidence, ...]) -> Cause:
    step, fix = signals.named(place), lower_rate(signals, place)
    leapt = any(map(signals.leaps_out_of_calm, range(max(0, place - _BEFORE), place)))
    return Cause(
        "nonfinite_growth",
        "certain" if times > 10 * GROWN and place > _BEFORE and not leapt else "likely",
        f"Losses and gradients grew until they became NaN or infinite at step {step}.",
        fix.advice,
        (seen, *(growth if times > 1 else ())),
        () if leapt else ("It is no bad sample and no bad operation: numbers grew step by step before.",),
        rate_factor=fix.factor,
        threshold=fix.threshold,
    )


def _scale_collapse(signals: RunSignals) -> Cause | None:
    """A loss scale that fell and fell: gradients overflow whatever it is."""
    if signals.finding("amp_scale_collapse") is None:
        return None
    longest = max((len(list(run)) for searched, run in groupby(signals.searched) if searched), default=0)
    words = f"The loss scale was halved {longest} times in a row, and every one of these steps was skipped."
    return Cause(
        "nonfinite_range",
        "likely",
        "Gradients overflow float16 whatever the loss scale is, so that steps are skipped one after the other.",
        "Use bfloat16 in place of float16 and no GradScaler; if numbers are not finite then either, "
        "`gradguard explain nan` finds the operation.",
        (signals.seen(words),),
    )
