r"""Decide from a loss's graph whether the loss is the mean, or the sum, of the samples' own losses.

A loss is a sum of terms. Each term reduces *rows*, such as the losses of single tokens, by means, sums and constants.
If the batch were sample i alone, a mean over all n rows would be a mean over the sample's own n_i rows. So in a loss
that is declared as the mean over B samples, the sample's part, as a multiple of its own loss, is

.. math:: f_i = B \cdot n_i / n

for a mean over all rows, 1 for a mean over samples, and B for a sum over samples. The loss is right if every f_i is 1.
Other constant factors are the user's.
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
from gradguard.per_sample.loss.ledger import Kind, Ledger, Page, RowWeights, page_of
from gradguard.per_sample.loss.loss_graph import (
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
from gradguard.per_sample.loss.operation_table import LABELLED, MEANS
from gradguard.per_sample.loss.readings import Reading, readings, same_shares
from gradguard.per_sample.loss.rows import LossTerm, Owner, SampleRows
from gradguard.per_sample.loss.separation import Outputs

_UNSCALED = (
    "a part of it is not multiplied by the scale of the GradScaler, {:g}: add up all parts before scaler.scale(loss)"
)

NO_PART = "the loss does not depend on the module's outputs"
"""The reason given for a loss that is computed from something else."""

_CLOSE = 1e-4
"""Largest distance from 1 of a factor that counts as 1."""


@dataclass(frozen=True)
class _Loss:
    """A loss that is to be judged.

    Attributes:
        terms: The terms that the loss adds up.
        rows: The weights of rows in the loss.
        returned: How many values of each sample the module returned.
        reduction: The reduction over samples that the user declared.
    """

    terms: Sequence[LossTerm]
    rows: Sequence[RowWeights]
    returned: float
    reduction: str

    @functools.cached_property
    def totals(self) -> Mapping[Node, Tensor]:
        """The summed weights [B] of all terms that share a constant, by the constant's node."""
        found: dict[Node, Tensor] = {}
        for term in self.terms:
            for node in {constant.node for constant in term.constants}:
                found[node] = found[node] + term.weights if node in found else term.weights
        return found

    def page(self, factors: Tensor) -> Page:
        """Return the ledger's page of the loss if samples have these parts, as multiples of their own losses."""
        return page_of(self.rows, factors, self.returned, self.reduction == "sum")

    def readings(self, term: LossTerm) -> list[Reading]:
        """Return the possible meanings of a term's numbers."""
        return readings(term, self.totals, self.reduction)


