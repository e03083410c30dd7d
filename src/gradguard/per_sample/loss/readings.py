r"""What the numbers in a loss may be: the user's own, or counts of the batch.

A sum that is divided by 4 in a batch of 4 samples may be the mean over samples, or have the user's own divisor 4. One
batch cannot tell. So for each term of a loss there is a list of *readings*, each of which says which number is which
count, and with it what each sample's share of the term is. Readings that give samples different shares relative to one
another are never chosen between: the loss is refused. A number that was taken for a count and is none is found in the
next batch, by the ledger.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Reading:
    """One possibility of what the numbers of a term are: at most one of them is a count.

    Attributes:
        what: What the number is.
        place: Which of the term's constants it is; -1 if none.
        level: Which of the counts of the term it is, where there are several.
        share: Each sample's share of the mean that the term is then [B]; None if it is none.
        constant: The constant.
    """

    what: What
    place: int = -1
    level: int = 0
    share: Tensor | None = None
    constant: Constant | None = None


OWN = Reading("own")


def readings(term: Term, together: Mapping[Node, Tensor], token_mean: bool) -> list[Reading]:
    """Return what the numbers of a term may be in this batch, the likeliest first.

    Args:
        term: The term.
        together: The weights of all terms that share a constant, by its node.
        token_mean: Whether a mean over the rows of one sample is the mean over all, where no other sample has a row.
    """
    if term.share is not None:
        return [*_of_mean(term, together), OWN]
    found = list(_of_sum(term, together, token_mean))
    return [*found, OWN]


def _of_sum(term: Term, together: Mapping[Node, Tensor], token_mean: bool) -> Iterator[Reading]:
    batch_size, count = len(term.weights), float(term.weights.sum())
    if not term.even and math.isclose(count, 1, rel_tol=1e-5):
        yield Reading("adds up to one", share=term.weights / count)
    if token_mean and term.mean_of_one:
        yield Reading("mean of one", share=(term.weights > 0).to(term.weights))
    for place, constant in enumerate(term.constants):
        if constant.origin == "declared":
            continue
        number = abs(1 / constant.value)

        def is_(n: float, number: float = number, constant: Constant = constant) -> bool:
            return n > 0 and math.isclose(number, n, rel_tol=constant.precision)

        shared = together.get(constant.node, term.weights)
        for level, weights in enumerate([term.weights, shared, *[each.counts for each in term.levels]]):
            if is_(float(weights.sum())):
                yield Reading("rows", place, level, weights / weights.sum(), constant)
        if is_(batch_size):
            yield Reading("samples", place, 0, torch.full_like(term.weights, 1 / batch_size), constant)
        if not term.labels:
            for level, (rows, size) in enumerate([(term.rows, term.size), *[(x.rows, x.size) for x in term.levels]]):
                if is_(size):
                    yield Reading("all rows", place, level, rows / rows.sum(), constant)
        equal = bool((term.weights == term.weights[0]).all())
        if (token_mean or equal) and any(is_(count / n) for n in term.inner if n > 1):
            yield Reading("values", place, 0, term.weights / count, constant)


def _of_mean(term: Term, together: Mapping[Node, Tensor]) -> Iterator[Reading]:
    constants = [(place, constant) for place, constant in enumerate(term.constants) if constant.origin != "declared"]
    if math.isclose(abs(math.prod(constant.value for _, constant in constants)), 1, rel_tol=1e-6):
        return  # one undoes another, as a trainer's and its adapter's
    batch_size = len(term.weights)
    levels = [(term.weights, term.size), *[(level.counts, level.size) for level in term.levels]]
    averaged = term.size if term.mean is None else float(term.mean[1].sum())
    for place, constant in constants:
        if constant.value == 1:
            continue
        for level, (each, size) in enumerate(levels):
            count = float(each.sum())
            if any(math.isclose(1 / constant.value, mean, rel_tol=1e-6) for mean in (count / size, count / averaged)):
                yield Reading("rows in the mean", place, level, each / each.sum(), constant)
    for place, constant in constants:
        counts = [*[float(each.sum()) for each, _ in levels], *[term.size / n for n in (1, *term.inner) if n]]
        shared = float(together.get(constant.node, term.weights).sum())
        counts += [shared / n for n in (1, *term.inner) if n]
        counts.append(float(batch_size))
        for level, count in enumerate(counts):
            number = abs(constant.value)
            of_samples = level == len(counts) - 1
            if number != 1 and math.isclose(number, count, rel_tol=1e-6):
                yield Reading("times", place, -1 if of_samples else level, None, constant)
            elif number != 1 and math.isclose(1 / number, count, rel_tol=1e-6):
                yield Reading("divided once more", place, -1 if of_samples else level, None, constant)


def same_shares(left: Sequence[Reading]) -> bool:
    """Tell whether readings that make a mean of a sum give samples the same shares."""
    shares = [reading.share for reading in left if reading.share is not None]
    return all(torch.allclose(share, shares[0], rtol=1e-4, atol=0) for share in shares[1:])
