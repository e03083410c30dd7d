"""What looks for one kind of fault each, step by step; `HealthMonitor` puts them together."""

import math
import statistics
from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from gradguard.monitoring.judge.findings import (
    ALWAYS_ON_SHARE,
    AMP_LEAST_SCALE,
    AMP_SKIPS,
    CONVERGED_LOSS,
    DOMINATING_ELEMENTS,
    DOMINATING_OF_STEPS,
    DOMINATING_SHARE,
    DOMINATING_TENSORS,
    EXPLODING_EARLY_TIMES,
    EXPLODING_ONCE_TIMES,
    EXPLODING_STEPS,
    EXPLODING_TIMES,
    FIXED_PATIENCE,
    LAYER_LINES,
    VANISHING_SHARE,
    VANISHING_STEPS,
    WEAK_LAYER_SHARE,
    Episode,
    Finding,
    Log,
)
from gradguard.monitoring.judge.recommend import cancels_scale
from gradguard.monitoring.record.steps import BINDS_BELOW
from gradguard.threshold_rules import LOCK_IN_TOLERANCE, LOCK_IN_WINDOW, LockInAlarm

BLOCK = 20
"""Norms whose median is one sample of what is usual."""

_BLOCKS_NEEDED = 3
_EARLY_BLOCKS = 10
_NEVER = -1


