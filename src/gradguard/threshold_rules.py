"""The rules that choose a threshold, on plain numbers: for records.

Each rule receives the finite norms of the taken steps one by one, and returns the coefficient of the step and the
threshold that it used. A norm of 0 carries no information about the scale and changes no state. The arithmetic, the
argument names and the defaults are those of the clippers (`gradguard.threshold_formulas`).
"""

import heapq
import math
import statistics
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from gradguard.threshold_formulas import (
    LOCK_IN_WINDOW,
    PLAIN,
    TO_STANDARD_DEVIATION,
    FractionRule,
    MedianRule,
    Memory,
    PercentileRule,
    PerTensorRule,
    ThresholdRule,
    ZScoreRule,
    coefficient_of,
    locked_in,
    pytorch_coefficient,
)


class FixedNorm:
    """One threshold for the whole run, as in `clip_grad_norm_`.

    Args:
        max_norm: The threshold.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def step(self, norm: float) -> tuple[float, float]:
        """Return PyTorch's coefficient, whose divisor is ``norm + 1e-6``, and the threshold.

        Args:
            norm: As for `NormRule.step`.
        """
        infinite = math.isinf(self.max_norm)
        return (1.0 if infinite else pytorch_coefficient(PLAIN, norm, self.max_norm)), self.max_norm


class NormRule(ThresholdRule, ABC):
    """A rule for the norm of all gradients that keeps its memory itself."""

    def __post_init__(self) -> None:
        """Begin with an empty memory."""
        self._memory = dict(self.memory())

    @abstractmethod
    def memory(self) -> Memory:
        """Return the rule's memory before the first step."""

    def step(self, norm: float) -> tuple[float, float]:
        """Return the coefficient for gradients of ``norm`` and the threshold, and update the memory.

        Args:
            norm: The norm of this step before any clip: finite, at least 0.
        """
        threshold = self.choose(norm)
        return coefficient_of(PLAIN, norm, threshold), threshold

    def choose(self, norm: float, **known: float) -> float:
        """Return the threshold for ``norm``, infinite for none; remember ``norm`` if it is above 0.

        Args:
            norm: As for `step`.
            known: Other inputs of the rule, by name.
        """
        threshold, changed = self.next_threshold(PLAIN, self._memory, norm, norm > 0, **known)
        self._memory.update(changed)
        return threshold


class Median(MedianRule, NormRule):
    """`ClipByMedian`.

    A record of norms does not hold the weights. The rule therefore behaves as without a guard, or as under a guard with
    ``update=None``: it starts gently and does not bound the update. ``choose(norm, longest=...)`` is the rule under a
    guard.
    """

    def memory(self) -> Memory:
        """Return an empty window."""
        return {"logarithms": SortedWindow(self.window), "count": 0, "held": 0.0}


class Percentile(PercentileRule, NormRule):
    """`AutoClip`."""

    def memory(self) -> Memory:
        """Return an empty history."""
        return {"history": _HeapHistory(), "count": 0}


class ZScore(ZScoreRule, NormRule):
    """`ZClip`."""

    def memory(self) -> Memory:
        """Return an empty warm-up."""
        return {"first": _FirstNorms(), "count": 0, "mean": math.nan, "variance": math.nan}


class Fraction(FractionRule, NormRule):
    """`ClipFraction`."""

    def memory(self) -> Memory:
        """Return no threshold yet."""
        return {"threshold": math.inf}


@dataclass(eq=False, repr=False)
class PerTensor(PerTensorRule):
    """`AdaGC`."""

    def __post_init__(self) -> None:
        """Begin without averages."""
        self._averages: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def step(self, norms: Sequence[float]) -> tuple[float, float]:
        """Return the coefficient of the step, and the 2-norm of all moving averages.

        The coefficient is the norm of all gradients after the clip over their norm before.

        Args:
            norms: The norm of each tensor, finite; 0 for a tensor without a gradient.
        """
        total = math.hypot(*norms)
        together = 1.0 if math.isinf(self.absolute) else PLAIN.ratio(self.absolute, total)
        after = list(map(self._scaled, range(len(norms)), norms, repeat(together)))
        clipped = any(scaled < norm for scaled, norm in zip(after, norms, strict=True))
        return (math.hypot(*after) / total if clipped else 1.0), math.hypot(*self._averages.values())

    def _scaled(self, place: int, norm: float, together: float) -> float:
        """Return the norm of one tensor after the clip, and update its average."""
        if norm == 0:
            return 0.0
        average, seen = self._averages.get(place, math.inf), self._seen.get(place, 0)
        warm = seen + 1 < self.warmup
        scaled = norm * self.factor(PLAIN, norm, average, warm, together)
        self._averages[place] = self.next_average(PLAIN, scaled, average, seen, warm)
        self._seen[place] = seen + 1
        return scaled


class _Past:
    """The norms of earlier steps, in the form that a rule needs."""

    def add(self, value: float) -> None:
        """Remember a value."""
        raise NotImplementedError

    def put(self, count: int, value: float, enters: bool) -> None:
        """Remember ``value`` if ``enters``; only memories of fixed size, on a device, use ``count``."""
        del count
        if enters:
            self.add(value)


