"""Which clipping threshold a run asks for, read from its own pre-clip gradient norms.

Norms of healthy training are close to log-normal, so all of this happens in log space, with median and MAD
rather than mean and deviation: the spikes that a threshold is for must not move the threshold.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gradguard.monitoring.judge.numbers import percent
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import binds, by_optimizer, regime_of, taken_steps, usable_norms

ENOUGH_STEPS = 200
DEVIATIONS = 6.0
SPREAD_FLOOR = 0.05
GUARD_SHARE = 0.05
DRIFT = 2.0
_MAD_TO_SIGMA = 1.4826
_WINDOWS = 10
_SHORTEST_WINDOW = 10
_NOISE_SPAN, _MEDIAN_ERROR = 6.0, 1.2533  # deviations of a window's median; of a median over those of a mean
_RESAMPLES = 400
_LARGEST_EXPONENT = 690.0  # exp of it is still a float after rounding up to two digits
_SCALE_FREE = ("adam", "lion", "adafactor", "rmsprop", "adagrad", "adadelta", "muon", "sign", "rprop", "soap")


@dataclass(frozen=True)
class Candidate:
    """One threshold and what it would have done to the run.

    Attributes:
        name: ``"guard"``, ``"shaping"`` or ``"reference"``.
        threshold: The number, two significant digits.
        meaning: Where the number comes from, in a few words.
        clip_share: The share of usable steps whose norm is above it.
        interval: 95 % block-bootstrap interval of that share.
    """

    name: str
    threshold: float
    meaning: str
    clip_share: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Recommendation:
    """A decision about clipping with its reason.

    Attributes:
        kind: ``"keep"`` the clip as it is, ``"constant"`` threshold, ``"rule"`` that follows the norms, ``"nothing"``
            to clip, ``"fix"`` something else first, or ``"unknown"`` where the record cannot say.
        headline: The decision in one sentence.
        reason: Plain sentences that a person can act on.
        threshold: The constant of ``"keep"`` and ``"constant"``, or None.
        rule: What ``gradguard run --clip`` takes, such as ``"norm=1.3"`` or ``"median"``; None where there is no rule
            to try.
        candidates: Guard, shaping and reference, empty when there is no recommendation.
        usable_steps: How many steps the numbers rest on.
        drift: The guard threshold at the start and at the end of the run, or where the norm was smallest and largest,
            in the order of time, if the norm moved by much.
        parts: The recommendation for each optimizer with its label, where the record has several.
    """

    kind: str
    headline: str
    reason: str
    threshold: float | None = None
    rule: str | None = None
    candidates: tuple[Candidate, ...] = ()
    usable_steps: int = 0
    drift: tuple[float, float] | None = None
    parts: tuple[tuple[str, "Recommendation"], ...] = ()


def recommend(record: Record) -> Recommendation:
    r"""Recommend a threshold for ``clip_grad_norm_`` from the pre-clip norms of a run.

    The rule: take the finite pre-clip norms of real steps and drop the warm-up. In log space let :math:`m` be
    the median and :math:`s = \max(1.4826\,\mathrm{MAD},\,0.05)`. Then

    .. math:: \text{guard} = e^{m + 6s}, \quad \text{shaping} = 90\text{th percentile}, \quad
              \text{reference} = 5 \times \text{mean}.

    The guard is recommended: it leaves ordinary steps alone and cuts off what is six deviations too large.

    **Guarantees**: multiplying every norm by a constant multiplies every threshold by it (to two digits); the
    same record always gives the same answer.

    **Edge cases**:

    ============================================ =====================================================
    no pre-clip norm in the record               None; a post-clip norm only repeats the old threshold
    steps of several optimizers                  None, and a recommendation for each in ``parts``
    fewer than 200 usable steps                  None, "not enough steps (n of 200)"
    a norm clip that bound on at most 5 %        that threshold: "keep it"
    guard above every norm of the run            guard, with "insurance, not a cure"
    windowed median moves by more than 2x        guard, and both ends in ``drift``
    ============================================ =====================================================

    Args:
        record: The record of a run, clipped or not.

    Returns:
        The threshold, its reason and the three candidates.
    """
    parts = by_optimizer(record)
    if len(parts) > 1:
        return _for_each([(part.label, _recommend(part.record)) for part in parts])
    return _recommend(record)


def _for_each(parts: list[tuple[str, Recommendation]]) -> Recommendation:
    said = [
        f"{label}: {'none' if one.threshold is None else f'{one.threshold:g}'}. {one.reason}" for label, one in parts
    ]
    usable = sum(one.usable_steps for _, one in parts)
    return Recommendation("unknown", _SEVERAL, " ".join([_SEVERAL, *said]), usable_steps=usable, parts=tuple(parts))


def _recommend(record: Record) -> Recommendation:
    if not any("norm" in step for step in record.steps):
        return Recommendation("unknown", "The record has no norms to judge by.", _no_norms(record))
    norms = usable_norms(record)
    if len(norms) < ENOUGH_STEPS:
        missing = f"not enough steps ({len(norms)} of {ENOUGH_STEPS}) for a threshold that can be trusted"
        headline = "Record a longer run."
        return Recommendation("unknown", headline, f"{missing}; record a longer run.", usable_steps=len(norms))
    candidates, moved = _candidates(norms), _drift(norms)
    drift = None if moved is None else (moved[0].guard, moved[1].guard)
    used = _guarding_threshold(record)
    first = _guard_reason(candidates, len(norms)) if used is None else _keep_reason(used, record)
    sentences = [first, _drift_reason(moved), _present(record) if used is None else "", _advice(record)]
    threshold = candidates[0].threshold if used is None else used
    kind, headline = ("constant", f"Clip at {threshold:g}.") if used is None else ("keep", f"Keep {threshold:g}.")
    reason, rule = " ".join(filter(None, sentences)), f"norm={threshold:g}"
    return Recommendation(kind, headline, reason, threshold, rule, candidates, len(norms), drift)


def centre_and_spread(norms: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation of the logarithms; the spread is at least 0.05.

    Args:
        norms: Positive norms, at least one.

    Returns:
        The median m and the spread s, both of natural logarithms.
    """
    logs = [math.log(norm) for norm in norms]
    centre = statistics.median(logs)
    mad = statistics.median(abs(value - centre) for value in logs)
    return centre, max(_MAD_TO_SIGMA * mad, SPREAD_FLOOR)


