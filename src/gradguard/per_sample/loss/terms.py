r"""Tells from a loss's graph whether it is the mean, or the sum, of what each sample's loss is by itself.

A loss is a sum of terms; each reduces *rows*, such as the losses of single tokens, by means, sums and constants. Had
the batch been sample i alone, a mean over all n rows would have been one over its own n_i. So in a loss that is said to
be the mean over B samples, the sample's part is

.. math:: f_i = B \cdot n_i / n

of its own loss; 1 for a mean over samples, and B for a sum over them. The loss is right if every f_i is 1. Other
constant factors are the user's.
"""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.beside import unrepeated
from gradguard.per_sample.loss.ledger import Kind, Ledger, Page, RowWeights, written
from gradguard.per_sample.loss.loss_graph import (
    LABELLED,
    MEANS,
    Constant,
    Coupled,
    LinearStep,
    Path,
    Refused,
    Root,
    Unreadable,
    Verdict,
    declared_at,
    parents,
    paths,
    shape_of,
)
from gradguard.per_sample.loss.readings import Reading, readings, same_shares
from gradguard.per_sample.loss.rows import LossTerm, Owner, SampleRows
from gradguard.per_sample.loss.separation import Outputs

NO_PART = "the loss does not depend on the module's outputs"
"""The reason for a loss of something else."""

_CLOSE = 1e-4
"""How far a factor may be from 1."""


@dataclass(frozen=True)
class _Loss:
    """A loss that is to be judged.

    Attributes:
        terms: The terms that it adds up.
        rows: The weights of rows in it.
        returned: How many values of each sample the module returned.
        reduction: The loss over samples as the user has said it.
    """

    terms: Sequence[LossTerm]
    rows: Sequence[RowWeights]
    returned: float
    reduction: str

    @functools.cached_property
    def totals(self) -> Mapping[Node, Tensor]:
        """The weights of all terms that share a constant, by sample."""
        found: dict[Node, Tensor] = {}
        for term in self.terms:
            for node in {constant.node for constant in term.constants}:
                found[node] = found[node] + term.weights if node in found else term.weights
        return found

    def page(self, factors: Tensor) -> Page:
        """Return what rows weigh if samples have these parts, as multiples of their own losses."""
        return written(self.rows, factors, self.returned, self.reduction == "sum")

    def readings(self, term: LossTerm) -> list[Reading]:
        """Return what the numbers of a term may be."""
        return readings(term, self.totals, self.reduction)


@dataclass(frozen=True)
class LossParts:
    """The verdict on a loss.

    Attributes:
        verdict: ``"right"`` if each sample's part is its own loss, ``"wrong"`` if not, ``"unknown"`` if a constant may
            be the user's or a number of samples, ``"unverified"`` if it cannot be told whether samples have parts.
        reason: The words of the finding if it is not right.
        factors: Each sample's part as a multiple of its own loss, for the term where it is furthest from 1; None if
            unknown. NaN for a sample without a row.
        divided_by: The number that the whole loss is divided by besides, as for the accumulation of as many
            mini-batches; 1 if there is none.
        terms: Number of terms that the loss adds up.
        weighted: Whether tensors decide weights of rows, which the next batch may change.
        owners: Whose the rows of each term are.
        label_owners: Whose the labels are of each operation that takes the mean over labels of several samples.
        page: The weights of its rows; None if it was not judged.
        repeated: Sizes of constants along which values were repeated, and which are not the number of samples.
    """

    verdict: Verdict
    reason: str = ""
    factors: Tensor | None = None
    divided_by: float = 1.0
    terms: int = 1
    weighted: bool = False
    owners: Sequence[Owner] = ()
    label_owners: Mapping[Node, Tensor] = field(default_factory=dict)
    page: Page | None = None
    repeated: frozenset[int] = frozenset()


