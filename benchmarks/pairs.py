"""Compare two calls pair by pair in one process: machines are noisy, ratios and medians are not."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Medians over pairs.

    Attributes:
        ratio: How many times faster ours is.
        ours: Milliseconds.
        theirs: Milliseconds.
    """

    ratio: float
    ours: float
    theirs: float


def compare(
    ours: Callable[[int], object],
    theirs: Callable[[int], object],
    pairs: int = 21,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time both, one after the other, in turn; each gets the number of the repetition."""
    for warm_up in range(2):
        ours(warm_up)
        theirs(warm_up)
    times = []
    for k in range(2, pairs + 2):
        first, second = (ours, theirs) if k % 2 else (theirs, ours)
        start = clock()
        first(k)
        middle = clock()
        second(k)
        end = clock()
        pair = (middle - start, end - middle)
        times.append(pair if k % 2 else pair[::-1])
    return Comparison(
        ratio=statistics.median(theirs / ours for ours, theirs in times),
        ours=1e3 * statistics.median(ours for ours, _ in times),
        theirs=1e3 * statistics.median(theirs for _, theirs in times),
    )
