r"""What the numbers in a loss may be: the user's own, or counts of the batch; each batch leaves fewer possibilities.

A sum that is divided by 4 in a batch of 4 samples may be the mean over samples, or have the user's own divisor 4. One
batch cannot tell; the next, of 6 samples, can. So for each term of a loss there is a set of *readings*, each of which
says which number is which count, and with it what each sample's share of the term is. A batch strikes out the readings
that its numbers contradict. Two rules make this safe where one batch leaves several:

- Readings that give samples different shares relative to one another are never chosen between: the loss is refused.
- What was judged by a reading stays bound to it. When a later batch strikes it out, the loss is refused, not judged by
  what is left.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.graph import Constant
from gradguard.per_sample.loss.rows import Term

What = Literal[
    "own",
    "adds up to one",
    "mean of one",
    "rows",
    "samples",
    "all rows",
    "values",
    "rows in the mean",
    "times",
    "divided once more",
]
"""What a number is.

- The user's own; or none, of weights that add up to one, or of a mean over the rows of the only sample that has some.
- A sum's divisor: the number of rows that count, of samples, of all rows, or of rows of several values.
- 1 over the part of a mean's rows that count; a count that multiplies a mean, or that divides it once more.
"""

_WORDS: Mapping[What, str] = {
    "own": "a constant",
    "adds up to one": "weights that add up to 1",
    "mean of one": "a mean over one sample's rows",
    "rows": "the number of rows",
    "samples": "the number of samples",
    "all rows": "the number of rows",
    "values": "the number of rows",
    "rows in the mean": "the part of the rows that count",
    "times": "the number of samples or rows",
    "divided once more": "the number of samples or rows",
}


@dataclass(frozen=True)
class Reading:
    """One possibility of what the numbers of a term are: at most one of them is a count.

    Attributes:
        what: What the number is.
        place: Which of the term's constants it is; -1 if none.
        level: Which of the counts of the term it is, where there are several.
        share: Each sample's share of the mean that the term is then [B]; None if it is none.
        constant: The constant.
        counted: How many rows of each sample the count counts, those that do not contribute included; None if it is
            no number of rows.
    """

    what: What
    place: int = -1
    level: int = 0
    share: Tensor | None = None
    constant: Constant | None = None
    counted: float | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        """What stays the same of it from batch to batch."""
        return self.what, self.place, self.level


OWN = Reading("own")


@dataclass(frozen=True)
class Space:
    """What batches have left of the readings of one term.

    Attributes:
        left: The keys of those that no batch has contradicted.
        taken: The keys of those by which all batches were judged as they were.
        numbers: The term's numbers in the batch before, and whether each may have been computed from it.
    """

    left: frozenset[tuple[str, int, int]]
    taken: frozenset[tuple[str, int, int]]
    numbers: tuple[tuple[float, bool], ...]

    def words(self) -> str:
        """Say what the term's number was taken for."""
        names = {_WORDS[what]: None for what, _, _ in sorted(self.taken)}  # type: ignore[index]
        return " or ".join(names)


@dataclass
class Experience:
    """What the losses of one kind have shown.

    Attributes:
        spaces: The readings that are left, by term, the number of terms and constants, and whether it is a sum.
        sizes: Sizes of constants that were not the number of samples there.
        lengths: For each term, how many values of a sample its means took, those that do not count included, and how
            many values of each sample the module returned.
        holes: The terms of which some of these did not count.
        strict: Accept no number that may be a count by chance, nor one that may come from the batch.
    """

    spaces: dict[tuple[int, int, int, bool], Space] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    lengths: set[tuple[int, float, float]] = field(default_factory=set)
    holes: set[int] = field(default_factory=set)
    strict: bool = False

    def add(self, other: "Experience") -> None:
        """Learn what another knows."""
        self.spaces |= other.spaces
        self.sizes |= other.sizes
        self.lengths |= other.lengths
        self.holes |= other.holes


def readings(term: Term, together: Mapping[Node, Tensor], token_mean: bool) -> list[Reading]:
    """Return what the numbers of a term may be in this batch, the likeliest first.

    Args:
        term: The term.
        together: The weights of all terms that share a constant, by its node.
        token_mean: Whether a mean over the rows of one sample is the mean over all, where no other sample has a row.
    """
    if term.share is not None:
        return [*_of_mean(term), OWN]
    found = list(_of_sum(term, together, token_mean))
    return [*found, OWN]


