r"""What rows weigh in a loss, from batch to batch: who else is in a batch must not change it.

Let row r of sample i be multiplied by :math:`o_{ir}` in B times the loss (in the loss itself, where it is a sum). The
sample's own loss is :math:`\sum_r o_{ir} \ell_{ir}`, so the :math:`o_{ir}` must come from the sample alone. One batch
cannot show that they do. A second one can show that they do not: for each kind of row four values are written down of
which at least one stays what it is in every batch that is accepted, the same one in all of them.

- The *row*: what each row weighs, as in a sum over a sample's rows.
- The *total*: what all rows of a sample weigh together, as in a mean over its own rows, however many they are.
- The *numbers*: what rows are multiplied by apart from weights of the user's, which are each row's own.
- The *average*: these numbers times the sample's count of rows, as in a weighted mean over its own rows.

It needs no opinion of what a number is: a count, a constant and a length are all written down alike. So of two batches
that are accepted none gives a sample another gradient than the other, as long as the rows that it has are its own. They
are not where the loss cuts or pads to the longest. There all samples have as many rows, by the shape alone, and
then the numbers must stay what they are, too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Values = tuple[float, ...]

_MOST_VALUES = 8
"""More distinct weights than these are the user's."""

_CLOSE = 1e-6
_POWERS = (-1.0, -0.5, 0.5, 1.0)
"""A float is taken to be a constant times a count to one of these powers, as long as it changes as that does."""


@dataclass(frozen=True)
class RowWeights:
    """What the rows where one path ends weigh in the loss.

    Attributes:
        kind: The operations that the rows come from.
        each: The sum of each sample's weights [B].
        counts: How many of each sample's rows count [B].
        distinct: The weights that rows have; empty if there are many.
        number: What rows are multiplied by apart from tensors of weights.
        own: The part of that which floats of Python's make up, which may be a schedule.
        precision: How far the numbers may be from what was meant, relatively.
        by_shape: Whether nothing but shapes decides how many rows there are.
    """

    kind: tuple[str, ...]
    each: Tensor
    counts: Tensor
    distinct: Values
    number: float
    own: float
    precision: float
    by_shape: bool


@dataclass(frozen=True)
class _Kept:
    """What has stayed the same; None for what has not."""

    row: Values | None
    total: Values | None
    numbers: Values | None
    average: Values | None

    @property
    def anything(self) -> bool:
        return any(values is not None for values in (self.row, self.total, self.numbers, self.average))

    def narrowed(self, other: "_Kept", close: float) -> "_Kept":
        row, total, numbers, average = (
            mine if mine is not None and theirs is not None and _same(mine, theirs, close) else None
            for mine, theirs in zip(self._values, other._values, strict=True)
        )
        if row is None and self.row is not None and other.row is not None:
            numbers = None  # a tensor that has one value for all rows is a number
        if total is None and self.total is not None and other.total is not None:
            average = None
        return _Kept(row, total, numbers, average)

    @property
    def _values(self) -> tuple[Values | None, ...]:
        return self.row, self.total, self.numbers, self.average


@dataclass(frozen=True)
class Entry:
    """What batches have left of one kind of rows.

    Attributes:
        whole: What has stayed the same; None once floats have changed.
        bare: What has stayed the same apart from floats.
        floats: The floats in the batch before.
        followed: The counts that floats may be computed from, by place and power: they have changed alike.
        shapes: The numbers, those without floats, and the number of a sample's rows, where nothing but shapes decides
            how many there are, by what the module returned.
        owned: Whether samples of one batch had different numbers of rows, which did not change what they weigh.
        read: Whether a batch of several samples was judged, too.
    """

    whole: _Kept | None
    bare: _Kept
    floats: Values
    followed: Set[tuple[int, float]]
    shapes: Mapping[float, tuple[Values, Values, float]]
    owned: bool
    read: bool


@dataclass(frozen=True)
class Page:
    """One batch in the ledger.

    Attributes:
        entries: What the rows of each kind weigh.
        precision: How far numbers may be from what was meant, relatively.
        counts: What may be counted in it: samples, rows, and rows with those that do not count.
        divided_by: What the whole loss is divided by besides.
    """

    entries: Mapping[tuple[str, ...], Entry]
    precision: float
    counts: Values
    divided_by: float = 1.0