class SortedWindow(_Past):
    """The last values, both in order of arrival and sorted: reading a median takes logarithmic time.

    Args:
        length: The number of values to keep.

    Attributes:
        recent: The values, the newest last.
        ordered: The values, ascending.
    """

    def __init__(self, length: int) -> None:
        self.recent: deque[float] = deque(maxlen=length)
        self.ordered: list[float] = []

    def add(self, value: float) -> None:
        """Remember a value; if the window is full, forget the oldest.

        Args:
            value: A number.
        """
        recent, ordered = self.recent, self.ordered
        if len(ordered) == recent.maxlen:
            del ordered[bisect_left(ordered, recent[0])]
        recent.append(value)
        insort(ordered, value)

    def median(self, count: int) -> float:
        """Return the median, or 0 if there are no values.

        Args:
            count: How many values were added so far.
        """
        return statistics.median(self.ordered) if count else 0.0

    def median_distance(self, count: int, middle: float) -> float:
        """Return the median distance of the values from ``middle``, or 0 if there are no values.

        Args:
            count: How many values were added so far.
            middle: Any number.
        """
        return median_distance(self.ordered, middle) if count else 0.0


class _HeapHistory(_Past):
    """All values, in two heaps split at the rank that was asked for last.

    The rank of a percentile moves by less than one with each value, so a run of a million steps needs no sorted list.
    """

    def __init__(self) -> None:
        self._below: list[float] = []  # the smallest values, negated: the heap's first entry is the largest of them
        self._above: list[float] = []

    def add(self, value: float) -> None:
        heapq.heappush(self._above, -heapq.heappushpop(self._below, -value))

    def last(self, count: int) -> int:
        return max(count, 1) - 1

    def neighbours(self, place: int, last: int) -> tuple[float, float]:
        while self._above and len(self._below) <= place:
            heapq.heappush(self._below, -heapq.heappop(self._above))
        low = -self._below[0] if self._below else math.inf
        return low, self._above[0] if place < last else low


class _FirstNorms(_Past):
    """The norms of the warm-up."""

    def __init__(self) -> None:
        self._norms: list[float] = []

    def add(self, value: float) -> None:
        self._norms.append(value)

    def moments(self) -> tuple[float, float]:
        mean = sum(self._norms) / len(self._norms)
        return mean, sum((norm - mean) ** 2 for norm in self._norms) / len(self._norms)


def median_distance(ordered: Sequence[float], middle: float) -> float:
    """Return the median distance of the numbers from ``middle``, in logarithmic time.

    Args:
        ordered: At least one number, ascending.
        middle: Any number.

    Example:
        >>> median_distance([0.0, 1.0, 2.0, 5.0], 1.0)
        1.0
    """
    first, last = _nearest(ordered, middle)
    left, right = abs(middle - ordered[first]), abs(ordered[last] - middle)
    upper = max(left, right)
    if len(ordered) % 2:
        return upper
    # An even count: the median is the mean of this distance and the next smaller one. Drop the farthest number.
    first, last = (first + 1, last) if left > right else (first, last - 1)
    lower = max(abs(middle - ordered[first]), abs(ordered[last] - middle)) if first <= last else upper
    return (upper + lower) / 2


def upper_median_distance(ordered: Sequence[float], middle: float) -> float:
    """Return `statistics.median_high` of the distances of the numbers from ``middle``.

    Args:
        ordered: At least one number, ascending.
        middle: Any number.
    """
    first, last = _nearest(ordered, middle)
    return max(abs(middle - ordered[first]), abs(ordered[last] - middle))


def centre_and_spread(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the upper median of some numbers, and their robust standard deviation.

    The robust standard deviation is that of a normal distribution with the same median distance from the median.

    Args:
        ordered: At least one number, ascending.
    """
    middle = ordered[len(ordered) // 2]
    return middle, TO_STANDARD_DEVIATION * upper_median_distance(ordered, middle)


def _nearest(ordered: Sequence[float], middle: float) -> tuple[int, int]:
    """Return first and last index of the numbers nearest to ``middle``: just more than half of all."""
    count = len(ordered)
    further = count // 2  # how many follow the first; the farthest of them is at the upper median distance
    low, high = 0, count - further - 1
    while low < high:
        start = (low + high) // 2
        if middle - ordered[start] > ordered[start + further + 1] - middle:
            low = start + 1
        else:
            high = start
    return low, low + further


class LockInAlarm:
    """Reports when a clip has bound on more than half of the last 100 finite steps at one threshold.

    The verdict is the same as that of the clippers themselves (``result.locked_in``), but made from a record.

    Args:
        window: How many steps to consider.

    Example:
        >>> alarm = LockInAlarm(window=4)
        >>> [alarm.follow(clipped=True, threshold=1.0) for step in range(5)]
        [False, False, False, True, True]
    """

    __slots__ = ("_bound", "_bound_on", "_thresholds")

    def __init__(self, window: int = LOCK_IN_WINDOW) -> None:
        self._thresholds: deque[float] = deque(maxlen=window)
        self._bound_on, self._bound = deque([False] * window, maxlen=window), 0

    def follow(self, clipped: bool, threshold: float) -> bool:
        """Return the verdict after one more step.

        Args:
            clipped: Whether the clip binds on this step.
            threshold: The threshold of this step, at least 0; infinite for none.
        """
        thresholds, bound_on = self._thresholds, self._bound_on
        window = len(bound_on)
        self._bound += clipped - bound_on[0]
        bound_on.append(clipped)
        thresholds.append(threshold)
        if 2 * self._bound <= window:
            return False  # most steps end here, and save the search for the extreme thresholds
        return locked_in(len(thresholds), self._bound, min(thresholds), max(thresholds), window)