@dataclass(frozen=True)
class LossParts:
    """The verdict on a loss.

    Attributes:
        verdict: ``"right"`` if each sample's part is its own loss; ``"wrong"`` if not; ``"unknown"`` if a constant may
            be the user's or a number of samples; ``"unverified"`` if the graph does not show each sample's part.
        reason: The reason if the loss is not right.
        factors: Each sample's part as a multiple of its own loss, for the term whose factors are furthest from 1; None
            if unknown. NaN for a sample without a row.
        divided_by: A further number by which the whole loss is divided, such as the number of accumulated
            mini-batches; 1 if there is none.
        terms: Number of terms that the loss adds up.
        weighted: Whether tensors decide the weights of rows; the next batch may change them.
        owners: The owner of the rows of each term.
        label_owners: The samples of the labels of each operation that takes a mean over labels of several samples.
        page: The ledger's page of the loss; None if the loss was not judged.
        repeated: Sizes of constants along which values were repeated, without the number of samples.
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


def _refuse_unscaled(found_paths: Sequence[Path], scale: float) -> None:
    """Check that a GradScaler's scale, which is above 1, multiplies each part of the loss.

    Raises:
        Coupled: If it does not.
    """
    for path in found_paths if scale > 1 else ():
        if not any(math.isclose(one.value, scale, rel_tol=1e-6) for one in path.constants):
            raise Coupled(_UNSCALED.format(scale))


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
    """Compare each sample's part in a loss with the sample's own loss. Call it before the backward frees the graph.

    Args:
        roots: The values that backward starts from; their sum is the loss.
        outputs: The values that the module returned for a batch of B samples.
        reduction: The reduction over samples that the user declared: ``"mean"``, ``"sum"`` or ``"token_mean"``.
        scale: The factor by which a GradScaler, or a trainer, multiplied the loss.
        known: The verdict on a loss of the same structure; its owners of rows are used again.
        ledger: The weights of rows in the accepted losses.
        constant_sizes: Sizes of constants in losses of the same kind that were not the number of samples.
        declared: Numbers that the user has declared as not computed from the batch.

    Returns:
        The verdict. Nothing is raised for a loss that is wrong or cannot be read.
    """
    ledger = ledger or Ledger()
    outputs.constant_sizes = constant_sizes
    try:
        found_paths = list(paths(roots, outputs.depends, outputs.values, declared))
        _refuse_unscaled(found_paths, scale)
        owners = known.owners if known else [None] * len(found_paths)
        ends = [_rows(path, outputs, owner) for path, owner in zip(found_paths, owners, strict=True)]
        if declared:
            _refuse_undeclared(ends, outputs, declared, {0.5} if ledger.strict else frozenset())
        if ledger.strict and outputs.batch_size > 1 and (cut := next(filter(None, (end.cut() for end in ends)), "")):
            return LossParts("unknown", _CUT.format(cut))
        weights = [unrepeated(path.coefficient) for path in found_paths] if ledger.strict else []
        if any(one.numel() and not bool(one.isfinite().any()) for one in weights):
            return LossParts("unknown", _ENDLESS)
        rows = [end.weights(scale) for end in ends]
        seen = not ledger.strict and ledger.knows([each.kind for each in rows])
        terms = [end.term(scale, seen) for end in ends]
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
    """Accept a loss whose rows weigh the same as in accepted batches, whatever its numbers mean.

    Returns:
        The verdict that the loss is right. None where rows weigh something else than before, or were not judged; and in
        private training, where each batch must be right by itself.
    """
    if ledger.strict or not ledger.knows([each.kind for each in loss.rows]):
        return None
    agreeing = [(factors, page) for factors in _possible(loss) if not ledger.objection(page := loss.page(factors))]
    if len(agreeing) != 1:
        return None
    factors, page = agreeing[0]
    return LossParts("right", factors=factors, divided_by=ledger.divided_by(page), page=page)


def _possible(loss: _Loss) -> list[Tensor]:
    """Return the samples' parts [B] with which the loss has the declared reduction, one tensor for each possibility."""
    has = torch.stack([term.weights > 0 for term in loss.terms]).any(0)
    ones = torch.ones_like(loss.terms[0].weights).where(has, math.nan)
    common = None if loss.reduction == "token_mean" else [ones]
    for term in loss.terms:
        if not bool(term.rows.any()):
            continue
        found = loss.readings(term)
        sure = [reading for reading in found if reading.what == "rows in the mean" and reading.is_sure]
        allowed = list[Tensor]()  # the factors of the readings that agree with the declared reduction
        for reading in sure or found:
            with suppress(Refused):
                allowed.append(_by(reading, term, loss.reduction))
        is_doubtful = not sure and found[0].what == "rows in the mean"
        if is_doubtful and any(not _is_among(factors, allowed[:1]) for factors in allowed):
            return []  # the number may be the user's and new in this batch: earlier batches do not decide
        if loss.reduction != "token_mean":
            has_rows = term.weights > 0
            agrees = any(_is_among(ones[has_rows], [factors[has_rows]]) for factors in allowed)
            allowed = [ones] if agrees else []
        common = allowed if common is None else [factors for factors in common if _is_among(factors, allowed)]
    distinct: list[Tensor] = []
    for factors in common or []:
        if not _is_among(factors, distinct):
            distinct.append(factors)
    return distinct


def _is_among(factors: Tensor, others: Sequence[Tensor]) -> bool:
    """Tell whether factors equal one of several, within `_CLOSE`."""
    return any(torch.allclose(factors, other, rtol=_CLOSE, atol=0, equal_nan=True) for other in others)


def _judged_anew(loss: _Loss, ledger: Ledger) -> LossParts:
    """Judge a loss by the possible meanings of its numbers, and by the ledger."""
    factors, divisors, refused = list[Tensor](), list[Mapping[Node, float]](), list[LossParts]()
    for term in loss.terms:
        of_term = {c.node: abs(1 / c.value) for c in term.constants if c.divides}
        divisors.append(of_term)
        if not bool((term.weights if ledger.strict else term.rows).any()):  # no sample has rows: nothing was selected
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
            of_term[reading.constant.node] = 1.0
    if refused:
        return max(refused, key=lambda one: (one.verdict == "wrong", _distance(one.factors)))
    for other in factors[1:]:
        if not _is_among(other, factors[:1]):
            return LossParts("wrong", _SEVERAL_SHARES, other)
    in_all_terms = set.intersection(*[set(of_term.items()) for of_term in divisors])
    divided_by = math.prod(divisor for _, divisor in in_all_terms)
    multiplied = [abs(constant.value) for term in loss.terms for constant in term.constants if not constant.divides]
    if any(math.isclose(divided_by, factor, rel_tol=1e-6) for factor in multiplied):
        divided_by = 1.0  # a factor undoes the division, such as that of a trainer's adapter
    candidate = loss.page(factors[0] if factors else torch.ones_like(loss.terms[0].weights))
    candidate = replace(candidate, divided_by=divided_by)
    if reason := ledger.objection(candidate):
        return LossParts("unknown", reason)
    return LossParts("right", factors=factors[0] if factors else None, divided_by=divided_by, page=candidate)


