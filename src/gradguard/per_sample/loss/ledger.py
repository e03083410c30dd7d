r"""Compare the weights of rows in a loss from batch to batch: the other samples of a batch must not change them.

Let row r of sample i be multiplied by :math:`o_{ir}` in B times the loss (in the loss itself, where it is a sum). The
sample's own loss is :math:`\sum_r o_{ir} \ell_{ir}`, so the :math:`o_{ir}` must come from the sample alone. One batch
cannot show that they do. A second batch can show that they do not. For each kind of row the ledger records four values.
At least one of the four must stay constant over all accepted batches.

- The *row*: the weight of each row, constant for a sum over a sample's rows.
- The *total*: the weight of all rows of a sample together, constant for a mean over the sample's own rows.
- The *numbers*: the factors of rows apart from the user's weights, which are each row's own.
- The *average*: these numbers times the sample's count of rows, constant for a weighted mean over its own rows.

The ledger does not decide whether a number is a count, a constant or a length: it records all of them in the same way.
So two accepted batches never give one sample two different gradients, as long as the sample's rows are its own. They
are not where the loss cuts or pads to the longest sample. There the shape alone gives all samples the same number of
rows, and then the numbers and the number of rows must stay constant, too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Values = tuple[float, ...]

Kind = tuple[str, ...]
"""The operations that compute rows, then "to", then the operations that add the rows up."""

_MOST_VALUES = 8
"""If rows have more distinct weights than this, the weights are the user's and are not recorded."""

_CLOSE = 1e-6


@dataclass(frozen=True)
class RowWeights:
    """The weights of the rows at the end of one path through the graph.

    Attributes:
        kind: The operations that compute the rows and add them up.
        each: The sum of each sample's weights [B].
        counts: How many of each sample's rows count [B].
        distinct: The distinct weights of rows; empty if there are many.
        number: The factor of the rows apart from tensors of weights; NaN in a mean over labels with class weights.
        precision: The relative error that the numbers may have.
        size: The number of rows, including those that do not count.
        by_shape: Whether shapes alone decide how many rows count; None if a mask or missing labels leave rows out: then
            they do only if all paths of this kind together cover every row.
    """

    kind: Kind
    each: Tensor
    counts: Tensor
    distinct: Values
    number: float
    precision: float
    size: int
    by_shape: bool | None


class _KeptEntry(NamedTuple):
    """The values that have stayed the same over the batches; None for a value that has not."""

    row: Values | None = None
    total: Values | None = None
    numbers: Values | None = None
    average: Values | None = None

    def narrowed(self, other: "_KeptEntry", close: float) -> "_KeptEntry":
        """Return the values that two entries have in common."""
        differs = self.changed(other, close)
        row, total, numbers, average = (
            None if theirs is None or changed else own
            for own, theirs, changed in zip(self, other, differs, strict=True)
        )
        # A tensor with one value for all rows acts as a number: where the rows' weight changed, the numbers did, too.
        return _KeptEntry(row, total, None if differs[0] else numbers, None if differs[1] else average)

    def changed(self, other: "_KeptEntry", close: float) -> list[bool]:
        """Tell of each value whether both entries have it and the two differ."""
        return [
            own is not None and theirs is not None and not _same(own, theirs, close)
            for own, theirs in zip(self, other, strict=True)
        ]


_NOTHING = _KeptEntry()


@dataclass(frozen=True)
class Entry:
    """The record of one kind of rows over batches that do not contradict each other.

    Attributes:
        kept: The values that have stayed the same.
        shapes: The numbers, followed by the rows of each sample, where shapes alone decide how many rows there are; by
            the number of values of each sample that the module returned.
        owned: Whether samples of one batch had different numbers of rows and nevertheless the same total weight.
        read: Whether some batch had rows of several samples.
    """

    kept: _KeptEntry
    shapes: Mapping[float, Values]
    owned: bool
    read: bool


@dataclass(frozen=True)
class Page:
    """One batch in the ledger.

    Attributes:
        entries: The record of each kind of rows.
        precision: The relative error that numbers may have.
        divided_by: A further number by which the whole loss is divided, such as the number of mini-batches; else 1.
    """

    entries: Mapping[Kind, Entry]
    precision: float
    divided_by: float = 1.0


