r"""List the possible meanings of the numbers in a loss: the user's own constants, or counts of the batch.

A sum that is divided by 4 in a batch of 4 samples may be the mean over samples, or have the user's own divisor 4. One
batch cannot decide. So each term of a loss has a list of *readings*. A reading says which number is which count, and
thereby each sample's share of the term. Where two readings give samples different shares relative to one another,
neither is chosen: the loss is refused. Where a number is read as a count and is none, the ledger finds it in a later
batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.loss_graph import Constant
from gradguard.per_sample.loss.rows import LossTerm

Meaning = Literal["own", "count", "samples", "rows in the mean", "times rows", "times samples"]
"""Meaning of a number.

- ``"own"``: the user's own constant.
- ``"count"``, ``"samples"``: the number of rows, or of samples, by which a sum is divided.
- ``"rows in the mean"``: 1 over the fraction of a mean's rows that count.
- ``"times rows"``, ``"times samples"``: a count that multiplies a mean, and so turns the mean into a sum.
"""


@dataclass(frozen=True)
class Reading:
    """One possible meaning of the numbers of a term: at most one of them is a count.

    Attributes:
        what: The meaning of the number.
        share: Each sample's share of the term if this meaning makes the term a mean [B]; None if it does not.
        constant: The number; None if all are the user's own.
    """

    what: Meaning
    share: Tensor | None = None
    constant: Constant | None = None

    @property
    def is_sure(self) -> bool:
        """True if the number is almost surely not the user's constant: a tensor, or a divisor below 1."""
        constant = self.constant
        return constant is not None and (constant.origin == "tensor" or (constant.divides and abs(constant.value) > 1))


def readings(term: LossTerm, together: Mapping[Node, Tensor], reduction: str) -> list[Reading]:
    """Return the possible meanings of a term's numbers in this batch: the likeliest first, the user's own last.

    Args:
        term: The term.
        together: The summed weights of all terms that share a constant, by the constant's node.
        reduction: The reduction over samples that the user declared.
    """
    constants = [constant for constant in term.constants if constant.origin != "declared"]
    if term.share is None:
        found = _of_sum(term, constants, together, reduction == "token_mean")
    else:
        found = _of_mean(term, constants, together, reduction == "sum")
    return [*found, Reading("own", term.share)]


def _of_sum(
    term: LossTerm, constants: Sequence[Constant], together: Mapping[Node, Tensor], token_mean: bool
) -> Iterator[Reading]:
    """Yield the readings by which the numbers of a sum make it a mean over rows or samples."""
    batch_size, count = len(term.weights), float(term.weights.sum())
    if not term.even and math.isclose(count, 1, rel_tol=1e-5):
        yield Reading("count", term.weights / count)
    if token_mean and term.mean_of_one:
        yield Reading("count", (term.weights > 0).to(term.weights))
    equal = bool((term.weights == term.weights[0]).all())
    every = [] if term.labels else [(term.size, term.rows), *[(level.size, level.rows) for level in term.levels]]
    widths = [n for n in term.inner if n > 1] if token_mean or equal else []
    samples = torch.ones_like(term.weights)
    for constant in constants:
        counts = [(float(each.sum()), each) for each in (term.weights, together.get(constant.node, term.weights))]
        # With token_mean, 1 over a sample's own rows may be any other count by chance.
        if constant.origin != "weights" or not token_mean:
            counts += [(float(level.counts.sum()), level.counts) for level in term.levels]
            counts += [(float(batch_size), samples), *every, *[(count / n, term.weights) for n in widths]]
        for value, each in counts:
            if math.isclose(abs(1 / constant.value), value, rel_tol=constant.precision):
                yield Reading("samples" if each is samples else "count", each / each.sum(), constant)


def _of_mean(
    term: LossTerm, constants: Sequence[Constant], together: Mapping[Node, Tensor], is_sum: bool
) -> Iterator[Reading]:
    """Yield the readings by which the numbers of a mean change the rows that it averages, or make it a sum."""
    if math.isclose(abs(math.prod(constant.value for constant in constants)), 1, rel_tol=1e-6):
        return  # one constant undoes another, such as a trainer's division and its adapter's factor
    constants = [constant for constant in constants if abs(constant.value) != 1]
    levels = [(term.weights, term.size), *[(level.counts, level.size) for level in term.levels]]
    averaged = term.size if term.mean is None else float(term.mean[1].sum())
    for constant in constants:
        for each, size in levels:
            parts = [float(each.sum()) / number for number in (size, averaged)]
            if any(math.isclose(1 / constant.value, part, rel_tol=1e-6) for part in parts):
                yield Reading("rows in the mean", each / each.sum(), constant)
    for constant in constants if is_sum else ():
        shared = float(together.get(constant.node, term.weights).sum())
        counts = [float(each.sum()) for each, _ in levels]
        counts += [number / n for number in (term.size, shared) for n in (1, *term.inner) if n]
        if any(math.isclose(abs(constant.value), count, rel_tol=1e-6) for count in counts):
            yield Reading("times rows", None, constant)
        elif math.isclose(abs(constant.value), len(term.weights), rel_tol=1e-6):
            yield Reading("times samples", term.share, constant)


def same_shares(found: Sequence[Reading]) -> bool:
    """Tell whether all readings that make the term a mean give samples the same shares."""
    shares = [reading.share for reading in found if reading.share is not None]
    return all(torch.allclose(share, shares[0], rtol=1e-4, atol=0) for share in shares[1:])