def _refuse_undeclared(
    ends: Sequence[SampleRows], outputs: Outputs, declared: Sequence[float], needless: Set[float]
) -> None:
    """Check that each number that counts as declared was declared itself, and does not just equal a declared number.

    Args:
        ends: The rows; a declared number may stand between the rows and the module as well.
        outputs: The values that the module returned.
        declared: The declared numbers, one for each call of ``clipper.constant``.
        needless: Factors that need no declaration.

    Raises:
        Refused: If more operations take a number than declarations name it, and it is not in ``needless``.
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
                "been counted from the batch. Write clipper.constant(number) at each place where the number stands, "
                "and leave a count a whole number, as len(output)"
            )


def _rows(path: Path, outputs: Outputs, owner: Owner | None) -> SampleRows:
    """Return the rows at the end of a path; if these cannot be read, those where the path passes the module's outputs.

    Raises:
        Coupled: If an operation mixes samples there.
        Unreadable: If the samples of the rows cannot be found out.
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
    """Return the message that refuses a loss, or that says why the loss could not be judged."""
    declared = _REDUCTIONS[reduction]
    if parts.verdict in {"unknown", "unverified"}:
        compute = (
            "Let clipper.per_sample_losses(loss_fn, outputs, targets) compute each sample's own loss, and take their "
            f"{reduction.removeprefix('token_')}: then the graph of the loss is not read."
        )
        return f"cannot verify that the loss is the {declared}: {parts.reason}. Nothing was clipped. {compute}"
    extent = ""
    if parts.factors is not None:
        smallest, largest = _extremes(parts.factors)
        same = math.isclose(smallest, largest, rel_tol=_CLOSE)
        numbers = f"{smallest:.3g}" if same else f"{smallest:.3g} to {largest:.3g}"
        extent = f"each sample's part is {numbers} of its own loss: "
    return f"the loss is not the {declared}: {extent}{parts.reason}. Nothing was clipped."


_ADVICE = (
    "Average within each sample first, (loss * mask).sum(1) / mask.sum(1), and then over samples, .mean(), so that no "
    "sample's part depends on the others' rows; or pass loss_reduction='token_mean', where a sample's own loss is the "
    "mean over its own rows"
)

_CLASS_WEIGHTS = (
    "weight= of a mean cross_entropy divides by the sum of the weights in the batch, so every sample changes all "
    "others' parts. Use reduction='none', weight each sample, and take the mean; or pass loss_reduction='token_mean', "
    "where a sample's own loss is the weighted mean over its own labels"
)

_TENSOR = (
    "a tensor with the value {:.6g} multiplies it, and may be computed from the batch. If it is not, multiply by a "
    "float, such as the tensor's .item()"
)

_WHOLE = (
    "a tensor or a whole number, {:.6g}, multiplies or divides it, and may be computed from the batch. Multiply by a "
    "float that is a constant, or write clipper.constant(number) where the number stands in the loss"
)

_EITHER = (
    "a mean was multiplied by {:.6g}, which may be a constant, or 1 over the fraction of its rows that count. Divide "
    "by the number of rows that count, or use a constant that does not depend on the batch"
)

_MEAN_OF_ONE = "it is a mean over the rows of the only sample that has any, and may be a mean over all samples' rows"

_DIVISORS = {
    "mean": "Divide a sum once, by the number of samples, len(output), or take .mean()",
    "sum": "Divide a sum by no count",
    "token_mean": "Divide a sum once, by the number of rows that it adds up, mask.sum(), or take .mean()",
}

_NOT_COUNTED = frozenset(["declared", "torch", "weights"])
"""Origins of constants that are no counts: declared numbers, numbers of torch's functions, and a row's own weight."""

_CUT = (
    "{} cuts or fills values in the loss at a place that may be the length of the longest sample, or puts rows at "
    "places that data decide. Both may depend on other samples. Take halves of each row, such as a mean and a "
    "log-variance, by output.chunk(2, -1), and single columns by output.unbind(-1). Declare any other place of yours "
    "where it stands: output[:, : int(clipper.constant(4))]"
)