def _of_sum(term: Term, together: Mapping[Node, Tensor], token_mean: bool) -> Iterator[Reading]:
    batch_size, count = len(term.weights), float(term.weights.sum())
    if not term.even and math.isclose(count, 1, rel_tol=1e-5):
        yield Reading("adds up to one", share=term.weights / count)
    if token_mean and term.mean_of_one:
        yield Reading("mean of one", share=(term.weights > 0).to(term.weights))
    for place, constant in enumerate(term.constants):
        number = abs(1 / constant.value)

        def is_(n: float, number: float = number, constant: Constant = constant) -> bool:
            return n > 0 and math.isclose(number, n, rel_tol=constant.precision)

        shared = together.get(constant.node, term.weights)
        counts = [(term.weights, term.size), (shared, float(shared.sum())), *[(x.counts, x.size) for x in term.levels]]
        for level, (weights, size) in enumerate(counts):
            if is_(float(weights.sum())):
                yield Reading("rows", place, level, weights / weights.sum(), constant, size / batch_size)
        if is_(batch_size):
            yield Reading("samples", place, 0, torch.full_like(term.weights, 1 / batch_size), constant)
        if not term.labels:
            for level, (rows, size) in enumerate([(term.rows, term.size), *[(x.rows, x.size) for x in term.levels]]):
                if is_(size):
                    yield Reading("all rows", place, level, rows / rows.sum(), constant, size / batch_size)
        equal = bool((term.weights == term.weights[0]).all())
        if (token_mean or equal) and any(is_(count / n) for n in term.inner if n > 1):
            yield Reading("values", place, 0, term.weights / count, constant)


def _of_mean(term: Term) -> Iterator[Reading]:
    constants = list(enumerate(term.constants))
    if math.isclose(abs(math.prod(constant.value for _, constant in constants)), 1, rel_tol=1e-6):
        return  # one undoes another, as a trainer's and its adapter's
    batch_size = len(term.weights)
    levels = [(term.weights, term.size), *[(level.counts, level.size) for level in term.levels]]
    for place, constant in constants:
        if constant.value == 1:
            continue
        for level, (each, size) in enumerate(levels):
            count = float(each.sum())
            if any(math.isclose(1 / constant.value, mean, rel_tol=1e-6) for mean in (count / size, count / batch_size)):
                yield Reading("rows in the mean", place, level, each / each.sum(), constant)
    for place, constant in constants:
        counts = [*[float(each.sum()) for each, _ in levels], term.size, float(batch_size)]
        for level, count in enumerate(counts):
            number = abs(constant.value)
            of_samples = level == len(counts) - 1
            if number != 1 and math.isclose(number, count, rel_tol=1e-6):
                yield Reading("times", place, -1 if of_samples else level, None, constant)
            elif number != 1 and math.isclose(1 / number, count, rel_tol=1e-6):
                yield Reading("divided once more", place, -1 if of_samples else level, None, constant)


def narrowed(found: Sequence[Reading], term: Term, before: Space | None) -> tuple[list[Reading], bool]:
    """Strike out the readings that earlier batches have contradicted, and those that this one does.

    Args:
        found: What the numbers may be in this batch.
        term: The term.
        before: What is left from earlier batches; None in the first.

    Returns:
        What is left, and whether a number has changed that may be computed from the batch, and is no count.
    """
    if before is None:
        return list(found), False
    left = [reading for reading in found if reading.key in before.left]
    counts = {reading.place for reading in left if reading.what != "own"}
    changed = [
        (place, constant, was_counted)
        for place, (constant, (value, was_counted)) in enumerate(zip(term.constants, before.numbers, strict=True))
        if not math.isclose(constant.value, value, rel_tol=1e-6)
    ]
    if any(place in counts for place, _, _ in changed):
        left = [reading for reading in left if reading.what != "own"]
    by_data = [
        place not in counts and may_be_counted(constant) and (was_counted or constant.value != 1)
        for place, constant, was_counted in changed  # the end of a schedule of floats is often a 1
    ]
    return left, any(by_data)


def may_be_counted(constant: Constant) -> bool:
    """Tell whether a number may be computed from the batch: a tensor, a whole number, or a whole divisor."""
    divisor = abs(1 / constant.value)
    return constant.may_be_data or (constant.divides and divisor >= 2 and float(divisor).is_integer())


def same_shares(left: Sequence[Reading]) -> bool:
    """Tell whether readings that make a mean of a sum give samples the same shares."""
    shares = [reading.share for reading in left if reading.share is not None]
    return all(torch.allclose(share, shares[0], rtol=1e-4, atol=0) for share in shares[1:])