def loss_parts(
    roots: Sequence[Root],
    outputs: Outputs,
    reduction: str,
    *,
    scale: float = 1.0,
    known: LossParts | None = None,
    ledger: Ledger | None = None,
    constant_sizes: Set[int] = frozenset(),
    declared: Sequence[float] = (),
) -> LossParts:
    """Compare each sample's part in a loss with the sample's own loss; before the backward, which frees the graph.

    Args:
        roots: The values that backward starts from; their sum is the loss.
        outputs: The values that the module returned for a batch of B samples.
        reduction: The loss as the user has said it: ``"mean"``, ``"sum"`` or ``"token_mean"``.
        scale: The factor by which a GradScaler, or a trainer, multiplied the loss.
        known: The verdict on a loss that is made in the same way: whose the rows are is not looked at again.
        ledger: The weights of rows in the losses that were accepted.
        constant_sizes: Sizes of constants in such losses that were not the number of samples.
        declared: Numbers in the loss that are no counts.

    Returns:
        What was found; nothing is raised for a loss that is wrong, or cannot be read.
    """
    ledger = ledger or Ledger()
    outputs.constant_sizes = constant_sizes
    try:
        found_paths = list(paths(roots, outputs.depends, outputs.values, declared))
        owners = known.owners if known else [None] * len(found_paths)
        ends = [_rows(path, outputs, owner) for path, owner in zip(found_paths, owners, strict=True)]
        if declared:
            _refuse_undeclared(ends, outputs, declared, {0.5} if ledger.strict else frozenset())
        if ledger.strict and outputs.batch_size > 1 and (cut := next(filter(None, (end.cut() for end in ends)), "")):
            return LossParts("unknown", _CUT.format(cut))
        weights = [unrepeated(path.coefficient) for path in found_paths] if ledger.strict else []
        if any(one.numel() and not bool(one.isfinite().any()) for one in weights):
            return LossParts("unknown", _ENDLESS)
        terms = [end.term(scale) for end in ends]
        rows = [end.weights(scale) for end in ends]
        together = _averaged_together(_joined(found_paths, terms, [each.kind for each in rows]))
        if not together:
            return LossParts("unknown", NO_PART)
        loss = _Loss(together, rows, outputs.values_of_each, reduction)
        found = _as_before(loss, ledger) or _judged_anew(loss, ledger)
    except Refused as refused:
        return LossParts(refused.verdict, str(refused), refused.factors)
    if found.verdict != "right":
        return found
    return replace(
        found,
        terms=len(together),
        weighted=any(path.weighing for path in found_paths)
        or any(term.class_weights for term in terms)
        or outputs.coincide,
        owners=[end.owner for end in ends],
        label_owners={
            end.path.value.node: end.owner.samples
            for end, term in zip(ends, terms, strict=True)
            if end.name in LABELLED and term.share is not None
        },
        repeated=frozenset(outputs.repeated - {outputs.batch_size}),
    )


def _as_before(loss: _Loss, ledger: Ledger) -> LossParts | None:
    """Judge a loss by what was accepted before, whatever its numbers may be.

    Returns:
        That it is right; None where rows weigh something else than before, or were not judged, or training is private,
        where each batch must be right by itself, too.
    """
    if ledger.strict or not ledger.knows([each.kind for each in loss.rows]):
        return None
    agreeing = [(factors, page) for factors in _possible(loss) if not ledger.objection(page := loss.page(factors))]
    if len(agreeing) != 1:
        return None
    factors, page = agreeing[0]
    return LossParts("right", factors=factors, divided_by=ledger.divided_by(page), page=page)


def _possible(loss: _Loss) -> list[Tensor]:
    """Return the parts of samples, as multiples of their own losses, with which the loss is what it is said to be."""
    has = torch.stack([term.weights > 0 for term in loss.terms]).any(0)
    ones = torch.ones_like(loss.terms[0].weights).where(has, math.nan)
    common = None if loss.reduction == "token_mean" else [ones]
    for term in loss.terms:
        if not bool(term.rows.any()):
            continue
        found = loss.readings(term)
        counted = [one for one in found if one.what == "rows in the mean" and one.is_sure]
        mine = list[Tensor]()  # the factors of the readings by which it is what it is said to be
        for reading in counted or found:
            with suppress(Refused):
                mine.append(_by(reading, term, loss.reduction))
        if not counted and found[0].what == "rows in the mean" and any(not _is_among(one, mine[:1]) for one in mine):
            return []  # the number may be the user's, new in this batch: no earlier batch tells
        if loss.reduction != "token_mean":
            mine = [ones] if any(_is_among(ones[term.weights > 0], [one[term.weights > 0]]) for one in mine) else []
        common = mine if common is None else [factors for factors in common if _is_among(factors, mine)]
    distinct: list[Tensor] = []
    for factors in common or []:
        if not _is_among(factors, distinct):
            distinct.append(factors)
    return distinct