_ENDLESS = (
    "it multiplies values by a number that is not finite, such as 1 over a count of the batch that is 0: then the "
    "other samples decide whether a sample has a gradient"
)

_SEVERAL_SHARES = (
    "it adds up terms in which a sample has different shares. Average each term within each sample first, and then "
    "over samples"
)


def _joined(found: Sequence[Path], terms: Sequence[LossTerm], kinds: Sequence[Kind]) -> list[LossTerm]:
    """Join terms of single samples into one term, as of ``torch.stack([loss(o[i]) for i in range(B)]).mean()``.

    Returns:
        All terms, the joined ones and the others.

    Raises:
        Unreadable: If a mean is over other values, too.
    """
    if terms and len(terms[0].weights) == 1:
        return list(terms)
    single = [i for i, term in enumerate(terms) if int((term.weights > 0).sum()) == 1 and term.share is None]
    shared: dict[Kind, Counter[Node]] = defaultdict(Counter)
    for i in single:
        shared[kinds[i]].update(_nodes(found[i]))
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i in single:  # a sample may have a term of each kind, as in exp(output) - target * output
        groups[kinds[i], *[node for node in _nodes(found[i]) if shared[kinds[i]][node] > 1]].append(i)
    together = [members for members in groups.values() if len(members) > 1]
    taken = {i for members in together for i in members}
    joined = [term for i, term in enumerate(terms) if i not in taken]
    for members in together:
        nodes, singles = shared[kinds[members[0]]], [terms[i] for i in members]
        above = [_above(found[i], nodes) for i in members]
        counts = torch.stack(
            [(t.weights > 0) * (to[-1].input.shape.numel() if to else 1) for t, to in zip(singles, above, strict=True)]
        ).sum(0, dtype=singles[0].weights.dtype)
        mean = math.prod(step.mean for step in above[0] if step.operation in MEANS)
        size = float(counts.sum())
        if mean != 1 and not math.isclose(mean * size, 1):
            raise Unreadable("a mean of single samples' terms is over other values, too")
        share = counts * mean if mean != 1 else None
        constants = tuple(constant for constant in singles[0].constants if nodes[constant.node] > 1)
        of_one = int((counts > 0).sum()) == 1 and all(term.is_mean for term in singles)
        joined.append(
            LossTerm(
                weights=counts,
                size=size,
                even=True,
                labels=False,
                share=share,
                levels=[],
                constants=constants,
                rows=counts,
                summed=counts,
                width=singles[0].width,
                is_mean=share is not None or of_one,
                numbers=_numbers(singles),
            )
        )
    return joined


def _above(path: Path, nodes: Counter[Node]) -> list[LinearStep]:
    """Return the operations, from the root down, that a path shares with other paths."""
    return list(itertools.takewhile(lambda step: nodes[step.value.node] > 1, reversed(path.steps)))


def _averaged_together(terms: Sequence[LossTerm]) -> list[LossTerm]:
    """Join terms that one mean reduces together, as in ``torch.cat([loss(part) for part in parts]).mean()``."""
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
    """Return the operations on a path, including those of its constants."""
    return [step.value.node for step in path.steps] + [constant.node for constant in path.constants]


def _likeliest(found: Sequence[Reading], term: LossTerm, reduction: str) -> Reading:
    """Return the reading by which a term is judged.

    Raises:
        Refused: If several readings are possible and give samples different shares.
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
    ignore_one = size > 1  # a division by 1 is no division by a count
    counts = [one for one in found[:-1] if not (ignore_one and one.constant and abs(one.constant.value) == 1)]
    if not counts:
        return own
    likeliest = min(counts, key=_is_constant)
    constant = likeliest.constant
    if constant is not None and not constant.divides and abs(constant.value) == 0.5 and reduction != "mean":
        raise Refused("a sum over 2 samples or rows was multiplied by 0.5, which may be a mean or a constant")
    if reduction != "sum" and not same_shares(counts):
        raise Refused(
            f"a sum was divided by {size}, which is both the number of samples and the number of rows. Begin with "
            "another batch, or divide within each sample first"
        )
    return likeliest


def _is_constant(reading: Reading) -> tuple[bool, bool]:
    """Return a sort key: readings of tensors come first, then those of divisors, then those of likely constants."""
    constant = reading.constant
    return constant is not None and constant.origin != "tensor", constant is not None and not constant.divides


def _doubt(reading: Reading, found: Sequence[Reading], term: LossTerm, reduction: str) -> str:
    """Return why a term that seems right cannot be accepted: a number in it may follow the batch; "" if it can."""
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
    """Return each sample's part in a term of private training, where no number gets its meaning from its value.

    The loss's structure and the counts of this batch fix the product of all numbers. A mean over all rows has no
    number. A sum has the one divisor that the declared reduction names. Every undeclared factor must be 0.5. So every
    batch that could be accepted gives a sample the same gradient.

    Raises:
        Refused: If the product of the numbers is another.
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
        within = len([c for c in given if c.divides and shape_of(c.node)])  # divisors within samples, before their sum
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
                "expected. In private training any number may have been counted from the batch, whatever its value. "
                f"{_DIVISORS[reduction]}. Declare a number that is yours where it stands in the loss: "
                "clipper.constant(number), with .item() of a tensor. Only the factor 0.5 needs no declaration: instead "
                "of loss / 2 write 0.5 * loss, or loss / clipper.constant(2). (If the number is that of mini-batches, "
                "leave the division out: the clipper averages over all samples)"
            )
    if reduction == "token_mean":
        return (share * size).where(share > 0, math.nan)
    return _compared(term, share, reduction if term.share is not None or by_torch else "mean")


