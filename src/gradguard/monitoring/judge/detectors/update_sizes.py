"""Detects updates of the weights that stand out, or that do not follow the optimizer's rule."""

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import mul
from typing import Any

from gradguard.monitoring.judge.findings import Kind, Log, said
from gradguard.monitoring.record.record_lines import Numbers, names_of
from gradguard.threshold_rules import SortedWindow, centre_and_spread

SPIKE_TIMES = 1.5
"""Times the median of recent updates, which hardly vary under an optimizer that divides by the size of gradients."""

SPIKE_DEVIATIONS = 4.0
"""Robust deviations of the logarithms that the update must exceed as well, each of at least `LEAST_DEVIATION`."""

LEAST_DEVIATION = 0.05

SPIKE_STEPS = 3
"""Measured steps in a row: a single long step comes from its batch."""

BATCH_TIMES, RECURRING_TIMES = 1.5, 1.2
"""Times the median loss. If the first long step has such a loss, a batch of another kind moves the weights. The second
number applies to a kind of batch that came before: another of the recent losses is as large."""

RATE_JUMP = 1.5
"""Ratio of the learning rates of two measured steps. After such a change the length of steps settles again."""

SETTLED = 60
"""Measured steps before one is judged: Adam's first steps are its longest, and a momentum's first ones its shortest."""

LINES = 16
"""Lines with the update of each tensor that are needed to judge the rule; the last `_KEPT` are used."""

CONSTANT = 0.1
"""Share of the spread that the length of all updates would have if tensors varied independently."""

LEAST_SPREAD = 0.003
"""Spread of the logarithms that must be expected: the updates of sign descent vary less."""

AT_FLOOR, SAME, SAME_ADDED, ABOVE, IS_ABOVE = 0.25, 0.002, 0.01, 1.05, 0.15
"""Updates are bounded from below if more than `AT_FLOOR` of them have the smallest size to within `SAME`, and more than
`IS_ABOVE` of them are more than `ABOVE` times as large. `SAME_ADDED` replaces `SAME` for additions to a momentum, which
bfloat16 rounds."""

APART, FACTORS, STEADY = 0.05, 6, 0.02
"""A step is a factor off its rule if the factor is further than `APART` from 1 on `FACTORS` steps in a row, and it, or
its ratio to the learning rate, varies by less than `STEADY` among them."""

ONLY_DECAY, IMPOSSIBLE, SHRUNK = 0.7, 1.25, 0.7
"""Steps are mostly decay if weight decay makes more than `ONLY_DECAY` of them, and the weight has shrunk below `SHRUNK`
since that began. A share above `IMPOSSIBLE` means that the group's learning rate is not the effective one: Prodigy's is
multiplied by an estimate."""

ROUNDED = 64.0
"""Times the last digit of a weight: the length of a shorter update is mostly rounding."""

LOGIT_STEPS, LARGE_LOGIT, LOGIT_TIMES = 20, 50.0, 4.0
"""Steps of a block; the median logit of a block that is large; and its ratio to the lowest such median before. A
softmax of such logits selects a single position, unless another one is as large."""

ELEMENTS = 4096
"""In larger tensors `moved` is estimated from about this many elements."""

_WINDOW, _KEPT, _LINES_BETWEEN = 64, 32, 8
_LAST_DIGIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}


class UpdateSpikes:
    """Detects steps that are longer than usual for their learning rate, which often precede a rising loss.

    Args:
        log: The log that receives the faults.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._window, self._losses = SortedWindow(_WINDOW), SortedWindow(_WINDOW)
        self._seen, self._hot, self._since, self._is_batch = 0, 0, 0, False
        self._rate = 0.0

    def follow(self, i: int, update: float, rate: float, loss: float | None) -> None:
        """Follow a step.

        Args:
            i: The step.
            update: The norm of the update over the norm of the weights.
            rate: The learning rate.
            loss: The loss; None if it is unknown.
        """
        usual = self._losses.median(len(self._losses.ordered))
        recurs = max(self._losses.recent, default=0.0) > RECURRING_TIMES * usual
        unusual = usual * (RECURRING_TIMES if recurs else BATCH_TIMES)
        if loss is not None:
            self._losses.add(loss)
        if not (update > 0 and rate > 0):
            return
        if max(rate, self._rate) > RATE_JUMP * min(rate, self._rate):  # a momentum still has the scale of the old rate
            self._window, self._seen = SortedWindow(_WINDOW), 0
        self._rate = rate
        size, ordered = math.log(update / rate), self._window.ordered
        self._seen += 1
        middle, deviation = centre_and_spread(ordered) if self._seen > SETTLED else (size, math.inf)
        distance = size - middle
        if distance > max(math.log(SPIKE_TIMES), SPIKE_DEVIATIONS * max(deviation, LEAST_DEVIATION)):
            if self._hot == 0:
                self._since, self._is_batch = i, loss is not None and loss > unusual > 0
            self._hot += 1
            if self._hot >= SPIKE_STEPS and not self._is_batch:
                times = math.exp(min(distance, 700.0))
                self._log.report("update spike", SPIKE, self._since, i, times, numbers={"largest": times})
        else:
            self._hot = 0
        self._window.add(size)


class Logits:
    """Detects attention logits that grow until the softmax selects a single position.

    Args:
        log: The log that receives the faults.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._block: list[float] = []
        self._lowest = math.inf

    def follow(self, i: int, logit: float, name: str) -> None:
        """Follow a step.

        Args:
            i: The step.
            logit: The largest logit of all attentions.
            name: The module that computed it.
        """
        self._block.append(logit)
        if len(self._block) < LOGIT_STEPS:
            return
        level, self._block = statistics.median(self._block), []
        if level > max(LARGE_LOGIT, LOGIT_TIMES * max(self._lowest, 1.0)):
            about = {"numbers": {"smallest": self._lowest, "largest": level}, "text": name or "the model"}
            self._log.report("logits", LOGITS_GROW, i - LOGIT_STEPS + 1, i, level, **about)
        self._lowest = min(self._lowest, level)


