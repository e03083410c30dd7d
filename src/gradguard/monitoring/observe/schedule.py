"""Schedule the costly measurements: at a fixed interval of steps, within a share of the run's time."""

EVERY = 50
"""Steps between two measurements."""

SHARE = 0.005
"""The largest share of the run's time that measurements may take."""

FREE = 0.05
"""The seconds of measuring that are always allowed: a run of a few seconds needs some measurements too."""


class Schedule:
    """Decide which steps are measured in full.

    A step on schedule is due if all full measurements together stay below `SHARE` of the run's time or below `FREE`
    seconds. An optimizer's steps 0, 1, 2, 4, 8 ... times ``every`` are always due: a slow machine also needs some
    measurements of the weights' growth.

    Args:
        every: Steps between two measurements; 0 for none.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every, self._spent, self._last = every, 0.0, 0.0

    def due(self, turn: int, elapsed: float) -> bool:
        """Return whether a step is measured in full.

        Args:
            turn: The number of the step among the steps of its optimizer.
            elapsed: Seconds since the run began.
        """
        if self._every <= 0 or turn % self._every:
            return False
        times = turn // self._every
        is_power_of_two = times & (times - 1) == 0  # true for 0 as well
        return is_power_of_two or self._spent + self._last <= max(FREE, SHARE * elapsed)

    def spent(self, seconds: float) -> None:
        """Add the seconds that the measurement of the last due step took."""
        self._spent += seconds
        self._last = seconds