def _torch_divides(numbers: Sequence[Constant]) -> bool:
    """Tell whether a function of torch's divides a sum by its rows, as `cross_entropy` with smoothed or soft labels."""
    return any(c.origin == "torch" and c.divides for c in numbers) or any(
        above.origin == "torch" and one.origin == "tensor" and one.divides for above, one in itertools.pairwise(numbers)
    )


def _of_row(constant: Constant, term: LossTerm) -> bool:
    """Tell whether a divisor equals the number of values of a row along its last dimensions."""
    return constant.divides and any(n > 1 and math.isclose(abs(1 / constant.value), n) for n in term.inner)


def _by(reading: Reading, term: LossTerm, reduction: str) -> Tensor:
    """Return each sample's part in a term, as a multiple of its own loss, according to one reading.

    Raises:
        Refused: If the term then does not have the declared reduction.
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
        raise Refused(
            f"a sum over samples was multiplied by {multiplied.value:.3g}, which may be a constant or 1 over the rows"
        )
    return _compared(term, reading.share, reduction)


def _compared(term: LossTerm, share: Tensor, reduction: str) -> Tensor:
    """Return each sample's part in a term from its share of a mean.

    Raises:
        Coupled: If the term is not the declared reduction of the samples' own losses.
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
    reason = f"it is a mean over {float(term.weights.sum()):.4g} {rows}, and samples have {' to '.join(counts)} of them"
    raise Coupled(f"{reason}. {_ADVICE}", factors)


def _judged_sum(term: LossTerm, reduction: str) -> Tensor:
    """Return each sample's part in a term that is a sum, and that no number of rows or samples divides.

    Raises:
        Coupled: If the term is no sum over samples, or the declared reduction is not a sum.
        Refused: If either cannot be decided.
    """
    batch_size, count, ones = len(term.weights), float(term.weights.sum()), torch.ones_like(term.weights)
    partly = (term.labels and count > batch_size) or count < term.size  # several labels a sample, or a mask
    users = {c.node: abs(1 / c.value) for c in term.constants if c.divides and not _of_row(c, term)}
    divisor = math.prod(users.values())
    if divisor % 1 == 0 and divisor >= 2 and (reduction != "sum" or (partly and divisor >= count / 2)):
        # Where rows are counted, a sample's own loss is the mean of its rows; else it is their sum.
        own = term.weights if partly else ones
        raise Coupled(
            f"a sum over {count:.4g} rows was divided by {divisor:.6g}, which is neither their number nor the number "
            f"of samples ({batch_size}). (Were labels counted before a shift, or for several mini-batches? The clipper "
            f"averages over all mini-batches by itself.) {_ADVICE}",
            (own * batch_size / divisor).where(term.weights > 0, math.nan),
        )
    if reduction == "sum" or batch_size == 1:
        return ones
    factor = math.prod(abs(c.value) for c in term.constants)
    if not term.even or factor * batch_size < 1:
        raise Refused(
            f"the rows of a sum are weighted, or multiplied by {factor:.3g}, which may hold 1/{batch_size} as a factor"
        )
    raise Coupled("it is a sum. Use loss_reduction='sum', or divide by the number of samples", ones * batch_size)


def _extremes(values: Tensor) -> tuple[float, float]:
    known = values[~values.isnan()]
    return (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)


def _distance(factors: Tensor | None) -> float:
    """Return the largest distance of a factor from 1; infinity where factors are unknown."""
    return math.inf if factors is None else max(abs(extreme - 1) for extreme in _extremes(factors))