class Rule:
    """Detects updates that do not follow a rule: of one length, bounded from below, a factor off, or mostly decay.

    Args:
        log: The log that receives the faults.
        params: The ``params`` of the record's first line.
    """

    def __init__(self, log: Log, params: Sequence[dict[str, Any]]) -> None:
        self._log, self._names = log, names_of(params)
        self._groups = [one.get("group", 0) for one in params]
        self._decays = [one.get("weight_decay") or 0.0 for one in params]
        elements = [one.get("numel", 0) for one in params]
        self._roots = [math.sqrt(count) for count in elements]
        digits = [ROUNDED * _LAST_DIGIT.get(one.get("dtype", ""), 2.0**-24) for one in params]
        # If all tensors are small, the record has exact root mean squares of updates; otherwise the norms give them.
        self._key, self._divisors = "update", [root or math.inf for root in self._roots]
        self._rounded = digits  # share of a weight's norm: a shorter update is mostly rounding
        if max(elements, default=0) <= ELEMENTS:
            self._key, self._divisors = "moved", [1.0] * len(elements)
            self._rounded = [digit / (root or 1.0) for digit, root in zip(digits, self._roots, strict=True)]
        self._weights = [0.0] * len(elements)
        self._gradients = deque[float](maxlen=_KEPT)  # gradient norms
        self._moved = deque[Numbers](maxlen=_KEPT)  # sizes of updates, on the same lines
        self._added = deque[Numbers](maxlen=_KEPT)  # sizes of the terms added to momenta
        self._factors: deque[tuple[float, float]] = deque(maxlen=FACTORS)
        self._followed = 0
        self._decaying: dict[int, tuple[int, float, float]] = {}  # first step, the weight's norm there, largest share
        self._shrunk = set[int]()

    def step(self, i: int, factor: float | None, rate: float) -> None:
        """Follow a step.

        Args:
            i: The step.
            factor: The step over the step that the optimizer's rule makes, if both were compared and are proportional.
            rate: The learning rate.
        """
        if factor is None or not rate > 0:
            return
        if abs(factor - 1) < APART:
            self._factors.clear()
            return
        self._factors.append((factor, factor / rate))
        columns = zip(*self._factors, strict=True)
        if len(self._factors) == FACTORS and any(max(one) - min(one) < STEADY * abs(max(one)) for one in columns):
            self._log.report("rule", FACTOR, i, i, numbers={"size": factor})

    def tensors(self, i: int, line: dict[str, Any], rate: float | None, gradient: float) -> None:
        """Follow a line with the update of each tensor.

        Args:
            i: The step.
            line: The line.
            rate: The learning rate of the first group.
            gradient: The norm of the gradients after clipping.
        """
        rates = list(map(dict(enumerate(line.get("rates", [rate]))).get, self._groups))
        weights, updates, added = line.get("weight"), line.get("update"), line.get("added", ())
        if weights and updates:
            self._weights = [weight or 0.0 for weight in weights]
            self._decay(i, self._weights, updates, rates)
        sizes = self._sizes(line.get(self._key, ()), rates)
        if sum(map(bool, sizes)) >= 2:
            self._gradients.append(gradient)
            self._moved.append(sizes)
        if sum(map(bool, added)) >= 2:
            self._added.append(added)
        self._followed += 1
        if self._followed % _LINES_BETWEEN:
            return
        if len(self._moved) >= LINES and self._is_one_length():
            self._log.report("rule", ONE_LENGTH, i, i)
        for kind, lines, same in ((FLOOR, self._moved, SAME), (ADDED_FLOOR, self._added, SAME_ADDED)):
            if len(lines) >= LINES and (floor := _floor(lines, same)) is not None:
                self._log.report("rule", kind, i, i, numbers={"size": floor})

    def _sizes(self, updates: Numbers, rates: Numbers) -> Numbers:
        """Return the root mean square of each tensor's update over its learning rate; None where rounding decides it.

        The length of an update that is short for its weight depends on the weight's last digits.
        """
        rows = zip(updates, rates, self._divisors, self._rounded, self._weights, strict=False)
        return [
            size / divisor / rate if size and rate and size > rounded * weight else None
            for size, rate, divisor, rounded, weight in rows
        ]

    def _is_one_length(self) -> bool:
        """Return whether all updates together have one length, while single tensors' updates and gradients vary."""
        pairs = zip(self._roots, zip(*self._moved, strict=False), strict=False)
        known = [(root, column) for root, column in pairs if all(column)]
        gradients = list(filter(None, self._gradients))
        if len(known) < 2 or len(gradients) < LINES:
            return False
        roots, columns = zip(*known, strict=True)
        lengths = [math.hypot(*map(mul, roots, line)) for line in zip(*columns, strict=True)]
        spread = _spread(lengths)
        if _spread(gradients) < 10 * max(spread, 1e-3):  # the updates vary with the gradients, as nearly always
            return False
        own = [root**2 * statistics.fmean(map(mul, column, column)) * _spread(column) for root, column in known]
        expected = math.hypot(*own) / statistics.fmean(map(mul, lengths, lengths))
        return expected > LEAST_SPREAD and spread < CONSTANT * expected

    def _decay(self, i: int, weights: Sequence[float], updates: Numbers, rates: Numbers) -> None:
        """Follow the share of weight decay in each step, and report weights that shrank by steps of mostly decay."""
        decaying, shrunk = self._decaying, list[int]()
        self._decaying = {}
        for place, (weight, update, rate, by) in enumerate(zip(weights, updates, rates, self._decays, strict=False)):
            if not (weight and update):
                continue
            since, before, most = decaying.get(place, (i, weight, 0.0))
            if weight < SHRUNK * before and place not in self._shrunk:
                shrunk.append(place)
            share = (rate or 0.0) * by * weight / update
            if ONLY_DECAY < share < IMPOSSIBLE:
                self._decaying[place] = since, before, max(most, share)
        if not shrunk:
            return
        self._shrunk.update(shrunk)
        first, share = min(decaying[place][0] for place in shrunk), max(decaying[place][2] for place in shrunk)
        about = {"params": [self._names[place] for place in shrunk], "numbers": {"share": min(1.0, share)}}
        self._log.begin("decay", DECAY, first, i, **about)


