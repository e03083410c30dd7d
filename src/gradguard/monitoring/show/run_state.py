"""The state of a run in progress, in memory that does not grow with the run.

Lines come from `parse_line`, so that their fields are of the types that it promises, and their texts are printable.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from gradguard.monitoring.judge.numbers import buckets
from gradguard.monitoring.record.step_rows import binds, is_nonfinite

WINDOW = 100
"""The number of last steps over which the rate and the share of clipped steps are computed."""

MOST_BUCKETS = 1024
MOST_EVENTS = 50


class History:
    """The largest norms of a whole run in at most `MOST_BUCKETS` buckets: when they are full, each two become one.

    Example:
        >>> history = History()
        >>> for norm in range(5000):
        ...     history.add(float(norm))
        >>> history.columns(2)
        [2495.0, 4999.0]
    """

    def __init__(self) -> None:
        self._buckets: list[float] = []
        self._width, self._filled = 1, 0  # steps in a bucket, and in the last one

    def add(self, norm: float) -> None:
        """Add the norm of one step: infinity if its gradients were not finite, 0 if it was not measured."""
        if self._buckets and self._filled < self._width:
            self._buckets[-1] = max(self._buckets[-1], norm)
            self._filled += 1
            return
        if len(self._buckets) == MOST_BUCKETS:
            self._buckets = list(map(max, self._buckets[::2], self._buckets[1::2]))
            self._width *= 2
        self._buckets.append(norm)
        self._filled = 1

    def columns(self, count: int) -> list[float]:
        """Return the run in ``count`` buckets, or in fewer if it has fewer steps."""
        return [max(self._buckets[part.start : part.stop]) for part in buckets(len(self._buckets), count)]


@dataclass
class OptimizerProgress:
    """The steps of one optimizer so far: the norms of two optimizers are not one series.

    Attributes:
        label: Its name in words; empty where the record has one optimizer.
        last: Its last step; empty before there is one.
        recent: Its last `WINDOW` steps.
        history: The norms of all its steps that were read.
        first_step: The number of the first of them.
    """

    label: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    history: History = field(default_factory=History)
    first_step: int | None = None

    def add(self, step: dict[str, Any]) -> None:
        """Take in one step."""
        self.last = step
        self.recent.append(step)
        self.first_step = step["i"] if self.first_step is None else self.first_step
        self.history.add(math.inf if is_nonfinite(step) else step.get("norm", 0.0))

    @property
    def clip_share(self) -> float | None:
        """The share of the last steps, those with finite gradients that were taken, on which a clip bound.

        None where nothing clipped or could have, and where no step counts.
        """
        if not any("coefficient" in step or "threshold" in step for step in self.recent):
            return None
        taken = self.recent_taken
        return sum(map(binds, taken)) / len(taken) if taken else None

    @property
    def recent_taken(self) -> list[dict[str, Any]]:
        """The last steps, without those that were skipped or not finite."""
        return [step for step in self.recent if not is_nonfinite(step) and not step.get("skipped")]


@dataclass
class RunState:
    """A run as far as its record has been read. Nothing in it grows with the number of steps.

    Attributes:
        meta: The first line.
        last: The last step; empty before there is one.
        states: The progress of each optimizer, by its place in ``meta.optimizers``, None where there is one.
        layers: The last norms per parameter; those of another optimizer are 0.
        events: The last events.
        severities: How many events of each severity there were.
        end: The closing line, once it is there.
        diagnosis: The diagnosis and its advice, as of the last look; empty where nobody has looked.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    states: dict[Any, OptimizerProgress] = field(default_factory=dict)
    layers: list[Any] = field(default_factory=list)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    severities: Counter[str] = field(default_factory=Counter)
    end: dict[str, Any] | None = None
    diagnosis: str = ""
    _walls: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, line: dict[str, Any]) -> None:
        """Take in one line of the record; kinds that are not known are passed over."""
        kind = line["t"]
        if kind == "meta":
            self.meta = line
        elif kind == "step":
            self.last = line
            self._walls += [line["wall"]] if "wall" in line else []
            self._state_of(line).add(line)
        elif kind == "tensors":
            self.layers = line["norm"]
        elif kind == "event":
            self.events.append(line)
            self.severities[line.get("severity", "info")] += 1
        elif kind == "end":
            self.end = line

    def _state_of(self, step: dict[str, Any]) -> OptimizerProgress:
        place, names = step.get("optimizer"), self.meta.get("optimizers", ())
        named = place is not None and place < len(names)
        label = f"optimizer {place} ({names[place]})" if named else "" if place is None else f"optimizer {place}"
        return self.states.setdefault(place, OptimizerProgress(label))

    @property
    def state(self) -> OptimizerProgress:
        """Return the state of the optimizer of the last step."""
        return self._state_of(self.last) if self.last else OptimizerProgress()

    @property
    def seconds_per_step(self) -> float | None:
        """Wall-clock seconds per step over the last steps; None before there are two."""
        walls = self._walls
        return (walls[-1] - walls[0]) / (len(walls) - 1) if len(walls) > 1 and walls[-1] > walls[0] else None

    def largest_layers(self, count: int) -> list[tuple[str, float]]:
        """Return the parameters with the largest shares of the squared norm, as last measured.

        Args:
            count: At most how many.

        Returns:
            Name and share, largest first.
        """
        norms = [norm or 0.0 for norm in self.layers]
        total = sum(norm * norm for norm in norms)
        if not 0 < total < math.inf:  # or too large to be squared
            known = [self.last["top"]] if "top" in self.last else []
            return [(self._name(place), share) for place, share in known[:count]]
        order = sorted(range(len(norms)), key=lambda place: -norms[place])[:count]
        return [(self._name(place), norms[place] ** 2 / total) for place in order if norms[place]]

    def _name(self, place: int) -> str:
        parameters = self.meta.get("params", ())
        return str(parameters[place].get("name", place)) if place < len(parameters) else f"parameter {place}"
