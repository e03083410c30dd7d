"""What causes are read from: the curves of one optimizer's steps, and its layers in the order of the forward.

"Usual" is the recent past of a run, and not its first steps: norms fall in a run that is well, and grow in one that is
not. Losses and norms are followed by medians, which single steps do not move.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from gradguard.monitoring.judge.cause import Evidence
from gradguard.monitoring.judge.findings import Finding
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.numbers import median
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.lines import without_none
from gradguard.monitoring.record.steps import BINDS_BELOW, is_search_of_scale, skipped_on
from gradguard.threshold_rules import SortedWindow, upper_median_distance

_OF_LOSSES = ("diverging_loss", "not_learning", "oscillation")

FEWEST_STEPS = 60
"""Fewer steps show neither whether a loss falls nor what a norm usually is."""

BLOCKS = 20
"""Medians that a curve is followed by."""

_FEWEST_RECENT, _REFRESH = 8, 4  # values before one may leap, and after which it is known anew what is usual
_LARGEST_LOGARITHM = 700.0
_NEARLY_ZERO = 3e-3
_HUGE = 30.0  # times the norm of the weights: a first gradient
_TURNS = 1.0  # of logarithms, between two losses in a row
_LONGEST_TURN = 8  # losses of so many kinds in a row
_ROUND_ZERO = 10.0  # times its noise: a loss that stays within is compared with a mean of its own
_RECENT = 24  # values before a step that say what is usual at that step
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Curve:
    """How the loss went.

    Attributes:
        start: Where it began.
        levels: Its median in each twentieth of the run.
        best: The lowest level.
        final: The level at the end.
        peak: The highest single value.
        noise: How far two values in a row differ, as a robust standard deviation.
        count: How many values there are.
    """

    start: float
    levels: tuple[float, ...]
    best: float
    final: float
    peak: float
    noise: float
    count: int

    @property
    def error(self) -> float:
        """How far chance may have moved a level: two standard errors."""
        return 2 * 1.25 * self.noise / math.sqrt(max(1, self.count // BLOCKS))

    @property
    def is_positive(self) -> bool:
        """Whether ratios of it mean something."""
        return self.start > 0 and self.best > 0

    def fallen(self, end: float | None = None) -> float:
        """Return which share of its start the loss has lost; below 0 where it rose."""
        return (self.start - (self.final if end is None else end)) / (abs(self.start) or 1.0)

    @property
    def has_fallen(self) -> bool:
        """Whether it ends below its start, by more than chance and by more than 2 %."""
        return self.start - self.final > max(self.error + 0.6 * self.noise, 0.02 * abs(self.start))

    @property
    def is_flat(self) -> bool:
        """Whether all its levels are one, but for chance."""
        first, last = self.levels[: max(1, len(self.levels) // 4)], self.levels[len(self.levels) // 2 :]
        fell = statistics.median(first) - statistics.median(last)
        wide = max(self.levels) - min(self.levels)
        return wide <= max(3 * self.error, 0.03 * abs(self.start)) and fell <= max(self.error, 0.02 * abs(self.start))

    @property
    def is_falling(self) -> bool:
        """Whether it still falls in the last third, by more than chance."""
        third = len(self.levels) // 3
        before = statistics.median(self.levels[-2 * third : -third] or self.levels)
        return before - statistics.median(self.levels[-third:] or self.levels) > self.error


@dataclass(frozen=True)
class Layer:
    """A weight: a parameter of two dimensions or more.

    Attributes:
        place: Its place in the record's arrays.
        name: Its name.
        depth: Its place in the forward among the weights, from 0.
        gradients: The root mean square of an element of its gradient on each line.
        ratios: The norm of its update over its own, where both were measured.
        weights: Its norm, where that was measured.
        uses: How many operations take it in one forward.
    """

    place: int
    name: str
    depth: int
    gradients: tuple[float, ...]
    ratios: tuple[float, ...]
    weights: tuple[float, ...]
    uses: int = 1

    @property
    def gradient(self) -> float:
        """The usual gradient of an element."""
        return statistics.median(self.gradients) if self.gradients else 0.0

    @property
    def ratio(self) -> float | None:
        """By which share of itself a step usually changes it; None where that was not measured."""
        later = self.ratios[1:] or self.ratios
        return median(later)


class Signals:
    """What one optimizer's steps show.

    Args:
        record: The record of its steps alone.

    Attributes:
        takes_turns: Whether other optimizers step between its steps, so that losses may be of networks that work
            against each other, and are not judged.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        steps = record.steps
        self.numbers: Sequence[int] = steps.column("i")
        self.count = len(self.numbers)
        self.takes_turns = sum(after - before > 1 for before, after in pairwise(self.numbers)) > self.count // 10
        self.skipped = skipped_on(steps)
        self.searched = [False] * self.count
        if steps.has_any("amp_scale"):
            self.searched = [is_search_of_scale(step) for step in steps]
        self.losses = _of_turns(_finite(steps.column("loss")))
        self.norms, self.rates, self.coefficients = (
            _finite(steps.column(key)) for key in ("norm", "lr", "coefficient")
        )
        self.lost_loss = [there and loss is None for loss, there in zip(self.losses, steps.has("loss"), strict=True)]
        lost_norm = (there and norm is None for norm, there in zip(self.norms, steps.has("norm"), strict=True))
        self.lost = [
            bool(bad or norm or loss) and not search
            for bad, norm, loss, search in zip(
                steps.column("nonfinite"), lost_norm, self.lost_loss, self.searched, strict=True
            )
        ]

    @cached_property
    def found(self) -> tuple[Finding, ...]:
        """The health findings of the record, without those on losses that mean nothing and on other optimizers."""
        about_losses = _OF_LOSSES if self.takes_turns else ()
        theirs = self._names_of_others()
        found = findings(self.record)
        return tuple(one for one in found if one.kind not in about_losses and not theirs & set(one.params))

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of what health finds."""
        return {one.kind for one in self.found}

    def _names_of_others(self) -> set[str]:
        """The parameters of other optimizers."""
        mine = {place or 0 for place in self.record.steps.column("optimizer")}
        others = (one for one in self.record.meta.get("params") or [] if mine and one.get("optimizer", 0) not in mine)
        return {str(one.get("name", "?")) for one in others if "optimizer" in one}

    def finding(self, kind: str) -> Finding | None:
        """Return what health found of a kind, the gravest first; None without it."""
        return next((one for one in self.found if one.kind == kind), None)

    # --- the loss -----------------------------------------------------------------------------------------------------

    @cached_property
    def curve(self) -> Curve | None:
        """How the loss went; None where it is not known or means no progress."""
        found = None if self.takes_turns else self.curve_until(self.count)
        if found is None:
            return None
        came_back = abs(found.start) <= 2 * found.noise and found.best < 0.5 * found.best < found.final
        if max(map(abs, found.levels)) < (_ROUND_ZERO if came_back else 2.0) * found.noise:
            return None  # around 0, as where returns are compared with their mean: it says nothing of what is learned
        return found

    def curve_until(self, place: int) -> Curve | None:
        """Return how the loss went before a step.

        Args:
            place: The place of the step.
        """
        known = [
            loss for loss, out in zip(self.losses[:place], self.skipped, strict=False) if loss is not None and not out
        ]
        if len(known) < 10:
            return None
        start = min(known[0], statistics.median(known[:5]))
        size = max(1, len(known) // BLOCKS)
        levels = tuple(statistics.median(known[k : k + size]) for k in range(0, len(known) - size + 1, size))
        steps = [abs(after - before) for before, after in pairwise(known)]
        noise = _MAD_TO_SIGMA * statistics.median(steps[len(steps) // 2 :]) / math.sqrt(2)
        last = levels[-2:] if len(known) >= 2 * BLOCKS else levels[-1:]
        return Curve(start, levels, min(levels), statistics.median(last), max(known), noise, len(known))

    @cached_property
    def is_stuck(self) -> bool:
        """Whether the loss stands still for a third of the run, and not because it has nearly all been learned."""
        curve = self.curve
        if curve is None:
            return False
        wide, needed = max(3 * curve.error, 0.03 * abs(curve.start)), round(0.3 * len(curve.levels))
        windows = [curve.levels[k : k + needed] for k in range(1, len(curve.levels) - needed + 1)]
        still = any(window and max(window) - min(window) <= wide for window in windows)
        after_start = max(curve.levels[1:3], default=curve.start)
        half = curve.fallen(statistics.median(curve.levels[: len(curve.levels) // 2]))
        return still and (half < 0.5 or curve.final > 0.7 * after_start)

    # --- norms --------------------------------------------------------------------------------------------------------

    def usual(self, place: int, values: Sequence[float | None] | None = None) -> float | None:
        """Return the median of the last values before a step.

        Args:
            place: The place of the step.
            values: Norms or losses; by default the norms.
        """
        values = self.norms if values is None else values
        recent = [value for value in values[max(0, place - _RECENT) : place] if value]
        return median(recent)

    @cached_property
    def outbursts(self) -> list[int]:
        """The places of steps whose norm or loss stands far above those before, out of calm; each outburst once."""
        found = sorted({*_outbursts(self.norms), *_outbursts(self.losses)})
        return [place for place, before in zip(found, [-99, *found], strict=False) if place - before > 3]

    @cached_property
    def bumps(self) -> list[int]:
        """The places of steps whose loss stands out by little, but clearly."""
        return _outbursts(self.losses, BUMP_TIMES)

    @cached_property
    def first_lost(self) -> int | None:
        """The place of the first step whose loss or gradients were not finite; None without one."""
        return next((place for place, lost in enumerate(self.lost) if lost), None)

    @cached_property
    def ends_lost(self) -> bool:
        """Whether most of the last steps are not finite."""
        tail = self.lost[-max(1, self.count // 20) :]
        return 2 * sum(tail) > len(tail)

    # --- the learning rate --------------------------------------------------------------------------------------------

    @cached_property
    def rate(self) -> float | None:
        """The largest learning rate; None where none is known."""
        known = without_none(self.rates)
        return max(known) if known else None

    @cached_property
    def is_warming_up(self) -> bool:
        """Whether the learning rate still rises at the end of the run."""
        known = without_none(self.rates)
        return len(known) > 10 and known[-1] == max(known) > 3 * statistics.median(known[: len(known) // 4])

    # --- layers -------------------------------------------------------------------------------------------------------

    @cached_property
    def params(self) -> list[dict[str, Any]]:
        """What the record says of each parameter."""
        return list(self.record.meta.get("params") or [])

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of per-tensor norms with finite numbers, at most some hundred, spread over the run."""
        tensors, width = self.record.tensors, len(self.params)
        every = max(1, len(tensors) // 400)
        picked = [tensors[place] for place in range(0, len(tensors), every)]
        return [line for line in picked if len(line["norm"]) == width and None not in line["norm"]]

    @cached_property
    def measured(self) -> list[dict[str, Any]]:
        """The lines with norms of weights and of updates."""
        tensors = self.record.tensors
        places = [place for place, there in enumerate(tensors.has("update")) if there]
        every = max(1, len(places) // 400)
        found = [tensors[place] for place in places[::every]]
        width = len(self.params)
        return [
            line
            for line in found
            if len(line.get("weight") or ()) == width == len(line.get("update") or ()) and None not in line["weight"]
        ]

    @cached_property
    def layers(self) -> list[Layer]:
        """The weights that had a gradient, in the order of the forward; all parameters of a model without matrices."""
        mine = [place for place in self.own if len(self.params[place].get("shape") or []) > 1]
        return self._layers(mine or self.own)

    @cached_property
    def biases(self) -> list[Layer]:
        """The vectors that had a gradient, in the order of the forward."""
        mine = [place for place in self.own if len(self.params[place].get("shape") or []) == 1]
        return self._layers(mine)

    def _layers(self, places: Sequence[int]) -> list[Layer]:
        found = []
        for place in places:
            parameter = self.params[place]
            root = math.sqrt(parameter.get("numel") or 1)
            absent = [place in (line.get("absent") or ()) for line in self.lines]
            norms = [line["norm"][place] / root for line, out in zip(self.lines, absent, strict=True) if not out]
            if not any(norms):
                continue
            pairs = [(line["weight"][place], line["update"][place]) for line in self.measured]
            weights = tuple(weight for weight, _ in pairs if weight)
            ratios = tuple(update / weight for weight, update in pairs if weight and update is not None)
            name = str(parameter.get("name", "?"))
            found.append(Layer(place, name, len(found), tuple(norms), ratios, weights, parameter.get("uses") or 1))
        return found

    @cached_property
    def own(self) -> list[int]:
        """The places of its parameters in the order of the forward; as the optimizer has them where none is known."""
        theirs = self._names_of_others()
        places = [place for place, one in enumerate(self.params) if str(one.get("name", "?")) not in theirs]
        known = {place: self.params[place].get("order") for place in places}
        if None in known.values():
            return places
        return sorted(places, key=lambda place: (known[place], place))

    def begins_exploded(self, layers: Sequence[Layer]) -> bool:
        """Return whether the first gradient is so far above the weights of some layers that no rate in use fits it.

        Args:
            layers: The layers.
        """
        weights = [layer.weights[0] for layer in layers if layer.weights]
        first = self.norms[0] if self.norms else None
        return bool(weights) and (first or 0.0) > _HUGE * math.hypot(*weights)

    @cached_property
    def eps(self) -> float | None:
        """What the optimizer adds to the number that it divides by; None where it divides by none."""
        known = self.record.meta.get("eps") or []
        numbers = {one for one in known if one is not None}
        return numbers.pop() if len(known) == 1 and len(numbers) == 1 else None

    def floor(self, layer: Layer) -> float:
        """Return the root mean square of an element's gradient below which ``eps`` decides the step of a layer.

        Args:
            layer: The layer.
        """
        if self.eps is None:
            return 0.0
        by_norm = "muon" in str(self.record.meta.get("optimizers")).lower()  # which divides by that of the matrix
        return self.eps / math.sqrt(self.params[layer.place].get("numel") or 1) if by_norm else self.eps

    def begins_at_zero(self, layer: Layer) -> bool:
        """Return whether a layer begins so near to 0 that it has to grow.

        Args:
            layer: The layer, measured at least once.
        """
        return layer.weights[0] < _NEARLY_ZERO * math.sqrt(self.params[layer.place].get("numel") or 1)

    @cached_property
    def sized_layers(self) -> list[Layer]:
        """The measured weights whose size says how far a step goes: all but those that begin at 0, if others are."""
        measured = [layer for layer in self.layers if layer.ratios and layer.weights]
        return [layer for layer in measured if not self.begins_at_zero(layer)] or measured

    @cached_property
    def ratio(self) -> float | None:
        """By which share of itself a step usually changes the usual weight; None where that was not measured."""
        known = [layer.ratio for layer in self.sized_layers if layer.ratio is not None]
        return median(known)

    @cached_property
    def growth(self) -> float:
        """How many times its first norm the usual weight has at the end; 1 where that was not measured."""
        layers = [layer for layer in self.layers if len(layer.weights) > 1 and not self.begins_at_zero(layer)]
        return statistics.median(layer.weights[-1] / layer.weights[0] for layer in layers) if layers else 1.0

    def gain(self, layer: Layer, line: int = 0) -> float | None:
        """Return by how much a random matrix of this norm multiplies the size of what goes in; None for a vector.

        An initialisation that keeps sizes has 1 to 1.4, the default of `torch.nn.Linear` 0.6.

        Args:
            layer: The layer, measured at least so often.
            line: Which of its measurements.
        """
        shape = self.params[layer.place].get("shape") or []
        return layer.weights[line] / math.sqrt(shape[0]) if len(shape) > 1 and shape[0] else None

    @cached_property
    def cancels_scale(self) -> bool:
        """Whether the optimizer makes steps of one length whatever the gradients are.

        It divides by their size if it has an ``eps``. Without one, measured updates decide: over the lines they vary
        far less than the gradients do.
        """
        return self.eps is not None or bool(is_scale_free(self.record))

    # --- clips --------------------------------------------------------------------------------------------------------

    @cached_property
    def bound(self) -> list[float]:
        """The coefficients of the steps on which a clip bound."""
        return [one for one in self.coefficients if one is not None and one < BINDS_BELOW]

    @cached_property
    def bound_share(self) -> float:
        """On which share of the steps a clip bound."""
        return len(self.bound) / self.taken if self.taken else 0.0

    @cached_property
    def taken(self) -> int:
        """How many steps the optimizer took with finite gradients."""
        return sum(not (out or lost) for out, lost in zip(self.skipped, self.lost, strict=True))

    def named(self, place: int) -> int:
        """Return the number of the step at a place."""
        return self.numbers[min(max(place, 0), self.count - 1)] if self.numbers else 0

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step."""
        return (self.numbers[0], self.numbers[-1]) if self.numbers else (0, 0)

    def seen(self, words: str, params: Sequence[str] = (), *, since: int | None = None) -> Evidence:
        """Return the evidence of what shows up to the last step.

        Args:
            words: What was seen.
            params: The parameters that it is about, if it is about some.
            since: The number of the step on which it begins; None for the first.
        """
        first, last = self.span
        return Evidence((first if since is None else since, last), words, tuple(params))


def period_of(places: Sequence[int]) -> int | None:
    """Return the distance at which events recur; None where they come without one.

    Args:
        places: The places of the events, ascending.

    Returns:
        The distance, where at least four events lie on its grid, which holds most of them and has few gaps.

    Example:
        >>> period_of([39, 79, 119, 120, 159, 239]), period_of([3, 50, 61, 90, 190])
        (40, None)
    """
    if len(places) < 4:
        return None
    gaps = {after - before for k, before in enumerate(places) for after in places[k + 1 : k + 4]}
    for gap in sorted(gaps):
        if gap < 3:
            continue
        on_grid = max(sum((place - first) % gap == 0 for place in places) for first in places[:6])
        slots = (places[-1] - places[0]) // gap + 1
        if on_grid >= 4 and on_grid >= 0.7 * len(places) and on_grid >= 0.7 * slots:
            return gap
    return None


OUTBURST_TIMES = 4.0
"""Of the recent median: norms of small batches reach twice it every day."""

BUMP_TIMES = 1.4

OUTBURST_DEVIATIONS = 6.0


def _outbursts(values: Sequence[float | None], times: float = OUTBURST_TIMES) -> list[int]:
    """Places where a value leaps away from the recent ones, which leave earlier leaps out."""
    found, recent, limit, fresh = list[int](), SortedWindow(_RECENT), math.inf, 0
    for place, value in enumerate(values):
        if value is None or value <= 0:
            continue
        if value > limit:
            found.append(place)
            if len(found) > 3 and found[-1] - found[-4] == 3:  # this is a new level, and no leap
                recent, limit = SortedWindow(_RECENT), math.inf
                recent.add(math.log(value))
            continue
        recent.add(math.log(value))
        fresh += 1
        if fresh >= _REFRESH and len(recent.ordered) >= _FEWEST_RECENT:
            limit, fresh = _limit(recent.ordered, times), 0
    return found


def _limit(logs: Sequence[float], times: float) -> float:
    """The value above which the next one leaps away from those with these logarithms, ascending."""
    middle = logs[len(logs) // 2]
    spread = _MAD_TO_SIGMA * upper_median_distance(logs, middle)
    return math.exp(min(middle + max(math.log(times), OUTBURST_DEVIATIONS * spread), _LARGEST_LOGARITHM))


def _of_turns(losses: list[float | None]) -> list[float | None]:
    """The losses, or geometric means over one turn where losses of different sizes come in turns."""
    logs = [math.log(loss) if loss is not None and loss > 0 else None for loss in losses]
    if sum(one is not None for one in logs) < max(20, sum(loss is not None for loss in losses) // 2):
        return losses
    one = usual_step(logs, 1)
    if one < _TURNS:
        return losses
    turn = next((lag for lag in range(2, _LONGEST_TURN + 1) if 2 * usual_step(logs, lag) <= one), None)
    if turn is None:
        return losses
    known = without_none(logs)
    if abs(statistics.fmean(known[turn : 2 * turn]) - statistics.fmean(known[:turn])) > 3 * one:
        return losses  # thrown up by its first steps, and going to and fro since then
    found = list(losses)
    for place, own in enumerate(logs):
        first = max(0, place - turn + 1)
        if own is not None:
            found[place] = math.exp(statistics.fmean(without_none(logs[first : first + turn])))
    return found


def usual_step(logs: Sequence[float | None], lag: int) -> float:
    """By how much two values that lie so far apart usually differ; infinite where no two do."""
    pairs = zip(logs, logs[lag:], strict=False)
    steps = [abs(after - before) for before, after in pairs if before is not None and after is not None]
    return statistics.median(steps) if steps else math.inf


def _finite(values: list[float | None]) -> list[float | None]:
    """The values, with None for those that are not finite, as a run that is still in memory may have them."""
    if math.isfinite(sum(filter(None, values))):
        return values
    return [value if value is not None and math.isfinite(value) else None for value in values]


@once
def signals_of(record: Record) -> Signals:
    """Return what one optimizer's steps show; nobody may change it.

    Args:
        record: The record of its steps alone.
    """
    return Signals(record)
