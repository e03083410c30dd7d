"""The health of a run that is over: what `HealthMonitor` finds line by line, found from columns in a tenth of the time.

Steps on which a detector can only find what is usual it follows together; where it may find more, or a line is out of
the ordinary, it follows one by one, as while the run went on.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import compress, islice
from operator import lt
from typing import Any

from gradguard.monitoring.judge.detectors.loop_setup import is_setup_event
from gradguard.monitoring.judge.detectors.loss_scale import AMP_LEAST_SCALE
from gradguard.monitoring.judge.live import HealthMonitor, Track
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.lines import Lines, Tops, Vectors
from gradguard.monitoring.record.steps import bound_on, nonfinite_on, thresholds_of

Events = dict[int, list[dict[str, Any]]]
"""Of one optimizer, by the place of the step that they follow; -1 before the first one."""

_DIAGNOSTICS = ("weight", "update", "zero_rows", "zeros")


def see_all(monitor: HealthMonitor, record: Record) -> None:
    """Let a new monitor see a whole record.

    **Guarantees**: its episodes are those that it would have after seeing the lines `in_order`; only the order of
    episodes of different detectors may be another.

    Args:
        monitor: A monitor that has seen nothing.
        record: The record of a run.
    """
    if not len(record.steps) or not (_ascends(record.steps) and _ascends(record.tensors)):
        for line in in_order(record):
            monitor.see(line)
        return
    numbers, optimizers = record.steps.column("i"), record.steps.column("optimizer")
    rows = _rows(numbers, record.tensors.column("i"))
    placed = [(_row(numbers, event["i"]), event) for event in record.events]
    events = sorted([(row, event) for row, event in placed if row is not None], key=_row_of)
    mine = _places(optimizers)
    for optimizer in _in_order_of_appearance(mine, events):
        monitor.track(optimizer)
    own = _own_events(monitor, mine, optimizers, events)
    for optimizer, places in mine.items():
        chosen = [row is not None and optimizers[row] == optimizer for row in rows]
        own_rows: Any = list(compress(rows, chosen))
        at = own_rows if len(mine) == 1 else [bisect_left(places, row) for row in own_rows]
        steps = record.steps.where([other == optimizer for other in optimizers])
        _TrackRun(monitor.track(optimizer), steps, record.tensors.where(chosen), at, own[optimizer]).follow()
    monitor.last = monitor.track(optimizers[-1])
    late = [event for row, event in placed if row is None]
    lost = [record.tensors[place] for place, row in enumerate(rows) if row is None]
    for line in _by_number([*lost, *late]):
        monitor.see(line)


def in_order(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record as they were written: each step, then what belongs to it.

    Args:
        record: The record of a run.
    """
    following: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in (*record.tensors, *record.events):
        following[line.get("i", 0)].append(line)
    for step in record.steps:
        yield step
        yield from following.pop(step["i"], ())
    for lines in following.values():  # skips before the step that never came
        yield from lines


def _by_number(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["i"]].append(line)
    for group in groups.values():
        yield from group


def _ascends(lines: Lines) -> bool:
    """Whether the numbers of the lines are whole, and each is above the one before."""
    numbers = lines.column("i")
    whole = not len(lines) or (type(numbers) is array and numbers.typecode == "q")
    return whole and all(map(lt, numbers, islice(numbers, 1, None)))


def _row(numbers: Sequence[int], number: int) -> int | None:
    """Which step has a number, if one has."""
    place = bisect_left(numbers, number)
    return place if place < len(numbers) and numbers[place] == number else None


def _rows(numbers: Sequence[int], wanted: Sequence[int]) -> Sequence[int | None]:
    return range(len(numbers)) if numbers == wanted else [_row(numbers, number) for number in wanted]


def _row_of(pair: tuple[float, Any]) -> float:
    return pair[0]


def _places(optimizers: Sequence[int | None]) -> dict[int | None, Sequence[int]]:
    """On which steps each optimizer stepped."""
    places: dict[int | None, Any] = {optimizer: array("q") for optimizer in dict.fromkeys(optimizers)}
    if len(places) == 1:
        return {optimizers[0]: range(len(optimizers))}
    for place, optimizer in enumerate(optimizers):
        places[optimizer].append(place)
    return places


def _in_order_of_appearance(
    mine: dict[int | None, Sequence[int]], events: Sequence[tuple[int, dict[str, Any]]]
) -> list[int | None]:
    first: list[tuple[float, int | None]] = [(places[0], optimizer) for optimizer, places in mine.items()]
    first += [(row + 0.5, event.get("optimizer")) for row, event in events if is_setup_event(event)]
    return [optimizer for _, optimizer in sorted(first, key=_row_of)]


