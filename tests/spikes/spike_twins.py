"""The slow twin of `SpikeDetector`: Python lists and the statistics module, one signal object each."""

import math
from statistics import median


class TwinSignal:
    def __init__(self, window, warmup, k, floor):
        self.window, self.warmup, self.k, self.floor = window, warmup, k, floor
        self.past = []  # as [slot -> value], None where empty
        self.slots, self.written = [None] * window, 0

    def score(self, value):
        """How many deviations above the median; NaN if that cannot be told."""
        past = [x for x in self.slots if x is not None]
        if len(past) < self.warmup or not math.isfinite(value):
            return math.nan
        if min(past) > 0:
            logs = [math.log(x) for x in past]
            m = median(logs)
            d = max(1.4826 * median([abs(x - m) for x in logs]), self.floor)
            return (math.log(value) - m) / d if value > 0 else -math.inf
        m = median(past)
        d = max(1.4826 * median([abs(x - m) for x in past]), self.floor * abs(m))
        return (value - m) / d if d > 0 else math.nan

    def put(self, value):
        self.slots[self.written % self.window] = value
        self.written += 1

    def replace(self, values):
        self.slots = [v if math.isfinite(v) else None for v in values] + [None] * (self.window - len(values))
        self.written = len(values)


class TwinDetector:
    def __init__(self, signals, k=6.0, window=128, warmup=32, cap=8, floor=0.05):
        self.signals = [TwinSignal(window, warmup, k, floor) for _ in range(signals)]
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
