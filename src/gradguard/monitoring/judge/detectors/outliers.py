"""Steps whose norm stands out from those around them: one now and then, or again and again."""

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise

from gradguard.monitoring.judge.findings import Episode, Kind, Log, Words
from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.judge.spikes import SpikeFinder

SPIKE_TIMES = 5.0
"""Of the median of its neighbourhood: less moves the weights no further than an ordinary step may."""

RECURRING = 8
"""Spikes within `RECURRING_STEPS`: more than chance leaves, even where one batch in a thousand is bad."""

RECURRING_STEPS = 1000
"""As many steps as an epoch often has; a long run may have a few spikes now and then."""

ONE_SPIKE = 5
"""Steps between two norms that belong to one spike: momentum carries it on."""

PERIOD_GAPS = 4
"""Equal distances in a row before they are called a period."""

PERIOD_TOLERANCE = 0.02
"""By which distances may differ, or by 1 step."""

FROM_ONE_LAYER = 0.5
"""Share of the squared norm from which on a layer is named as where it comes from."""

SETTLING = 20
"""The first norms, which often are large and fall fast, are no spikes."""

_KEPT_SPIKES = 64

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
        self._spikes: deque[tuple[int, float, str, bool]] = deque(maxlen=_KEPT_SPIKES)  # step, times, layer, clipped
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
            if is_new:
                self._spikes.append((i, times, self._layer(top), clipped))
                self._spike(i, times)

    def _layer(self, top: Top) -> str:
        if top is None or top[1] < FROM_ONE_LAYER or not 0 <= top[0] < len(self._names):
            return ""
        return self._names[top[0]]

    def _spike(self, i: int, times: float) -> None:
        near = [spike for spike in self._spikes if i - spike[0] <= RECURRING_STEPS]
        layers = Counter(layer for _, _, layer, _ in near if layer)
        layer, often = layers.most_common(1)[0] if layers else ("", 0)
        harmless = all(clipped for *_, clipped in near)
        episode = self._log.goes_on("recurring spikes", i, times)
        if episode is not None:
            episode.harmless = episode.harmless and harmless
            episode.numbers["period"] = _period([at for at, *_ in self._spikes])
            return
        if len(near) >= RECURRING:
            numbers = {"largest": max(times for _, times, *_ in near), "period": _period([at for at, *_ in near])}
            params = [layer] if 2 * often > len(near) else []
            about = {"count": len(near), "numbers": numbers, "params": params, "harmless": harmless}
            self._log.begin("recurring spikes", RECURRING_SPIKES, near[0][0], i, **about)
            return
        *_, layer, clipped = self._spikes[-1]
        if not clipped:  # which has done what it is for
            self._log.tell("spike", SPIKE, i, i, times, numbers={"largest": times}, params=[layer] if layer else [])


def _period(at: list[int]) -> float:
    """The distance between spikes where it is always the same one, or twice or three times it; else 0."""
    gaps = [after - before for before, after in pairwise(at)]
    if len(gaps) < PERIOD_GAPS:
        return 0.0
    least = statistics.median_low(gaps)
    for gap in gaps:
        rounds = round(gap / least)
        if not 1 <= rounds <= 3 or abs(gap - rounds * least) > max(1, PERIOD_TOLERANCE * gap):
            return 0.0
    return float(least)


def _where(found: Episode) -> str:
    return f", mostly in {found.params[0]}" if found.params else ""


def _spike(found: Episode) -> Words:
    message = (
        f"the gradient norm was {number(found.numbers['largest'])} times that of the steps around it on step "
        f"{found.first}{_where(found)}"
    )
    return "info", message, "look at its batch; what to clip by, the report's decision says"


def _recurring(found: Episode) -> Words:
    message = (
        f"the gradient norm stood out {found.count} times from that of the steps around it, first on step "
        f"{found.first}, by up to {number(found.numbers['largest'])} times{_where(found)}"
    )
    period = found.numbers["period"]
    cause = "look at the batches of these steps: mislabelled, unnormalised or overlong samples do that"
    if period:
        message += f"; every {period:g} steps"
        cause = (
            f"something comes back every {period:g} steps: a bad batch of each epoch, if that is its length, or a log"
        )
    if found.harmless:
        return "info", f"{message}; a clip bound on all of them", cause
    return "warning", message, f"{cause}; clip as the report advises, or by gg.ClipByMedian()"


SPIKE = Kind("spike", _spike, value="largest")
RECURRING_SPIKES = Kind("recurring_spikes", _recurring, value="largest")
KINDS = (SPIKE, RECURRING_SPIKES)