def page_of(rows: Sequence[RowWeights], factors: Tensor, returned: float, is_sum: bool) -> Page:
    """Return the page of a batch: the weights of its rows in the scale of each sample's own loss.

    Args:
        rows: The weights of the rows in the batch's loss.
        factors: Each sample's part in the loss, as a multiple of its own loss [B].
        returned: How many values of each sample the module returned.
        is_sum: Whether the loss is a sum over samples, not a mean.

    Returns:
        The page.
    """
    scale = (1.0 if is_sum else float(len(factors))) / factors.nan_to_num(1.0).where(factors != 0, 1.0)
    entries: dict[Kind, Entry] = {}
    for kind in {each.kind: None for each in rows}:
        of_kind = [each for each in rows if each.kind == kind]
        if all(each.by_shape and not each.size for each in of_kind):  # the loss is cut to a longest sample of no rows
            entries[kind] = Entry(_NOTHING, {returned: (0.0,)}, owned=False, read=False)
        counting = [each for each in of_kind if bool((each.counts > 0).any())]
        if not counting:
            continue
        counts = torch.stack([each.counts for each in counting]).sum(0)
        kept = _kept(counting, scale, counts)
        above_zero = counts[counts > 0]
        unequal = bool((above_zero != above_zero[0]).any())
        by_shape = not unequal and _by_shape(counting)
        shapes = {returned: (*(kept.numbers or ()), float(above_zero[0]))} if by_shape else {}
        owned = unequal and kept.total is not None
        entries[kind] = Entry(kept, shapes, owned=owned, read=len(above_zero) > 1)
    return Page(entries, max([each.precision for each in rows], default=0.0))


def _by_shape(rows: Sequence[RowWeights]) -> bool:
    """Tell whether shapes alone decide how many rows of a kind there are."""
    # Masks may divide the rows among several paths, as with `labels` in one product and `1 - labels` in another.
    counted, size = sum(float(each.counts.sum()) for each in rows), max(each.size for each in rows)
    return all(each.by_shape or (each.by_shape is None and counted % size == 0) for each in rows)


def _kept(rows: Sequence[RowWeights], scale: Tensor, counts: Tensor) -> _KeptEntry:
    """Return the four values of one kind of rows, each only if all samples agree on it."""
    has_rows = counts > 0
    total = (torch.stack([each.each for each in rows]).sum(0) * scale)[has_rows]
    numbers = [value for each in rows for value in (each.number * scale)[each.counts > 0].tolist()]
    averages = torch.stack([each.number * each.counts for each in rows]).sum(0) * scale
    weights = [
        value * float(factor)
        for each in rows
        for value in each.distinct
        for factor in (scale[each.counts > 0].unique() if len(scale) else ())
    ]
    weights_are_known = all(each.distinct for each in rows)
    return _KeptEntry(
        row=_single(weights) if weights_are_known else None,
        total=_single(total.tolist()),
        numbers=None if any(map(math.isnan, numbers)) else _distinct(numbers),
        average=_single(averages[has_rows].tolist()),
    )


def _distinct(values: Sequence[float]) -> Values | None:
    """Return the distinct values in ascending order; None if there are more than `_MOST_VALUES`."""
    found: list[float] = []
    for value in sorted(values):
        if not found or not math.isclose(value, found[-1], rel_tol=_CLOSE):
            found.append(value)
        if len(found) > _MOST_VALUES:
            return None
    return tuple(found)


def _single(values: Sequence[float]) -> Values | None:
    """Return the one value that all values are; None if they differ, or if there is none."""
    found = _distinct(values)
    return found if found is not None and len(found) == 1 else None


def _same(one: Values, other: Values, close: float) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=close) for a, b in zip(one, other, strict=True))


