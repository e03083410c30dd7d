"""Detectors on the norms of single tensors: one that jumps alone, updates out of proportion, dead units."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradguard.monitoring.judge.findings import Episode, Kind, Lasting, Log, Words, named, said
from gradguard.monitoring.judge.numbers import number, percent
from gradguard.monitoring.record.lines import Numbers

CORRUPT_TIMES = 10.0
"""Of a tensor's own median norm, while the others are as usual: a batch would have moved them too."""

CORRUPT_DEVIATIONS = 7.0
"""And so many deviations, its own or those of the usual tensor, in logarithms: some runs are wilder than others."""

CALM_TIMES = 3.0
"""The others are as usual where their median is below so many times what it was."""

CORRUPT_SHARE = 0.01
"""Of the squared norm: what is less matters to nobody."""

CORRUPT_TENSORS = 4
"""Below so many tensors there are no others to compare with."""

LARGE_UPDATE = 0.1
"""Norm of an update over that of its weight: 1e-3 is the rule of thumb, and above a tenth a weight is another one after
ten steps."""

SMALL_UPDATE = 1e-6
"""Below it float32 loses most of an update to rounding, and ten thousand steps change a weight by a hundredth."""

ORDINARY_UPDATE = 1e-4
"""Where the median tensor's update has at least this, the learning rate is not what keeps one small."""

UPDATE_LINES = 5
"""Measurements in a row: the first steps of a run, and the first after a restart, may well be large."""

UPDATE_STEPS = 200
"""And so many steps from the first to the last of them: a burst of measurements after a spike is none of that."""

HALF_DEAD = 0.5
"""Share of the rows, or elements, of a weight's gradient that are exactly 0."""

NOT_SO_AT_FIRST = 0.25
"""By so much the share must have risen: an embedding has many zeros from the first step on."""

HALF_DEAD_LINES = 4
"""Measurements in a row, of which one is made every 50 steps."""

FEW_CHANGES = 2
"""Times that the number of zeros may have changed; where it often does, a batch leaves units alone that are alive."""

SPARSE_LINES = 10
"""Measurements in a row, all with one number of zeros, where that has changed more often."""

HALF_DEAD_STEPS = 150
"""And so many steps from the first to the last of them."""

_WINDOW = 80
_REFRESH = 40
_MANY_UNITS = 32


class Corruption:
    """Whether one tensor's gradient is many times what it was on one line, while all others are as usual.

    Args:
        log: Where faults go.
        names: The names of the parameters.
    """

    def __init__(self, log: Log, names: list[str]) -> None:
        self._log, self._names = log, names
        self._lines: deque[Sequence[float]] = deque(maxlen=_WINDOW)
        self._since = 0
        self._limits, self._usual = [math.inf] * len(names), [0.0] * len(names)
        self._beyond: list[int] = []
        self._suspect: tuple[int, int, float, float] | None = None  # step, place, times, limit

    def follow(self, i: int, norms: Sequence[float]) -> None:
        """Follow a line with the norm of each parameter.

        Args:
            i: The step.
            norms: One finite norm for each.
        """
        beyond = [place for place, (norm, limit) in enumerate(zip(norms, self._limits, strict=True)) if norm > limit]
        if self._suspect is not None:
            self._returned(*self._suspect, norms)
        self._suspect = self._alone(i, beyond[0], norms) if len(beyond) == 1 and beyond != self._beyond else None
        self._beyond = beyond
        self._lines.append(norms)
        self._since += 1
        if self._since >= _REFRESH:
            self._since = 0
            self._refresh()

    def _returned(self, i: int, place: int, times: float, limit: float, norms: Sequence[float]) -> None:
        """Tell of a norm that came back: what lasts is another state, not an accident."""
        if norms[place] <= limit:
            about = {"params": [self._names[place]], "numbers": {"largest": times}}
            self._log.tell(f"corrupt {place}", CORRUPT, i, i, times, **about)

    def _alone(self, i: int, place: int, norms: Sequence[float]) -> tuple[int, int, float, float] | None:
        others = [
            norm / usual
            for k, (norm, usual) in enumerate(zip(norms, self._usual, strict=True))
            if k != place and usual > 0
        ]
        calm = len(others) + 1 >= CORRUPT_TENSORS and statistics.median_high(others) < CALM_TIMES
        total = math.hypot(*norms)
        if not calm or norms[place] < math.sqrt(CORRUPT_SHARE) * total:
            return None
        return i, place, norms[place] / self._usual[place], self._limits[place]

    def _refresh(self) -> None:
        middles, spreads = [], []
        for its in zip(*self._lines, strict=True):
            ordered = sorted(its)
            low, middle, high = (ordered[int(share * len(ordered))] for share in (0.16, 0.5, 0.84))
            middles.append(middle if low > 0 else 0.0)  # an expert that many batches leave alone is not judged
            spreads.append(max(high / middle, middle / low) if low > 0 else 1.0)
        usual = statistics.median_high(spreads or [1.0])
        self._usual = middles
        widths = [CORRUPT_DEVIATIONS * math.log(max(spread, usual)) for spread in spreads]
        self._limits = [
            middle * max(CORRUPT_TIMES, math.exp(min(width, 100.0))) if middle else math.inf
            for middle, width in zip(middles, widths, strict=True)
        ]


