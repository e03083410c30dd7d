"""Hold the state of a run in progress, in memory that does not grow with the run.

The lines come from `parse_line`: their known fields have checked types, and their texts are printable.
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
    """The largest norms of a whole run in at most `MOST_BUCKETS` buckets; when all are full, pairs of them are merged.

    Example:
        >>> history = History()
        >>> for norm in range(5000):
        ...     history.add(float(norm))
        >>> history.columns(2)
        [2495.0, 4999.0]
    """

    def __init__(self) -> None:
        self._buckets: list[float] = []
        self._width, self._filled = 1, 0  # the steps per full bucket, and the steps in the last bucket

    def add(self, norm: float) -> None:
        """Add the norm of one step: infinity for non-finite gradients, 0 for a norm that was not measured."""
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
        """Return the largest norms in ``count`` buckets, or in fewer buckets for a shorter run."""
        return [max(self._buckets[part.start : part.stop]) for part in buckets(len(self._buckets), count)]


@dataclass
class OptimizerProgress:
    """The steps of one optimizer so far, kept separate because the norms of two optimizers are not one series.

    Attributes:
        label: The optimizer's name; empty if the record has one optimizer.
        last: The optimizer's last step; empty before the first.
        recent: The optimizer's last `WINDOW` steps.
        history: The norms of all steps that were read.
        first_step: The number of the first step that was read.
    """

    label: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    history: History = field(default_factory=History)
    first_step: int | None = None

    def add(self, step: dict[str, Any]) -> None:
        """Add one step."""
        self.last = step
        self.recent.append(step)
        self.first_step = step["i"] if self.first_step is None else self.first_step
        self.history.add(math.inf if is_nonfinite(step) else step.get("norm", 0.0))

    @property
    def clip_share(self) -> float | None:
        """The share of the recent taken steps on which a clip bound; None without a clip or without such steps."""
        if not any("coefficient" in step or "threshold" in step for step in self.recent):
            return None
        taken = self.recent_taken
        return sum(map(binds, taken)) / len(taken) if taken else None

    @property
    def recent_taken(self) -> list[dict[str, Any]]:
        """The recent steps without the skipped and non-finite ones."""
        return [step for step in self.recent if not is_nonfinite(step) and not step.get("skipped")]


@dataclass
class RunState:
    """The state of a run as far as its record has been read; its size does not depend on the number of steps.

    Attributes:
        meta: The first line.
        last: The last step; empty before the first.
        states: The progress of each optimizer, by its index in ``meta.optimizers``; by None for a single optimizer.
        layers: The last norms per parameter; 0 for the parameters of another optimizer.
        events: The last events.
        severities: The number of events of each severity.
        end: The ``end`` line; None before it is read.
        diagnosis: The last diagnosis and its advice; empty before the first diagnosis.
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
        """Add one line of the record; ignore unknown kinds of lines."""
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
        if place is None:
            label = ""
        elif place < len(names):
            label = f"optimizer {place} ({names[place]})"
        else:
            label = f"optimizer {place}"
        return self.states.setdefault(place, OptimizerProgress(label))

    @property
    def state(self) -> OptimizerProgress:
        """Return the state of the optimizer that made the last step."""
        return self._state_of(self.last) if self.last else OptimizerProgress()

    @property
    def seconds_per_step(self) -> float | None:
        """The wall-clock seconds per step over the last steps; None before the second step."""
        walls = self._walls
        return (walls[-1] - walls[0]) / (len(walls) - 1) if len(walls) > 1 and walls[-1] > walls[0] else None

    def largest_layers(self, count: int) -> list[tuple[str, float]]:
        """Return the parameters with the largest shares of the squared norm in the last measurement.

        Args:
            count: The largest number of parameters.

        Returns:
            The names and shares, largest first.
        """
        norms = [norm or 0.0 for norm in self.layers]
        total = sum(norm * norm for norm in norms)
        if not 0 < total < math.inf:  # no norms, or a sum of squares that overflows
            known = [self.last["top"]] if "top" in self.last else []
            return [(self._name(place), share) for place, share in known[:count]]
        order = sorted(range(len(norms)), key=lambda place: -norms[place])[:count]
        return [(self._name(place), norms[place] ** 2 / total) for place in order if norms[place]]

    def _name(self, place: int) -> str:
        parameters = self.meta.get("params", ())
        return str(parameters[place].get("name", place)) if place < len(parameters) else f"parameter {place}"