def _floor(lines: Iterable[Numbers], same: float) -> float | None:
    """Return the smallest size of updates, if many have just that size and many others are larger; else None."""
    of_each = [list(filter(None, column)) for column in zip(*lines, strict=False)]
    # Many rules give all updates of a tensor one size, by its shape. Such tensors say nothing about a clip.
    sizes = sorted(chain.from_iterable(own for own in filter(None, of_each) if max(own) > ABOVE * min(own)))
    if not sizes:
        return None
    least = sizes[0]
    at, above = bisect_right(sizes, (1 + same) * least), len(sizes) - bisect_right(sizes, ABOVE * least)
    return least if at > AT_FLOOR * len(sizes) and above > IS_ABOVE * len(sizes) else None


def _spread(values: Iterable[float]) -> float:
    """Return the standard deviation of the logarithms."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    return math.sqrt(statistics.fmean([(one - mean) ** 2 for one in logs]))  # `pstdev` is slow: it adds fractions


SPIKE = Kind(
    "update_spike",
    said(
        "info",
        "steps changed the weights by up to {largest} times as much as usual at their learning rate, from step "
        "{found.first} on",
        "the loss often rises after such steps: lower the learning rate or Adam's beta2, bound the step with "
        "gg.ClipUpdate, or normalise queries and keys",
    ),
    value="largest",
    confidence="medium",
)
LOGITS_GROW = Kind(
    "logits_grow",
    said(
        "warning",
        "the largest attention logit grew from {smallest} to {largest}, in {found.text}",
        "attention becomes one-hot, and the loss may rise: use gg.QKClip, a normalisation of queries and keys, weight "
        "decay on their projections, or a lower learning rate for these",
    ),
    value="largest",
    confidence="medium",
)
ONE_LENGTH, FLOOR, ADDED_FLOOR, FACTOR = (
    Kind("update_rule", said("warning", message, advice))
    for message, advice in (
        (
            "the update of all weights together has the same length on every step, whatever the gradients are",
            "a clip divides the update by its own norm: clip the gradients before the optimizer instead",
        ),
        (
            "updates have a root mean square of {size} times the learning rate or more, and never less",
            "a clip of updates is inverted and enlarges small ones: divide by max(1, rms / threshold)",
        ),
        (
            "the term that a step adds to the momentum has a root mean square of {size} or more, and never less",
            "a clip of updates before the momentum is inverted: divide by max(1, rms / threshold)",
        ),
        (
            "each step is {size} times the step that the optimizer's rule makes of its learning rate and gradients",
            "the learning rate is multiplied in twice, or a clip divides each update by its own norm",
        ),
    )
)
DECAY = Kind(
    "update_rule",
    said(
        "warning",
        "{share:%} of each step of {names} is weight decay, and the weights shrink with it",
        "lower weight_decay, or exempt this group from it",
    ),
    value="share",
)
KINDS = (SPIKE, DECAY, LOGITS_GROW)
