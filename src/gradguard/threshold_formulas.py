"""The rules that choose a threshold, once: for tensors on a device and for plain numbers.

A rule is a function of the norm of this step and of what it remembers. It takes the operations that differ between the
two kinds of number as ``ops``: `PLAIN` for floats, and `gradguard.tensors.number_operations.TENSORS`, with which the
host reads nothing. The norms of earlier steps are in a `History`: a tensor of fixed length in
`gradguard.clip.thresholds.base`, lists in `gradguard.threshold_rules`. All else that a rule remembers is an argument,
and its next value a result.
"""

import math
import operator
from typing import Any, Protocol

Number = Any
"""A float, or a tensor: 0-dim, or with one entry for each gradient where a rule treats each by itself."""

Numbers = Any
"""A tuple of them."""

Truth = Any
"""A bool, or a tensor of them."""


class Operations(Protocol):
    """What is written differently for floats and for tensors."""

    def where(self, condition: Truth, yes: Number, no: Number, /) -> Number:
        """Return ``yes`` where ``condition`` holds, else ``no``."""

    def within(self, x: Number, low: float, high: float, /) -> Number:
        """Return ``x``, or the bound that it exceeds."""

    def larger(self, x: Number, y: Number, /) -> Number:
        """Return the larger of two numbers."""

    def ratio(self, x: Number, y: Number, /) -> Number:
        """Return x / y; of a zero y infinity, or NaN if x is zero too."""

    def number(self, x: Number | Truth, like: Number, /) -> Number:
        """Return ``x`` as a number of the type of ``like``; 1 of a condition that holds, else 0."""

    def is_infinite(self, x: Number, /) -> Truth:
        """Tell whether ``x`` is positive infinity."""

    def logical_not(self, condition: Truth, /) -> Truth:
        """Return whether ``condition`` does not hold."""

    def possible(self, condition: Truth, /) -> Truth:
        """Return False only where the host knows that ``condition`` does not hold: never of a tensor."""

    def exp(self, x: Number, /) -> Number:
        """Return e to the power of ``x``."""

    def log(self, x: Number, /) -> Number:
        """Return the natural logarithm of ``x``, negative infinity of 0 and below."""

    def sqrt(self, x: Number, /) -> Number:
        """Return the square root of ``x``."""

    def floor(self, x: Number, /) -> Number:
        """Return the largest whole number up to ``x``."""


class History(Protocol):
    """Some of the norms so far, or their logarithms. ``count`` is how many norms entered the rule before."""

    def put(self, count: Number, value: Number, enters: Truth, /) -> None:
        """Remember ``value`` where ``enters`` holds; the oldest value goes where there is no room."""


class WindowHistory(History, Protocol):
    """The last values."""

    def median(self, count: Number, /) -> Number:
        """Return their median; any number if there are none."""

    def median_distance(self, count: Number, middle: Number, /) -> Number:
        """Return the median of their distances from ``middle``; any number if there are none."""


class OrderedHistory(History, Protocol):
    """Values in order."""

    def last(self, count: Number, /) -> Number:
        """Return the number of the largest value, counted from 0; 0 if there are none."""

    def neighbours(self, place: Number, last: Number, /) -> Numbers:
        """Return the value of number ``place`` and the next one, which is the same at the end."""


class FirstHistory(History, Protocol):
    """The first values."""

    def moments(self) -> Numbers:
        """Return mean and variance, added from the first value to the last."""


class _Plain:
    """The operations on floats."""

    @staticmethod
    def where(condition: bool, yes: float, no: float) -> float:
        return yes if condition else no

    @staticmethod
    def within(x: float, low: float, high: float) -> float:
        return low if x < low else high if x > high else x

    @staticmethod
    def ratio(x: float, y: float) -> float:
        if y:
            return x / y
        return math.nan if x == 0 else math.copysign(math.inf, x)

    @staticmethod
    def number(x: float | bool, like: float) -> float:
        del like
        return float(x)

    @staticmethod
    def is_infinite(x: float) -> bool:
        return x == math.inf

    @staticmethod
    def exp(x: float) -> float:
        try:
            return math.exp(x)
        except OverflowError:
            return math.inf

    @staticmethod
    def log(x: float) -> float:
        return math.log(x) if x > 0 else -math.inf

    logical_not = staticmethod(operator.not_)
    possible = staticmethod(bool)
    larger = staticmethod(max)
    sqrt = staticmethod(math.sqrt)
    floor = staticmethod(math.floor)