@dataclass(slots=True)
class _Zeros:
    """The zeros of one gradient: their first and last share, how often it changed, and the last lines with many."""

    first: float
    last: float
    changes: int = 0
    lines: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SPARSE_LINES))


class UnevenTensors:
    """Whether updates are out of proportion to their weights, and whether a layer's units die.

    Args:
        log: Where faults go.
        params: The ``params`` of the record's first line.
    """

    def __init__(self, log: Log, params: Sequence[dict[str, Any]]) -> None:
        self._log = log
        self._names = [str(parameter.get("name", "?")) for parameter in params]
        self._shapes: list[tuple[int, ...]] = [tuple(parameter.get("shape") or ()) for parameter in params]
        self._groups = [parameter.get("group") or 0 for parameter in params]
        self._matrices = [place for place, shape in enumerate(self._shapes) if len(shape) > 1]
        self._large, self._small = (Lasting(log, self._names, UPDATE_LINES, UPDATE_STEPS) for _ in range(2))
        self._zeros: dict[int, _Zeros] = {}

    def updates(self, i: int, weights: Numbers, updates: Numbers, gradients: Numbers, rates: Numbers) -> None:
        """Follow a line with the norms of weights and of their updates.

        Args:
            i: The step.
            weights: One norm for each parameter.
            updates: The norm of what the step changed: 0 counts where there was a gradient and a learning rate.
            gradients: The norm of each gradient.
            rates: The learning rate of each group; empty where there is one.
        """
        ratios = {
            place: update / weight
            for place in self._matrices
            if place < min(len(weights), len(updates), len(gradients))
            and (weight := weights[place])
            and ((update := updates[place]) or (update == 0 and gradients[place] and self._learns(place, rates)))
        }
        if not ratios:
            return
        median = statistics.median_high(ratios.values())
        large = [place for place, ratio in ratios.items() if ratio > LARGE_UPDATE]
        small = [place for place, ratio in ratios.items() if ratio < SMALL_UPDATE and median > ORDINARY_UPDATE]
        for lasting, kind, places, worst in (
            (self._large, LARGE_UPDATES, large, max),
            (self._small, SMALL_UPDATES, small, min),
        ):
            new = lasting.follow(i, places)
            lasting.begin(kind, i, new, ratio=worst((ratios[place] for place in new), default=0.0))

    def _learns(self, place: int, rates: Numbers) -> bool:
        group = self._groups[place]
        return not rates or (group < len(rates) and rates[group] != 0)

    def zeros(self, i: int, rows: Numbers, zeros: Numbers) -> None:
        """Follow a line with shares of zeros.

        Args:
            i: The step.
            rows: The share of each gradient's rows that are 0, null where it has none.
            zeros: The share of its elements.
        """
        new = []
        for place in self._matrices:
            share = _at(rows, place)
            share = _at(zeros, place) if share is None else share
            if share is not None and self._is_half_dead(i, place, share, zeros):
                new.append(place)
        begun = [place for place in new if self._log.goes_on(f"half dead {place}", i) is None]
        if not begun:
            return
        share = max(self._zeros[place].lines[-1][1] for place in begun)
        first = min(self._zeros[place].lines[0][0] for place in begun)
        names = [self._names[place] for place in begun]
        rows_of = float(self._shapes[begun[0]][0]) if len(begun) == 1 else 0.0
        numbers = {"share": share, "rows": rows_of}
        self._log.begin(f"half dead {begun[0]}", HALF_DEAD_LAYER, first, i, params=names, numbers=numbers)
        for place in begun[1:]:
            self._log.same(f"half dead {begun[0]}", f"half dead {place}")

    def _is_half_dead(self, i: int, place: int, share: float, zeros: Numbers) -> bool:
        units, zeros_of = self._shapes[place][0], self._zeros.setdefault(place, _Zeros(share, share))
        zeros_of.changes += abs(share - zeros_of.last) * units > 1
        zeros_of.last = share
        if share < HALF_DEAD or share == 1:  # all of it is another finding
            zeros_of.lines.clear()
            return False
        zeros_of.lines.append((i, share))
        # Units that a batch happens to leave alone are others in the next one, and seldom the same number of them.
        needed = HALF_DEAD_LINES if zeros_of.changes <= FEW_CHANGES else SPARSE_LINES
        recent = list(zeros_of.lines)[-needed:]
        shares = [share for _, share in recent]
        steady = (max(shares) - min(shares)) * units < (1.5 if units >= _MANY_UNITS else 0.5)
        lasts = len(recent) == needed and i - recent[0][0] >= HALF_DEAD_STEPS
        rose = share - zeros_of.first >= NOT_SO_AT_FIRST
        return lasts and steady and (rose or self._bias_agrees(place, share, zeros))

    def _bias_agrees(self, place: int, share: float, zeros: Numbers) -> bool:
        """Whether the bias that follows has its zeros on as many units: an embedding has none."""
        after = place + 1
        if after >= len(self._shapes) or self._shapes[after] != self._shapes[place][:1]:
            return False
        of_bias = _at(zeros, after)
        return of_bias is not None and abs(of_bias - share) * self._shapes[after][0] < 1