def _is_among(factors: Tensor, others: Sequence[Tensor]) -> bool:
    return any(torch.allclose(factors, other, rtol=_CLOSE, atol=0, equal_nan=True) for other in others)


def _judged_anew(loss: _Loss, ledger: Ledger) -> LossParts:
    """Judge a loss by what its numbers may be."""
    factors, divisors, refused = list[Tensor](), list[Mapping[Node, float]](), list[LossParts]()
    for term in loss.terms:
        own = {c.node: abs(1 / c.value) for c in term.constants if c.divides}
        divisors.append(own)
        if not bool((term.weights if ledger.strict else term.rows).any()):  # of no sample, as where nothing was chosen
            continue
        try:
            if ledger.strict:
                reading, parts = Reading("own"), _private_factors(term, loss.reduction)
            else:
                found = loss.readings(term)
                reading = _likeliest(found, term, loss.reduction)
                parts = _by(reading, term, loss.reduction)
                if reason := _doubt(reading, found, term, loss.reduction):
                    raise Refused(reason)
        except Refused as one:
            refused.append(LossParts(one.verdict, str(one), one.factors))
            continue
        factors.append(parts)
        if reading.constant is not None and reading.constant.divides:
            own[reading.constant.node] = 1.0
    if refused:
        return max(refused, key=lambda one: (one.verdict == "wrong", _distance(one.factors)))
    for other in factors[1:]:
        if not _is_among(other, factors[:1]):
            return LossParts("wrong", _SEVERAL_SHARES, other)
    divided_by = math.prod(divisor for _, divisor in set.intersection(*[set(own.items()) for own in divisors]))
    multiplied = [abs(constant.value) for term in loss.terms for constant in term.constants if not constant.divides]
    if any(math.isclose(divided_by, factor, rel_tol=1e-6) for factor in multiplied):
        divided_by = 1.0  # a factor undoes it, as a trainer's adapter does
    candidate = loss.page(factors[0] if factors else torch.ones_like(loss.terms[0].weights))
    candidate = replace(candidate, divided_by=divided_by)
    if reason := ledger.objection(candidate):
        return LossParts("unknown", reason)
    return LossParts("right", factors=factors[0] if factors else None, divided_by=divided_by, page=candidate)


def _refuse_undeclared(
    ends: Sequence[SampleRows], outputs: Outputs, declared: Sequence[float], needless: Set[float]
) -> None:
    """Check that no number is taken for a declared one because it equals that: each was declared where it stands.

    Args:
        ends: The rows; a declared number may stand between them and the module as well.
        outputs: The values that the module returned.
        declared: The declared numbers.
        needless: Factors that need not be declared.

    Raises:
        Refused: If more operations take a number than were declared, and it is no such factor.
    """
    on_paths = {c.node: c for end in ends for c in end.path.constants if c.origin == "declared"}
    behind = [one for end in ends for node in end.behind for one in declared_at(node, outputs.depends, declared)]
    nodes = {one.node: one for one in behind} | on_paths
    for constant in on_paths.values():
        number = constant.number
        same = [one for one in nodes.values() if math.isclose(one.number, number, rel_tol=1e-12)]
        taken, said = len(same), sum(math.isclose(one, number, rel_tol=1e-12) for one in declared)
        if taken > said and (number not in needless or any(one.divides for one in same)):
            raise Refused(
                f"{taken} operations take the number {number:.6g}, and {said} of them were declared: another may have "
                "been counted from the batch. Say clipper.constant(number) at each place where it stands, and leave a "
                "count a whole number, as len(output)"
            )


def _rows(path: Path, outputs: Outputs, owner: Owner | None) -> SampleRows:
    """Return the rows at the end of a path, or at its end in what the module returned.

    Raises:
        Coupled: If samples are mixed there.
        Unreadable: If it cannot be told whose they are.
    """
    if owner is None or owner.name or path.output is None:
        try:
            return SampleRows(path, outputs, owner)
        except Unreadable:
            if path.output is None:
                raise
    return SampleRows(path.output, outputs, owner, is_output=True)


_REDUCTIONS = {"mean": "mean over samples", "sum": "sum over samples", "token_mean": "mean over rows"}