class Level:
    """Whether the norm stays far above or far below what is usual, or is not finite.

    What is usual is the median of the medians of each 20 finite norms, without the first 20: neither a spike nor the
    start moves it, and a lasting change not before it has lasted for half of the run.

    Args:
        log: Where faults go.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._block: list[float] = []
        self._blocks, self._levels, self._usual = 0, [], 0.0
        self._high, self._low = math.inf, 0.0  # until something is known to be usual
        self._run, self._since, self._peak = 0, 0, 0.0  # of norms above or below, signed
        self._norm, self._first_losses = 0.0, []

    def finite(self, i: int, norm: float, loss: float | None, clipped: bool = False) -> list[Finding]:
        """Return what is new after a step with a finite norm.

        Args:
            i: The step.
            norm: Its norm.
            loss: Its loss, if known and finite.
            clipped: Whether a clip bound on it.
        """
        self._norm = norm
        self._block.append(norm)
        if len(self._block) == BLOCK:
            self._close_block()
        if loss is not None and self._blocks <= _BLOCKS_NEEDED:
            self._first_losses.append(loss)
        if self._low < norm <= self._high:
            self._run = 0
            return []
        return self._exploding(i, norm, clipped) if norm > self._high else self._vanishing(i, norm, loss)

    def nonfinite(self, i: int, skipped: bool, amp: bool) -> list[Finding]:
        """Return what is new after a step with gradients that are not finite.

        Args:
            i: The step.
            skipped: Whether the optimizer left it out.
            amp: Whether a loss scaler is at work, whose search for its scale is no fault.
        """
        if skipped and amp:
            return []
        episode = self._log.goes_on("nonfinite", i)
        if episode is not None:
            episode.harmless = episode.harmless and skipped
            return []
        numbers = {}
        if self._usual and self._norm > EXPLODING_TIMES * self._usual:
            numbers = {"before": self._norm, "times": self._norm / self._usual}
        return self._log.begin("nonfinite", "nonfinite", i, i, numbers=numbers, harmless=skipped)

    def blame(self, i: int, names: Sequence[str]) -> None:
        """Name the parameters whose gradients were not finite on step ``i``.

        Args:
            i: The step.
            names: Their names.
        """
        for episode in reversed(self._log.episodes):
            if episode.kind == "nonfinite" and episode.last == i:
                episode.params += [name for name in names if name not in episode.params]
                return

    def _count(self, i: int, sign: int) -> int:
        """For how many steps in a row the norm has been on that side."""
        if self._run * sign <= 0:
            self._run, self._since = 0, i
        self._run += sign
        return abs(self._run)

    def _exploding(self, i: int, norm: float, clipped: bool) -> list[Finding]:
        count = self._count(i, +1)
        self._peak = norm if count == 1 else max(self._peak, norm)
        if count < EXPLODING_STEPS:
            return [] if clipped else self._jump(i, norm)
        if self._log.goes_on("exploding", i, norm):
            return []
        numbers = {"usual": self._usual, "times": self._high / self._usual, "largest": self._peak}
        return self._log.begin("exploding", "exploding", self._since, i, count=count, numbers=numbers)

    def _jump(self, i: int, norm: float) -> list[Finding]:
        if norm <= EXPLODING_ONCE_TIMES * self._usual or self._log.goes_on("jump", i, norm):
            return []
        numbers = {"usual": self._usual, "largest": norm, "once": 1.0}
        return self._log.begin("jump", "exploding", i, i, numbers=numbers)

    def _vanishing(self, i: int, norm: float, loss: float | None) -> list[Finding]:
        count = self._count(i, -1)
        if count < VANISHING_STEPS or self._has_converged(loss) or self._log.goes_on("vanishing", i, norm):
            return []
        numbers = {"below": self._low, "smallest": norm}
        return self._log.begin("vanishing", "vanishing", self._since, i, count=count, numbers=numbers)

    def _has_converged(self, loss: float | None) -> bool:
        if loss is None or not self._first_losses:
            return False
        return 0 <= loss < CONVERGED_LOSS * statistics.median(self._first_losses)

    def _close_block(self) -> None:
        level = statistics.median(self._block)
        self._block, self._blocks = [], self._blocks + 1
        if self._blocks > 1:
            insort(self._levels, level)
        if len(self._levels) >= _BLOCKS_NEEDED:
            self._usual = self._levels[len(self._levels) // 2]
            times = EXPLODING_TIMES if self._blocks > _EARLY_BLOCKS else EXPLODING_EARLY_TIMES
            self._high = times * self._usual or math.inf
            self._low = VANISHING_SHARE * self._usual


class Clipping:
    """Whether a clip binds most of the time at one threshold.

    A threshold that a rule moves is told of at once; one that is fixed only when it goes on, because many healthy
    warm-ups bind for some hundred steps.

    Args:
        log: Where faults go.
        optimizer: The class of the optimizer.
    """

    def __init__(self, log: Log, optimizer: str = "") -> None:
        self._log, self._optimizer = log, optimizer
        self._alarm, self._held, self._since = LockInAlarm(), 0, 0
        self._steps, self._bound = 0, 0
        self._least, self._largest = math.inf, -math.inf
        self._coefficients: deque[float] = deque(maxlen=LOCK_IN_WINDOW)

    @property
    def fixed(self) -> bool:
        """Whether one threshold was in use since the start."""
        return self._largest <= self._least * (1 + LOCK_IN_TOLERANCE)

    def follow(self, i: int, threshold: float, coefficient: float | None) -> list[Finding]:
        """Return what is new after a step with finite gradients.

        Args:
            i: The step.
            threshold: What the clip compared with.
            coefficient: What it multiplied by, if known.
        """
        binds = coefficient is not None and coefficient < BINDS_BELOW
        self._steps += 1
        if binds and coefficient is not None:
            self._bound += 1
            self._coefficients.append(coefficient)
        if threshold < self._least or threshold > self._largest:
            self._least, self._largest = min(threshold, self._least), max(threshold, self._largest)
        if not self._alarm.follow(binds, threshold):
            self._held = 0
            return []
        self._held += 1
        if self._held == 1:
            self._since = i
        if self.fixed and self._held <= FIXED_PATIENCE:
            return []
        return self._locked_in(i, threshold)

    def _locked_in(self, i: int, threshold: float) -> list[Finding]:
        share = self._bound / self._steps
        kind = "clipping_always_on" if self.fixed and share > ALWAYS_ON_SHARE else "lock_in"
        if self._log.goes_on(kind, i):
            return []
        numbers = {
            "threshold": threshold,
            "coefficient": statistics.median(self._coefficients),
            "share": share,
            "fixed": float(self.fixed),
        }
        count = self._steps if kind == "clipping_always_on" else self._held
        harmless = cancels_scale(self._optimizer)
        return self._log.begin(kind, kind, self._since, i, count=count, numbers=numbers, harmless=harmless)


class Amp:
    """Whether a loss scaler falls without end.

    Args:
        log: Where faults go.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._skipped_steps, self._at, self._skips_there = 0, _NEVER, 0

    def step(self, i: int, scale: float, skipped: bool) -> list[Finding]:
        """Return what is new after a step.

        Args:
            i: The step.
            scale: The loss scale.
            skipped: Whether the optimizer left it out.
        """
        self._skipped_steps = self._skipped_steps + 1 if skipped else 0
        if scale >= AMP_LEAST_SCALE:
            return self._many(i, self._skipped_steps) if skipped else []
        if self._log.goes_on("amp", i, scale):
            return []
        return self._log.begin("amp", "amp_scale_collapse", i, i, numbers={"smallest": scale})

    def skip(self, i: int) -> list[Finding]:
        """Return what is new after a skip that left no step behind.

        Args:
            i: The number that the next step will have.
        """
        self._at, self._skips_there = i, self._skips_there + 1 if i == self._at else 1
        return self._many(i, self._skips_there)

    def _many(self, i: int, count: int) -> list[Finding]:
        if count < AMP_SKIPS or self._log.goes_on("amp", i):
            return []
        return self._log.begin("amp", "amp_scale_collapse", i, i, count=count)