PLAIN: Operations = _Plain()


_TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_EPSILON = 1e-6

LOCK_IN_WINDOW = 100
"""Steps that the lock-in alarm looks back upon."""

LOCK_IN_TOLERANCE = 0.01
"""A threshold that has moved by less than this fraction over the window counts as one threshold."""


def coefficient_of(ops: Operations, norm: Number, threshold: Number) -> Number:
    """Return what gradients of ``norm`` are multiplied by: 1 up to the threshold, and then what makes it their norm."""
    # NaN fails both tests, so that it spreads, as PyTorch's does.
    return ops.where((norm <= threshold) | ops.is_infinite(threshold), 1.0, ops.ratio(threshold, norm))


def pytorch_coefficient(ops: Operations, norm: Number, threshold: Number) -> Number:
    """Return what `torch.nn.utils.clip_grad_norm_` multiplies by."""
    return ops.within(ops.ratio(threshold, norm + _EPSILON), -math.inf, 1.0)


def locked_in(seen: Number, bound: Number, least: Number, most: Number, window: int) -> Truth:
    r"""Tell whether a clip has bound on more than half of the last steps at one threshold.

    .. math:: \text{seen} \ge N \quad\text{and}\quad \text{bound} > N/2 \quad\text{and}\quad
              \max_t c_t \le 1.01 \, \min_t c_t

    Args:
        seen: How many steps there were.
        bound: On how many of the last N the clip has bound.
        least: The smallest threshold of these.
        most: The largest.
        window: N.

    Returns:
        The verdict.
    """
    return (seen >= window) & (bound * 2 > window) & (most <= least * (1 + LOCK_IN_TOLERANCE))


def median_threshold(ops: Operations, middle: Number, deviation: Number, k: float, floor: float) -> Number:
    """Return `ClipByMedian`'s threshold: k robust deviations above the median of the logarithms.

    Args:
        ops: The operations.
        middle: Their median.
        deviation: The median of their distances from it.
        k: How many.
        floor: The least robust deviation.
    """
    return ops.exp(middle + k * ops.within(_TO_STANDARD_DEVIATION * deviation, floor, math.inf))


MEDIAN_START = 0.1
"""The share of the first norm that `ClipByMedian` lets through at the first step."""

MEDIAN_START_TIMES = 1.5
"""Within its start, so many times the median is what a norm is remembered as at most."""


MEDIAN_START_TIMES_BOUNDED = 3.0
"""The same where the update is bounded besides."""

MEDIAN_UPDATE = 0.1
"""The share of the weights' norm by which a step may move them under `ClipByMedian`."""

UPDATE_PATIENCE = 16
"""After so many steps on which that bound has held it is half as large."""


def update_bound(ops: Operations, norm: Number, longest: Number, held: Number, share: float) -> tuple[Number, Number]:
    r"""Return the norm up to which gradients move the weights by no more than is allowed, and the next ``held``.

    .. math:: c = \frac{\text{share}}{1 + h / 16} \, L

    h grows by 1 on each step on which the bound holds a gradient, and falls by 1, down to 0, on each other step. So a
    run whose rate is too high goes on in steps that become shorter, as under a rate that decays like 1/t, and still
    covers any distance, since the sum of such steps has no limit. A run that needs the bound for a while gets all of it
    back.

    Args:
        ops: The operations.
        norm: The norm of this step.
        longest: L, the norm that would move the weights by as much as they are long; infinite if that is not known.
        held: h.
        share: What is allowed at h = 0.
    """
    bound = share * longest / (1 + held / UPDATE_PATIENCE)
    return bound, ops.where(norm > bound, held + 1, ops.within(held - 1, 0.0, math.inf))


def median_start(
    ops: Operations, norm: Number, middle: Number, progress: Number, start: float, times: float = MEDIAN_START_TIMES
) -> tuple[Number, Number]:
    r"""Return `ClipByMedian`'s threshold within its start, and as what this norm is remembered.

    Args:
        ops: The operations.
        norm: The norm of this step, above 0.
        middle: The median of the logarithms so far.
        progress: The share of the start that is over, from 0 to 1.
        start: The share of the first norm that passes.
        times: How many times the median a norm is remembered as at most.
    """
    most = ops.where(progress == 0, norm, times * ops.exp(middle))
    return most * ops.exp((1 - progress) * math.log(start)), ops.where(norm < most, norm, most)