def explain(parts: LossParts, reduction: str) -> str:
    """Return the message that refuses a loss, or says why it could not be told."""
    declared = _REDUCTIONS[reduction]
    if parts.verdict in {"unknown", "unverified"}:
        compute = (
            "Let clipper.per_sample_losses(loss_fn, outputs, targets) compute each sample's own loss, and take their "
            f"{reduction.removeprefix('token_')}: then nothing of it is read."
        )
        return f"whether the loss is the {declared} cannot be told: {parts.reason}. Nothing was clipped. {compute}"
    extent = ""
    if parts.factors is not None:
        smallest, largest = _extremes(parts.factors)
        same = math.isclose(smallest, largest, rel_tol=_CLOSE)
        numbers = f"{smallest:.3g}" if same else f"{smallest:.3g} to {largest:.3g}"
        extent = f"each sample's part is {numbers} of its own loss: "
    return f"the loss is not the {declared}: {extent}{parts.reason}. Nothing was clipped."


_ADVICE = (
    "Average within each sample first, (loss * mask).sum(1) / mask.sum(1), and then over samples, .mean(), so that no "
    "sample's part depends on what others have; or say loss_reduction='token_mean', where a sample's own loss is the "
    "mean over its own rows"
)

_CLASS_WEIGHTS = (
    "weight= of a mean cross_entropy divides by the sum of the weights in the batch, so every sample changes all "
    "others' parts; use reduction='none', weight each sample, and take the mean; or say loss_reduction='token_mean', "
    "where a sample's own loss is the weighted mean over its own labels"
)

_TENSOR = (
    "a tensor multiplies it, {:.6g}, which may be computed from the batch. If it is not, multiply by a float, such as "
    "its .item()"
)

_WHOLE = (
    "a tensor, or a whole number, multiplies or divides it, {:.6g}, which may be computed from the batch. Multiply by "
    "a float that is a constant, or say clipper.constant(number) where it stands in the loss"
)

_EITHER = (
    "a mean was multiplied by {:.6g}, a constant or 1 over the part of its rows that count. Divide by the number of "
    "rows that count, or use a constant that does not depend on the batch"
)

_MEAN_OF_ONE = "it is a mean over the rows of the only sample that has some, which may be one over those of all samples"

_DIVISORS = {
    "mean": "Divide a sum once, by the number of samples, len(output), or take .mean()",
    "sum": "Divide a sum by no count",
    "token_mean": "Divide a sum once, by the number of rows that it adds up, mask.sum(), or take .mean()",
}

_NOT_COUNTED = frozenset(["declared", "torch", "weights"])
"""Constants that no count decides: those which are declared, those of functions of torch's, and a row's own weight."""

_CUT = (
    "{} cuts or fills values in the loss at a place that may be the length of the longest sample, or puts rows where "
    "data say, so that it tells of one sample by all others. Halves of each row, such as a mean and a log-variance, "
    "are taken by output.chunk(2, -1), single columns by output.unbind(-1). Any other place that is yours is declared "
    "where it stands: output[:, : int(clipper.constant(4))]"
)

_ENDLESS = (
    "it multiplies values by a number that is not finite, as where it is divided by a count of the batch that is 0: "
    "then the others in the batch decide whether a sample has a gradient"
)

_SEVERAL_SHARES = (
    "it adds up terms of which a sample has different shares. Average each term within each sample first, and then "
    "over samples"
)


