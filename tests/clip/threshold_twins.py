"""The slow twins of the rules that choose a threshold: plain Python floats, one step at a time, from the papers.

Each takes the norm of a step and returns what the gradient is multiplied by; what else it knows are its attributes.
"""

import math
import statistics

EPSILON = 1e-6


def divide(a: float, b: float) -> float:
    """Division as the floating-point standard has it."""
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a)
    return a / b


def at_most_one(x: float) -> float:
    return 1.0 if x > 1 else x  # NaN stays


def pytorch_coefficient(norm: float, max_norm: float) -> float:
    return at_most_one(divide(max_norm, norm + EPSILON))


def percentile(values: list[float], percent: float) -> float:
    """NumPy's, with linear interpolation."""
    if any(math.isnan(x) for x in values):
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * (percent / 100)
    below = math.floor(place)
    low, high, fraction = ordered[below], ordered[min(below + 1, len(ordered) - 1)], place - below
    return low + (high - low) * fraction if fraction < 0.5 else high - (high - low) * (1 - fraction)


class AutoClip:
    """The published code: append, percentile of all, PyTorch's clip."""

    def __init__(self, percent: float = 10.0) -> None:
        self.percent, self.history, self.threshold = percent, [], math.nan

    def step(self, norm: float) -> float:
        self.history.append(norm)
        self.threshold = percentile(self.history, self.percent)
        return pytorch_coefficient(norm, self.threshold)


class ZClip:
    """The published code, version 1.0.0."""

    def __init__(
        self,
        alpha: float = 0.97,
        z_threshold: float = 2.5,
        warmup: int = 25,
        ceiling: float | None = 1.0,
        clip_factor: float = 1.0,
        mode: str = "adaptive_scaling",
        skip_update_on_spike: bool = False,
    ) -> None:
        self.alpha, self.z_threshold, self.warmup, self.ceiling = alpha, z_threshold, warmup, ceiling
        self.clip_factor, self.mode, self.skip = clip_factor, mode, skip_update_on_spike
        self.first: list[float] = []
        self.mean = self.variance = math.nan

    def step(self, norm: float) -> float:
        if len(self.first) < self.warmup:
            self.first.append(norm)
            if len(self.first) == self.warmup:
                self.mean = in_order(self.first) / self.warmup
                self.variance = in_order([square(x - self.mean) for x in self.first]) / self.warmup
            return 1.0 if self.ceiling is None else pytorch_coefficient(norm, self.ceiling)
        bound = self.bound(norm)
        effective = norm if bound is None else bound
        if self.ceiling is not None:
            effective = min(effective, self.ceiling)
        if bound is None or not self.skip:
            seen = norm if bound is None else bound
            self.mean = self.alpha * self.mean + (1 - self.alpha) * seen
            self.variance = self.alpha * self.variance + (1 - self.alpha) * square(seen - self.mean)
        return effective / (norm + EPSILON) if norm > effective else 1.0

    def bound(self, norm: float) -> float | None:
        deviation = math.sqrt(self.variance)
        if self.mode == "percentile":
            bound = self.mean + self.z_threshold * deviation
            return bound if norm > bound else None
        z = (norm - self.mean) / (deviation + EPSILON)
        if not z > self.z_threshold:
            return None
        if self.mode == "mean":
            return self.mean
        return (self.mean + (self.z_threshold * deviation) / (z / self.z_threshold)) * self.clip_factor


class AdaGC:
    """Algorithm 1 as pytorch_optimizer has it; norms of all tensors in, a factor for each out."""

    def __init__(self, absolute: float = 1.0, relative: float = 1.05, beta: float = 0.98, warmup: int = 100) -> None:
        self.absolute, self.relative, self.beta, self.warmup = absolute, relative, beta, warmup
        self.averages: list[float] = []
        self.t = 0

    def step(self, norms: list[float], total: float) -> list[float]:
        self.t += 1
        if self.t < self.warmup:
            factors = [at_most_one(self.absolute / (total + 1e-8))] * len(norms)
            scaled = [h * n for h, n in zip(factors, norms, strict=True)]
            self.averages = scaled if self.t == 1 else list(map(min, self.averages, scaled))
        else:
            own = zip(self.averages, norms, strict=True)
            factors = [at_most_one(divide(self.relative * average, n)) for average, n in own]
            scaled = [h * n for h, n in zip(factors, norms, strict=True)]
            both = zip(self.averages, scaled, strict=True)
            self.averages = [self.beta * average + (1 - self.beta) * s for average, s in both]
        return factors


class ClipByMedian:
    """The recommended rule, from its text."""

    def __init__(self, k: float = 6.0, window: int = 128, warmup: int = 32, floor: float = 0.05) -> None:
        self.k, self.window, self.warmup, self.floor = k, window, warmup, floor
        self.logarithms: list[float] = []
        self.threshold = math.inf

    def step(self, norm: float) -> float:
        count = len(self.logarithms)
        last, usable = self.logarithms[-self.window :], math.isfinite(norm) and norm > 0
        remembered = norm
        if count >= self.warmup:
            middle = statistics.median(last)
            spread = max(1.4826 * statistics.median(abs(x - middle) for x in last), self.floor)
            threshold = math.exp(middle + self.k * spread)
        elif count or usable:  # the start: at most 1.5 times what is usual, and of that a tenth, growing
            most = 1.5 * math.exp(statistics.median(last)) if count else norm
            threshold = most * 0.1 ** (1 - count / self.warmup)
            remembered = min(norm, most)
        else:
            threshold = math.inf
        if usable:
            self.logarithms.append(math.log(remembered))
        self.threshold = threshold
        return min(1.0, threshold / norm) if norm else 1.0


def square(x: float) -> float:
    return x * x


def in_order(values: list[float]) -> float:
    """The sum from left to right, which ``sum`` is only up to Python 3.11."""
    total = 0.0
    for value in values:
        total += value
    return total
