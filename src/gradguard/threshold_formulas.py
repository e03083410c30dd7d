"""The formulas of the rules that choose a threshold, written once for device tensors and for plain numbers.

A `ThresholdRule` holds one rule's settings and its `ThresholdRule.next_threshold`. The clipper of that name and the
rule for records (`gradguard.threshold_rules`) both inherit from it; `PerTensorRule` is shared in the same way. A step
that does not ``enter``, such as a non-finite one, changes no memory. ``ops`` holds the operations that floats and
tensors write differently: `PLAIN`, or `gradguard.tensors.number_operations.TENSORS`, which needs no host sync.

A norm may be a float or a tensor. The tensor is 0-dim, or has one entry for each gradient if the rule treats each by
itself. An object stores the norms of earlier steps, and each step changes it in place by ``put(count, value, enters)``.
`gradguard.clip.thresholds.threshold_rule` uses tensors of fixed length, `gradguard.threshold_rules` uses lists.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Number = Any
"""A float or a tensor."""

Truth = Any
"""A bool, or a tensor of bools."""

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
        """Return x / y as tensors do: for y = 0 infinity, or NaN if x is zero too."""
        if y:
            return x / y
        return math.nan if x == 0 else math.copysign(math.inf, x)

    @staticmethod
    def number(x: float | bool, like: float) -> float:
        """Return ``x`` as a float; a condition becomes 1.0 or 0.0."""
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

    possible = staticmethod(bool)  # False only if the host knows that the condition is false; always true for tensors
    logical_not = staticmethod(operator.not_)
    larger = staticmethod(max)
    smaller = staticmethod(min)
    sqrt = staticmethod(math.sqrt)
    floor = staticmethod(math.floor)


PLAIN = _Plain()

TO_STANDARD_DEVIATION = 1.4826  # standard deviation over median absolute deviation, for a normal distribution
_EPSILON = 1e-6

LOCK_IN_WINDOW = 100
"""How many steps the lock-in alarm considers."""

LOCK_IN_TOLERANCE = 0.01
"""A threshold that moves by less than this fraction over the window counts as one threshold."""


def coefficient_of(ops: Operations, norm: Number, threshold: Number) -> Number:
    """Return the coefficient for gradients of ``norm``: 1 up to the threshold, above it ``threshold / norm``."""
    # A NaN norm fails both tests, so the coefficient is NaN, as with PyTorch's own clip.
    return ops.where((norm <= threshold) | ops.is_infinite(threshold), 1.0, ops.ratio(threshold, norm))


def pytorch_coefficient(ops: Operations, norm: Number, threshold: Number) -> Number:
    """Return the coefficient of `torch.nn.utils.clip_grad_norm_`."""
    return ops.within(ops.ratio(threshold, norm + _EPSILON), -math.inf, 1.0)


def locked_in(seen: Number, bound: Number, least: Number, most: Number, window: int) -> Truth:
    r"""Tell whether a clip has bound on more than half of the last steps at one threshold.

    .. math:: \text{seen} \ge N \quad\text{and}\quad \text{bound} > N/2 \quad\text{and}\quad
              \max_t c_t \le 1.01 \, \min_t c_t

    Args:
        seen: The number of steps so far.
        bound: On how many of the last N steps the clip has bound.
        least: The smallest threshold of the last N steps.
        most: The largest threshold of the last N steps.
        window: N.

    Returns:
        The verdict, a bool or a tensor.
    """
    return (seen >= window) & (bound > window / 2) & (most <= least * (1 + LOCK_IN_TOLERANCE))


MEDIAN_START = 0.1
"""The share of the first norm that `ClipByMedian` passes at the first step, without a bound on the update."""

MEDIAN_START_TIMES = 1.5
"""During its start, `ClipByMedian` remembers a norm as at most this multiple of the median."""


MEDIAN_START_TIMES_BOUNDED = 3.0
"""This multiple applies if the update is bounded."""

MEDIAN_UPDATE = 0.1
"""`ClipByMedian` lets a step move the weights by at most this share of their norm."""

UPDATE_PATIENCE = 16
"""After the bound on the update has held for this many steps, it is half as large."""


def update_bound(ops: Operations, norm: Number, longest: Number, held: Number, share: float) -> tuple[Number, Number]:
    r"""Return the norm up to which gradients move the weights by no more than allowed, and the next ``held``.

    .. math:: c = \frac{\text{share}}{1 + h / 16} \, L

    h grows by 1 on each step whose norm exceeds the bound, and falls by 1, down to 0, on each other step. If the
    learning rate stays too high, the steps become shorter, as under a rate that decays like 1/t. The sum of such steps
    has no limit, so the run can still cover any distance. A run that needs the bound only for a while gets all of it
    back.

    Args:
        ops: The operations.
        norm: The norm of this step.
        longest: L, the norm of gradients that would move the weights by the weights' own norm; infinite if unknown.
        held: h.
        share: The allowed share at h = 0.
    """
    bound = share * longest / (1 + held / UPDATE_PATIENCE)
    return bound, ops.where(norm > bound, held + 1, ops.within(held - 1, 0.0, math.inf))


class ThresholdRule:
    """A rule that chooses a threshold from the norms so far: a subclass is a dataclass of its settings."""

    def __post_init__(self) -> None:
        """Do nothing; a rule that keeps its own memory overrides this."""

    def next_threshold(self, ops: Operations, memory: Memory, norm: Number, enters: Truth) -> tuple[Number, Memory]:
        """Return the threshold of this step, infinite for none, and the entries of ``memory`` that change.

        Args:
            ops: The operations.
            memory: The rule's memory, by name.
            norm: The norm of this step.
            enters: Whether ``norm`` may enter the memory.
        """
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class MedianRule(ThresholdRule):
    """`ClipByMedian`: the median of the recent log-norms plus a multiple of their robust deviation.

    The memory holds the ``logarithms`` of recent norms, their ``count`` so far, and ``held`` for `update_bound`.

    Attributes:
        k: The multiple of the deviation.
        window: How many norms are remembered.
        warmup: How many norms the start lasts.
        floor: The smallest deviation.
        start: The share of the first norm that passes, if no bound on the update is known.
        update: The share of the weights' norm by which a step may move them.
        ceiling: An upper limit of every threshold.
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
        """Return the threshold, and the next ``count`` and ``held``; ``longest`` as for `update_bound`, if known."""
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
    """`AutoClip`: a percentile, from 0 to 100, of all norms so far, this one included.

    The memory holds the ``history`` of norms, and their ``count`` so far.
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
        # NumPy's linear interpolation: start from the nearer neighbour.
        threshold = ops.where(fraction < 0.5, low + (high - low) * fraction, high - (high - low) * (1 - fraction))
        return ops.where(count > 0, threshold, math.inf), {"count": count}


def z_score_bounds(
    ops: Operations, norm: Number, mean: Number, variance: Number, limit: float, factor: float, mode: str
) -> tuple[Number, Number, Truth]:
    """Return the norm above which `ZClip` binds, the bound that it scales ``norm`` to, and whether it binds.

    Args:
        ops: The operations.
        norm: The norm of this step.
        mean: The mean of earlier norms.
        variance: The variance of earlier norms.
        limit: The largest accepted z-score.
        factor: The factor of the bound in ``"adaptive_scaling"`` mode.
        mode: A mode of `ZClip`.
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
    """`ZClip`: scale down a norm whose z-score is too high; moving averages of the clipped norms define the z-score.

    The memory holds the ``first`` norms, the ``count`` of all so far, and the moving ``mean`` and ``variance``. Both
    moments are NaN in the warm-up, so nothing is a spike.

    Attributes:
        ceiling: An upper limit of every threshold; the published default is 1.0, infinity is none.
        z_threshold: The largest accepted z-score.
        alpha: The decay of both moments.
        warmup: How many norms make the first mean and variance.
        clip_factor: The factor of the bound in ``"adaptive_scaling"`` mode.
        mode: A mode of `ZClip`.
        skip_update_on_spike: Whether a spike leaves mean and variance unchanged.
    """

    ceiling: float = 1.0
    z_threshold: float = 2.5
    alpha: float = 0.97
    warmup: int = 25
    clip_factor: float = 1.0
    mode: str = "adaptive_scaling"
    skip_update_on_spike: bool = False

    def next_threshold(self, ops: Operations, memory: Memory, norm: Number, enters: Truth) -> tuple[Number, Memory]:
        """Return the bound of a spike, or else the norm from which one would begin; and the next moments."""
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
    """`ClipFraction`: keep the share of clipped steps at a target. The memory holds the ``threshold``.

    Attributes:
        target: The share.
        learning_rate: How fast the threshold moves.
        floor: The smallest threshold.
        ceiling: The largest threshold.
    """

    target: float
    learning_rate: float = 0.2
    floor: float = 0.0
    ceiling: float = math.inf

    def next_threshold(self, ops: Operations, memory: Memory, norm: Number, enters: Truth) -> tuple[Number, Memory]:
        """Return the threshold of this step, and the next step's in the changed memory."""
        before = memory["threshold"]
        now = ops.within(before, self.floor, self.ceiling)
        within = ops.number(norm <= now, norm)
        moved = now * ops.exp(-self.learning_rate * (within - (1 - self.target)))
        moved = ops.within(ops.where(ops.is_infinite(before), norm, moved), self.floor, self.ceiling)
        return now, {"threshold": ops.where(enters, moved, before)}


@dataclass(eq=False, repr=False)
class PerTensorRule:
    """`AdaGC`: bound each gradient by a moving average of its own norm; in the warm-up, bound all gradients together.

    Attributes:
        absolute: The threshold of the global norm in the warm-up; infinity for none.
        relative: The largest accepted ratio of a norm to its average.
        beta: The decay of the averages.
        warmup: The first step after the warm-up, counted from 1.
    """

    absolute: float = 1.0
    relative: float = 1.05
    beta: float = 0.98
    warmup: int = 100

    def factor(self, ops: Operations, norm: Number, average: Number, warm: Truth, together: Number) -> Number:
        """Return the factor of one gradient.

        Args:
            ops: The operations.
            norm: The gradient's norm.
            average: The moving average of its norms.
            warm: Whether the gradient is in its warm-up.
            together: The factor of all gradients.
        """
        own = ops.ratio(self.relative * average, norm)
        return ops.where(norm == 0, 1.0, ops.within(ops.where(warm, together, own), -math.inf, 1.0))

    def next_average(self, ops: Operations, scaled: Number, average: Number, seen: Number, warm: Truth) -> Number:
        """Return the average after one more norm: the smallest norm in the warm-up, then a moving average.

        Args:
            ops: The operations.
            scaled: The norm after the clip.
            average: The average before.
            seen: How many norms have entered the average.
            warm: Whether the gradient is in its warm-up.
        """
        least = ops.where(scaled < average, scaled, average)  # not a minimum, which NaN would spread through
        later = self.beta * average + (1 - self.beta) * scaled
        return ops.where(seen == 0, scaled, ops.where(warm, least, later))