def median_step(
    ops: Operations,
    logarithms: WindowHistory,
    count: Number,
    norm: Number,
    enters: Truth,
    *,
    k: float,
    warmup: int,
    floor: float,
    start: float,
    times: float,
) -> tuple[Number, Number]:
    """Return `ClipByMedian`'s threshold from the norms before this one, and the next ``count``; remember this norm.

    Args:
        ops: The operations.
        logarithms: The logarithms of the last norms.
        count: How many norms entered before.
        norm: The norm of this step.
        enters: Whether it may be remembered.
        k: How many robust deviations above the median.
        warmup: How many norms the start has.
        floor: The least robust deviation.
        start: The share of the first norm that passes.
        times: Within the start, how many times the median a norm is remembered as at most.
    """
    progress = ops.within(ops.number(count, norm) / warmup, 0.0, 1.0)
    middle = logarithms.median(count)
    early, remembered = median_start(ops, norm, middle, progress, start, times)
    later = median_threshold(ops, middle, logarithms.median_distance(count, middle), k, floor)
    starts = progress < 1
    threshold = ops.where((count > 0) | enters, ops.where(starts, early, later), math.inf)
    logarithms.put(count, ops.log(ops.where(starts, remembered, norm)), enters)
    return threshold, count + enters


def percentile_step(
    ops: Operations, history: OrderedHistory, count: Number, norm: Number, enters: Truth, percent: float
) -> tuple[Number, Number]:
    """Return `AutoClip`'s threshold, a percentile of the norms with this one among them, and the next ``count``.

    Args:
        ops: The operations.
        history: The norms.
        count: How many norms entered before.
        norm: The norm of this step.
        enters: Whether it may be remembered.
        percent: From 0 to 100.
    """
    history.put(count, norm, enters)
    count = count + enters
    last = history.last(count)
    place = ops.number(last, norm) * (percent / 100)
    below = ops.floor(place)
    low, high = history.neighbours(below, last)
    return ops.where(count > 0, interpolated(ops, low, high, place - below), math.inf), count


def interpolated(ops: Operations, low: Number, high: Number, fraction: Number) -> Number:
    """Return what lies between two neighbours of a percentile, to the last digit as NumPy has it: from the nearer."""
    return ops.where(fraction < 0.5, low + (high - low) * fraction, high - (high - low) * (1 - fraction))


def z_score_bounds(
    ops: Operations, norm: Number, mean: Number, variance: Number, limit: float, factor: float, mode: str
) -> tuple[Number, Number, Truth]:
    """Return `ZClip`'s norm from which on it binds, what it cuts ``norm`` back to, and whether it does.

    Args:
        ops: The operations.
        norm: The norm of this step.
        mean: Of the norms before.
        variance: Of the norms before.
        limit: The z-score that is too high.
        factor: What ``"adaptive_scaling"`` multiplies its bound by.
        mode: As `ZClip` has it.
    """
    deviation = ops.sqrt(variance)
    if mode == "percentile":
        bound = mean + limit * deviation
        return bound, bound, norm > bound
    z = (norm - mean) / (deviation + _EPSILON)
    passes = mean + limit * (deviation + _EPSILON)
    if mode == "mean":
        return passes, mean, z > limit
    bound = mean + ops.ratio(limit * deviation, z / limit)
    return passes, bound * factor, z > limit


def z_score_threshold(
    ops: Operations, norm: Number, passes: Number, bound: Number, spike: Truth, warm: Truth, ceiling: float
) -> Number:
    """Return `ZClip`'s threshold: what a spike is cut back to, else the norm from which on one would be.

    Args:
        ops: The operations.
        norm: The norm of this step.
        passes: What `z_score_bounds` returned first.
        bound: What it returned second.
        spike: What it returned third.
        warm: Whether there are a mean and a variance yet.
        ceiling: A threshold that always holds.
    """
    threshold = ops.where(spike, bound, ops.where(warm & (norm <= passes), passes, math.inf))
    return ops.within(threshold, -math.inf, ceiling)