def _joined(found: Sequence[Path], terms: Sequence[LossTerm], kinds: Sequence[Kind]) -> list[LossTerm]:
    """Join terms of one sample each to one of all: those of ``torch.stack([loss(o[i]) for i in range(B)]).mean()``.

    Returns:
        All terms.

    Raises:
        Unreadable: If how much of a mean they are cannot be told.
    """
    if terms and len(terms[0].weights) == 1:
        return list(terms)
    single = [i for i, term in enumerate(terms) if int((term.weights > 0).sum()) == 1 and term.share is None]
    shared: dict[Kind, Counter[Node]] = defaultdict(Counter)
    for i in single:
        shared[kinds[i]].update(_nodes(found[i]))
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i in single:  # a sample may have a term of each kind, as exp(output) - target * output
        groups[kinds[i], *[node for node in _nodes(found[i]) if shared[kinds[i]][node] > 1]].append(i)
    together = [members for members in groups.values() if len(members) > 1]
    taken = {i for members in together for i in members}
    joined = [term for i, term in enumerate(terms) if i not in taken]
    for members in together:
        nodes, mine = shared[kinds[members[0]]], [terms[i] for i in members]
        above = [_above(found[i], nodes) for i in members]
        counts = torch.stack(
            [(t.weights > 0) * (to[-1].input.shape.numel() if to else 1) for t, to in zip(mine, above, strict=True)]
        ).sum(0, dtype=mine[0].weights.dtype)
        mean = math.prod(step.mean for step in above[0] if step.operation in MEANS)
        size = float(counts.sum())
        if mean != 1 and not math.isclose(mean * size, 1):
            raise Unreadable("a mean of single samples' terms is over other values, too")
        share = counts * mean if mean != 1 else None
        constants = tuple(constant for constant in mine[0].constants if nodes[constant.node] > 1)
        of_one = int((counts > 0).sum()) == 1 and all(term.is_mean for term in mine)
        joined.append(
            LossTerm(
                counts,
                size,
                True,
                False,
                share,
                [],
                constants,
                counts,
                summed=counts,
                width=mine[0].width,
                is_mean=share is not None or of_one,
                numbers=_numbers(mine),
            )
        )
    return joined


def _above(path: Path, nodes: Counter[Node]) -> list[LinearStep]:
    """The operations, from the root down, that a path shares with others."""
    return list(itertools.takewhile(lambda step: nodes[step.value.node] > 1, reversed(path.steps)))


def _averaged_together(terms: Sequence[LossTerm]) -> list[LossTerm]:
    """Join terms that one mean takes side by side: those of ``torch.cat([loss(part) for part in parts]).mean()``."""
    groups: dict[Node, list[LossTerm]] = defaultdict(list)
    for term in terms:
        if term.mean is not None:
            groups[term.mean[0]].append(term)
    joined = [term for term in terms if term.mean is None]
    for node, members in groups.items():
        counts = torch.stack([term.mean[1] for term in members if term.mean is not None]).sum(0)
        [averaged] = parents(node)
        if len(members) == 1 or float(counts.sum()) * shape_of(node).numel() != averaged.shape.numel():
            joined += members
            continue
        joined.append(
            LossTerm(
                weights=torch.stack([term.weights for term in members]).sum(0),
                size=sum(term.size for term in members),
                even=all(term.even for term in members),
                labels=all(term.labels for term in members),
                share=counts / counts.sum(),
                rows=torch.stack([term.rows for term in members]).sum(0),
                levels=[],
                constants=tuple(c for c in members[0].constants if all(c in term.constants for term in members)),
                inner=members[0].inner,
                width=members[0].width,
                is_mean=True,
                numbers=_numbers(members),
            )
        )
    return joined


def _numbers(terms: Sequence[LossTerm]) -> tuple[tuple[Constant, ...], ...]:
    return tuple(numbers for term in terms for numbers in term.numbers)


def _nodes(path: Path) -> list[Node]:
    """Return the operations on a path, which other paths may pass as well."""
    return [step.value.node for step in path.steps] + [constant.node for constant in path.constants]


def _likeliest(found: Sequence[Reading], term: LossTerm, reduction: str) -> Reading:
    """Return the reading, of several, by which a term is judged.

    Raises:
        Refused: If they give samples other shares.
    """
    own = found[-1]
    means = [reading for reading in found if reading.what == "rows in the mean"]
    if means:
        if not same_shares(means if means[0].is_sure else [*means, own]):
            raise Refused(_EITHER.format(means[0].constant and means[0].constant.value))
        return means[0]
    if term.share is not None:
        return found[0] if reduction == "sum" else own
    size = len(term.weights)
    by_one = size > 1  # is not divided
    counts = [one for one in found[:-1] if not (by_one and one.constant and abs(one.constant.value) == 1)]
    if not counts:
        return own
    likeliest = min(counts, key=_is_constant)
    constant = likeliest.constant
    if constant is not None and not constant.divides and abs(constant.value) == 0.5 and reduction != "mean":
        raise Refused("a sum over 2 samples or rows was multiplied by 0.5, which may be a mean or a constant")
    if reduction != "sum" and not same_shares(counts):
        raise Refused(
            f"a sum was divided by {size}, which is both the number of samples and that of the rows. Begin with "
            "another batch, or divide within each sample first"
        )
    return likeliest