class Layers:
    """Whether one layer makes the whole norm, gets no gradient, or hardly any.

    Args:
        log: Where faults go.
        params: The ``params`` of the record's first line.
        several: Whether the run has several optimizers, so that some of these parameters are not this one's.
    """

    def __init__(self, log: Log, params: Sequence[dict[str, Any]], several: bool = False) -> None:
        self._log, self._several = log, several
        self.names = [str(parameter.get("name", "?")) for parameter in params]
        elements = [parameter.get("numel") or 0 for parameter in params]
        self._large = [count > DOMINATING_ELEMENTS * sum(elements) for count in elements]
        # Vectors stay out: a bias before a normalisation or of attention's keys has a gradient of 0 by mathematics.
        matrices = [i for i, count in enumerate(elements) if count and len(params[i].get("shape") or []) > 1]
        self._roots = {place: math.sqrt(elements[place]) for place in matrices}
        self._tensors = 0 if several else len(self.names)  # how many are this optimizer's
        self._seen, self._tops = 0, Counter()
        self._alive = [False] * len(self.names)
        self._dead, self._weak = _Runs(), _Runs()

    def top(self, i: int, place: int, share: float) -> list[Finding]:
        """Return what is new after a step whose largest gradient is known.

        Args:
            i: The step.
            place: Which parameter it is.
            share: Its share of the squared norm.
        """
        self._seen += 1
        if share > DOMINATING_SHARE:
            self._tops[place] += 1
        if self._seen < LOCK_IN_WINDOW:
            return []
        tops, self._tops, self._seen = self._tops, Counter(), 0
        place, count = max(tops.items(), key=lambda item: item[1], default=(_NEVER, 0))
        if count < DOMINATING_OF_STEPS * LOCK_IN_WINDOW or not self._may_dominate(place):
            return []
        name = self.names[place]
        if self._log.goes_on(f"dominating {name}", i):
            return []
        return self._log.begin(
            f"dominating {name}", "dominating_layer", i, i, params=[name], numbers={"share": count / LOCK_IN_WINDOW}
        )  # fmt: skip

    def norms(self, i: int, norms: Sequence[float], absent: Sequence[int] = ()) -> list[Finding]:
        """Return what is new after a line with the norm of each parameter.

        Args:
            i: The step.
            norms: One finite norm for each; 0 for one that was not measured.
            absent: Those that had no gradient, which is not one of exact zeros.
        """
        if len(norms) != len(self.names) or not any(norms):
            return []  # where all of them are 0, the norm says so
        if self._several:
            self._tensors = sum(norm > 0 for norm in norms)
        for place, norm in enumerate(norms):
            if norm:
                self._alive[place] = True
        # With several optimizers, a parameter that never had a gradient on this one's steps is another's.
        zero = [place for place, norm in enumerate(norms) if not norm and (self._alive[place] or not self._several)]
        zero = [place for place in zero if place not in absent] if absent else zero
        new, found = self._dead.follow(i, zero), []
        for alive in (True, False):
            places = [place for place in new if self._alive[place] is alive]
            found += self._begin(self._dead, "dead_layer", i, places, harmless=not alive)
        return found + self._vanishing(i, norms)

    def _may_dominate(self, place: int) -> bool:
        known = 0 <= place < len(self.names)
        return known and self._tensors >= DOMINATING_TENSORS and not self._large[place]

    def _vanishing(self, i: int, norms: Sequence[float]) -> list[Finding]:
        sizes = {place: norms[place] / root for place, root in self._roots.items() if norms[place]}
        if len(sizes) < _BLOCKS_NEEDED:
            return []
        usual = statistics.median(sizes.values())
        new = self._weak.follow(i, [place for place, size in sizes.items() if size < WEAK_LAYER_SHARE * usual])
        share = min((sizes[place] / usual for place in new), default=0.0)
        return self._begin(self._weak, "vanishing", i, new, numbers={"smallest": share})

    def _begin(self, runs: "_Runs", kind: str, i: int, places: list[int], **more: Any) -> list[Finding]:
        if not places:
            return []
        first = min(runs.since[place] for place in places)
        names = [self.names[place] for place in places]
        found = self._log.begin(f"{kind} {places}", kind, first, i, count=LAYER_LINES, params=names, **more)
        runs.episodes.update(dict.fromkeys(places, self._log.episodes[-1]))
        return found


class _Runs:
    """For how many lines in a row a fault has been seen on each parameter."""

    def __init__(self) -> None:
        self.since: dict[int, int] = {}
        self.episodes: dict[int, Episode] = {}
        self._counts: dict[int, int] = {}

    def follow(self, i: int, faulty: Sequence[int]) -> list[int]:
        """Return the parameters on which the fault has lasted long enough just now; let open episodes go on."""
        self._counts = {place: self._counts.get(place, 0) + 1 for place in faulty}
        self.since = {place: self.since.get(place, i) for place in faulty}
        self.episodes = {place: its for place in faulty if (its := self.episodes.get(place)) is not None}
        for place, episode in self.episodes.items():
            episode.last, episode.count = i, max(episode.count, self._counts[place])
        return [place for place, count in self._counts.items() if count == LAYER_LINES]
