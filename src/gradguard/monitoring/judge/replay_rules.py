"""The clipping rules as they act on one number a step: each the plain-number twin of a clipper, a few lines long.

Every rule is told the finite norms of the steps that were taken, one after the other, and answers with the
coefficient of that step and the threshold that it compared with. A norm of 0 tells nothing of the scale and enters no
state. The constants are the defaults of the clippers.
"""

import heapq
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

_MAD_TO_SIGMA = 1.4826
_EPSILON = 1e-6


class Rule(ABC):
    """A rule for the norm of all gradients, as a function of that norm and of those before it."""

    def step(self, norm: float) -> tuple[float, float]:
        """Return what gradients of ``norm`` are multiplied by, and the threshold; let the state follow.

        Args:
            norm: The norm of this step before any clip: finite, at least 0.
        """
        threshold = self.choose(norm)
        return (1.0 if norm <= threshold else threshold / norm), threshold

    @abstractmethod
    def choose(self, norm: float) -> float:
        """Return the threshold for ``norm``, infinite for none, and let the state follow where ``norm`` is above 0.

        Args:
            norm: As for `step`.
        """


class FixedNorm(Rule):
    """One threshold for the whole run, as `clip_grad_norm_` has it.

    Args:
        max_norm: The threshold.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def step(self, norm: float) -> tuple[float, float]:
        """Return PyTorch's coefficient, whose divisor is ``norm + 1e-6``.

        Args:
            norm: As for `Rule.step`.
        """
        return (1.0 if math.isinf(self.max_norm) else min(1.0, self.max_norm / (norm + _EPSILON))), self.max_norm

    def choose(self, norm: float) -> float:
        """Return the threshold.

        Args:
            norm: Not looked at.
        """
        return self.max_norm


class Median(Rule):
    """So many robust deviations above the median of the last log-norms (`ClipByMedian`).

    Args:
        deviations: How many.
        window: How many norms are remembered.
        warm_up: How many are needed first.
        floor: The least deviation.
    """

    def __init__(self, deviations: float = 6.0, window: int = 128, warm_up: int = 32, floor: float = 0.05) -> None:
        self.deviations, self.warm_up, self.floor = deviations, warm_up, floor
        self._recent: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []

    def choose(self, norm: float) -> float:
        """Return the threshold of the norms before this one, and remember this one.

        Args:
            norm: As for `Rule.step`.
        """
        threshold = math.inf
        if len(self._ordered) >= self.warm_up:
            middle = median_of(self._ordered)
            spread = max(_MAD_TO_SIGMA * median_distance(self._ordered, middle), self.floor)
            threshold = _exp(middle + self.deviations * spread)
        if norm > 0:
            self._push(math.log(norm))
        return threshold

    def _push(self, logarithm: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._ordered[bisect_left(self._ordered, self._recent[0])]
        self._recent.append(logarithm)
        insort(self._ordered, logarithm)


class Percentile(Rule):
    """A percentile of all norms so far, this one among them (`AutoClip`).

    Two heaps meet at the percentile, whose place moves by less than one for each norm: a run of a million steps needs
    no sorted list of a million norms.

    Args:
        percent: From 0 to 100.
    """

    def __init__(self, percent: float = 10.0) -> None:
        self.percent = percent
        self._below: list[float] = []  # the smallest ones, negated, so that their largest comes first
        self._above: list[float] = []

    def choose(self, norm: float) -> float:
        """Return the percentile of all norms, after remembering this one.

        Args:
            norm: As for `Rule.step`.
        """
        if norm > 0:
            heapq.heappush(self._above, -heapq.heappushpop(self._below, -norm))
        count = len(self._below) + len(self._above)
        if not count:
            return math.inf
        place = (count - 1) * (self.percent / 100)
        while len(self._below) < math.floor(place) + 1:
            heapq.heappush(self._below, -heapq.heappop(self._above))
        low, fraction = -self._below[0], place - math.floor(place)
        return low + ((self._above[0] if self._above else low) - low) * fraction


class ZScore(Rule):
    """A norm whose z-score is too high is cut back (`ZClip`), with moving averages of what was passed.

    Args:
        ceiling: A threshold that always holds; the published default is 1.0, infinity is none.
        limit: The z-score that is too high.
        decay: Of the moving averages.
        warm_up: How many norms make the first mean and variance.
    """

    def __init__(self, ceiling: float = 1.0, limit: float = 2.5, decay: float = 0.97, warm_up: int = 25) -> None:
        self.ceiling, self.limit, self.decay, self.warm_up = ceiling, limit, decay, warm_up
        self._first: list[float] = []
        self._mean = self._variance = math.nan

    def choose(self, norm: float) -> float:
        """Return what a spike is cut back to, or the norm from which on one would be; follow what was passed.

        Args:
            norm: As for `Rule.step`.
        """
        if len(self._first) < self.warm_up:
            self._collect(norm)
            return self.ceiling
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + _EPSILON)
        threshold = self._mean + self.limit * (deviation + _EPSILON)
        if z > self.limit:
            threshold = self._mean + self.limit * deviation / (z / self.limit)
        if norm > 0:
            self._follow(threshold if z > self.limit else norm)
        return min(threshold, self.ceiling)

    def _collect(self, norm: float) -> None:
        if norm > 0:
            self._first.append(norm)
        if len(self._first) == self.warm_up:
            self._mean = sum(self._first) / self.warm_up
            self._variance = sum((value - self._mean) ** 2 for value in self._first) / self.warm_up

    def _follow(self, passed: float) -> None:
        self._mean = self.decay * self._mean + (1 - self.decay) * passed
        self._variance = self.decay * self._variance + (1 - self.decay) * (passed - self._mean) ** 2


class Fraction(Rule):
    """A controller that keeps the share of clipped steps at a target (`ClipFraction`).

    Args:
        target: The share.
        rate: How fast the threshold moves.
    """

    def __init__(self, target: float, rate: float = 0.2) -> None:
        self.target, self.rate = target, rate
        self._threshold = math.inf

    def choose(self, norm: float) -> float:
        """Return the threshold, and move it.

        Args:
            norm: As for `Rule.step`.
        """
        threshold = self._threshold
        if norm > 0:
            within = 1.0 if norm <= threshold else 0.0
            moved = threshold * math.exp(-self.rate * (within - (1 - self.target)))
            self._threshold = norm if math.isinf(threshold) else moved
        return threshold


class TwiceTheMedian(Rule):
    """Every 100 steps, twice the median of the last 100 norms (icefall's ScaledAdam); the first 100 pass.

    Args:
        factor: Times the median.
        period: How many steps a threshold holds.
    """

    def __init__(self, factor: float = 2.0, period: int = 100) -> None:
        self.factor, self.period = factor, period
        self._norms: list[float] = []
        self._threshold = math.inf

    def choose(self, norm: float) -> float:
        """Return the threshold, and remember ``norm``.

        Args:
            norm: As for `Rule.step`.
        """
        if len(self._norms) == self.period:
            self._threshold = self.factor * sorted(self._norms)[2 * (self.period // 4)]
            self._norms.clear()
        if norm > 0:
            self._norms.append(norm)
        return self._threshold


class PerTensor:
    """Each tensor is held to a moving average of its own norm (`AdaGC`).

    Args:
        absolute: The threshold of the global norm in the warm-up; infinity for none.
        relative: How many times its average a norm may be.
        decay: Of the averages.
        warm_up: The warm-up has one step less.
    """

    def __init__(self, absolute: float = 1.0, relative: float = 1.05, decay: float = 0.98, warm_up: int = 100) -> None:
        self.absolute, self.relative, self.decay, self.warm_up = absolute, relative, decay, warm_up
        self._averages: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def step(self, norms: Sequence[float]) -> tuple[float, float]:
        """Return the norm of all gradients after the clip over that before, and the 2-norm of all averages.

        Args:
            norms: The norm of each tensor, finite; 0 for one without a gradient.
        """
        total = math.hypot(*norms)
        together = min(1.0, self.absolute / total) if total > 0 and math.isfinite(self.absolute) else 1.0
        after = [self._scaled(place, norm, together) for place, norm in enumerate(norms)]
        clipped = any(scaled < norm for scaled, norm in zip(after, norms, strict=True))
        return (math.hypot(*after) / total if clipped else 1.0), math.hypot(*self._averages.values())

    def _scaled(self, place: int, norm: float, together: float) -> float:
        """The norm of one tensor after the clip; its average follows."""
        if norm == 0:
            return 0.0
        average, seen = self._averages.get(place, math.inf), self._seen.get(place, 0)
        warm = seen + 1 < self.warm_up
        scaled = norm * (together if warm else min(1.0, self.relative * average / norm))
        if seen == 0:
            self._averages[place] = scaled
        else:
            later = self.decay * average + (1 - self.decay) * scaled
            self._averages[place] = min(average, scaled) if warm else later
        self._seen[place] = seen + 1
        return scaled


def median_of(ordered: Sequence[float]) -> float:
    """Return the median of an ascending sequence; the mean of both middle ones if it is even.

    Args:
        ordered: At least one number.
    """
    last = len(ordered) - 1
    return (ordered[last // 2] + ordered[last - last // 2]) / 2


def median_distance(ordered: Sequence[float], middle: float) -> float:
    """Return the median of the distances of all numbers from ``middle``, in logarithmic time.

    Args:
        ordered: At least one number, ascending.
        middle: Any number.

    Example:
        >>> median_distance([0.0, 1.0, 2.0, 5.0], 1.0)
        1.0
    """
    count = len(ordered)
    nearest = count // 2 + 1  # so many lie side by side; the farthest of them is the upper of the middle distances
    low, high = 0, count - nearest
    while low < high:
        start = (low + high) // 2
        if middle - ordered[start] > ordered[start + nearest] - middle:
            low = start + 1
        else:
            high = start
    left, right = abs(middle - ordered[low]), abs(ordered[low + nearest - 1] - middle)
    if count % 2:
        return max(left, right)
    rest = ordered[low + 1 : low + nearest] if left > right else ordered[low : low + nearest - 1]
    within = max(abs(middle - rest[0]), abs(rest[-1] - middle)) if rest else max(left, right)
    return (max(left, right) + within) / 2


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf
