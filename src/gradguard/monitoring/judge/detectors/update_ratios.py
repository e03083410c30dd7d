"""Whether updates are out of proportion to their weights."""

import statistics
from collections.abc import Sequence
from typing import Any

from gradguard.monitoring.judge.findings import Kind, Lasting, Log, said
from gradguard.monitoring.record.record_lines import Numbers, names_of

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


class UpdateRatios:
    """Whether updates are out of proportion to their weights.

    Args:
        log: Where faults go.
        params: The ``params`` of the record's first line.
    """

    def __init__(self, log: Log, params: Sequence[dict[str, Any]]) -> None:
        names = names_of(params)
        self._groups = [parameter.get("group", 0) for parameter in params]
        self._matrices = [place for place, parameter in enumerate(params) if len(parameter.get("shape", ())) > 1]
        self._large, self._small = (Lasting(log, names, UPDATE_LINES, UPDATE_STEPS) for _ in range(2))

    def follow(self, i: int, weights: Numbers, updates: Numbers, gradients: Numbers, rates: Numbers) -> None:
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
)
KINDS = (LARGE_UPDATES, SMALL_UPDATES)