def written(rows: Sequence[RowWeights], factors: Tensor, returned: float, counts: Values, is_sum: bool) -> Page:
    """Return what rows weigh in a batch.

    Args:
        rows: What they weigh in its loss.
        factors: Each sample's part in the loss, as a multiple of its own loss [B].
        returned: How many values of each sample the module returned.
        counts: What may be counted in the batch.
        is_sum: Whether the loss is a sum over samples, not a mean.

    Returns:
        The batch's page.
    """
    size = len(factors)
    scale = (1.0 if is_sum else float(size)) / factors.nan_to_num(1.0).where(factors != 0, 1.0)
    entries: dict[tuple[str, ...], Entry] = {}
    for kind in {each.kind: None for each in rows}:
        mine = [each for each in rows if each.kind == kind and bool((each.counts > 0).any())]
        if not mine:
            continue
        whole, bare = _kept(mine, scale), _kept([_bare(each) for each in mine], scale)
        counted = torch.stack([each.counts for each in mine]).sum(0)
        unequal = len(_distinct(counted[counted > 0].tolist()) or ()) > 1
        by_shape = not unequal and all(each.by_shape for each in mine) and bare.numbers is not None
        shapes = {}
        if by_shape and whole.numbers and bare.numbers and len(bare.numbers) == 1:
            shapes[returned] = whole.numbers, bare.numbers, float(counted.max())
        floats = _distinct([each.own for each in mine]) or ()
        followed = {(place, power) for place in range(len(counts)) for power in _POWERS}
        entries[kind] = Entry(whole, bare, floats, followed, shapes, unequal and bare.total is not None, size > 1)
    return Page(entries, max([each.precision for each in rows], default=0.0), counts)


def _kept(rows: Sequence[RowWeights], scale: Tensor) -> _Kept:
    has = torch.stack([each.counts for each in rows]).sum(0) > 0
    total = (torch.stack([each.each for each in rows]).sum(0) * scale)[has]
    numbers = [value for each in rows for value in (each.number * scale)[each.counts > 0].tolist()]
    averages = torch.stack([each.number * each.counts for each in rows]).sum(0) * scale
    weights = [
        value * float(factor)
        for each in rows
        for value in each.distinct
        for factor in (scale[each.counts > 0].unique() if len(scale) else ())
    ]
    known = all(each.distinct for each in rows)
    return _Kept(
        _single(weights) if known else None,
        _single(total.tolist()),
        _distinct(numbers),
        _single(averages[has].tolist()),
    )


def _bare(rows: RowWeights) -> RowWeights:
    own = rows.own
    return replace(
        rows, each=rows.each / own, distinct=tuple(value / own for value in rows.distinct), number=rows.number / own
    )


def _distinct(values: Sequence[float]) -> Values | None:
    found: list[float] = []
    for value in sorted(values):
        if not found or not math.isclose(value, found[-1], rel_tol=_CLOSE):
            found.append(value)
        if len(found) > _MOST_VALUES:
            return None
    return tuple(found)


def _single(values: Sequence[float]) -> Values | None:
    found = _distinct(values)
    return found if found is not None and len(found) == 1 else None


def _same(one: Values, other: Values, close: float) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=close) for a, b in zip(one, other, strict=True))


