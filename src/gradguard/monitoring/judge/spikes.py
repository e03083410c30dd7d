"""Spikes: norms that stand out from those around them, however the norms drift."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import chain, count
from typing import Generic, TypeVar

from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.step_rows import usable_norms
from gradguard.threshold_rules import SortedWindow, centre_and_spread

NEIGHBOURS = 50
"""Neighbours on each side. A spike is missed only if more than half of its neighbours are spikes."""

DEVIATIONS = 6.0
"""Robust deviations above the median of the neighbourhood. Log-normal noise gets there once in 10^8 steps or less."""

LEAST_DEVIATION = 0.05
"""The smallest deviation. With it a spike is at least 1.35 times the median; norms that hardly differ would otherwise
turn every bump into a spike."""

_T = TypeVar("_T")
_FEWEST = 21
_LEAST = DEVIATIONS * LEAST_DEVIATION
_WIDTH = 2 * NEIGHBOURS + 1


class SpikeFinder(Generic[_T]):
    """Finds spikes in norms that arrive one by one, each as soon as its neighbourhood is complete.

    **Guarantees**: some microseconds per norm; it stores 101 of them. It finds the same spikes as `find_spikes`.

    Example:
        >>> finder = SpikeFinder()
        >>> [finder.follow(16.0 if i == 80 else 1.0, i) for i in range(131)][-1], finder.finish()
        ([80], [])
    """

    def __init__(self) -> None:
        self._logarithms = SortedWindow(_WIDTH)
        self._remembered: deque[_T] = deque(maxlen=_WIDTH)

    @property
    def level(self) -> float:
        """The median of the stored norms; 0 without any."""
        ordered = self._logarithms.ordered
        return math.exp(ordered[len(ordered) // 2]) if ordered else 0.0

    def follow(self, norm: float, about: _T) -> list[_T]:
        """Return the ``about`` values of the norms that are now known to be spikes.

        Args:
            norm: The next norm. Zero, negative and non-finite norms are neither spikes nor neighbours.
            about: Any value that belongs to the norm, such as its position.
        """
        if not 0 < norm < math.inf:
            return []
        window = self._logarithms
        before = len(window.ordered)
        window.add(math.log(norm))
        self._remembered.append(about)
        if before == _WIDTH:
            is_low = window.recent[NEIGHBOURS] <= window.ordered[NEIGHBOURS] + _LEAST
            return [] if is_low else self._spikes(NEIGHBOURS, NEIGHBOURS + 1)
        # the first norms have no neighbours before them, so all are judged once the first window is full
        return self._spikes(0, NEIGHBOURS + 1) if before + 1 == _WIDTH else []

    def finish(self) -> list[_T]:
        """Return the ``about`` values of the spikes among the last norms, at the end of the run; call it once."""
        count = len(self._remembered)
        return self._spikes(NEIGHBOURS + 1 if count == _WIDTH else 0, count) if count >= _FEWEST else []

    def _spikes(self, begin: int, end: int) -> list[_T]:
        recent, ordered = self._logarithms.recent, self._logarithms.ordered
        middle, deviation = centre_and_spread(ordered)
        limit = middle + DEVIATIONS * max(deviation, LEAST_DEVIATION)
        high = [place for place in range(begin, end) if recent[place] > limit]
        at_first = sum(place == k for k, place in enumerate(high))  # high norms at the very start; 0 in later windows
        return [self._remembered[place] for place in (high[at_first:] if at_first > 1 else high)]


def find_spikes(norms: Sequence[float]) -> list[int]:
    r"""Return the positions of the norms that stand out from their neighbourhood.

    .. math:: \log n_i > \mathrm{med} + 6 \max(1.4826\,\mathrm{MAD},\ 0.05)

    Median and MAD are taken of the logarithms of the 101 norms around position i; at both ends, of the first and the
    last 101 norms.

    **Guarantees**: O(n log w). A drift makes no spikes, and hides no spike that stands out from the norms within 101
    steps. A lasting change of level is no spike, except among the last 50 norms, where it could be a burst. Bursts of
    up to about 25 steps are found completely, and recurring spikes of up to one step in eight.

    **Edge cases**: two or more high norms at the very start are the level where the run began, not spikes. Norms that
    are zero, negative or not finite are neither spikes nor neighbours. Fewer than 21 norms have no spikes.

    Args:
        norms: Norms in the order of their steps.

    Returns:
        Positions in ``norms``, ascending.

    Example:
        >>> find_spikes([16.0 if i in (40, 90) else 1.0 + 0.01 * (i % 7) for i in range(200)])
        [40, 90]
    """
    finder = SpikeFinder[int]()
    return [*chain.from_iterable(map(finder.follow, norms, count())), *finder.finish()]


@once
def spikes_of(record: Record) -> list[int]:
    """Return the spikes among the usable norms of a record.

    Args:
        record: The record of a run.

    Returns:
        Positions in its `usable_norms`.
    """
    return find_spikes(usable_norms(record))