def guard_threshold(norms: Sequence[float]) -> float:
    """The norm six robust deviations above the median, in log space; a larger norm is called a spike.

    Args:
        norms: Positive norms, at least one.

    Returns:
        The threshold, not rounded.
    """
    centre, spread = centre_and_spread(norms)
    return math.exp(min(centre + DEVIATIONS * spread, _LARGEST_EXPONENT))


def is_scale_free(record: Record) -> bool | None:
    """Whether the optimizer cancels a constant factor on all gradients, as Adam does and SGD does not.

    Args:
        record: The record of a run.

    Returns:
        True, False, or None where the record does not say or the run mixes both kinds.
    """
    optimizers: list[Any] = record.meta.get("optimizers") or []
    answers = {cancels_scale(str(name)) for name in optimizers}
    return answers.pop() if len(answers) == 1 else None


def cancels_scale(optimizer: str) -> bool:
    """Whether an optimizer's update stays nearly the same when all gradients are multiplied by a constant.

    Args:
        optimizer: The name of its class.

    Returns:
        True for Adam and its like, False for SGD and for what is not known.

    Example:
        >>> [cancels_scale(name) for name in ("AdamW", "SGD")]
        [True, False]
    """
    return any(word in optimizer.lower() for word in _SCALE_FREE)


