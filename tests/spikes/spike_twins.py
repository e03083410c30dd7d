"""The slow twin of `SpikeDetector`: Python lists and the statistics module, one signal object each."""

import math
from statistics import median


class TwinSignal:
    def __init__(self, window, warmup, floor, recent):
        self.window, self.warmup, self.floor, self.recent = window, warmup, floor, recent
        self.past = []  # the oldest first

    def score(self, value):
        """How many deviations above the median; NaN if that cannot be told."""
        if len(self.past) < self.warmup or not math.isfinite(value):
            return math.nan
        if all(x > 0 for x in self.past):
            x, least = [math.log(x) for x in self.past], lambda _: self.floor
            value = math.log(value) if value > 0 else -math.inf
        else:
            x, least = self.past, lambda m: self.floor * abs(m)
        m = median(x[-self.recent :])
        mad = median([abs(y - m) for y in x[-self.recent :]])
        jump = median([abs(x[i] - x[i - 1]) for i in range(1, len(x))]) if len(x) > 1 else 0.0
        d = max(1.4826 * mad, 1.4826 * jump / math.sqrt(2), least(m))
        return (value - m) / d if d > 0 else math.nan

    def put(self, value):
        self.past = [*self.past, value][-self.window :]

    def replace(self, values):
        self.past = [value for value in values if math.isfinite(value)]


class TwinDetector:
    def __init__(self, signals, k=6.0, window=128, warmup=32, cap=8, floor=0.05, recent=32):
        self.signals = [TwinSignal(window, warmup, floor, recent) for _ in range(signals)]
        self.k, self.cap = k, cap
        self.row = []  # (values, which were too high) of the spikes in a row
        self.scores, self.adopted = [], False

    def observe(self, values):
        self.adopted = False
        self.scores = [s.score(v) for s, v in zip(self.signals, values, strict=True)]
        if not any(math.isfinite(v) for v in values):
            return False
        high = [score > self.k for score in self.scores]
        if not any(high):
            self.row = []
            for signal, value in zip(self.signals, values, strict=True):
                if math.isfinite(value):
                    signal.put(value)
            return False
        self.row.append((list(values), high))
        if len(self.row) == self.cap:
            self.adopted = True
            for i, signal in enumerate(self.signals):
                if any(too_high[i] for _, too_high in self.row):
                    signal.replace([row[i] for row, _ in self.row])
            self.row = []
        return True
