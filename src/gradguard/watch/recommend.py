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

from gradguard.watch.record import Record

ENOUGH_STEPS = 200
DEVIATIONS = 6.0
SPREAD_FLOOR = 0.05
GUARD_SHARE = 0.05
DRIFT = 2.0
_MAD_TO_SIGMA = 1.4826
_WINDOWS = 10
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
    """A threshold with its reason.

    Attributes:
        threshold: The number for ``--clip norm=``, or None when the record cannot support one.
        reason: Plain sentences that a person can act on.
        candidates: Guard, shaping and reference, empty when there is no recommendation.
        usable_steps: How many steps the numbers rest on.
        drift: The guard threshold at the start and at the end of the run, if the two differ by much.
    """

    threshold: float | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    usable_steps: int = 0
    drift: tuple[float, float] | None = None


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
    steps of several optimizers                  None, their norms are not one distribution
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
    if not any("norm" in step for step in record.steps):
        return Recommendation(None, _no_norms(record))
    if len({step.get("optimizer") for step in record.steps}) > 1:
        return Recommendation(None, _SEVERAL)
    norms = usable_norms(record)
    if len(norms) < ENOUGH_STEPS:
        missing = f"not enough steps ({len(norms)} of {ENOUGH_STEPS}) for a threshold that can be trusted"
        return Recommendation(None, f"{missing}; record a longer run.", usable_steps=len(norms))
    candidates = _candidates(norms)
    drift = _drift(norms)
    used = _guarding_threshold(record)
    if used is not None:
        return Recommendation(used, _keep_reason(used, record), candidates, len(norms), drift)
    sentences = [_guard_reason(candidates, len(norms)), _drift_reason(drift), _advice(record)]
    reason = " ".join(filter(None, sentences))
    return Recommendation(candidates[0].threshold, reason, candidates, len(norms), drift)


def usable_norms(record: Record) -> list[float]:
    """Pre-clip norms that say something about ordinary training.

    Left out: the warm-up (the first 10 % of a run below 1,000 steps, else the larger of 2 % and 100 steps),
    skipped steps, norms that are not finite, and zeros, which have no logarithm.

    Args:
        record: The record of a run.

    Returns:
        The norms in the order of the steps.
    """
    count = len(record.steps)
    warm_up = count // 10 if count < 1000 else max(count // 50, 100)
    return [norm for step in record.steps[warm_up:] if not step.get("skipped") and (norm := step.get("norm"))]


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
    answers = {any(word in str(name).lower() for word in _SCALE_FREE) for name in optimizers}
    return answers.pop() if len(answers) == 1 else None


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


def _drift(norms: list[float]) -> tuple[float, float] | None:
    # The guard of the first and of the last window, where the windowed median moves by more than 2x.
    size = len(norms) // _WINDOWS
    windows = [norms[start : start + size] for start in range(0, size * _WINDOWS, size)]
    medians = [statistics.median(window) for window in windows]
    if max(medians) <= DRIFT * min(medians):
        return None
    return _two_digits(guard_threshold(windows[0])), _two_digits(guard_threshold(windows[-1]))


def _guarding_threshold(record: Record) -> float | None:
    # The threshold of a norm clip that was in force all along and already acts as a guard.
    used = {step.get("threshold") if step.get("rule") == "norm" else None for step in record.steps}
    threshold = used.pop() if len(used) == 1 else None
    return threshold if 0 < _bound_share(record) <= GUARD_SHARE else None


def _bound_share(record: Record) -> float:
    return sum((step.get("coefficient") or 1.0) < 1 for step in record.steps) / len(record.steps)


def _keep_reason(used: float, record: Record) -> str:
    share = 100 * _bound_share(record)
    return f"Keep it: {used:g} bound on {share:.2g} % of {len(record.steps):,} steps and left the others alone."


def _no_norms(record: Record) -> str:
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
            "of this run: insurance, not a cure. If training is unstable all the same, try the shaping "
            f"threshold {shaping.threshold:g}."
        )
    low, high = guard.interval
    return (
        "It is six robust deviations above the median, and would have clipped "
        f"{100 * guard.clip_share:.2g} % of {count:,} steps (95 % interval {100 * low:.2g} to "
        f"{100 * high:.2g} %), "
        f"{_SPIKES_ONLY if guard.clip_share < GUARD_SHARE else _HEAVY_TAIL}."
    )


_SEVERAL = (
    "Several optimizers step in this run, and one threshold cannot fit the norms of all: clip each with a number of "
    "its own."
)
_SPIKES_ONLY = "the spikes, and left every ordinary step alone"
_HEAVY_TAIL = "so many that it already shapes training: the norms are heavy-tailed, or the run diverged"


def _drift_reason(drift: tuple[float, float] | None) -> str:
    if drift is None:
        return ""
    return (
        "The norms drift by more than 2x, so one number cannot fit both ends: the first tenth asks "
        f"for {drift[0]:g}, the last for {drift[1]:g}."
    )


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