def moving_moments(mean: Number, variance: Number, norm: Number, decay: float) -> tuple[Number, Number]:
    """Return mean and variance after one more norm."""
    mean = decay * mean + (1 - decay) * norm
    return mean, decay * variance + (1 - decay) * (norm - mean) ** 2


def z_score_step(
    ops: Operations,
    first: FirstHistory,
    count: Number,
    moments: Numbers,
    norm: Number,
    enters: Truth,
    *,
    alpha: float,
    z_threshold: float,
    warmup: int,
    ceiling: float,
    clip_factor: float = 1.0,
    mode: str = "adaptive_scaling",
    skip_update_on_spike: bool = False,
) -> tuple[Number, Number, Numbers]:
    """Return `ZClip`'s threshold, and the next ``count`` and ``moments``.

    Args:
        ops: The operations.
        first: The norms of the warm-up.
        count: How many norms entered before.
        moments: Mean and variance of the norms before; NaN in the warm-up, in which nothing is a spike.
        norm: The norm of this step.
        enters: Whether it may be remembered.
        alpha: The decay of both moments.
        z_threshold: The z-score that is too high.
        warmup: How many norms make the first mean and variance.
        ceiling: A threshold that always holds.
        clip_factor: What ``"adaptive_scaling"`` multiplies its bound by.
        mode: As `ZClip` has it.
        skip_update_on_spike: Whether mean and variance stay where the rule binds.
    """
    warm = count >= warmup
    mean, variance = moments
    bounds = z_score_bounds(ops, norm, mean, variance, z_threshold, clip_factor, mode)
    _, bound, spike = bounds
    threshold = z_score_threshold(ops, norm, *bounds, warm, ceiling)
    collects, follows = enters & ops.logical_not(warm), enters & warm & ops.logical_not(spike & skip_update_on_spike)
    first.put(count, norm, collects)
    count = count + enters
    complete = collects & (count == warmup)
    if ops.possible(follows):
        moved = moving_moments(mean, variance, ops.where(spike, bound, norm), alpha)
        mean, variance = ops.where(follows, moved[0], mean), ops.where(follows, moved[1], variance)
    if ops.possible(complete):
        made = first.moments()
        mean, variance = ops.where(complete, made[0], mean), ops.where(complete, made[1], variance)
    return threshold, count, (mean, variance)


def fraction_threshold(
    ops: Operations,
    norm: Number,
    threshold: Number,
    target: float,
    rate: float,
    floor: float,
    ceiling: float,
) -> tuple[Number, Number]:
    """Return `ClipFraction`'s threshold of this step and that of the next.

    Args:
        ops: The operations.
        norm: The norm of this step.
        threshold: What was returned for it; infinite where there was no step.
        target: The share of steps to clip.
        rate: How fast the threshold moves.
        floor: The least threshold.
        ceiling: The largest.
    """
    now = ops.within(threshold, floor, ceiling)
    within = ops.number(norm <= now, norm)
    moved = now * ops.exp(-rate * (within - (1 - target)))
    return now, ops.within(ops.where(ops.is_infinite(threshold), norm, moved), floor, ceiling)


def per_tensor_factor(
    ops: Operations, norm: Number, average: Number, warm: Truth, together: Number, relative: float
) -> Number:
    """Return `AdaGC`'s factor of one gradient: together with all others in its warm-up, later by its own average.

    Args:
        ops: The operations.
        norm: Its norm.
        average: The moving average of its norms.
        warm: Whether it is in its warm-up.
        together: The factor of all gradients.
        relative: How many times its average a norm may be.
    """
    own = ops.ratio(relative * average, norm)
    return ops.where(norm == 0, 1.0, ops.within(ops.where(warm, together, own), -math.inf, 1.0))


def per_tensor_average(
    ops: Operations, scaled: Number, average: Number, seen: Number, warm: Truth, decay: float
) -> Number:
    """Return `AdaGC`'s average after one more norm: the smallest in the warm-up, then a moving one.

    Args:
        ops: The operations.
        scaled: The norm after the clip.
        average: The average before.
        seen: How many norms are in it.
        warm: Whether it is in its warm-up.
        decay: Of the average.
    """
    least = ops.where(scaled < average, scaled, average)  # not a minimum, which NaN would spoil
    later = decay * average + (1 - decay) * scaled
    return ops.where(seen == 0, scaled, ops.where(warm, least, later))