class Ledger:
    """The pages of all batches that were accepted, each kind of rows by itself.

    Args:
        strict: Let nothing change, floats and lengths of what the module returns included.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._entries: dict[tuple[str, ...], Entry] = {}
        self._counts: dict[tuple[str, ...], Values] = {}
        self._divided_by: dict[frozenset[tuple[str, ...]], float] = {}

    def knows(self, kinds: Sequence[tuple[str, ...]]) -> bool:
        """Tell whether a batch of several samples with rows of these kinds was accepted."""
        return all(kind in self._entries and self._entries[kind].read for kind in kinds)

    def objection(self, page: Page) -> str:
        """Return why a batch contradicts those before; "" if it does not."""
        return next((words for _, words in self._merged(page) if isinstance(words, str)), "")

    def add(self, page: Page) -> None:
        """Add a batch that was accepted."""
        for kind, entry in self._merged(page):
            assert isinstance(entry, Entry)
            self._entries[kind] = entry
            self._counts[kind] = page.counts
        self._divided_by[frozenset(page.entries)] = page.divided_by

    def divided_by(self, page: Page) -> float:
        """Return what losses of the same kinds of rows are divided by."""
        return self._divided_by.get(frozenset(page.entries), 1.0)

    def _merged(self, page: Page) -> Iterator[tuple[tuple[str, ...], Entry | str]]:
        close = _CLOSE + 2 * page.precision
        for kind, new in page.entries.items():
            old = self._entries.get(kind)
            yield kind, new if old is None else self._both(old, new, self._counts[kind], page.counts, close)

    def _both(self, old: Entry, new: Entry, counts: Values, now: Values, close: float) -> Entry | str:
        followed = _followed(old, new, counts, now)
        whole = None if old.whole is None or new.whole is None else old.whole.narrowed(new.whole, close)
        bare = old.bare.narrowed(new.bare, close)
        if whole is None or not whole.anything:
            whole = None
            if not bare.anything:
                return _changed(old.whole or old.bare, (new.whole if old.whole else new.bare) or new.bare)
            if self.strict or (followed and not _same(old.floats, new.floats, close)):
                return _FLOATS.format(_shown(old.floats), _shown(new.floats))
        shapes = dict(old.shapes)
        for returned, shape in new.shapes.items():
            alike = [one for other, one in old.shapes.items() if self.strict or other == returned]
            if not old.owned and not all(_same_shape(shape, one, close) for one in alike):
                return PADDED
            shapes[returned] = shape
        return Entry(whole, bare, new.floats, followed, shapes, old.owned or new.owned, old.read or new.read)


def _same_shape(one: tuple[Values, Values, float], other: tuple[Values, Values, float], close: float) -> bool:
    return one[2] == other[2] and (_same(one[0], other[0], close) or _same(one[1], other[1], close))


def _followed(old: Entry, new: Entry, counts: Values, now: Values) -> Set[tuple[int, float]]:
    """Return the counts, and powers of them, of which floats may be a constant multiple in all batches so far."""
    if len(old.floats) != len(new.floats) or len(counts) != len(now):
        return old.followed
    ratios = [b / a for a, b in zip(old.floats, new.floats, strict=True)]
    changed = [ratio for ratio in ratios if not math.isclose(ratio, 1, rel_tol=_CLOSE)] or [1.0]
    return {
        (place, power)
        for place, power in old.followed
        if min(counts[place], now[place]) <= 0
        or any(math.isclose(ratio, (now[place] / counts[place]) ** power, rel_tol=1e-5) for ratio in changed)
    }


def _changed(old: _Kept, new: _Kept) -> str:
    was, now = next(
        (
            (one, other)
            for one, other in zip(old._values, new._values, strict=True)
            if one is not None and other is not None and not _same(one, other, _CLOSE)
        ),
        ((), ()),
    )
    words = f", from {_shown(was)} to {_shown(now)} in the scale of its own loss" if was else ""
    return (
        f"what a sample's rows weigh has changed since an earlier batch{words}. Is a number in the loss, a tensor of "
        "weights, or a length, as of padding up to the longest sample, computed from the batch? Divide by the number "
        "of samples, len(loss), or average over each sample's own rows first, and multiply by constants that do not "
        "depend on the batch"
    )


def _shown(values: Values) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


PADDED = (
    "the mean counts padding, up to a length that changes from batch to batch, so that every sample's part depends on "
    "the longest. Average over each sample's own rows, (loss * mask).sum(1) / mask.sum(1), or pad to one length"
)

_FLOATS = (
    "a number that multiplies it has changed from {} to {}, which may be computed from the batch: the number of "
    "samples or rows has changed likewise, or training is private. Multiply by a constant"
)