class Ledger:
    """The merged pages of all accepted batches, with one entry for each kind of rows.

    Args:
        strict: Refuse a change of the number of rows even if the module returns values of another size.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._entries: dict[Kind, Entry] = {}
        self._divided_by: dict[frozenset[Kind], float] = {}

    def knows(self, kinds: Sequence[Kind]) -> bool:
        """Tell whether, for each of these kinds, a batch with rows of several samples was accepted."""
        return all(kind in self._entries and self._entries[kind].read for kind in kinds)

    def objection(self, page: Page) -> str:
        """Return the reason why a batch contradicts the accepted ones; "" if it does not."""
        return next((words for _, words in self._merged(page) if isinstance(words, str)), "")

    def add(self, page: Page) -> None:
        """Add an accepted batch."""
        merged = [*self._merged(page)]
        self._entries |= {kind: entry for kind, entry in merged if isinstance(entry, Entry)}
        self._divided_by[frozenset(page.entries)] = page.divided_by

    def divided_by(self, page: Page) -> float:
        """Return the further divisor of the last accepted loss with the same kinds of rows; 1 if there is none."""
        return self._divided_by.get(frozenset(page.entries), 1.0)

    def _merged(self, page: Page) -> Iterator[tuple[Kind, Entry | str]]:
        """Yield the kinds of a page, each with its entry merged into the accepted ones, or with the objection."""
        # Entries of this page are merged as well: two kinds of one page may contradict each other.
        close, entries = _CLOSE + 2 * page.precision, {**self._entries}
        for kind, new in page.entries.items():
            old = entries.get(kind)
            candidates = _beside(entries, kind, new) if old is None else []
            if old is not None:
                merged = [(kind, self._both(old, new, close))]
            elif not candidates:
                merged = [(kind, new)]
            else:
                both = [(other, self._both(entries[other], new, close)) for other in candidates]
                other, together = next((one for one in both if isinstance(one[1], Entry)), both[0])
                merged = [(kind, together), (other, together)]
            entries |= {key: entry for key, entry in merged if isinstance(entry, Entry)}
            yield from merged

    def _both(self, old: Entry, new: Entry, close: float) -> Entry | str:
        """Merge two entries of one kind; return the objection if they contradict each other."""
        kept = old.kept.narrowed(new.kept, close)
        if _NOTHING in (old.kept, new.kept):
            kept = new.kept if old.kept == _NOTHING else old.kept
        elif kept == _NOTHING:
            return _changed(old.kept, new.kept)
        for returned, shape in new.shapes.items():
            before = [one for other, one in old.shapes.items() if self.strict or other == returned]
            other = next((one for one in before if not _same(shape, one, close)), None)
            if not old.owned and other is not None:
                return _other_rows(other, shape, close)
        return Entry(kept, {**old.shapes, **new.shapes}, old.owned or new.owned, old.read or new.read)


def _beside(entries: Mapping[Kind, Entry], kind: Kind, new: Entry) -> list[Kind]:
    """Return the kinds that may be the same rows, added up by other operations as in a batch of one sample."""
    rows = kind[: kind.index("to")]
    of_rows = [other for other in entries if other[: other.index("to")] == rows]
    return [other for other in of_rows if not (new.read and entries[other].read)]


def _changed(old: _KeptEntry, new: _KeptEntry) -> str:
    """Return the objection to values of which none has stayed the same."""
    differs = old.changed(new, _CLOSE)
    was, now = next(((a, b) for a, b, one in zip(old, new, differs, strict=True) if one and a and b), ((), ()))
    words = f", from {_shown(was)} to {_shown(now)} in the scale of its own loss" if was else ""
    return (
        f"the weight of a sample's rows has changed since an earlier batch{words}. Is a number in the loss, a tensor "
        "of weights, or a length, as of padding up to the longest sample, computed from the batch? Divide by the "
        "number of samples, len(loss), or average over each sample's own rows first. If a schedule changes a number, "
        "write clipper.constant(number) where the number stands in the loss"
    )


def _shown(values: Values) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _other_rows(old: Values, new: Values, close: float) -> str:
    """Return the objection to another number of a sample's rows, or to other numbers by which they are multiplied."""
    if not _same(old[:-1], new[:-1], close):
        return _PADDED
    return (
        f"the loss adds up {new[-1]:g} rows of each sample, and added up {old[-1]:g} in an earlier batch. If the batch "
        "decides how many, as by padding up to the longest sample, every sample's part depends on that sample: pad to "
        "one length, or mask the padding. If it is the number of calls of the module, use as many calls in each loss"
    )


_PADDED = (
    "the mean counts padding up to a length that changes from batch to batch, so every sample's part depends on the "
    "longest sample. Average over each sample's own rows, (loss * mask).sum(1) / mask.sum(1), or pad to one length. If "
    "nothing is padded, a number in the loss has changed: if it is yours and not computed from samples, write "
    "clipper.constant(number) where it stands in the loss"
)
