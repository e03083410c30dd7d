"""The rules that choose a threshold, once: for tensors on a device and for plain numbers.

Each `ThresholdRule` is one rule: its settings, and `ThresholdRule.next_threshold`, which the clipper of that name and
the rule for records (`gradguard.threshold_rules`) inherit, as they do `PerTensorRule`. Nothing is remembered of a step
that does not ``enter``, such as one that is not finite. Operations that floats and tensors write differently are those
of ``ops``: `PLAIN`, or `gradguard.tensors.number_operations.TENSORS`, with which the host reads nothing.

A norm may be a float or a tensor, 0-dim, or with one entry for each gradient where a rule treats each by itself. The
norms of earlier steps are in an object that the step changes in place, ``put(count, value, enters)``: a tensor of fixed
length in `gradguard.clip.thresholds.threshold_rule`, lists in `gradguard.threshold_rules`.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Number = Any
"""A float or a tensor."""

Truth = Any
"""A bool, or a tensor of them."""

Operations = Any
"""`PLAIN` or `TENSORS`."""

Memory = Mapping[str, Any]
"""The state of a rule: numbers, counts and histories, by name."""


class _Plain:
    """The operations on floats."""

    @staticmethod
    def where(condition: bool, yes: float, no: float) -> float:
        return yes if condition else no

    @staticmethod
    def within(x: float, low: float, high: float) -> float:
        """Return ``x``, or the bound that it exceeds."""
        return low if x < low else high if x > high else x

    @staticmethod
    def ratio(x: float, y: float) -> float:
        """Return x / y as a tensor does: of a zero y infinity, or NaN if x is zero too."""
        if y:
            return x / y
        return math.nan if x == 0 else math.copysign(math.inf, x)

    @staticmethod
    def number(x: float | bool, like: float) -> float:
        """Return ``x`` as a number of the type of ``like``; of a condition 1 where it holds, else 0."""
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

    possible = staticmethod(bool)  # False only where the host knows that a condition does not hold: of no tensor
    logical_not = staticmethod(operator.not_)
    larger = staticmethod(max)
    smaller = staticmethod(min)
    sqrt = staticmethod(math.sqrt)
    floor = staticmethod(math.floor)


PLAIN = _Plain()

TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
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
    return (seen >= window) & (bound > window / 2) & (most <= least * (1 + LOCK_IN_TOLERANCE))


MEDIAN_START = 0.1
"""The share of the first norm that `ClipByMedian` lets through at the first step."""

MEDIAN_START_TIMES = 1.5
"""Within its start, so many times the median is what a norm is remembered as at most."""


MEDIAN_START_TIMES_BOUNDED = 3.0
"""The multiple where the update is bounded besides."""

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
        share: The share that is allowed at h = 0.
    """
    bound = share * longest / (1 + held / UPDATE_PATIENCE)
    return bound, ops.where(norm > bound, held + 1, ops.within(held - 1, 0.0, math.inf))


