"""The signals that the search for causes reads: curves of one optimizer's steps, and its layers in forward order.

"Usual" always means the recent past of a run, not its first steps: norms fall in a healthy run and grow in a sick one.
Losses and norms are summarised by medians, which single steps do not move. A *place* is the index of a step or of a
parameter in the record's arrays.
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
"""Fewer steps show neither whether the loss falls nor the usual norm."""

BLOCKS = 20
"""The number of medians that summarise a curve."""

FAR = 20.0
"""Times the recent losses or norms, within one step. A learning rate that is too high needs several steps for that."""

OF_EPS = 3.0
"""Times eps: with smaller gradients an optimizer that divides by their size hardly moves a weight."""

A_LITTLE = 0.15
"""Share of its first level that a loss can lose by learning the output bias alone."""

REACH = 2.0
"""Times the distance from the first weights to the last that clipped steps must be able to cover."""

_FEWEST_MEASURED = 4  # measured updates that are needed to know the length of a step for its gradient
_CALM, _LAST, _STANDS_OUT = 10, 3, 2.5  # steps before a leap; steps that must be calm; times the usual
_FEWEST_RECENT, _REFRESH = 8, 4  # values before the first possible leap; values between updates of the limit
_LARGEST_LOGARITHM = 700.0
_NEARLY_ZERO = 3e-3  # root mean square of a weight that starts at 0, for all practical purposes
_HUGE = 30.0  # norm of the first gradient over the norm of the weights
_TURNS = 1.0  # usual difference of the logarithms of two losses in a row, if losses of several kinds take turns
_LONGEST_TURN = 8  # the most kinds of losses in a turn
_ROUND_ZERO = 10.0  # times its noise: a loss that stays this close to 0 is a difference from its own mean
_RECENT = 24  # values before a step that define what is usual there
_MAD_TO_SIGMA = 1.4826
_HARDLY, _MOVES = 0.05, 1e-3  # weights' gradients over vectors' gradients; update of a vector over its norm


@dataclass(frozen=True)
class Curve:
    """The course of the loss.

    Attributes:
        start: The level at the start.
        levels: The median of each twentieth of the run, at least ten.
        best: The lowest level.
        final: The level at the end.
        noise: The robust standard deviation of the loss from one step to the next, in the second half of the run.
        count: The number of values.
    """

    start: float
    levels: tuple[float, ...]
    best: float
    final: float
    noise: float
    count: int

    @property
    def is_known(self) -> bool:
        """True if the loss was measured. For `UNKNOWN` all numbers are NaN; the other properties are NaN or False."""
        return self.count > 0

    @property
    def error(self) -> float:
        """Two standard errors of a level: the distance that chance may have moved it."""
        return 2 * 1.25 * self.noise / math.sqrt(max(1, self.count // BLOCKS))

    @property
    def is_positive(self) -> bool:
        """True if ratios of the loss are meaningful: its start and its best level are above 0."""
        return self.start > 0 and self.best > 0

    @property
    def fallen(self) -> float:
        """The share of its start that the loss has lost; negative where it rose."""
        return (self.start - self.final) / (abs(self.start) or 1.0)

    @property
    def has_fallen(self) -> bool:
        """True if the loss ends below its start, by more than chance and by more than 2 %."""
        return self.start - self.final > max(self.error + 0.6 * self.noise, 0.02 * abs(self.start))

    @property
    def has_fallen_by_thirds(self) -> bool:
        """True if the last third of the run lies below its start, and below the first third by more than chance.

        Under heavy-tailed noise this tells more than the start, which is the level of a few losses.
        """
        third = len(self.levels) // 3
        first, last = statistics.median(self.levels[:third]), statistics.median(self.levels[-third:])
        return last < self.start and first - last > self.error

    @property
    def stands_still(self) -> bool:
        """True if the loss is where it began, and its levels after the first tenth differ only by chance."""
        levels = self.levels[len(self.levels) // 10 :]
        first, last = levels[: len(levels) // 4], levels[len(levels) // 2 :]
        fell = statistics.median(first) - statistics.median(last)
        fell_at_once = self.levels[0] - self.final > A_LITTLE * abs(self.levels[0])
        wide = math.inf if fell_at_once else max(levels) - min(levels)
        return wide <= max(3 * self.error, 0.03 * abs(self.start)) and fell <= max(self.error, 0.02 * abs(self.start))

    @property
    def is_falling(self) -> bool:
        """True if the loss still falls in the last third of the run, by more than chance."""
        third = len(self.levels) // 3
        before = statistics.median(self.levels[-2 * third : -third])
        return before - statistics.median(self.levels[-third:]) > self.error


def middle(values: Sequence[float]) -> float:
    """Return the median of some numbers; NaN for none.

    Args:
        values: The numbers.
    """
    return statistics.median(values) if values else math.nan


class Series:
    """One number per step, NaN where it is not known. A comparison with NaN is False, so unknown numbers need no check.

    Args:
        values: The numbers in the order of the steps; None where one is not known.

    Attributes:
        values: The numbers, NaN in place of None.
    """

    def __init__(self, values: Numbers) -> None:
        self.values = [math.nan if value is None else value for value in values]

    def __getitem__(self, place: int) -> float:
        """Return the number of the step at a place."""
        return self.values[place]

    def known(self, first: int, end: int | None = None) -> list[float]:
        """Return the known numbers between two places.

        Args:
            first: The first place; a negative one stands for 0.
            end: The place after the last; None for the end.
        """
        return [value for value in self.values[max(0, first) : end] if value == value]

    def usual(self, place: int) -> float:
        """Return the median of the recent numbers before a step, without zeros.

        Args:
            place: The place of the step.
        """
        return middle(list(filter(None, self.known(place - _RECENT, place))))


UNKNOWN = Curve(math.nan, (math.nan,) * BLOCKS, math.nan, math.nan, math.nan, 0)
"""The curve of losses that are unknown or do not measure progress: it has neither fallen nor stood still, and so on."""


@dataclass(frozen=True)
class Layer:
    """A parameter that had a gradient, usually a weight of two dimensions or more.

    Attributes:
        place: The index in the record's arrays.
        name: The name.
        gradients: The root mean square of its gradient's elements on each per-tensor line.
        ratios: The norm of its update over its own norm, where both were measured.
        weights: Its norm, where it was measured.
        uses: The number of operations that use it in one forward pass.
        shape: The shape; empty where it is not known.
        root: The square root of the number of elements: a norm divided by it is a root mean square.
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
        """The usual root mean square of the gradient's elements."""
        return statistics.median(self.gradients)

    @property
    def ratio(self) -> float | None:
        """The share of itself by which a step usually changes it; None where it was not measured."""
        return median(self.ratios[1:] or self.ratios)

    @property
    def begins_at_zero(self) -> bool:
        """True if it begins so near to 0 that it has to grow. Its norm must have been measured at least once."""
        return self.weights[0] < _NEARLY_ZERO * self.root

    def gain(self, line: int = 0) -> float | None:
        """Return the factor by which a random matrix of this norm scales the size of its input; None for a vector.

        Initialisations that preserve the size of values have a gain of 1 to 1.4; the default of `torch.nn.Linear` has
        0.6.

        Args:
            line: The index of the measurement.
        """
        return self.weights[line] / math.sqrt(self.shape[0]) if len(self.shape) > 1 and self.shape[0] else None


