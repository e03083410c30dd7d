"""When to measure what is dear: every so many steps, as far as it stays cheap, and at once after an alert."""

import math
import statistics
from collections import deque

EVERY = 50
"""Steps between two measurements on schedule."""

SHARE = 0.005
"""The largest share of the run's time that measurements on schedule may take; and the same again for bursts."""

FREE = 0.05
"""Seconds of them that no share limits: a run of a few seconds needs some measurements too."""

BURST = 20
"""Steps that are measured after an alert."""

WINDOW = 128
"""Norms that an alert compares with."""

DEVIATIONS = 6.0
"""An alert is a norm so many robust deviations above the median, in logarithms."""

_FEWEST = 32
_LEAST_DEVIATION = 0.05
_REFRESH = 16


class Alarm:
    """Tells which norms are out of the ordinary; plain numbers, under a microsecond a step.

    Example:
        >>> alarm = Alarm()
        >>> any(alarm.see(1.0 + 0.01 * (k % 7)) for k in range(100)), alarm.see(50.0), alarm.see(float("nan"))
        (False, True, True)
    """

    def __init__(self) -> None:
        self._logarithms: deque[float] = deque(maxlen=WINDOW)
        self._limit = math.inf
        self._since = 0

    def see(self, norm: float) -> bool:
        """Return whether ``norm`` is not finite, or far above the last ones."""
        if not math.isfinite(norm):
            return True
        if norm <= 0:
            return False
        logarithm = math.log(norm)
        alert = logarithm > self._limit
        self._logarithms.append(logarithm)
        self._since += 1
        if self._since >= _REFRESH and len(self._logarithms) >= _FEWEST:
            self._refresh()
        return alert

    def _refresh(self) -> None:
        self._since = 0
        median = statistics.median(self._logarithms)
        deviation = 1.4826 * statistics.median([abs(x - median) for x in self._logarithms])
        self._limit = median + DEVIATIONS * max(deviation, _LEAST_DEVIATION)


class Schedule:
    """Says which steps are measured in full.

    A step is due if it is on schedule (`EVERY`) and all such measurements together stay below `SHARE` of the run's
    time, or below `FREE` seconds, or if it is one of the `BURST` steps after an alert, which have a budget of the same
    size; the first burst is never refused. Whatever the time, an optimizer's first step is due, and those of the
    numbers 1, 2, 4, 8 … times `EVERY`: how weights grew is seen on a slow machine too.

    Args:
        every: Steps between two measurements on schedule; 0 for none, and no bursts.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._burst_ends = 0
        self._bursts = 0
        self._spent = {"schedule": 0.0, "burst": 0.0}
        self._last = 0.0
        self._now = "schedule"

    def due(self, step: int, turn: int, elapsed: float) -> bool:
        """Return whether a step is measured in full.

        Args:
            step: Its number.
            turn: Its number among those of its optimizer.
            elapsed: Seconds since the run began.
        """
        if step < self._burst_ends:
            self._now = "burst"
            return True
        self._now = "schedule"
        if self._every <= 0 or turn % self._every:
            return False
        times = turn // self._every
        is_power_of_two = times & (times - 1) == 0  # and 0
        return is_power_of_two or self._spent["schedule"] + self._last <= max(FREE, SHARE * elapsed)

    def spent(self, seconds: float) -> None:
        """Tell what the measurement of the last due step took."""
        self._spent[self._now] += seconds
        self._last = seconds

    def alert(self, step: int, elapsed: float) -> None:
        """Start a burst with ``step``, unless one is going on or bursts took too much already."""
        affordable = self._bursts == 0 or self._spent["burst"] + BURST * self._last <= SHARE * elapsed
        if self._every > 0 and step >= self._burst_ends and affordable:
            self._burst_ends = step + BURST
            self._bursts += 1
