"""The lock-in alarm on plain numbers: a clip that binds most of the time at one threshold no longer guards."""

from collections import deque

WINDOW = 100
"""Steps that are looked back upon."""

TOLERANCE = 0.01
"""A threshold that has moved by less than this fraction over the window counts as one threshold."""


class LockInAlarm:
    """Whether a clip has bound on more than half of the last 100 finite steps at one threshold.

    The same judgement as that of the clippers themselves (``result.locked_in``), made from a record.

    Args:
        window: How many steps.

    Example:
        >>> alarm = LockInAlarm(window=4)
        >>> [alarm.follow(clipped=True, threshold=1.0) for step in range(5)]
        [False, False, False, True, True]
    """

    __slots__ = ("_bound", "_bound_on", "_same", "_thresholds")

    def __init__(self, window: int = WINDOW) -> None:
        self._thresholds: deque[float] = deque(maxlen=window)
        self._bound_on: deque[bool] = deque(maxlen=window)
        self._bound = 0
        self._same = 0  # for how many steps the threshold has been what it is, to the last digit

    def follow(self, clipped: bool, threshold: float) -> bool:
        """Return the verdict after one more step.

        Args:
            clipped: Whether the clip binds on this step.
            threshold: What it compared with, at least 0; infinite for none.
        """
        thresholds, bound_on = self._thresholds, self._bound_on
        window = thresholds.maxlen or 0
        self._same = self._same + 1 if thresholds and thresholds[-1] == threshold else 1
        if len(bound_on) == window:
            self._bound -= bound_on[0]
        thresholds.append(threshold)
        bound_on.append(clipped)
        self._bound += clipped
        if len(bound_on) < window or 2 * self._bound <= window:
            return False
        return self._same >= window or max(thresholds) <= min(thresholds) * (1 + TOLERANCE)