class ThresholdRule:
    """A rule that chooses a threshold from the norms so far: a subclass is a dataclass of its settings."""

    def __post_init__(self) -> None:
        """Do nothing; a rule that keeps its memory itself begins it here."""

    def next_threshold(self, ops: Operations, memory: Memory, norm: Number, enters: Truth) -> tuple[Number, Memory]:
        """Return the threshold of this step, infinite for none, and what has changed in ``memory``.

        Args:
            ops: The operations.
            memory: The rule's memory, by name.
            norm: The norm of this step.
            enters: Whether it may be remembered.
        """
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class MedianRule(ThresholdRule):
    """`ClipByMedian`: so many robust deviations above the median of the last log-norms.

    It remembers the ``logarithms`` of the last norms, their ``count`` so far, and ``held``, as for `update_bound`.

    Attributes:
        k: How many deviations.
        window: How many norms are remembered.
        warmup: How many norms the start has.
        floor: The least deviation.
        start: The share of the first norm that passes, where no bound on the update is known.
        update: The share of their norm by which a step may move the weights.
        ceiling: A threshold that always holds.
    """

    k: float = 6.0
    window: int = 128
    warmup: int = 32
    floor: float = 0.05
    start: float = MEDIAN_START
    update: float = MEDIAN_UPDATE
    ceiling: float = math.inf

    def next_threshold(
        self, ops: Operations, memory: Memory, norm: Number, enters: Truth, longest: Number | None = None
    ) -> tuple[Number, Memory]:
        """Return the threshold, and the next ``count`` and ``held``; ``longest`` is as for `update_bound`, if known."""
        logarithms, count = memory["logarithms"], memory["count"]
        start, times = (self.start, MEDIAN_START_TIMES) if longest is None else (1.0, MEDIAN_START_TIMES_BOUNDED)
        progress = ops.within(ops.number(count, norm) / self.warmup, 0.0, 1.0)
        middle = logarithms.median(count)
        deviation = ops.within(TO_STANDARD_DEVIATION * logarithms.median_distance(count, middle), self.floor, math.inf)
        later = ops.exp(middle + self.k * deviation)
        most = ops.where(count == 0, norm, times * ops.exp(middle))
        early = most * ops.exp((1 - progress) * math.log(start))
        starts = progress < 1
        threshold = ops.where((count > 0) | enters, ops.where(starts, early, later), math.inf)
        logarithms.put(count, ops.log(ops.where(starts & (norm >= most), most, norm)), enters)
        changed = {"count": count + enters}
        if longest is not None:
            bound, held = update_bound(ops, norm, longest, memory["held"], self.update)
            threshold, changed["held"] = ops.smaller(threshold, bound), ops.where(enters, held, memory["held"])
        return ops.within(threshold, -math.inf, self.ceiling), changed


@dataclass(eq=False, repr=False)
class PercentileRule(ThresholdRule):
    """`AutoClip`: a percentile, from 0 to 100, of the norms with this one among them.

    It remembers the ``history`` of norms, and their ``count`` so far.
    """

    percentile: float = 10.0

    def next_threshold(self, ops: Operations, memory: Memory, norm: Number, enters: Truth) -> tuple[Number, Memory]:
        """Return the percentile, and the next ``count``."""
        history, count = memory["history"], memory["count"] + enters
        history.put(memory["count"], norm, enters)
        last = history.last(count)
        place = ops.number(last, norm) * (self.percentile / 100)
        below = ops.floor(place)
        fraction = place - below
        low, high = history.neighbours(below, last)
        # from the nearer of the two neighbours, as NumPy interpolates
        threshold = ops.where(fraction < 0.5, low + (high - low) * fraction, high - (high - low) * (1 - fraction))
        return ops.where(count > 0, threshold, math.inf), {"count": count}


