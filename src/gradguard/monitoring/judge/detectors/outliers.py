"""Steps whose norm stands out from those around them: one now and then, or again and again."""

import math
import statistics
from collections import Counter, deque
from itertools import pairwise

from gradguard.monitoring.judge.findings import Episode, Finding, Kind, Log, Words
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

_REMEMBERED = 128
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
        self._log, self._names, self._finder = log, names, SpikeFinder()
        # Position, step, norm, top and whether a clip bound: of the norms that the finder remembers, zeros are none.
        self._steps: deque[tuple[int, int, float, Top, bool]] = deque(maxlen=_REMEMBERED)
        self._seen = 0
        self._spikes: deque[tuple[int, float, str, bool]] = deque(maxlen=_KEPT_SPIKES)  # step, times, layer, clipped
        self._last = -math.inf

    def follow(self, i: int, norm: float, top: Top, clipped: bool) -> list[Finding]:
        """Return what is new after a step with a finite norm.

        Args:
            i: The step.
            norm: Its norm.
            top: The place of the parameter with the largest gradient, and its share of the squared norm, if known.
            clipped: Whether a clip bound on it.
        """
        if norm > 0:
            self._steps.append((self._seen, i, norm, top, clipped))
        self._seen += 1
        positions = self._finder.follow(norm)
        return self._told(positions) if positions else []

    def finish(self) -> list[Finding]:
        """Return what the last norms show, at the end of a run."""
        return self._told(self._finder.finish())

    def _told(self, positions: list[int]) -> list[Finding]:
        found, usual = [], self._finder.level
        steps = {step[0]: step for step in self._steps}
        for position in positions:
            _, i, norm, top, clipped = steps[position]
            times = norm / usual
            if times < SPIKE_TIMES or position < SETTLING:
                continue
            is_new, self._last = i - self._last > ONE_SPIKE, i
            if is_new:
                self._spikes.append((i, times, self._layer(top), clipped))
                found += self._spike(i, times)
        return found

    def _layer(self, top: Top) -> str:
        if top is None or top[1] < FROM_ONE_LAYER or not 0 <= top[0] < len(self._names):
            return ""
        return self._names[top[0]]

    def _spike(self, i: int, times: float) -> list[Finding]:
        near = [spike for spike in self._spikes if i - spike[0] <= RECURRING_STEPS]
        layers = Counter(layer for _, _, layer, _ in near if layer)
        layer, often = layers.most_common(1)[0] if layers else ("", 0)
        about = {"params": [layer] if 2 * often > len(near) else [], "harmless": all(spike[3] for spike in near)}
        episode = self._log.goes_on("recurring spikes", i, times)
        if episode is not None:
            episode.harmless = episode.harmless and about["harmless"]
            episode.numbers["period"] = _period([spike[0] for spike in self._spikes])
            return []
        if len(near) >= RECURRING:
            numbers = {"largest": max(spike[1] for spike in near), "period": _period([spike[0] for spike in near])}
            return self._log.begin(
                "recurring spikes", RECURRING_SPIKES, near[0][0], i, count=len(near), numbers=numbers, **about
            )  # fmt: skip
        _, _, layer, clipped = self._spikes[-1]
        if clipped:  # which has done what it is for
            return []
        about = {"numbers": {"largest": times}, "params": [layer] if layer else []}
        return self._log.tell("spike", SPIKE, i, i, times, **about)


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