class RunSignals:
    """The signals of one optimizer's steps.

    Args:
        record: The record of its steps alone.

    Attributes:
        takes_turns: Whether other optimizers step in between on losses of their own. Such losses may belong to networks
            that work against each other, so they are not judged.
        turn: The number of steps that each loss is a mean over. A change of level takes that many steps to show.
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
        self.searched = list(map(all, searched))  # skips by which a GradScaler searches for its scale
        self.losses, self.turn = _of_turns(steps.column("loss"))
        self.norms, self.rates, self.coefficients = map(steps.column, ("norm", "lr", "coefficient"))
        no_loss = [there and loss is None for there, loss in zip(steps.has("loss"), self.losses, strict=True)]
        lost = zip(nonfinite_on(steps), no_loss, self.searched, strict=True)
        self.lost = [(bad or gone) and not searched for bad, gone, searched in lost]

    @cached_property
    def found(self) -> tuple[Finding, ...]:
        """The health findings of the record, without those on losses that are not judged or on other optimizers."""
        theirs, left_out = self._names_of_others(), "diverging_loss" if self.takes_turns else ""
        return tuple(one for one in findings(self.record) if one.kind != left_out and not theirs & set(one.params))

    def _names_of_others(self) -> set[str]:
        """Return the names of the parameters of other optimizers."""
        mine = {place or 0 for place in self.record.steps.column("optimizer")}
        others = (one for one in self.record.meta.get("params", []) if mine and one.get("optimizer", 0) not in mine)
        return set(names_of(one for one in others if "optimizer" in one))

    def finding(self, kind: str) -> Finding | None:
        """Return the most severe finding of a kind; None without one."""
        return next((one for one in self.found if one.kind == kind), None)

    # --- the loss -----------------------------------------------------------------------------------------------------

    @cached_property
    def curve(self) -> Curve:
        """The course of the loss; `UNKNOWN` where it does not measure progress."""
        found = self.curve_until(self.count)
        if self.takes_turns or not found.is_known:
            return UNKNOWN
        first = without_none(self.losses)[:10]  # before a learning rate or a batch can have moved the loss
        has_no_floor = min(first) < 0 < max(first) + 2 * found.noise and found.final > 0.5 * min(found.best, 0.0)
        noise = min(found.noise, self.curve_until(self.count // 8).noise)  # a loss that grows has more noise later
        if max(map(abs, found.levels)) < (_ROUND_ZERO if has_no_floor else 2.0) * noise:
            return UNKNOWN  # a loss around 0, such as returns less their mean
        return found

    def curve_until(self, place: int) -> Curve:
        """Return the course of the loss before a step; `UNKNOWN` where fewer than ten losses are known.

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
        """The final loss as text: the summary's ``final_loss`` where it is finite, else the last level."""
        final = verdict(self.record).final_loss
        return number(self.curve.final if final is None else final)

    @property
    def learns(self) -> bool:
        """True if the loss has fallen. A fall only at the very start, while the first weight shrank, does not count."""
        return self.curve.has_fallen and not (self.curve.stands_still and self.first_growth < 1)

    @property
    def first_growth(self) -> float:
        """The growth of the norm of the first weight, which reads the data; 1 where it is not known.

        It is 0 where no weight ever had a gradient: then no weight reads the data.
        """
        return next(iter(self.growths()), 0.0 if self.lines and not self.layers else 1.0)

    @cached_property
    def is_stuck(self) -> bool:
        """True if the loss stands still for a third of the run, though there is still something to learn."""
        curve = self.curve
        wide, needed = max(3 * curve.error, 0.03 * abs(curve.start)), round(0.3 * len(curve.levels))
        windows = [curve.levels[k : k + needed] for k in range(1, len(curve.levels) - needed + 1)]
        still = any(window and max(window) - min(window) <= wide for window in windows)
        after_start = max(curve.levels[1:3], default=curve.start)
        half = replace(curve, final=statistics.median(curve.levels[: len(curve.levels) // 2])).fallen
        return still and (half < 0.5 or curve.best > 0.7 * after_start)

    # --- norms --------------------------------------------------------------------------------------------------------

    def positive_norms(self, end: int | None = None) -> list[float]:
        """Return the norms above 0 of the steps before a place, or of all steps."""
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
        """The norms of the gradients that the optimizer got, after all clips."""
        clipped = zip(self.norms, self.coefficients, strict=True)
        return Series([norm if norm is None or by is None else norm * by for norm, by in clipped])

    def times(self, place: int) -> float:
        """Return the norm or the loss of a step over its recent median, whichever ratio is larger; at least 1.

        The ratio is 1 after an unusually long gap in the step numbers, as between the turns of local copies: the steps
        before the gap are not comparable.

        Args:
            place: The place of the step.
        """
        if place and self.numbers[place] - self.numbers[place - 1] > 2 * self._usual_gap:
            return 1.0
        times = (one[place] / one.usual(place) for one in (self.norm, self.loss))
        return max([1.0, *(one for one in times if one == one)])

    def leaps_out_of_calm(self, place: int) -> bool:
        """Return whether a step leaps further than any learning rate takes it, and the steps just before were calm."""
        calm = place >= _CALM and all(self.times(before) < _STANDS_OUT for before in range(place - _LAST, place))
        return calm and self.times(place) >= FAR

    @cached_property
    def outbursts(self) -> list[int]:
        """The places of steps whose norm or loss leaps far above the recent ones; each outburst once."""
        found = sorted({*_outbursts(self.norms), *_outbursts(self.losses)})
        return [place for place, before in zip(found, [-99, *found], strict=False) if place - before > 3]

    @cached_property
    def first_lost(self) -> int | None:
        """The place of the first step whose loss or gradients were not finite; None without one."""
        return self.lost.index(True) if True in self.lost else None

    @cached_property
    def ends_lost(self) -> bool:
        """True if most of the last steps are not finite."""
        tail = self.lost[-max(1, self.count // 20) :]
        return 2 * sum(tail) > len(tail)

    # --- the learning rate --------------------------------------------------------------------------------------------

    @cached_property
    def rate(self) -> float | None:
        """The largest learning rate; None where none is known."""
        return max(without_none(self.rates), default=None)

    @cached_property
    def is_warming_up(self) -> bool:
        """True if the learning rate still rises at the end of the run."""
        known = without_none(self.rates)
        rises = len(known) > 10 and known[-1] == max(known) > known[len(known) // 2]
        return rises and known[-1] > 3 * statistics.median(known[: len(known) // 4])

    @property
    def leaves(self) -> int | None:
        """The number of leaf tensors that the backward pass reached; None where it is not known."""
        return self.record.meta.get("leaves")

    # --- layers -------------------------------------------------------------------------------------------------------

    @cached_property
    def params(self) -> list[dict[str, Any]]:
        """The recorded facts about each parameter."""
        return self.record.meta.get("params", [])

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The per-tensor lines whose norms are all finite: some hundred at most, spread over the run."""
        return self._picked("norm", "norm")

    @cached_property
    def measured(self) -> list[dict[str, Any]]:
        """The per-tensor lines that have the norms of weights and of updates."""
        lines = self._picked("update", "weight")
        return [line for line in lines if len(line["update"]) == len(self.params)]

    def _picked(self, there: str, key: str) -> list[dict[str, Any]]:
        """Return some hundred of the lines that have ``there``, without those that lack a number under ``key``."""
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
        """The weights that had a gradient, in forward order; in a model without matrices, all such parameters."""
        return self._layers(self.matrices or self.own)

    @cached_property
    def biases(self) -> list[Layer]:
        """The vectors that had a gradient, in forward order."""
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
        """The places of the optimizer's parameters, in forward order if it is known, else in the optimizer's order."""
        theirs = self._names_of_others()
        places = [place for place, name in enumerate(self.names) if name not in theirs]
        order: dict[int, Any] = {place: self.params[place].get("order") for place in places}
        return places if None in order.values() else sorted(places, key=order.__getitem__)

    @cached_property
    def matrices(self) -> list[int]:
        """The places of the optimizer's weights (two dimensions or more), in the order of `own`."""
        return [place for place in self.own if len(self.shape(place)) > 1]

    def norms_of(self, place: int) -> list[float]:
        """Return the norm of one parameter's gradient on each of `lines`; 0 where it has no gradient."""
        return [line["norm"][place] for line in self.lines]

    def begins_exploded(self, layers: Sequence[Layer]) -> bool:
        """Return whether the first gradient of some layers exceeds their weights so far that no common rate fits.

        Args:
            layers: The layers.
        """
        pairs = [(layer.gradients[0] * layer.root, layer.weights[0]) for layer in layers if layer.weights]
        first, weights = (math.hypot(*numbers) for numbers in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        return first > _HUGE * weights

    @cached_property
    def eps(self) -> float | None:
        """The epsilon that the optimizer adds to its divisor; None where the record has none, or several."""
        return only(self.record.meta.get("eps", ()))

    def floor(self, layer: Layer) -> float:
        """Return the root mean square of a layer's gradient below which ``eps`` decides the length of its step.

        Args:
            layer: The layer.
        """
        by_norm = "muon" in str(self.record.meta.get("optimizers")).lower()  # Muon divides by the norm of the matrix
        return OF_EPS * (self.eps or 0.0) / (layer.root if by_norm else 1.0)

    @cached_property
    def sized_layers(self) -> list[Layer]:
        """The measured weights that a step can be compared with: those that do not begin at 0, or else all."""
        measured = [layer for layer in self.layers if layer.ratios and layer.weights]
        return [layer for layer in measured if not layer.begins_at_zero] or measured

    @cached_property
    def ratio(self) -> float | None:
        """The share of itself by which a step usually changes the usual weight; None where it was not measured."""
        return median(without_none(layer.ratio for layer in self.sized_layers))

    @cached_property
    def travel(self) -> float | None:
        """The share of itself by which all steps together can have moved the usual weight; None where not measured."""
        ratios = [statistics.fmean(layer.ratios) for layer in self.sized_layers]
        return statistics.median(ratios) * self.count if ratios else None

    def growths(self, end: float = math.inf) -> list[float]:
        """Return the growth of each measured weight's norm, in forward order, without weights that begin at 0.

        Args:
            end: Only measurements before the step of this number count.
        """
        count = max(1, sum(line["i"] < end for line in self.measured))
        layers = [layer for layer in self.layers if len(layer.weights) > 1 and not layer.begins_at_zero]
        return [layer.weights[:count][-1] / layer.weights[0] for layer in layers]

    @cached_property
    def only_vectors_learn(self) -> bool:
        """True if weights have nearly no gradient beside biases, and biases move: hardly any input arrives."""
        weights, vectors = self.layers, self.biases
        if not vectors or len(weights) < 2 or any(len(layer.shape) < 2 for layer in weights):
            return False
        pairs = [[layer.gradient * layer.root for layer in some] for some in (weights, vectors)]
        largest = max(vectors, key=lambda layer: layer.gradient)
        return math.hypot(*pairs[0]) < _HARDLY * math.hypot(*pairs[1]) and (largest.ratio or 0.0) > _MOVES

    @cached_property
    def cancels_scale(self) -> bool:
        """True if the length of the optimizer's steps does not depend on the scale of the gradients.

        This holds for an optimizer with an ``eps``, which divides by the size of the gradients. For others the name of
        the class decides (`is_scale_free`).
        """
        return self.eps is not None or bool(is_scale_free(self.record))

    @cached_property
    def low_threshold(self) -> float:
        """The lowest threshold under which clipped steps can still take the weights as far as this run took them.

        All steps clipped to it, in one direction, would cover `REACH` times the distance between the first and the last
        weights. Where steps are mostly noise, the weights go to and fro, and the norms are far above this threshold. It
        is infinite where updates were not measured or do not scale with the gradients.
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
        """The number of steps that the optimizer took with finite gradients."""
        return sum(not (out or lost) for out, lost in zip(self.skipped, self.lost, strict=True))

    def named(self, place: int) -> int:
        """Return the number of the step at a place."""
        return self.numbers[min(max(place, 0), self.count - 1)] if self.numbers else 0

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step."""
        return (self.numbers[0], self.numbers[-1]) if self.numbers else (0, 0)

    def seen(self, words: str, params: Sequence[str] = (), *, since: int | None = None) -> Evidence:
        """Return an observation that lasts to the end of the run, as evidence.

        Args:
            words: The observation, as one sentence.
            params: The parameters concerned, if any.
            since: The number of the step on which it begins; None for the first step.
        """
        first, last = self.span
        return Evidence((first if since is None else since, last), words, tuple(params))


def period_of(places: Sequence[int]) -> int | None:
    """Return the period of some events; None where they have none.

    Args:
        places: The places of the events, ascending.

    Returns:
        The period. At least four events, and 70 % of them, lie on its grid, and 70 % of the grid has an event.

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
"""Times the recent median. Norms of small batches often reach twice the median."""

OUTBURST_DEVIATIONS = 6.0
"""Robust standard deviations of the logarithms above their median."""


def _outbursts(values: Numbers) -> list[int]:
    """Return the places where a value leaps above the recent ones; earlier leaps do not count among these."""
    found, recent, limit, fresh = list[int](), deque[float](maxlen=_RECENT), math.inf, 0
    for place, value in enumerate(values):
        if value is None or value <= 0:
            continue
        if value > limit:
            found.append(place)
            if len(found) > 3 and found[-1] - found[-4] == 3:  # four leaps in a row are a new level
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
    """Return the losses and 1; or, if different sizes take turns, geometric means over a turn and its length."""
    logs = [math.log(loss) if loss is not None and loss > 0 else None for loss in losses]
    known, one = without_none(logs), usual_step(logs, 1)
    if len(known) < max(20, len(without_none(losses)) // 2) or one < _TURNS:
        return losses, 1
    turn = next((lag for lag in range(2, _LONGEST_TURN + 1) if 2 * usual_step(logs, lag) <= one), 1)
    if turn == 1 or abs(statistics.fmean(known[turn : 2 * turn]) - statistics.fmean(known[:turn])) > 3 * one:
        return losses, 1  # no turns; or the first steps threw the loss up, and it has gone to and fro since then
    found = list(losses)
    for place, own in enumerate(logs):
        first = max(0, place - turn + 1)
        if own is not None:
            found[place] = math.exp(statistics.fmean(without_none(logs[first : first + turn])))
    return found, turn


def usual_step(logs: Numbers, lag: int) -> float:
    """Return the median difference of two values ``lag`` steps apart; infinite where there are no two."""
    pairs = zip(logs, logs[lag:], strict=False)
    steps = [abs(after - before) for before, after in pairs if before is not None and after is not None]
    return statistics.median(steps) if steps else math.inf


@once
def signals_of(record: Record) -> RunSignals:
    """Return the signals of one optimizer's steps; the result is cached, so it must not be changed.

    Args:
        record: The record of its steps alone.
    """
    return RunSignals(record)
