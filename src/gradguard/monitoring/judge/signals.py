"""The signals from which causes are read: the curves of one optimizer's steps, and its layers in forward order.

"Usual" is the recent past of a run, and not its first steps: norms fall in a run that is well, and grow in one that is
not. Losses and norms are followed by medians, which single steps do not move.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, pairwise
from operator import not_
from typing import Any

from gradguard.monitoring.judge.cause import Evidence
from gradguard.monitoring.judge.findings import Finding
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.numbers import median, medians, number, only
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.record_lines import Numbers, names_of, without_none
from gradguard.monitoring.record.step_rows import OTHER_LOSSES, bound_on, nonfinite_on, skipped_on
from gradguard.threshold_rules import centre_and_spread

FEWEST_STEPS = 60
"""Fewer steps show neither whether a loss falls nor what a norm usually is."""

BLOCKS = 20
"""Medians that a curve is followed by."""

FAR = 20.0
"""Times the recent losses or norms, within one step: a rate that is too high takes several steps to get there."""

OF_EPS = 3.0
"""Below so many eps an optimizer that divides by the size of the gradient hardly moves."""

A_LITTLE = 0.15
"""Of its first level: what the bias of an output can take from a loss."""

REACH = 2.0
"""Times the way from the first weights to the last: what clipped steps must be able to go."""

_FEWEST_MEASURED = 4  # updates that say how long a step is for its gradient
_CALM, _LAST, _STANDS_OUT = 10, 3, 2.5  # steps of calm; those just before a leap; and times what is usual
_FEWEST_RECENT, _REFRESH = 8, 4  # values before one may leap, and after which it is known anew what is usual
_LARGEST_LOGARITHM = 700.0
_NEARLY_ZERO = 3e-3
_HUGE = 30.0  # times the norm of the weights: a first gradient
_TURNS = 1.0  # of logarithms, between two losses in a row
_LONGEST_TURN = 8  # losses of so many kinds in a row
_ROUND_ZERO = 10.0  # times its noise: a loss that stays within is compared with a mean of its own
_RECENT = 24  # values before a step that say what is usual at that step
_MAD_TO_SIGMA = 1.4826
_HARDLY, _MOVES = 0.05, 1e-3  # gradients of weights over those of vectors; and a step over its vector


@dataclass(frozen=True)
class Curve:
    """How the loss went.

    Attributes:
        start: Where it began.
        levels: Its median in each twentieth of the run, at least ten.
        best: The lowest level.
        final: The level at the end.
        noise: How far two values in a row differ, as a robust standard deviation.
        count: How many values there are.
    """

    start: float
    levels: tuple[float, ...]
    best: float
    final: float
    noise: float
    count: int

    @property
    def is_known(self) -> bool:
        """Whether it was measured; of `UNKNOWN` every number is NaN, and nothing else is true."""
        return self.count > 0

    @property
    def error(self) -> float:
        """How far chance may have moved a level: two standard errors."""
        return 2 * 1.25 * self.noise / math.sqrt(max(1, self.count // BLOCKS))

    @property
    def is_positive(self) -> bool:
        """Whether ratios of it mean something."""
        return self.start > 0 and self.best > 0

    @property
    def fallen(self) -> float:
        """Which share of its start the loss has lost; below 0 where it rose."""
        return (self.start - self.final) / (abs(self.start) or 1.0)

    @property
    def has_fallen(self) -> bool:
        """Whether it ends below its start, by more than chance and by more than 2 %."""
        return self.start - self.final > max(self.error + 0.6 * self.noise, 0.02 * abs(self.start))

    @property
    def stands_still(self) -> bool:
        """Whether it is where it began, and all its levels after the first tenth are one, but for chance."""
        levels = self.levels[len(self.levels) // 10 :]
        first, last = levels[: len(levels) // 4], levels[len(levels) // 2 :]
        fell = statistics.median(first) - statistics.median(last)
        fell_at_once = self.levels[0] - self.final > A_LITTLE * abs(self.levels[0])
        wide = math.inf if fell_at_once else max(levels) - min(levels)
        return wide <= max(3 * self.error, 0.03 * abs(self.start)) and fell <= max(self.error, 0.02 * abs(self.start))

    @property
    def is_falling(self) -> bool:
        """Whether it still falls in the last third, by more than chance."""
        third = len(self.levels) // 3
        before = statistics.median(self.levels[-2 * third : -third])
        return before - statistics.median(self.levels[-third:]) > self.error


def middle(values: Sequence[float]) -> float:
    """Return the median of some numbers; NaN where there are none.

    Args:
        values: Numbers that are known.
    """
    return statistics.median(values) if values else math.nan


class Series:
    """A number of each step, NaN where it is not known: what is compared with that is false.

    Args:
        values: The numbers, in the order of the steps; None where one is not known.

    Attributes:
        values: The numbers, NaN in place of None.
    """

    def __init__(self, values: Numbers) -> None:
        self.values = [math.nan if value is None else value for value in values]

    def __getitem__(self, place: int) -> float:
        """Return the number of the step at a place."""
        return self.values[place]

    def known(self, first: int, end: int | None = None) -> list[float]:
        """Return what is known between two places.

        Args:
            first: The place that it begins with; what is below 0 stands for the first step.
            end: The place behind it; None for all that comes.
        """
        return [value for value in self.values[max(0, first) : end] if value == value]

    def usual(self, place: int) -> float:
        """Return the median of the last numbers before a step that are not 0.

        Args:
            place: The place of the step.
        """
        return middle(list(filter(None, self.known(place - _RECENT, place))))


UNKNOWN = Curve(math.nan, (math.nan,) * BLOCKS, math.nan, math.nan, math.nan, 0)
"""The curve of losses that are not known or mean no progress: it has not fallen, does not stand still, and so on."""


@dataclass(frozen=True)
class Layer:
    """A weight: a parameter of two dimensions or more.

    Attributes:
        place: Its place in the record's arrays.
        name: Its name.
        gradients: The root mean square of an element of its gradient on each line.
        ratios: The norm of its update over its own, where both were measured.
        weights: Its norm, where that was measured.
        uses: How many operations take it in one forward.
        shape: Its shape; empty where it is not known.
        root: The root of its number of elements, by which its norm is that of one element.
    """

    place: int
    name: str
    gradients: tuple[float, ...]
    ratios: tuple[float, ...]
    weights: tuple[float, ...]
    uses: int
    shape: Sequence[int]
    root: float

    @property
    def gradient(self) -> float:
        """The usual gradient of an element."""
        return statistics.median(self.gradients)

    @property
    def ratio(self) -> float | None:
        """By which share of itself a step usually changes it; None where that was not measured."""
        return median(self.ratios[1:] or self.ratios)

    @property
    def begins_at_zero(self) -> bool:
        """Whether it begins so near to 0 that it has to grow; it was measured at least once."""
        return self.weights[0] < _NEARLY_ZERO * self.root

    def gain(self, line: int = 0) -> float | None:
        """Return by how much a random matrix of this norm multiplies the size of what goes in; None for a vector.

        An initialisation that keeps sizes has 1 to 1.4, the default of `torch.nn.Linear` 0.6.

        Args:
            line: Which of its measurements.
        """
        return self.weights[line] / math.sqrt(self.shape[0]) if len(self.shape) > 1 and self.shape[0] else None


class RunSignals:
    """The signals of one optimizer's steps.

    Args:
        record: The record of its steps alone.

    Attributes:
        takes_turns: Whether other optimizers step between its steps on losses of their own, which may be of networks
            that work against each other, and are not judged.
        turn: The number of steps that a loss is a mean over, which take it from one level to another.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        steps = record.steps
        self.numbers: Sequence[int] = steps.column("i")
        self.count, self.names = len(self.numbers), record.names
        gaps = [after - before for before, after in pairwise(self.numbers)]
        self._usual_gap = middle(gaps)
        self.takes_turns = bool(record.meta.get(OTHER_LOSSES)) and sum(gap > 1 for gap in gaps) > self.count // 10
        self.skipped = skipped_on(steps)
        searched = zip(self.skipped, steps.has("amp_scale"), map(not_, steps.column("spike")), strict=True)
        self.searched = list(map(all, searched))  # an overflow now and then is how a GradScaler finds its scale
        self.losses, self.turn = _of_turns(steps.column("loss"))
        self.norms, self.rates, self.coefficients = map(steps.column, ("norm", "lr", "coefficient"))
        no_loss = [there and loss is None for there, loss in zip(steps.has("loss"), self.losses, strict=True)]
        lost = zip(nonfinite_on(steps), no_loss, self.searched, strict=True)
        self.lost = [(bad or gone) and not searched for bad, gone, searched in lost]

    @cached_property
    def found(self) -> tuple[Finding, ...]:
        """The health findings of the record, without those on losses that mean nothing and on other optimizers."""
        theirs, left_out = self._names_of_others(), "diverging_loss" if self.takes_turns else ""
        return tuple(one for one in findings(self.record) if one.kind != left_out and not theirs & set(one.params))

    def _names_of_others(self) -> set[str]:
        """The parameters of other optimizers."""
        mine = {place or 0 for place in self.record.steps.column("optimizer")}
        others = (one for one in self.record.meta.get("params", []) if mine and one.get("optimizer", 0) not in mine)
        return set(names_of(one for one in others if "optimizer" in one))

    def finding(self, kind: str) -> Finding | None:
        """Return what health found of a kind, the gravest first; None without it."""
        return next((one for one in self.found if one.kind == kind), None)

    # --- the loss -----------------------------------------------------------------------------------------------------

    @cached_property
    def curve(self) -> Curve:
        """How the loss went; `UNKNOWN` where it means no progress."""
        found = self.curve_until(self.count)
        if self.takes_turns or not found.is_known:
            return UNKNOWN
        first = without_none(self.losses)[:10]  # before a rate or a batch can have moved it
        has_no_floor = min(first) < 0 < max(first) + 2 * found.noise and found.final > 0.5 * min(found.best, 0.0)
        noise = min(found.noise, self.curve_until(self.count // 8).noise)  # what grows leaves 0 far behind
        if max(map(abs, found.levels)) < (_ROUND_ZERO if has_no_floor else 2.0) * noise:
            return UNKNOWN  # around 0, as where returns are compared with their mean
        return found

    def curve_until(self, place: int) -> Curve:
        """Return how the loss went before a step; `UNKNOWN` where fewer than ten losses are known.

        Args:
            place: The place of the step.
        """
        known = [
            loss for loss, out in zip(self.losses[:place], self.skipped, strict=False) if loss is not None and not out
        ]
        if len(known) < 10:
            return UNKNOWN
        start = min(known[0], statistics.median(known[:5]))
        levels = tuple(medians(known, max(1, len(known) // BLOCKS)))
        steps = [abs(after - before) for before, after in pairwise(known)]
        noise = _MAD_TO_SIGMA * statistics.median(steps[len(steps) // 2 :]) / math.sqrt(2)
        last = levels[-2:] if len(known) >= 2 * BLOCKS else levels[-1:]
        return Curve(start, levels, min(levels), statistics.median(last), noise, len(known))

    @cached_property
    def ends_at(self) -> str:
        """The loss at the end in words: the ``final_loss`` of the summary, where it is finite."""
        final = verdict(self.record).final_loss
        return number(self.curve.final if final is None else final)

    @property
    def learns(self) -> bool:
        """Whether the loss has fallen, and not only at once while the first weight, which reads the data, shrank."""
        return self.curve.has_fallen and not (self.curve.stands_still and self.first_growth < 1)

    @property
    def first_growth(self) -> float:
        """How many times its first norm the first weight has at the end, which reads the data; 1 if not known.

        Where no weight ever had a gradient, none has read anything: 0.
        """
        return next(iter(self.growths()), 0.0 if self.lines and not self.layers else 1.0)

    @cached_property
    def is_stuck(self) -> bool:
        """Whether the loss stands still for a third of the run, and not because it has nearly all been learned."""
        curve = self.curve
        wide, needed = max(3 * curve.error, 0.03 * abs(curve.start)), round(0.3 * len(curve.levels))
        windows = [curve.levels[k : k + needed] for k in range(1, len(curve.levels) - needed + 1)]
        still = any(window and max(window) - min(window) <= wide for window in windows)
        after_start = max(curve.levels[1:3], default=curve.start)
        half = replace(curve, final=statistics.median(curve.levels[: len(curve.levels) // 2])).fallen
        return still and (half < 0.5 or curve.best > 0.7 * after_start)

    # --- norms --------------------------------------------------------------------------------------------------------

    def positive_norms(self, end: int | None = None) -> list[float]:
        """Return the norms above 0 of the steps before a place; of all steps without one."""
        return [norm for norm in self.norms[:end] if norm]

    @cached_property
    def norm(self) -> Series:
        """The norms before any clip."""
        return Series(self.norms)

    @cached_property
    def loss(self) -> Series:
        """The losses."""
        return Series(self.losses)

    @cached_property
    def length(self) -> Series:
        """The norms of what the optimizer got, after all clips."""
        clipped = zip(self.norms, self.coefficients, strict=True)
        return Series([norm if norm is None or by is None else norm * by for norm, by in clipped])

    def times(self, place: int) -> float:
        """Return how far the norm or the loss of a step stands above those just before it; at least 1.

        After more steps of other optimizers than usual, as between the turns of local copies, nothing is just before.

        Args:
            place: The place of the step.
        """
        if place and self.numbers[place] - self.numbers[place - 1] > 2 * self._usual_gap:
            return 1.0
        times = (one[place] / one.usual(place) for one in (self.norm, self.loss))
        return max([1.0, *(one for one in times if one == one)])

    def leaps_out_of_calm(self, place: int) -> bool:
        """Return whether a step stands too far above those before for any rate, and none of the last ones stood out."""
        calm = place >= _CALM and all(self.times(before) < _STANDS_OUT for before in range(place - _LAST, place))
        return calm and self.times(place) >= FAR

    @cached_property
    def outbursts(self) -> list[int]:
        """The places of steps whose norm or loss stands far above those before, out of calm; each outburst once."""
        found = sorted({*_outbursts(self.norms), *_outbursts(self.losses)})
        return [place for place, before in zip(found, [-99, *found], strict=False) if place - before > 3]

    @cached_property
    def first_lost(self) -> int | None:
        """The place of the first step whose loss or gradients were not finite; None without one."""
        return self.lost.index(True) if True in self.lost else None

    @cached_property
    def ends_lost(self) -> bool:
        """Whether most of the last steps are not finite."""
        tail = self.lost[-max(1, self.count // 20) :]
        return 2 * sum(tail) > len(tail)

    # --- the learning rate --------------------------------------------------------------------------------------------

    @cached_property
    def rate(self) -> float | None:
        """The largest learning rate; None where none is known."""
        return max(without_none(self.rates), default=None)

    @cached_property
    def is_warming_up(self) -> bool:
        """Whether the learning rate still rises at the end of the run."""
        known = without_none(self.rates)
        rises = len(known) > 10 and known[-1] == max(known) > known[len(known) // 2]
        return rises and known[-1] > 3 * statistics.median(known[: len(known) // 4])

    @property
    def leaves(self) -> int | None:
        """How many tensors the backward pass reached; None where that is not known."""
        return self.record.meta.get("leaves")

    # --- layers -------------------------------------------------------------------------------------------------------

    @cached_property
    def params(self) -> list[dict[str, Any]]:
        """Return the recorded facts of each parameter."""
        return self.record.meta.get("params", [])

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of per-tensor norms with finite numbers, at most some hundred, spread over the run."""
        return self._picked("norm", "norm")

    @cached_property
    def measured(self) -> list[dict[str, Any]]:
        """The lines with norms of weights and of updates."""
        lines = self._picked("update", "weight")
        return [line for line in lines if len(line["update"]) == len(self.params)]

    def _picked(self, there: str, key: str) -> list[dict[str, Any]]:
        """Some hundred of the lines that have the first key, without those that lack a number under the second."""
        lines = self.record.tensors
        lines = lines.where(lines.has(there))
        picked = lines[:: max(1, len(lines) // 400)]
        pairs = [(line, line.get(key, ())) for line in picked]
        return [line for line, numbers in pairs if len(numbers) == len(self.params) and None not in numbers]

    def shape(self, place: int) -> list[int]:
        """Return the shape of a parameter; an empty one where it is not known.

        Args:
            place: Its place in the record's arrays.
        """
        return self.params[place].get("shape", [])

    def elements(self, places: Sequence[int]) -> int:
        """Return how many elements some parameters have.

        Args:
            places: Their places in the record's arrays.
        """
        return sum(self.params[place].get("numel", 0) for place in places)

    @cached_property
    def layers(self) -> list[Layer]:
        """The weights that had a gradient, in the order of the forward; all parameters of a model without matrices."""
        return self._layers(self.matrices or self.own)

    @cached_property
    def biases(self) -> list[Layer]:
        """The vectors that had a gradient, in the order of the forward."""
        return self._layers([place for place in self.own if len(self.shape(place)) == 1])

    def _layers(self, places: Sequence[int]) -> list[Layer]:
        found = []
        for place in places:
            root, uses = math.sqrt(self.elements([place]) or 1), self.params[place].get("uses", 1)
            there = [line["norm"][place] for line in self.lines if place not in line.get("absent", ())]
            gradients = tuple(norm / root for norm in there)
            pairs = [(line["weight"][place], line["update"][place]) for line in self.measured]
            weights = tuple(weight for weight, _ in pairs if weight)
            ratios = tuple(update / weight for weight, update in pairs if weight and update is not None)
            layer = Layer(place, self.names[place], gradients, ratios, weights, uses, self.shape(place), root)
            found += [layer] if any(there) else []
        return found

    @cached_property
    def own(self) -> list[int]:
        """The places of its parameters in the order of the forward; as the optimizer has them where none is known."""
        theirs = self._names_of_others()
        places = [place for place, name in enumerate(self.names) if name not in theirs]
        order: dict[int, Any] = {place: self.params[place].get("order") for place in places}
        return places if None in order.values() else sorted(places, key=order.__getitem__)

    @cached_property
    def matrices(self) -> list[int]:
        """The places of its weights, those of two dimensions or more, in the order of the forward."""
        return [place for place in self.own if len(self.shape(place)) > 1]

    def norms_of(self, place: int) -> list[float]:
        """Return the norm of one parameter's gradient on each of `lines`, 0 where it has none."""
        return [line["norm"][place] for line in self.lines]

    def begins_exploded(self, layers: Sequence[Layer]) -> bool:
        """Return whether the first gradient of some layers is so far above their weights that no rate in use fits it.

        Args:
            layers: The layers.
        """
        pairs = [(layer.gradients[0] * layer.root, layer.weights[0]) for layer in layers if layer.weights]
        first, weights = (math.hypot(*numbers) for numbers in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        return first > _HUGE * weights

    @cached_property
    def eps(self) -> float | None:
        """Return the epsilon that the optimizer adds to its divisor; None where it has none."""
        return only(self.record.meta.get("eps", ()))

    def floor(self, layer: Layer) -> float:
        """Return the root mean square of an element's gradient below which ``eps`` decides a layer's step.

        Args:
            layer: The layer.
        """
        by_norm = "muon" in str(self.record.meta.get("optimizers")).lower()  # which divides by that of the matrix
        return OF_EPS * (self.eps or 0.0) / (layer.root if by_norm else 1.0)

    @cached_property
    def sized_layers(self) -> list[Layer]:
        """The measured weights whose size says how far a step goes: all but those that begin at 0, if others are."""
        measured = [layer for layer in self.layers if layer.ratios and layer.weights]
        return [layer for layer in measured if not layer.begins_at_zero] or measured

    @cached_property
    def ratio(self) -> float | None:
        """By which share of itself a step usually changes the usual weight; None where that was not measured."""
        return median(without_none(layer.ratio for layer in self.sized_layers))

    @cached_property
    def travel(self) -> float | None:
        """By which share of itself the usual weight can have moved in all steps together; None where not measured."""
        ratios = [statistics.fmean(layer.ratios) for layer in self.sized_layers]
        return statistics.median(ratios) * self.count if ratios else None

    def growths(self, end: float = math.inf) -> list[float]:
        """Return how many times its first norm each measured weight has, in forward order, but for those from 0.

        Args:
            end: The number of the step before which they are measured last.
        """
        count = max(1, sum(line["i"] < end for line in self.measured))
        layers = [layer for layer in self.layers if len(layer.weights) > 1 and not layer.begins_at_zero]
        return [layer.weights[:count][-1] / layer.weights[0] for layer in layers]

    @cached_property
    def only_vectors_learn(self) -> bool:
        """Whether gradients of weights are nearly 0 beside those of biases, which move: hardly an input arrives."""
        weights, vectors = self.layers, self.biases
        if not vectors or len(weights) < 2 or any(len(layer.shape) < 2 for layer in weights):
            return False
        pairs = [[layer.gradient * layer.root for layer in some] for some in (weights, vectors)]
        largest = max(vectors, key=lambda layer: layer.gradient)
        return math.hypot(*pairs[0]) < _HARDLY * math.hypot(*pairs[1]) and (largest.ratio or 0.0) > _MOVES

    @cached_property
    def cancels_scale(self) -> bool:
        """Whether the optimizer makes steps of one length whatever the gradients are.

        It divides by their size if it has an ``eps``. Without one, measured updates decide: over the lines they vary
        far less than the gradients do.
        """
        return self.eps is not None or bool(is_scale_free(self.record))

    @cached_property
    def low_threshold(self) -> float:
        """The norm below which clipped steps might not take the weights where this run took them.

        Clipped steps of that length, all in one direction, would go `REACH` times as far as the weights are from where
        they began. A run whose steps are mostly noise goes to and fro, and its norms are far above that. Infinite where
        updates were not measured, or do not follow the gradients.
        """
        known = {i: norm for i, norm in zip(self.numbers, self.norms, strict=True) if norm}
        lengths = [(math.hypot(*without_none(line["update"])), known.get(line["i"])) for line in self.measured]
        rates = [length / norm for length, norm in lengths if norm]
        if self.cancels_scale or len(rates) < _FEWEST_MEASURED or not (rate := statistics.median(rates)):
            return math.inf
        way = math.hypot(*(math.hypot(layer.weights[0], layer.weights[-1]) for layer in self.layers if layer.weights))
        return REACH * way / (rate * self.count)

    # --- clips --------------------------------------------------------------------------------------------------------

    @cached_property
    def bound(self) -> list[float]:
        """The coefficients of the steps on which a clip bound."""
        return list(compress(self.coefficients, bound_on(self.record.steps)))

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
            words: The observation, as one sentence.
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
        grids = Counter(place % gap for place in places)
        on_grid = max(grids[first % gap] for first in places[:6])
        slots = (places[-1] - places[0]) // gap + 1
        if on_grid >= 4 and on_grid >= 0.7 * len(places) and on_grid >= 0.7 * slots:
            return gap
    return None


OUTBURST_TIMES = 4.0
"""Of the recent median: norms of small batches reach twice it every day."""

OUTBURST_DEVIATIONS = 6.0


def _outbursts(values: Numbers) -> list[int]:
    """Places where a value leaps away from the recent ones, which leave earlier leaps out."""
    found, recent, limit, fresh = list[int](), deque[float](maxlen=_RECENT), math.inf, 0
    for place, value in enumerate(values):
        if value is None or value <= 0:
            continue
        if value > limit:
            found.append(place)
            if len(found) > 3 and found[-1] - found[-4] == 3:  # this is a new level, and no leap
                recent, limit = deque([math.log(value)], maxlen=_RECENT), math.inf
            continue
        recent.append(math.log(value))
        fresh += 1
        if fresh >= _REFRESH and len(recent) >= _FEWEST_RECENT:
            fresh, (middle, spread) = 0, centre_and_spread(sorted(recent))
            above = max(math.log(OUTBURST_TIMES), OUTBURST_DEVIATIONS * spread)
            limit = math.exp(min(middle + above, _LARGEST_LOGARITHM))
    return found


def _of_turns(losses: list[float | None]) -> tuple[list[float | None], int]:
    """The losses and 1, or geometric means over one turn and its length where losses of different sizes take turns."""
    logs = [math.log(loss) if loss is not None and loss > 0 else None for loss in losses]
    known, one = without_none(logs), usual_step(logs, 1)
    if len(known) < max(20, len(without_none(losses)) // 2) or one < _TURNS:
        return losses, 1
    turn = next((lag for lag in range(2, _LONGEST_TURN + 1) if 2 * usual_step(logs, lag) <= one), 1)
    if turn == 1 or abs(statistics.fmean(known[turn : 2 * turn]) - statistics.fmean(known[:turn])) > 3 * one:
        return losses, 1  # or thrown up by its first steps, and going to and fro since then
    found = list(losses)
    for place, own in enumerate(logs):
        first = max(0, place - turn + 1)
        if own is not None:
            found[place] = math.exp(statistics.fmean(without_none(logs[first : first + turn])))
    return found, turn


def usual_step(logs: Numbers, lag: int) -> float:
    """By how much two values that lie so far apart usually differ; infinite where no two do."""
    pairs = zip(logs, logs[lag:], strict=False)
    steps = [abs(after - before) for before, after in pairs if before is not None and after is not None]
    return statistics.median(steps) if steps else math.inf


@once
def signals_of(record: Record) -> RunSignals:
    """Return what one optimizer's steps show; nobody may change it.

    Args:
        record: The record of its steps alone.
    """
    return RunSignals(record)