def _is_constant(reading: Reading) -> tuple[bool, bool]:
    """Order readings by how much their number looks like a constant: tensors first, and then divisors."""
    constant = reading.constant
    return constant is not None and constant.origin != "tensor", constant is not None and not constant.divides


def _doubt(reading: Reading, found: Sequence[Reading], term: LossTerm, reduction: str) -> str:
    """Return why a term that seems right cannot be accepted: its number may be another; "" if it can."""
    if reduction == "sum" and term.mean_of_one:
        return _MEAN_OF_ONE
    others = [constant for constant in term.constants if constant is not reading.constant]
    tensors = [c.value for c in others if c.origin == "tensor" and abs(c.value) != 1]
    if tensors:
        return _TENSOR.format(tensors[0])
    counts = {one.constant for one in found if one.constant is not None}
    unknown = [c.value for c in others if c.may_be_data and c not in counts and c.value != 1 and not _of_row(c, term)]
    if unknown and reading.constant is not None and not reading.constant.divides:
        return _WHOLE.format(unknown[0])
    return ""


def _private_factors(term: LossTerm, reduction: str) -> Tensor:
    """Return each sample's part in a term of private training, where no number is taken for what it equals.

    The way in which the loss is made, and the counts of this batch, leave each number one value: a mean over all has
    none, a sum has the one divisor that its reduction names. A factor that is not declared must be 0.5, which is one
    value as well. So every batch that might be accepted gives a sample the same gradient.

    Raises:
        Refused: If a number is another.
        Coupled: If samples have different shares.
    """
    size, alone = len(term.weights), int((term.weights > 0).sum()) == 1
    summed = term.weights if term.summed is None else term.summed
    by_torch = any(map(_torch_divides, term.numbers))
    by_rows = not term.is_mean and (by_torch or reduction == "token_mean")
    count, share = 1.0, torch.full_like(term.weights, 1 / size)
    if term.mean_of_one and reduction == "sum":
        raise Refused(_MEAN_OF_ONE)
    if term.share is not None:
        share = term.share
    elif term.is_mean and (not alone or (size > 1 and term.width != 1)):
        count = math.nan
    elif term.is_mean and reduction == "token_mean":
        share = (term.weights > 0).to(share)
    elif by_rows:
        count, share = float(summed.sum()), summed / summed.sum()
    elif reduction == "mean":
        count = float(size)
    for numbers in term.numbers:
        given = [c for c in numbers if c.origin not in _NOT_COUNTED or (by_rows and c.origin == "weights")]
        given += [c for c in numbers if c.origin == "torch" and c.divides]
        divisors = len([c for c in given if c.divides])
        within = len([c for c in given if c.divides and shape_of(c.node)])  # samples, and not behind their sum
        halves = len([c for c in given if not c.divides and c.origin not in {"weights", "gradient"}])
        divided = by_rows or (not term.is_mean and reduction != "sum")
        tensors = [c.value for c in given if c.origin == "tensor"]
        if len(tensors) > divided:
            raise Refused(_TENSOR.format(tensors[-1]))
        if divided:
            halves, within = halves - (not divisors and halves > 0), within - (divisors == within)
        expected = 0.5**halves / count / (term.width if within > 0 else 1.0)
        found = math.prod(abs(c.value) for c in given)
        if not math.isclose(found, expected, rel_tol=1e-6 + sum(c.precision for c in given)):
            raise Refused(
                f"numbers multiply {'a mean' if term.is_mean else 'a sum'} by {found:.6g}, and {expected:.6g} was "
                "expected. In private training a number may be counted from the batch, whatever it equals. "
                f"{_DIVISORS[reduction]}. Declare a number that is yours where it stands in the loss: "
                "clipper.constant(number), with .item() of a tensor. Only the factor 0.5 needs none: instead of "
                "loss / 2 write 0.5 * loss, or loss / clipper.constant(2). (If it is the number of mini-batches, leave "
                "the division away: the clipper averages over all samples)"
            )
    if reduction == "token_mean":
        return (share * size).where(share > 0, math.nan)
    return _compared(term, share, reduction if term.share is not None or by_torch else "mean")