def z_score_bounds(
    ops: Operations, norm: Number, mean: Number, variance: Number, limit: float, factor: float, mode: str
) -> tuple[Number, Number, Truth]:
    """Return `ZClip`'s norm from which on it binds, what it cuts ``norm`` back to, and whether it does.

    Args:
        ops: The operations.
        norm: The norm of this step.
        mean: The mean of the norms before.
        variance: The variance of the norms before.
        limit: The z-score that is too high.
        factor: The factor of ``"adaptive_scaling"``'s bound.
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


@dataclass(eq=False, repr=False)
class ZScoreRule(ThresholdRule):
    """`ZClip`: a norm whose z-score is too high is cut back, with moving averages of what was passed.

    It remembers the ``first`` norms, the ``count`` of all so far, and their moving ``mean`` and ``variance``, which are
    NaN in the warm-up, so that nothing is a spike.

    Attributes:
        ceiling: A threshold that always holds; the published default is 1.0, infinity is none.
        z_threshold: The z-score that is too high.
        alpha: The decay of both moments.
        warmup: How many norms make the first mean and variance.
        clip_factor: The factor of ``"adaptive_scaling"``'s bound.
        mode: As `ZClip` has it.
        skip_update_on_spike: Whether mean and variance stay where the rule binds.
    """

    ceiling: float = 1.0
    z_threshold: float = 2.5
    alpha: float = 0.97
    warmup: int = 25
    clip_factor: float = 1.0
    mode: str = "adaptive_scaling"
    skip_update_on_spike: bool = False

    def next_threshold(self, ops: Operations, memory: Memory, norm: Number, enters: Truth) -> tuple[Number, Memory]:
        """Return what a spike is cut back to, else the norm from which on one would be, and the next moments."""
        first, count, mean, variance = (memory[name] for name in ("first", "count", "mean", "variance"))
        passes, bound, spike = z_score_bounds(ops, norm, mean, variance, self.z_threshold, self.clip_factor, self.mode)
        warm = count >= self.warmup
        threshold = ops.where(spike, bound, ops.where(warm & (norm <= passes), passes, math.inf))
        collects, follows = (
            enters & ops.logical_not(warm),
            enters & warm & ops.logical_not(spike & self.skip_update_on_spike),
        )
        first.put(count, norm, collects)
        count = count + enters
        complete = collects & (count == self.warmup)
        if ops.possible(follows):
            passed = ops.where(spike, bound, norm)
            moved = self.alpha * mean + (1 - self.alpha) * passed
            spread = self.alpha * variance + (1 - self.alpha) * (passed - moved) ** 2
            mean, variance = ops.where(follows, moved, mean), ops.where(follows, spread, variance)
        if ops.possible(complete):
            moved, spread = first.moments()
            mean, variance = ops.where(complete, moved, mean), ops.where(complete, spread, variance)
        return ops.within(threshold, -math.inf, self.ceiling), {"count": count, "mean": mean, "variance": variance}


@dataclass(eq=False, repr=False)
class FractionRule(ThresholdRule):
    """`ClipFraction`: a controller that keeps the share of clipped steps at a target. It remembers its ``threshold``.

    Attributes:
        target: The share.
        learning_rate: How fast the threshold moves.
        floor: The least threshold.
        ceiling: The largest one.
    """

    target: float
    learning_rate: float = 0.2
    floor: float = 0.0
    ceiling: float = math.inf

    def next_threshold(self, ops: Operations, memory: Memory, norm: Number, enters: Truth) -> tuple[Number, Memory]:
        """Return the threshold of this step, and that of the next."""
        before = memory["threshold"]
        now = ops.within(before, self.floor, self.ceiling)
        within = ops.number(norm <= now, norm)
        moved = now * ops.exp(-self.learning_rate * (within - (1 - self.target)))
        moved = ops.within(ops.where(ops.is_infinite(before), norm, moved), self.floor, self.ceiling)
        return now, {"threshold": ops.where(enters, moved, before)}


@dataclass(eq=False, repr=False)
class PerTensorRule:
    """`AdaGC`: each gradient is held to a moving average of its own norm; together with all others in its warm-up.

    Attributes:
        absolute: The threshold of the global norm in the warm-up; infinity for none.
        relative: How many times its average a norm may be.
        beta: The decay of the averages.
        warmup: The warm-up has one step less.
    """

    absolute: float = 1.0
    relative: float = 1.05
    beta: float = 0.98
    warmup: int = 100

    def factor(self, ops: Operations, norm: Number, average: Number, warm: Truth, together: Number) -> Number:
        """Return the factor of one gradient.

        Args:
            ops: The operations.
            norm: Its norm.
            average: The moving average of its norms.
            warm: Whether it is in its warm-up.
            together: The factor of all gradients.
        """
        own = ops.ratio(self.relative * average, norm)
        return ops.where(norm == 0, 1.0, ops.within(ops.where(warm, together, own), -math.inf, 1.0))

    def next_average(self, ops: Operations, scaled: Number, average: Number, seen: Number, warm: Truth) -> Number:
        """Return the average after one more norm: the smallest in the warm-up, then a moving one.

        Args:
            ops: The operations.
            scaled: The norm after the clip.
            average: The average before.
            seen: How many norms are in it.
            warm: Whether it is in its warm-up.
        """
        least = ops.where(scaled < average, scaled, average)  # not a minimum, which NaN would spoil
        later = self.beta * average + (1 - self.beta) * scaled
        return ops.where(seen == 0, scaled, ops.where(warm, least, later))