def _at(values: Numbers, place: int) -> float | None:
    return values[place] if place < len(values) else None


_EXPLODED = (
    "most likely what this layer hands back through time has exploded, and a clip helps; else suspect a flipped bit"
)


def _corrupt(found: Episode) -> Words:
    times = number(found.numbers["largest"])
    message = (
        f"the gradient of {named(found.params)} alone was {times} times its usual on step {found.first}, while the "
        "other layers were calm"
    )
    if all("weight_hh" in name for name in found.params):  # PyTorch's name for what a recurrent layer multiplies by
        return "info", message, _EXPLODED
    advice = (
        "a bad batch moves other layers too: suspect a flipped bit, a custom backward or kernel, or a hook that writes "
        "to this gradient; a recurrent layer whose own gradients explode does the same"
    )
    return "warning", message, advice


def _half_dead(found: Episode) -> Words:
    share, rows = found.numbers["share"], found.numbers["rows"]
    part = f"{round(share * rows)} of {rows:g} units" if rows else f"up to {percent(share)}"
    message = f"the gradient of {named(found.params)} was exactly 0 for {part} on steps {found.first} to {found.last}"
    advice = "dead ReLUs: lower the learning rate, check biases and initialisation, or take LeakyReLU or GELU"
    return "warning", message, advice


CORRUPT = Kind("corrupt_gradient", _corrupt, value="largest", confidence="medium", apart=True)
LARGE_UPDATES = Kind(
    "update_ratio",
    said(
        "warning",
        "{names} {changes} by up to {ratio:%} of itself with each step, measured on steps {found.first} to "
        "{found.last}",
        "a weight learns at about 0.1 % a step: lower the learning rate, at least of this group",
    ),
    value="ratio",
    confidence="medium",
    of_layers=True,
)
SMALL_UPDATES = Kind(
    "update_ratio",
    said(
        "warning",
        f"{{names}} {{changes}} by only {{ratio:.1g}} of itself with each step, while others do by more than "
        f"{ORDINARY_UPDATE:g}",
        "it hardly learns: check its group's learning rate, the scale of the weight, and if 16 bits lose what a "
        "step adds",
    ),
    value="ratio",
    confidence="medium",
    of_layers=True,
)
HALF_DEAD_LAYER = Kind("half_dead_layer", _half_dead, value="share", confidence="medium", of_layers=True)
KINDS = (CORRUPT, LARGE_UPDATES, SMALL_UPDATES, HALF_DEAD_LAYER)