def _own_events(
    monitor: HealthMonitor,
    mine: dict[int | None, Sequence[int]],
    optimizers: Sequence[int | None],
    events: Sequence[tuple[int, dict[str, Any]]],
) -> dict[int | None, Events]:
    own: dict[int | None, Events] = {optimizer: defaultdict(list) for optimizer in mine}
    for row, event in events:
        optimizer = event.get("optimizer") if is_setup_event(event) else optimizers[row]
        if optimizer in mine:
            own[optimizer][bisect_right(mine[optimizer], row) - 1].append(event)
        else:  # it never stepped, so that this is all there is
            monitor.see(event)
    return own


class _TrackRun:
    """The steps of one optimizer, and what belongs to them.

    Args:
        track: What watches them.
        steps: The steps.
        tensors: Their lines of per-tensor numbers.
        at: To which step each of these belongs.
        events: Their events.
    """

    def __init__(self, track: Track, steps: Lines, tensors: Lines, at: Sequence[int], events: Events) -> None:
        self._track, self._steps, self._tensors, self._at, self._events = track, steps, tensors, at, events
        self._numbers, self._norms, self._losses = (steps.column(key) for key in ("i", "norm", "loss"))
        self._thresholds, self._coefficients = thresholds_of(steps), steps.column("coefficient")
        self._tops, self._bound = steps.column("top"), bound_on(steps)
        self._has = {key: steps.has_any(key) for key in ("loss", "threshold", "top", "amp_scale")}
        self._line_numbers = tensors.column("i")
        norms = tensors.column("norm")
        fits = isinstance(norms, Vectors) and norms.width == len(track.layers.names)
        self._vectors: Vectors | None = norms if fits and isinstance(norms, Vectors) else None
        self._odd = self._odd_lines()
        self._diagnosed = sorted({place for key in _DIAGNOSTICS for place in _where(tensors.has(key))})

    def follow(self) -> None:
        """Let the track see all of it."""
        for event in self._events.get(-1, ()):
            self._event(event)
        begin = 0
        for row in self._unusual():
            self._run(begin, row)
            self._one(row)
            begin = row + 1
        self._run(begin, len(self._steps))

    def _odd_lines(self) -> list[int]:
        """The lines whose norms are no row of finite floats, one for each parameter; or that lack a gradient."""
        if self._vectors is None:
            return list(range(len(self._tensors)))
        odd = set(_where(self._tensors.column("absent")))
        if not math.isfinite(sum(self._vectors.flat)):  # also where something else stands beside them
            odd |= {place for place, norms in enumerate(self._vectors.rows()) if not math.isfinite(sum(norms))}
        return sorted(odd)

    def _unusual(self) -> Sequence[int]:
        """The steps that are followed one by one."""
        steps = self._steps
        if self._track.several and self._has["top"]:  # how many tensors are its own depends on the line before
            return range(len(steps))
        found = {row for row in self._events if row >= 0} | set(_where(nonfinite_on(steps)))
        for key in ("skipped", "scaled_clip", "kept_gradients"):
            found |= set(_where(steps.column(key)))
        for values in (self._norms, self._losses):
            if type(values) is not array or not math.isfinite(sum(values)):
                found |= {row for row, value in enumerate(values) if value is not None and not math.isfinite(value)}
        if type(self._norms) is not array:
            found |= {row for row, norm in enumerate(self._norms) if norm is None}
        if self._has["amp_scale"]:
            scales = steps.column("amp_scale")
            found |= {row for row, scale in enumerate(scales) if scale is not None and scale < AMP_LEAST_SCALE}
        lines = self._tensors.column("norm")
        found |= {self._at[place] for place in self._odd if not _all_finite(lines[place])}
        return sorted(found)

    def _event(self, event: dict[str, Any]) -> None:
        if is_setup_event(event):
            self._track.setup.event(event)
        else:
            self._track.event(event)

    def _one(self, row: int) -> None:
        """Follow one step, and what belongs to it, as while the run went on."""
        self._track.step(self._steps[row])
        for place in range(bisect_left(self._at, row), bisect_right(self._at, row)):
            self._track.tensors(self._tensors[place])
        for event in self._events.get(row, ()):
            self._event(event)

    def _run(self, begin: int, end: int) -> None:
        """Follow steps that were taken, with finite norms and without events, and their lines."""
        if begin == end:
            return
        place = begin
        while place < end:
            stop = min(end, place + self._track.level.to_next_block)
            self._block(place, stop)
            place = stop
        if self._has["amp_scale"] and any(scale is not None for scale in self._steps.column("amp_scale")[begin:end]):
            self._track.scale.pass_over()
        self._lines(bisect_left(self._at, begin), bisect_left(self._at, end))
        self._track.setup.step(self._steps[end - 1])

    def _block(self, begin: int, end: int) -> None:
        """Follow a few steps: those until it is known better which norms are usual, or less."""
        track, numbers = self._track, self._numbers[begin:end]
        norms, bound = list(self._norms[begin:end]), self._bound[begin:end]
        tops: Sequence[Any] = self._tops_of(begin, end)
        losses: list[float | None] = list(self._losses[begin:end]) if self._has["loss"] else [None] * len(norms)
        at = [k for k, loss in enumerate(losses) if loss is not None]
        known = [loss for loss in losses if loss is not None]
        with_loss = numbers if len(at) == len(norms) else [numbers[k] for k in at]
        bound_with_loss = bound if len(at) == len(norms) else [bound[k] for k in at]
        closes = len(norms) == track.level.to_next_block
        before = norms[:-1] if closes else norms  # the last one is compared with what is usual from then on
        if not before or track.level.is_usual(before):
            track.loss.follow_all(with_loss, known)
            if before:
                track.level.pass_over(before)
            if closes:
                track.level.finite(numbers[-1], norms[-1], losses[-1], bound[-1], tops[-1])
        else:
            for i, norm, loss, binds, top in zip(numbers, norms, losses, bound, tops, strict=True):
                if loss is not None:
                    track.loss.follow(i, loss)
                track.level.finite(i, norm, loss, binds, top)
        track.oscillation.follow_all(with_loss, known, bound_with_loss)
        track.outliers.follow_all(numbers, norms, tops, bound)
        if self._has["threshold"]:
            self._clips(begin, end)
        if self._has["top"]:
            pairs = [(i, top) for i, top in zip(numbers, tops, strict=True) if top is not None]
            track.layers.tops([i for i, _ in pairs], [top for _, top in pairs])

    def _tops_of(self, begin: int, end: int) -> Sequence[Any]:
        if isinstance(self._tops, Tops) and not self._tops.other:
            return list(zip(self._tops.places[begin:end], self._tops.shares[begin:end], strict=True))
        return [self._tops[row] for row in range(begin, end)]

    def _clips(self, begin: int, end: int) -> None:
        thresholds = list(self._thresholds[begin:end])
        known = [threshold for threshold in thresholds if threshold is not None]
        has = [threshold is not None for threshold in thresholds]
        if known:
            numbers, coefficients = (list(compress(its[begin:end], has)) for its in (self._numbers, self._coefficients))
            self._track.clipping.follow_all(numbers, known, coefficients)

    def _lines(self, begin: int, end: int) -> None:
        """Follow lines of per-tensor numbers."""
        place = begin
        while place < end:
            odd = bisect_left(self._odd, place)
            next_odd = self._odd[odd] if odd < len(self._odd) else end
            stop = min(end, next_odd, place + self._track.corruption.to_refresh)
            if stop > place and self._vectors is not None:
                self._usual_lines(self._vectors, place, stop)
                place = stop
            else:
                self._track.setup.step(self._steps[self._at[place]])
                self._track.tensors(self._tensors[place])
                place += 1

    def _usual_lines(self, vectors: Vectors, begin: int, end: int) -> None:
        track, numbers, lines = self._track, self._line_numbers[begin:end], list(vectors.rows(begin, end))
        columns = vectors.columns(begin, end)
        least, largest = list(map(min, columns)), list(map(max, columns))
        if not track.layers.pass_over(len(lines), least, largest):
            for i, norms in zip(numbers, lines, strict=True):
                track.layers.norms(i, norms)
        if not track.setup.pass_over(len(lines), self._coefficients[self._at[begin] : self._at[end - 1] + 1]):
            for place, norms in zip(range(begin, end), lines, strict=True):
                track.setup.step(self._steps[self._at[place]])
                track.setup.tensors(self._line_numbers[place], norms, ())
        if not track.corruption.pass_over(lines, least, largest):
            for i, norms in zip(numbers, lines, strict=True):
                track.corruption.follow(i, norms)
        for place in self._diagnosed[bisect_left(self._diagnosed, begin) : bisect_left(self._diagnosed, end)]:
            track.diagnose(self._line_numbers[place], self._tensors[place])


def _where(values: Sequence[Any]) -> list[int]:
    """The places of what is true."""
    return list(compress(range(len(values)), values))


def _all_finite(norms: Sequence[float | None]) -> bool:
    return all(norm is not None and math.isfinite(norm) for norm in norms)
