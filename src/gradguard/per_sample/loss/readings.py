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

from gradguard.per_sample.loss.loss_graph import Constant
from gradguard.per_sample.loss.rows import LossTerm

Meaning = Literal["own", "count", "samples", "rows in the mean", "times rows", "times samples"]
"""The meaning of a number: the user's own; the number of rows, or of samples, by which a sum is divided; 1 over the
part of a mean's rows that count; a count that multiplies a mean, which makes it a sum."""


@dataclass(frozen=True)
class Reading:
    """One possibility of what the numbers of a term are: at most one of them is a count.

    Attributes:
        what: The meaning of the number.
        share: Each sample's share of the mean that the term is then [B]; None if it is none.
        constant: The number; None if all are the user's own.
    """

    what: Meaning
    share: Tensor | None = None
    constant: Constant | None = None

    @property
    def is_sure(self) -> bool:
        """Whether the number is hardly a constant of the user's: a tensor, or a divisor below 1."""
        one = self.constant
        return one is not None and (one.origin == "tensor" or (one.divides and abs(one.value) > 1))


def readings(term: LossTerm, together: Mapping[Node, Tensor], reduction: str) -> list[Reading]:
    """Return what the numbers of a term may be in this batch, the likeliest first and the user's own last.

    Args:
        term: The term.
        together: The weights of all terms that share a constant, by its node.
        reduction: The loss over samples as the user has said it.
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
    if math.isclose(abs(math.prod(constant.value for constant in constants)), 1, rel_tol=1e-6):
        return  # one undoes another, as a trainer's and its adapter's
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
    """Tell whether readings that make a mean of a sum give samples the same shares."""
    shares = [reading.share for reading in found if reading.share is not None]
    return all(torch.allclose(share, shares[0], rtol=1e-4, atol=0) for share in shares[1:])
