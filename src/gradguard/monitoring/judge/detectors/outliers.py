"""Steps whose norm stands out from those around them: one now and then, or again and again."""

import math
from collections import deque
from collections.abc import Sequence

from gradguard.monitoring.judge.findings import Kind, Log, said
from gradguard.monitoring.judge.spikes import SpikeFinder

SPIKE_TIMES = 5.0
"""Of the median of its neighbourhood: less moves the weights no further than an ordinary step may."""

RECURRING = 8
"""Spikes within `RECURRING_STEPS`: more than chance leaves, even where one batch in a thousand is bad."""

RECURRING_STEPS = 1000
"""As many steps as an epoch often has; a long run may have a few spikes now and then."""

ONE_SPIKE = 5
"""Steps between two norms that belong to one spike: momentum carries it on."""

FROM_ONE_LAYER = 0.5
"""Share of the squared norm from which on a layer is named as where it comes from."""

SETTLING = 20
"""The first norms, which often are large and fall fast, are no spikes."""

Top = tuple[int, float] | None


class Outliers:
    """Whether single norms stand out from their neighbourhood, and how often.

    A norm is judged when the 50 after it are known.

    Args:
        log: Where faults go.
        names: The names of the parameters.
    """

    def __init__(self, log: Log, names: list[str]) -> None:
        self._log, self._names = log, names
        self._finder = SpikeFinder[tuple[int, int, float, Top, bool]]()
        self._seen = 0
        self._spikes: deque[tuple[int, float, bool]] = deque(maxlen=RECURRING)  # step, times, whether clipped
        self._last = -math.inf

    def follow(self, i: int, norm: float, top: Top, clipped: bool) -> None:
        """Follow a step with a finite norm.

        Args:
            i: The step.
            norm: Its norm.
            top: The place of the parameter with the largest gradient, and its share of the squared norm, if known.
            clipped: Whether a clip bound on it.
        """
        self._tell(self._finder.follow(norm, (self._seen, i, norm, top, clipped)))
        self._seen += 1

    def finish(self) -> None:
        """Tell what the last norms show, at the end of a run."""
        self._tell(self._finder.finish())

    def _tell(self, spikes: Sequence[tuple[int, int, float, Top, bool]]) -> None:
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
                self._log.tell("recurring spikes", RECURRING_SPIKES, steps[0], i, times, **about)
            elif not clipped:  # a clip has done what it is for
                source = source_of(top, self._names)
                self._log.tell("spike", SPIKE, i, i, times, numbers={"largest": times}, params=source)


def source_of(top: Top, names: Sequence[str]) -> list[str]:
    """Return the parameter that most of a gradient comes from; nothing where there is none, or it is not known.

    Args:
        top: The place of the parameter with the largest gradient, and its share of the squared norm, if known.
        names: The names of the parameters.
    """
    return [] if top is None or top[1] < FROM_ONE_LAYER else [*names[top[0] : top[0] + 1]]


_STOOD_OUT = (
    "the gradient norm stood out {found.count} times from that of the steps around it, first on step {found.first}, by "
    "up to {largest} times"
)
_LOOK = "look at the batches of these steps: mislabelled, unnormalised or overlong samples do that"

SPIKE = Kind(
    "spike",
    said(
        "info",
        "the gradient norm was {largest} times that of the steps around it on step {found.first}{where}",
        "look at its batch; what to clip by, the report's decision says",
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