def _candidates(norms: list[float]) -> tuple[Candidate, ...]:
    percentile = statistics.quantiles(norms, n=10, method="inclusive")[-1]
    mean = math.fsum(norm / len(norms) for norm in norms)
    named = (
        ("guard", guard_threshold(norms), "median × exp(6 robust deviations)"),
        ("shaping", percentile, "90th percentile"),
        ("reference", 5 * mean, "5 × mean (Pascanu et al.)"),
    )
    return tuple(_candidate(name, _two_digits(number), meaning, norms) for name, number, meaning in named)


def _candidate(name: str, threshold: float, meaning: str, norms: list[float]) -> Candidate:
    clipped = [norm > threshold for norm in norms]
    return Candidate(name, threshold, meaning, sum(clipped) / len(clipped), _bootstrap_share(clipped))


def _two_digits(number: float) -> float:
    return float(f"{number:.1e}")


def _bootstrap_share(flags: list[bool], seed: int = 0) -> tuple[float, float]:
    # 95 % interval of the share of true flags, from circular blocks: neighbouring steps are not independent.
    count, block = len(flags), math.isqrt(len(flags))
    sums = list(accumulate(flags + flags[:block], initial=0))
    draws, generator = -(-count // block), random.Random(seed)
    resamples = (generator.choices(range(count), k=draws) for _ in range(_RESAMPLES))
    shares = sorted(sum(sums[i + block] - sums[i] for i in starts) / (draws * block) for starts in resamples)
    return shares[round(0.025 * _RESAMPLES)], shares[round(0.975 * _RESAMPLES) - 1]


@dataclass(frozen=True, slots=True)
class _Window:
    # A tenth of the run: where it lies in it, from 0 to 9, its median norm, and the guard of its norms.
    place: int
    median: float
    norms: Sequence[float]

    @property
    def guard(self) -> float:
        return _two_digits(guard_threshold(self.norms))


def drift_ratio(norms: Sequence[float]) -> float | None:
    """By how much the windowed median norm moves: the largest over the smallest median of ten windows.

    Args:
        norms: Positive norms in the order of the steps.

    Returns:
        A number of at least 1, or None for fewer than 100 norms, whose windows are too short for a median.

    Example:
        >>> drift_ratio([1.0] * 500 + [3.0] * 500)
        3.0
    """
    if len(norms) < _WINDOWS * _SHORTEST_WINDOW:
        return None
    medians = [window.median for window in _windows(norms)]
    return max(medians) / min(medians)


def has_drifted(norms: Sequence[float]) -> bool:
    """Whether the windowed median moves by more than 2x, and by more than the noise of medians alone would explain.

    Args:
        norms: Positive norms in the order of the steps.

    Returns:
        True where one fixed threshold would be wrong at one end.
    """
    ratio = drift_ratio(norms)
    if ratio is None or ratio <= DRIFT:
        return False
    # Ten medians of noise span some three of their standard deviations, and six in one run of a thousand. The spread
    # is taken within windows, because the drift is none of it.
    size = len(norms) // _WINDOWS
    spread = statistics.median(centre_and_spread(window.norms)[1] for window in _windows(norms))
    return math.log(ratio) > _NOISE_SPAN * _MEDIAN_ERROR * spread / math.sqrt(size)


def drift_ends(norms: Sequence[float]) -> tuple[float, float] | None:
    """The median norms between which a run drifted, in the order of time.

    Args:
        norms: Positive norms in the order of the steps.

    Returns:
        Those of the first and the last tenth, or of the two extreme tenths where the ends are alike; None without
        drift.
    """
    moved = _drift(norms)
    return None if moved is None else (moved[0].median, moved[1].median)


def _windows(norms: Sequence[float]) -> list[_Window]:
    size = len(norms) // _WINDOWS
    parts = (norms[place * size : (place + 1) * size] for place in range(_WINDOWS))
    return [_Window(place, statistics.median(part), part) for place, part in enumerate(parts)]


def _drift(norms: Sequence[float]) -> tuple[_Window, _Window] | None:
    # The first and the last window where they are wide apart, else the two extremes in the order of time.
    if not has_drifted(norms):
        return None
    windows = _windows(norms)
    ends = windows[0], windows[-1]
    if max(end.median for end in ends) > DRIFT * min(end.median for end in ends):
        return ends
    extremes = (f(windows, key=lambda window: window.median) for f in (min, max))
    first, second = sorted(extremes, key=lambda window: window.place)
    return first, second


def _guarding_threshold(record: Record) -> float | None:
    # The threshold of a norm clip that was in force all along and already acts as a guard.
    used = {step.get("threshold") if step.get("rule") == "norm" else None for step in record.steps}
    threshold = used.pop() if len(used) == 1 else None
    return threshold if 0 < _bound_share(record) <= GUARD_SHARE else None


def _bound_share(record: Record) -> float:
    taken = taken_steps(record)
    return sum(map(binds, taken)) / len(taken) if taken else 0.0


def _keep_reason(used: float, record: Record) -> str:
    share = percent(_bound_share(record))
    return f"Keep it: {used:g} bound on {share} of {len(taken_steps(record)):,} steps and left the others alone."


def _present(record: Record) -> str:
    # What clipping does now, so that a reader can tell whether the number changes anything.
    if not any("coefficient" in step for step in record.steps):
        return ""
    share = _bound_share(record)
    return f"At present clipping binds on {percent(share)} of the steps (regime: {regime_of(share)})."


def _no_norms(record: Record) -> str:
    if not record.steps and record.end is not None:
        clips = record.end.get("clips")
        seen = f"Clip calls were seen ({clips:,}), but no step" if clips else "No step"
        return (
            f"{seen} of a torch.optim optimizer{'' if clips else ' was seen'}, so no norm was recorded: gradguard "
            "measures at optimizer.step(), which a script that changes its weights by hand does not call."
        )
    if any("post_norm" in step for step in record.steps):
        return (
            "Only norms after clipping were recorded; a threshold read from those would repeat the old one; "
            "record the run again with gradguard run, which sees the norms before clipping."
        )
    return "The record holds no gradient norms; record the run again with gradguard run."


def _guard_reason(candidates: tuple[Candidate, ...], count: int) -> str:
    guard, shaping, _ = candidates
    if guard.clip_share == 0:
        return (
            "It is six robust deviations above the median, and would not have clipped any step "
            f"of this run: insurance, not a cure (counted on {count:,} usable steps). If training is unstable all the "
            f"same, try the shaping threshold {shaping.threshold:g}."
        )
    low, high = guard.interval
    return (
        "It is six robust deviations above the median, and would have clipped "
        f"{percent(guard.clip_share)} of {count:,} steps (95 % interval {percent(low)} to "
        f"{percent(high)}; counted on the recorded norms, without feedback), "
        f"{_SPIKES_ONLY if guard.clip_share < GUARD_SHARE else _HEAVY_TAIL}."
    )


_SEVERAL = "Several optimizers step in this run, and one threshold cannot fit the norms of all."
_SPIKES_ONLY = "the spikes, and left every ordinary step alone"
_HEAVY_TAIL = "so many that it already shapes training: the norms are heavy-tailed, or the run diverged"


def _drift_reason(moved: tuple[_Window, _Window] | None) -> str:
    if moved is None:
        return ""
    first, second = moved
    return (
        "The norms drift by more than 2x, so one number cannot fit both ends: "
        f"{_TENTHS[first.place]} asks for {first.guard:g}, {_TENTHS[second.place]} for {second.guard:g}. "
        "A threshold that follows the norms fits both: gg.ClipByMedian()."
    )


_TENTHS = ("the first tenth", *(f"tenth {place} of 10" for place in range(2, 10)), "the last")


def _advice(record: Record) -> str:
    scale_free, names = is_scale_free(record), " and ".join(map(str, record.meta.get("optimizers") or []))
    if scale_free is None:
        return ""
    if scale_free:
        return (
            f"With {names} a constant scaling nearly cancels, so a threshold so low that it binds on every "
            "step would mostly normalise one step against the next."
        )
    return f"With {names} a threshold so low that it always binds would act as a smaller learning rate."