def _torch_divides(numbers: Sequence[Constant]) -> bool:
    """Tell whether a function of torch's divides a sum by the rows, as `cross_entropy` of smoothed or soft labels."""
    return any(c.origin == "torch" and c.divides for c in numbers) or any(
        above.origin == "torch" and one.origin == "tensor" and one.divides for above, one in itertools.pairwise(numbers)
    )


def _of_row(constant: Constant, term: LossTerm) -> bool:
    """Tell whether a divisor is the number of values that a row has along some dimensions, which never changes."""
    return constant.divides and any(n > 1 and math.isclose(abs(1 / constant.value), n) for n in term.inner)


def _by(reading: Reading, term: LossTerm, reduction: str) -> Tensor:
    """Return each sample's part in a term, as a multiple of its own loss, as one reading has it.

    Raises:
        Refused: If the term is not what it is said to be then.
    """
    number = reading.constant
    if reading.what == "times rows":
        return torch.ones_like(term.weights)
    if reading.what == "times samples":
        return _compared(term, cast("Tensor", reading.share), "mean")
    if reading.share is None:
        return _judged_sum(term, reduction)
    multiplied = number if term.share is None and reduction == "sum" and number and not number.divides else None
    if multiplied and not math.isclose(abs(1 / multiplied.value), len(term.weights), rel_tol=multiplied.precision):
        raise Refused(f"a sum over samples was multiplied by {multiplied.value:.3g}, a constant or 1 over the rows")
    return _compared(term, reading.share, reduction)


def _compared(term: LossTerm, share: Tensor, reduction: str) -> Tensor:
    """Return each sample's part in a term by its share of a mean.

    Raises:
        Coupled: If it is none over samples.
    """
    if term.class_weights and reduction != "token_mean":
        raise Coupled(_CLASS_WEIGHTS)
    factors = (share if reduction == "sum" else share * len(share)).where(share > 0, math.nan)
    if reduction == "sum" and len(share) > 1:
        raise Coupled("it is a mean. Use loss_reduction='mean', or a loss that adds samples up", factors)
    if reduction == "token_mean" or _distance(factors) <= _CLOSE:
        return factors
    rows = "labels" if term.labels else "weights of the rows" if not term.even else "rows"
    counts = [f"{count:.4g}" for count in _extremes(term.weights)]
    reason = f"it is a mean over {float(term.weights.sum()):.4g} {rows}, of which samples have {' to '.join(counts)}"
    raise Coupled(f"{reason}. {_ADVICE}", factors)


def _judged_sum(term: LossTerm, reduction: str) -> Tensor:
    """Return each sample's part in a term that a sum reduced, and that was divided by no number of rows or samples.

    Raises:
        Coupled: If it is no sum over samples, or is not to be one.
        Refused: If that cannot be told.
    """
    batch_size, count, ones = len(term.weights), float(term.weights.sum()), torch.ones_like(term.weights)
    partly = (term.labels and count > batch_size) or count < term.size  # labels of several places, or a mask
    users = {c.node: abs(1 / c.value) for c in term.constants if c.divides and not _of_row(c, term)}
    divisor = math.prod(users.values())
    if divisor % 1 == 0 and divisor >= 2 and (reduction != "sum" or (partly and divisor >= count / 2)):
        own = term.weights if partly else ones  # a sum of a sample's own, or its mean where rows are counted
        raise Coupled(
            f"a sum over {count:.4g} rows was divided by {divisor:.6g}, which is neither their number nor the number "
            f"of samples ({batch_size}). (Labels counted before a shift, or for several mini-batches? The clipper "
            f"averages over all of these by itself.) {_ADVICE}",
            (own * batch_size / divisor).where(term.weights > 0, math.nan),
        )
    if reduction == "sum" or batch_size == 1:
        return ones
    factor = math.prod(abs(c.value) for c in term.constants)
    if not term.even or factor * batch_size < 1:
        raise Refused(f"the rows of a sum are weighed, or multiplied by {factor:.3g}, which may hold 1/{batch_size}")
    raise Coupled("it is a sum. Use loss_reduction='sum', or divide by the number of samples", ones * batch_size)


def _extremes(values: Tensor) -> tuple[float, float]:
    known = values[~values.isnan()]
    return (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)


def _distance(factors: Tensor | None) -> float:
    """How far from 1 a factor is."""
    return math.inf if factors is None else max(abs(extreme - 1) for extreme in _extremes(factors))
