"""Detects steps whose norm stands out from those around them: single spikes and recurring ones."""

import math
from collections import deque
from collections.abc import Sequence

from gradguard.monitoring.judge.findings import Kind, Log, said
from gradguard.monitoring.judge.spikes import SpikeFinder

SPIKE_TIMES = 5.0
"""Times the median of the neighbourhood: a smaller norm moves the weights no further than an ordinary step may."""

RECURRING = 8
"""Spikes within `RECURRING_STEPS`: more than chance produces, even if one batch in a thousand is bad."""

RECURRING_STEPS = 1000
"""The number of steps in a typical epoch. A long run may have an occasional spike."""

ONE_SPIKE = 5
"""Steps within which two high norms belong to one spike, which momentum carries on."""

FROM_ONE_LAYER = 0.5
"""Share of the squared norm from which on the largest parameter is named as the source."""

SETTLING = 20
"""The first norms of a run, which are often large and fall fast, are not reported as spikes."""

Top = tuple[int, float] | None


class Outliers:
    """Detects norms that stand out from their neighbourhood.

    A norm is judged once the 50 norms after it are known.

    Args:
        log: The log that receives the faults.
        names: The names of the parameters.
    """

    def __init__(self, log: Log, names: list[str]) -> None:
        self._log, self._names = log, names
        self._finder = SpikeFinder[tuple[int, int, float, Top, bool]]()
        self._seen = 0
        self._spikes: deque[tuple[int, float, bool]] = deque(maxlen=RECURRING)  # step, size, whether clipped
        self._last = -math.inf

    def follow(self, i: int, norm: float, top: Top, clipped: bool) -> None:
        """Follow a step with a finite norm.

        Args:
            i: The step.
            norm: Its norm.
            top: The place of the parameter with the largest gradient, and its share of the squared norm, if known.
            clipped: Whether a clip bound on it.
        """
        self._report(self._finder.follow(norm, (self._seen, i, norm, top, clipped)))
        self._seen += 1

    def finish(self) -> None:
        """Report the spikes among the last norms, at the end of a run."""
        self._report(self._finder.finish())

    def _report(self, spikes: Sequence[tuple[int, int, float, Top, bool]]) -> None:
        for position, i, norm, top, clipped in spikes:
            times = norm / self._finder.level
            if times < SPIKE_TIMES or position < SETTLING:
                continue
            is_new, self._last = i - self._last > ONE_SPIKE, i
            if not is_new:
                continue
            self._spikes.append((i, times, clipped))
            near = [spike for spike in self._spikes if i - spike[0] <= RECURRING_STEPS]
            if len(near) >= RECURRING:
                steps, sizes, bound = zip(*near, strict=True)
                about = {"numbers": {"largest": max(sizes)}, "harmless": all(bound), "count": len(near)}
                self._log.report("recurring spikes", RECURRING_SPIKES, steps[0], i, times, **about)
            elif not clipped:  # a spike that was clipped is no fault
                source = source_of(top, self._names)
                self._log.report("spike", SPIKE, i, i, times, numbers={"largest": times}, params=source)


def source_of(top: Top, names: Sequence[str]) -> list[str]:
    """Return the name of the parameter that makes most of the squared norm, as a list; empty if there is none.

    Args:
        top: The index of the parameter with the largest gradient and its share of the squared norm, if known.
        names: The names of the parameters.
    """
    return [] if top is None or top[1] < FROM_ONE_LAYER else [*names[top[0] : top[0] + 1]]


_STOOD_OUT = (
    "the gradient norm stood out from the steps around it {found.count} times, first on step {found.first}, and was up "
    "to {largest} times theirs"
)
_LOOK = "check the batches of these steps for mislabelled, unnormalised or overlong samples"

SPIKE = Kind(
    "spike",
    said(
        "info",
        "the gradient norm was {largest} times that of the steps around it on step {found.first}{where}",
        "check the batch of that step; the report's decision says whether to clip, and at which norm",
        where=", mostly in {found.params[0]}",
    ),
    value="largest",
)
RECURRING_SPIKES = Kind(
    "recurring_spikes",
    said(
        "warning",
        _STOOD_OUT,
        f"{_LOOK}; clip as the report advises, or by gg.ClipByMedian()",
        harmless=("info", f"{_STOOD_OUT}; a clip bound on all of them", _LOOK),
    ),
    value="largest",
)
KINDS = (SPIKE, RECURRING_SPIKES)
