"""When to measure what is costly: every so many steps, as far as it stays cheap."""

EVERY = 50
"""Steps between two measurements."""

SHARE = 0.005
"""The largest share of the run's time that measurements may take."""

FREE = 0.05
"""Seconds of them that no share limits: a run of a few seconds needs some measurements too."""


class Schedule:
    """Says which steps are measured in full.

    A step is due if it is on schedule and all such measurements together stay below `SHARE` of the run's time, or
    below `FREE` seconds. Whatever the time, an optimizer's first step is due, and those of the numbers 1, 2, 4, 8 ...
    times `EVERY`: how weights grew is seen on a slow machine too.

    Args:
        every: Steps between two measurements; 0 for none.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every, self._spent, self._last = every, 0.0, 0.0

    def due(self, turn: int, elapsed: float) -> bool:
        """Return whether a step is measured in full.

        Args:
            turn: Its number among those of its optimizer.
            elapsed: Seconds since the run began.
        """
        if self._every <= 0 or turn % self._every:
            return False
        times = turn // self._every
        is_power_of_two = times & (times - 1) == 0  # and 0
        return is_power_of_two or self._spent + self._last <= max(FREE, SHARE * elapsed)

    def spent(self, seconds: float) -> None:
        """Tell what the measurement of the last due step took."""
        self._spent += seconds
        self._last = seconds
