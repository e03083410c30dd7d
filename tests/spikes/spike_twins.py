"""The slow twin of `SpikeDetector`: Python lists and the statistics module, one signal object each."""

import math
from statistics import median


class TwinSignal:
    def __init__(self, window, warmup, floor, recent):
        self.window, self.warmup, self.floor, self.recent = window, warmup, floor, recent
        self.past = []  # the oldest first
        self.weights = []

    def score(self, value, weight=math.nan, alone=1.0):
        """How many deviations above the median, and whether that is a spike by itself; NaN if it cannot be told."""
        if len(self.past) < min(8, self.warmup) or not math.isfinite(value):
            return math.nan, False
        logarithms = all(x > 0 for x in self.past)
        if logarithms:
            x, least = [math.log(x) for x in self.past], lambda _: self.floor
            value = math.log(value) if value > 0 else -math.inf
        else:
            x, least = self.past, lambda m: self.floor * abs(m)
        m = median(x[-self.recent :])
        mad = median([abs(y - m) for y in x[-self.recent :]])
        jump = median([abs(x[i] - x[i - 1]) for i in range(1, len(x))]) if len(x) > 1 else 0.0
        d = max(1.4826 * mad, 1.4826 * jump / math.sqrt(2), least(m))
        if d <= 0:
            return math.nan, False
        wider = 1.0
        if self.weights and 0 < weight < math.inf:
            wider = max(1.0, math.sqrt(median(self.weights[-self.recent :]) / weight))
        above = (value - m) / wider
        return above / d, above > (math.log(alone) if logarithms else (alone - 1) * max(abs(m), d))

    def put(self, value, weight):
        self.past = [*self.past, value][-self.window :]
        if 0 < weight < math.inf:
            self.weights.append(weight)

    def replace(self, values):
        self.past = [value for value in values if math.isfinite(value)]


class TwinDetector:
    def __init__(self, signals, k=6.0, window=128, warmup=32, cap=8, floor=0.05, recent=32, alone=50.0):
        self.signals = [TwinSignal(window, warmup, floor, recent) for _ in range(signals)]
        self.k, self.cap, self.window, self.alone = k, cap, window, alone
        self.row = []  # (values, which were too high) of the spikes in a row
        self.became = []  # of each step "ordinary", "stood out" or "skipped"
        self.scores, self.adopted = [], False

    def observe(self, values, weight=math.nan):
        self.adopted = False
        found = [s.score(v, weight, self.alone) for s, v in zip(self.signals, values, strict=True)]
        judged = [len(s.past) >= s.warmup for s in self.signals]
        self.scores = [score if known else math.nan for (score, _), known in zip(found, judged, strict=True)]
        if not any(math.isfinite(v) for v in values):
            return False
        high = [score > self.k for score, _ in found]
        blamed = [h and known for h, known in zip(high, judged, strict=True)]
        far = any(b and is_far for b, (_, is_far) in zip(blamed, found, strict=True))
        if not (any(blamed) and (far or self.is_burst())):
            self.row = []
            for signal, value in zip(self.signals, values, strict=True):
                if math.isfinite(value):
                    signal.put(value, weight)
            self.note("stood out" if any(high) else "ordinary")
            return False
        self.row.append((list(values), high))
        self.note("skipped")
        if len(self.row) == self.cap:
            self.adopted = True
            for i, signal in enumerate(self.signals):
                if any(too_high[i] for _, too_high in self.row):
                    signal.replace([row[i] for row, _ in self.row])
            self.row = []
            self.became = ["ordinary" if one == "skipped" else one for one in self.became]
        return True

    def note(self, what):
        self.became = [*self.became, what][-self.window :]

    def is_burst(self):
        """Whether the steps that end with this one, which stands out, do so more often than those before."""
        steps = [*self.became, "stood out"]
        best = 0.0
        for length in range(1, min(16, len(steps)) + 1):
            before, row = steps[:-length], steps[-length:]
            if row[0] == "ordinary":
                continue
            usual = (before.count("stood out") + 1) / (before.count("stood out") + before.count("ordinary") + 2)
            share = (len(row) - row.count("ordinary")) / length
            if share > usual:
                gain = share * math.log(share / usual)
                gain += (1 - share) * math.log((1 - share) / (1 - usual)) if share < 1 else 0.0
                best = max(best, length * gain)
        return best >= 9
