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
"""On each side: more than half of them would have to be spikes before one goes unseen."""

DEVIATIONS = 6.0
"""Robust deviations above the median of the neighbourhood: with log-normal noise once in 10^8 steps or less."""

LEAST_DEVIATION = 0.05
"""Norms that hardly differ would make a spike of every bump: one stands out from 1.35 times the median on."""

_T = TypeVar("_T")
_FEWEST = 21
_LEAST = DEVIATIONS * LEAST_DEVIATION
_WIDTH = 2 * NEIGHBOURS + 1


class SpikeFinder(Generic[_T]):
    """Finds spikes in norms that come one by one, each as soon as its neighbourhood is complete.

    **Guarantees**: some microseconds a norm; it remembers 101 of them. What it finds is what `find_spikes` finds.

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
        """The median of the norms that it remembers; 0 without any."""
        ordered = self._logarithms.ordered
        return math.exp(ordered[len(ordered) // 2]) if ordered else 0.0

    def follow(self, norm: float, about: _T) -> list[_T]:
        """Return what belongs to the norms that are now known to be spikes.

        Args:
            norm: The next norm; one without a logarithm is no spike and no neighbour.
            about: Any value that belongs to it, such as its position.
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
        return self._spikes(0, NEIGHBOURS + 1) if before + 1 == _WIDTH else []  # the first have no others before them

    def finish(self) -> list[_T]:
        """Return what belongs to the spikes among the last norms, which have no others after them; call it once."""
        count = len(self._remembered)
        return self._spikes(NEIGHBOURS + 1 if count == _WIDTH else 0, count) if count >= _FEWEST else []

    def _spikes(self, begin: int, end: int) -> list[_T]:
        recent, ordered = self._logarithms.recent, self._logarithms.ordered
        middle, deviation = centre_and_spread(ordered)
        limit = middle + DEVIATIONS * max(deviation, LEAST_DEVIATION)
        high = [place for place in range(begin, end) if recent[place] > limit]
        at_first = sum(place == k for k, place in enumerate(high))  # 0 in a window that begins later
        return [self._remembered[place] for place in (high[at_first:] if at_first > 1 else high)]


def find_spikes(norms: Sequence[float]) -> list[int]:
    r"""Return the positions of the norms that stand out from their neighbourhood.

    .. math:: \log n_i > \mathrm{med} + 6 \max(1.4826\,\mathrm{MAD},\ 0.05)

    where the median and the MAD are those of the logarithms of the 101 norms around position i; at both ends, the
    first and the last 101.

    **Guarantees**: O(n log w). A drift makes no spike and hides none that stands out from what the norms do within 101
    steps; a lasting change of level is none, but for the last 50 norms, which could be a burst. Bursts are
    found whole up to some 25 steps, and recurring spikes up to one in eight.

    **Edge cases**: two norms or more that are high from the first one on are where the run began, and no spikes. Norms
    that are zero, negative or not finite are no spikes and no neighbours. Fewer than 21 norms have none.

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
    """The spikes among the usable norms of a record.

    Args:
        record: The record of a run.

    Returns:
        Positions in its `usable_norms`.
    """
    return find_spikes(usable_norms(record))
