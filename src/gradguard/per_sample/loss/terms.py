r"""Tells from a loss's graph whether it is the mean, or the sum, of what each sample's loss is by itself.

A loss is a sum of terms; each reduces *rows*, such as the losses of single tokens, by means, sums and constants. Had
the batch been sample i alone, a mean over all n rows would have been one over its own n_i. So in a loss that is said to
be the mean over B samples, the sample's part is

.. math:: f_i = B \cdot n_i / n

of its own loss; 1 for a mean over samples, and B for a sum over them. The loss is right if every f_i is 1. Other
constant factors are the user's.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.graph import (
    LABELLED,
    MEANS,
    Constant,
    Dependence,
    Path,
    Root,
    Step,
    Unreadable,
    operation,
    parents,
    paths,
    shape_of,
)
from gradguard.per_sample.loss.rows import Coupled, Owner, Term, mean_of, owner_of, term_of
from gradguard.per_sample.loss.separation import Outputs

Verdict = Literal["right", "wrong", "unknown", "unverified"]

NO_PART = "the loss does not depend on the module's outputs"
"""The reason for a loss of something else."""

_CLOSE = 1e-4
"""How far a factor may be from 1."""


class _Ambiguous(Exception):  # noqa: N818
    """A constant may be the user's, or a number of samples."""


@dataclass
class Experience:
    """Evidence of earlier losses on ambiguous numbers: a constant of the user, or a number of samples or rows.

    Attributes:
        constants: Numbers by which losses were multiplied that were no number of samples or rows there.
        sizes: Sizes of constants that were not the number of samples there.
        divisors: What sums were divided by: ``"samples"``, ``"rows"``.
        by_samples: Numbers by which sums were multiplied that were 1 over the number of samples.
        sum_divisors: Numbers by which sums over samples were divided that are to stay sums.
        either: Numbers by which means were multiplied that were a number of samples or rows there, or constants: the
            next that is another tells that it was no constant.
        strict: Accept none of these.
        counts: Numbers that may be computed from data, by which terms were multiplied.
        lengths: For each term, how many values of a sample its means took, those that do not count included, and how
            many values of each sample the module returned.
        holes: The terms of which some of these did not count.
    """

    constants: set[float] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)
    divisors: set[str] = field(default_factory=set)
    by_samples: set[float] = field(default_factory=set)
    sum_divisors: set[float] = field(default_factory=set)
    either: set[float] = field(default_factory=set)
    strict: bool = False
    counts: set[float] | None = None
    lengths: set[tuple[int, float, float]] = field(default_factory=set)
    holes: set[int] = field(default_factory=set)

    def add(self, other: "Experience") -> None:
        """Learn what another knows."""
        self.constants |= other.constants
        self.sizes |= other.sizes
        self.divisors |= other.divisors
        self.by_samples |= other.by_samples
        self.sum_divisors |= other.sum_divisors
        self.either |= other.either
        self.counts = (self.counts or set()) | (other.counts or set())
        self.lengths |= other.lengths
        self.holes |= other.holes


@dataclass(frozen=True)
class LossParts:
    """What was found.

    Attributes:
        verdict: ``"right"`` if each sample's part is its own loss, ``"wrong"`` if not, ``"unknown"`` if a constant may
            be the user's or a number of samples, ``"unverified"`` if it cannot be told whether samples have parts.
        reason: What was found if it is not right, in words.
        factors: Each sample's part as a multiple of its own loss, for the term where it is furthest from 1; None if
            unknown. NaN for a sample without a row.
        divided_by: The number that the whole loss is divided by besides, as for the accumulation of as many
            mini-batches; 1 if there is none.
        terms: Number of terms that the loss adds up.
        weighted: Whether tensors decide weights of rows, which the next batch may change.
        owners: Whose the rows of each term are.
        label_owners: Whose the labels are of each operation that takes the mean over labels of several samples.
        learned: What it shows of numbers.
    """

    verdict: Verdict
    reason: str = ""
    factors: Tensor | None = None
    divided_by: float = 1.0
    terms: int = 1
    weighted: bool = False
    owners: Sequence[Owner] = ()
    label_owners: Mapping[Node, Tensor] = field(default_factory=dict)
    learned: Experience = field(default_factory=Experience)


def loss_parts(
    roots: Sequence[Root],
    outputs: Outputs,
    reduction: str,
    *,
    scale: float = 1.0,
    known: LossParts | None = None,
    experience: Experience | None = None,
    chosen: bool = False,
) -> LossParts:
    """Compare each sample's part in a loss with the sample's own loss; before the backward, which frees the graph.

    Args:
        roots: What backward starts from; their sum is the loss.
        outputs: What the module returned for a batch of B samples.
        reduction: What the loss is said to be: ``"mean"``, ``"sum"`` or ``"token_mean"``.
        scale: What a GradScaler, or a trainer, multiplied the loss by.
        known: What was found of a loss that is made in the same way: whose the rows are is not looked at again.
        experience: What earlier losses have shown.
        chosen: Data decide which rows count, so that their number is each sample's own.

    Returns:
        What was found; nothing is raised for a loss that is wrong, or cannot be read.
    """
    experience = experience or Experience()
    learned = Experience()
    outputs.constant_sizes = experience.sizes
    try:
        depends = Dependence()
        found_paths = list(paths(roots, depends, outputs.values, outputs.numbers))
        owners = known.owners if known else [_owner(path, outputs, depends) for path in found_paths]
        terms = [
            term_of(path.output if not owner.name and path.output else path, owner, outputs.batch_size, scale)
            for path, owner in zip(found_paths, owners, strict=True)
        ]
        together = _averaged_together(_joined(found_paths, terms))
        if not together:
            return LossParts("unknown", NO_PART)
        totals = _totals(together)
        found = [_judged(term, totals, reduction, experience, learned) for term in together]
    except Coupled as coupled:
        return LossParts("wrong", str(coupled))
    except _Ambiguous as ambiguous:
        return LossParts("unknown", str(ambiguous))
    except Unreadable as unreadable:
        return LossParts("unverified", str(unreadable))
    for verdict in ("wrong", "unknown"):
        worst = [judged.parts for judged in found if judged.parts.verdict == verdict]
        if worst:
            return max(worst, key=_distance)
    factors = [judged.parts.factors for judged in found if judged.parts.factors is not None]
    for other in factors[1:]:
        if not torch.allclose(other, factors[0], rtol=_CLOSE, atol=0, equal_nan=True):
            return LossParts("wrong", _SEVERAL_SHARES, other)
    learned.lengths = {
        (i, length, outputs.values_of_each)
        for i, (term, one) in enumerate(zip(together, found, strict=True))
        if (length := _length(term, one)) is not None
    }
    learned.holes = {i for i, term in enumerate(together) if _has_holes(term)}
    for i, length, returned in learned.lengths:
        others = {(n, size) for k, n, size in experience.lengths if k == i and n != length}
        cut = any(size == returned for _, size in others)
        if (
            others
            and reduction != "token_mean"
            and not chosen
            and (cut or experience.strict or i in experience.holes | learned.holes)
        ):
            return LossParts("unknown", _PADDED)
    learned.counts = {
        constant.value
        for term, one in zip(together, found, strict=True)
        for constant in term.constants
        if constant.may_be_data and constant is not one.matched
    }
    known_counts = experience.counts or ({1.0} if experience.counts is not None else learned.counts)
    if not learned.counts <= known_counts:  # the end of a schedule of floats is often a 1
        return LossParts("unknown", _CHANGING)
    learned.sizes |= outputs.repeated - {outputs.batch_size}
    return LossParts(
        "right",
        factors=factors[0] if factors else None,
        divided_by=_common_divisor(found, together),
        terms=len(found),
        weighted=any(path.weighted for path in found_paths),
        owners=owners,
        label_owners={
            path.node: owner.samples
            for path, owner, term in zip(found_paths, owners, terms, strict=True)
            if owner.name in LABELLED and term.share is not None
        },
        learned=learned,
    )


def _length(term: Term, judged: "_Judged") -> float | None:
    """Return how many values of a sample count, padding included; None for a sum that a mask leaves some out of."""
    divisor = 1.0 if judged.matched is None else abs(1 / judged.matched.value)
    sizes = [size for size in (term.size, *[level.size for level in term.levels]) if math.isclose(size, divisor)]
    if sizes:
        return term.length * sizes[0] / len(term.weights)
    if term.share is not None:
        return term.length
    if _has_holes(term) and (term.weighted or term.labels):
        return None
    return term.length * float((term.weights if term.even else term.rows).max())


def _has_holes(term: Term) -> bool:
    """Whether values that a mean takes, or that are counted, do not contribute."""
    return term.holes or (term.share is None and term.even and float(term.weights.sum()) < term.size)


def _owner(path: Path, outputs: Outputs, depends: Dependence) -> Owner:
    """Return whose the rows at the end of a path are, or at its end in what the module returned.

    Raises:
        Coupled: If samples are mixed there.
        Unreadable: If that cannot be told.
    """
    try:
        return owner_of(path, outputs, depends)
    except Unreadable:
        if path.output is None:
            raise
        return owner_of(path.output, outputs, depends, is_output=True)


_REDUCTIONS = {"mean": "mean over samples", "sum": "sum over samples", "token_mean": "mean over rows"}


def explain(parts: LossParts, reduction: str) -> str:
    """Return the message that refuses a loss, or says why it could not be told."""
    declared = _REDUCTIONS[reduction]
    if parts.verdict in {"unknown", "unverified"}:
        compute = (
            "Compute one loss for each sample, of shape [B], by PyTorch's own operations, uncompiled, and take its "
            f"{reduction.removeprefix('token_')}. (check='warn' accepts it as it is: then nothing shows that a "
            "sample's gradient does not depend on the others.)"
        )
        return f"whether the loss is the {declared} cannot be told: {parts.reason}. Nothing was clipped. {compute}"
    extent = ""
    if parts.factors is not None:
        smallest, largest = _extremes(parts.factors)
        same = math.isclose(smallest, largest, rel_tol=_CLOSE)
        numbers = f"{smallest:.3g}" if same else f"{smallest:.3g} to {largest:.3g}"
        extent = f"each sample's part is {numbers} of its own loss: "
    return (
        f"the loss is not the {declared}: {extent}{parts.reason}. Nothing was clipped. (check='warn' "
        "accepts it: the bound on each sample holds, but norms are in that scale.)"
    )


Totals = dict[Node, Tensor]
"""The weights of all terms that share a constant, by sample."""

_ADVICE = (
    "Average within each sample first, (loss * mask).sum(1) / mask.sum(1), and then over samples, .mean(), so that no "
    "sample's part depends on what others have; or say loss_reduction='token_mean', where a sample's own loss is the "
    "mean over its own rows"
)

_CHANGING = (
    "a tensor, or a whole number, multiplies it that has changed since the step before. If it is computed from the "
    "batch, every sample's part depends on the others; if it is not, multiply by a float, such as its .item()"
)

_PADDED = (
    "the mean counts padding, up to a length that changes from batch to batch, so that every sample's part depends on "
    "the longest. Average over each sample's own rows, (loss * mask).sum(1) / mask.sum(1), or pad to one length"
)

_SEVERAL_SHARES = (
    "it adds up terms of which a sample has different shares. Average each term within each sample first, and then "
    "over samples"
)


def _joined(found: Sequence[Path], terms: Sequence[Term]) -> list[Term]:
    """Join terms of one sample each to one of all: those of ``torch.stack([loss(o[i]) for i in range(B)]).mean()``.

    Returns:
        All terms.

    Raises:
        Unreadable: If how much of a mean they are cannot be told.
    """
    if terms and len(terms[0].weights) == 1:
        return list(terms)
    single = [int((term.weights > 0).sum()) == 1 and term.share is None for term in terms]
    nodes = Counter(node for path, one in zip(found, single, strict=True) if one for node in _nodes(path))
    groups: dict[tuple[Node, ...], list[int]] = defaultdict(list)
    for i, path in enumerate(found):
        if single[i]:
            groups[tuple(node for node in _nodes(path) if nodes[node] > 1)].append(i)
    together = [members for members in groups.values() if len(members) > 1]
    taken = {i for members in together for i in members}
    joined = [term for i, term in enumerate(terms) if i not in taken]
    for members in together:
        sizes = [_values_joined(found[i], nodes) for i in members]
        counts = torch.stack(
            [(terms[i].weights > 0).to(terms[i].weights) * n for i, n in zip(members, sizes, strict=True)]
        ).sum(0)
        mean = math.prod(mean_of(step) for step in _above(found[members[0]], nodes) if operation(step.node) in MEANS)
        if mean != 1 and not math.isclose(mean * float(counts.sum()), 1):
            raise Unreadable("a mean of single samples' terms is over other values, too")
        share = counts * mean if mean != 1 else None
        constants = tuple(constant for constant in terms[members[0]].constants if nodes[constant.node] > 1)
        joined.append(Term(counts, float(counts.sum()), True, False, share, [], constants, counts))
    return joined


def _averaged_together(terms: Sequence[Term]) -> list[Term]:
    """Join terms that one mean takes side by side: those of ``torch.cat([loss(part) for part in parts]).mean()``."""
    groups: dict[Node, list[Term]] = defaultdict(list)
    for term in terms:
        if term.mean is not None:
            groups[term.mean[0]].append(term)
    joined = [term for term in terms if term.mean is None]
    for node, members in groups.items():
        counts = torch.stack([term.mean[1] for term in members if term.mean is not None]).sum(0)
        [(child, number)] = parents(node)
        if len(members) == 1 or float(counts.sum()) * shape_of(node).numel() != shape_of(child, number).numel():
            joined += members
            continue
        joined.append(
            Term(
                weights=torch.stack([term.weights for term in members]).sum(0),
                size=sum(term.size for term in members),
                even=all(term.even for term in members),
                labels=all(term.labels for term in members),
                share=counts / counts.sum(),
                rows=torch.stack([term.rows for term in members]).sum(0),
                levels=[],
                constants=tuple(c for c in members[0].constants if all(c in term.constants for term in members)),
            )
        )
    return joined


def _above(path: Path, nodes: Counter[Node]) -> list[Step]:
    """The operations, from the root down, that a path shares with others."""
    return list(itertools.takewhile(lambda step: nodes[step.node] > 1, reversed(path.steps)))


def _values_joined(path: Path, nodes: Counter[Node]) -> int:
    """The number of values that a path brings to the first operation that it shares with others."""
    above = _above(path, nodes)
    if not above:
        return 1
    child, number = above[-1].node.next_functions[above[-1].which]
    assert child is not None
    return shape_of(child, number).numel()


def _nodes(path: Path) -> list[Node]:
    """What a path passes that other paths may pass as well."""
    return [step.node for step in path.steps] + [constant.node for constant in path.constants]


@dataclass(frozen=True)
class _Judged:
    """The verdict on one term, its other divisors, and the constant that turns its sum into a mean."""

    parts: LossParts
    divisors: dict[Node, float]
    matched: Constant | None = None


def _judged(term: Term, totals: Totals, reduction: str, experience: Experience, learned: Experience) -> _Judged:
    """Compare one term with what it would be for each sample alone."""
    divisors = {c.node: abs(1 / c.value) for c in term.constants if c.divides}
    if not bool(term.rows.any()):  # of no sample at all, as where nothing was chosen
        return _Judged(LossParts("right"), divisors)
    if term.share is not None:
        return _judged_mean(term, term.share, reduction, experience, learned, divisors)
    match = _match(term, totals, reduction, experience, learned)
    if match is not None:
        share, constant = match
        if constant is not None and constant.divides:
            divisors[constant.node] = 1.0
        elif constant is not None and reduction == "sum" and not math.isclose(abs(1 / constant.value), len(share)):
            reason = f"a sum over samples was multiplied by {constant.value:.3g}, a constant or 1 over the rows"
            return _Judged(LossParts("unknown", reason), divisors)
        return _Judged(_compared(term, share, reduction), divisors, constant)
    return _Judged(_judged_sum(term, divisors, reduction, experience, learned), divisors)


def _judged_mean(
    term: Term, share: Tensor, reduction: str, experience: Experience, learned: Experience, divisors: dict[Node, float]
) -> _Judged:
    """Judge a term that a mean over the batch reduced, and constants multiplied."""
    batch_size, constants = len(share), list(term.constants)
    if math.isclose(abs(math.prod(c.value for c in constants)), 1, rel_tol=1e-6):
        constants = []  # one undoes another, as a trainer's and its adapter's
    weights = [(term.weights, term.size), *[(level.counts, level.size) for level in term.levels]]
    counts = {float(each.sum()) for each, _ in weights}
    if reduction == "sum":
        factors = [abs(c.value) for c in constants]
        if any(math.isclose(factor, count, rel_tol=1e-6) for count in (*counts, term.size) for factor in factors):
            return _Judged(LossParts("right", factors=torch.ones_like(share)), divisors)
        is_sum = any(math.isclose(factor, batch_size, rel_tol=1e-6) for factor in factors)
        return _Judged(_compared(term, share, "mean" if is_sum else reduction), divisors)
    for constant, (each, size) in itertools.product(constants, weights):  # as of (losses * mask).mean() / mask.mean()
        means = (float(each.sum()) / size, float(each.sum()) / batch_size)
        if constant.value != 1 and any(math.isclose(1 / constant.value, mean, rel_tol=1e-6) for mean in means):
            return _Judged(_compared(term, each / each.sum(), reduction), divisors, constant)
    for factor in {abs(constant.value) for constant in constants}:
        sizes = [n for n in (batch_size, *counts, term.size) if any(math.isclose(f, n) for f in (factor, 1 / factor))]
        if factor == 1 or not sizes or factor in experience.constants:
            learned.constants.add(factor)
        elif experience.strict or experience.either - {factor}:
            before = "".join(f"; it was {number:.6g} before" for number in sorted(experience.either - {factor}))
            reason = (
                f"a mean was multiplied by {factor:.6g}, a constant or the number of "
                f"{'samples' if batch_size in sizes else 'rows'}{before}. Use a constant that does not depend on the "
                "batch, and another than the number of samples in the first one. (If it is the number of mini-batches, "
                "leave the division away: the clipper averages over all samples by itself)"
            )
            return _Judged(LossParts("unknown", reason), divisors)
        else:
            learned.either.add(factor)
    return _Judged(_compared(term, share, reduction), divisors)


def _compared(term: Term, share: Tensor, reduction: str) -> LossParts:
    """Judge a term by each sample's share of a mean."""
    factors = (share if reduction == "sum" else share * len(share)).where(share > 0, math.nan)
    if reduction == "sum" and len(share) > 1:
        return LossParts("wrong", "it is a mean. Use loss_reduction='mean', or a loss that adds samples up", factors)
    if reduction == "token_mean" or _distance(LossParts("right", factors=factors)) <= _CLOSE:
        return LossParts("right", factors=factors)
    rows = "labels" if term.labels else "weights of the rows" if not term.even else "rows"
    counts = [f"{count:.4g}" for count in _extremes(term.weights)]
    reason = f"it is a mean over {float(term.weights.sum()):.4g} {rows}, of which samples have {' to '.join(counts)}"
    return LossParts("wrong", f"{reason}. {_ADVICE}", factors)


def _judged_sum(
    term: Term, divisors: dict[Node, float], reduction: str, experience: Experience, learned: Experience
) -> LossParts:
    """Judge a term that a sum over the batch reduced, and that was not divided by any number of rows or samples."""
    batch_size, count = len(term.weights), float(term.weights.sum())
    divisor = math.prod(divisors.values())
    rows = "labels" if term.labels else "rows"
    counted = float(divisor).is_integer() and divisor >= 2
    if counted and (reduction != "sum" or (_partly(term) and divisor >= count / 2)):
        reason = (
            f"a sum over {count:.4g} {rows} was divided by {divisor:.6g}, which is neither their number nor the number "
            f"of samples ({batch_size})"
        )
        hint = " (counted before the shift, or for several mini-batches?)" if term.labels else ""
        if divisor % batch_size == 0 and not hint:
            hint = " (that of several mini-batches? The clipper averages over all of them by itself)"
        own = term.weights if _partly(term) else 1.0  # a sum of a sample's own, or its mean where rows are counted
        factors = torch.full_like(term.weights, batch_size / divisor) * own
        factors = factors.where(term.weights > 0, math.nan)
        return LossParts("wrong", f"{reason}{hint}. {_ADVICE}", factors)
    if reduction == "sum":
        if counted and experience.sum_divisors and divisor not in experience.sum_divisors:
            before = ", ".join(f"{number:.6g}" for number in sorted(experience.sum_divisors))
            return LossParts(
                "unknown",
                f"a sum over samples was divided by {divisor:.6g}, and before by {before}: is it a number of rows? "
                "Divide by a number that does not depend on the batch",
            )
        if counted:
            learned.sum_divisors.add(divisor)
        return LossParts("right", factors=torch.ones_like(term.weights))
    if batch_size == 1:
        return LossParts("right", factors=torch.ones_like(term.weights))
    if not term.even:
        return LossParts("unknown", f"a sum over samples has unequal weights, which may hold 1/{batch_size}")
    factor = math.prod(abs(c.value) for c in term.constants)
    if factor * batch_size < 1:
        return LossParts("unknown", f"a sum over samples was multiplied by {factor:.3g}, which may hold 1/{batch_size}")
    factors = torch.full_like(term.weights, batch_size)
    return LossParts("wrong", "it is a sum. Use loss_reduction='sum', or divide by the number of samples", factors)


def _match(
    term: Term, totals: Totals, reduction: str, experience: Experience, learned: Experience
) -> tuple[Tensor, Constant | None] | None:
    """Find the constant by which a sum was made a mean, and each sample's share of it."""
    batch_size, count = len(term.weights), float(term.weights.sum())
    each = torch.full_like(term.weights, 1 / batch_size)
    if not term.even and math.isclose(count, 1, rel_tol=1e-5):  # weights that add up to 1
        return term.weights / count, None
    for constant in term.constants:
        number = abs(1 / constant.value)
        if reduction == "sum" and number in experience.sum_divisors:
            continue
        of_samples = math.isclose(number, batch_size, rel_tol=constant.precision)
        for weights in (term.weights, totals[constant.node], *[level.counts for level in term.levels]):
            if math.isclose(number, float(weights.sum()), rel_tol=constant.precision):
                share = weights / weights.sum()
                if of_samples and not torch.allclose(share, each):
                    if experience.divisors != {"samples"}:
                        raise _Ambiguous(
                            f"a sum was divided by {batch_size}, which is both the number of samples and that of the "
                            "rows. Begin with another batch, or divide within each sample first"
                        )
                    continue
                if not of_samples:
                    learned.divisors.add("rows")
                return share, constant
        sizes = [] if term.labels else [(term.rows, term.size), *[(level.rows, level.size) for level in term.levels]]
        if not of_samples and abs(constant.value) in experience.by_samples:
            raise _Ambiguous(
                f"a sum over {batch_size} samples was multiplied by {constant.value:.6g}, which was 1 over the number "
                "of samples before. Divide by the number of samples, len(loss)"
            )
        of_samples = of_samples and abs(constant.value) not in experience.constants
        whole = next((rows for rows, n in sizes if math.isclose(number, n, rel_tol=constant.precision)), None)
        if whole is not None or of_samples:
            is_constant = reduction == "sum" and not constant.divides and math.isclose(number, 2, rel_tol=1e-6)
            if is_constant and abs(constant.value) not in experience.constants:
                raise _Ambiguous("a sum over 2 samples was multiplied by 0.5, which may be a mean or a constant")
            if is_constant:
                continue
            if whole is not None and not of_samples:
                return whole / whole.sum(), constant
            if experience.strict and whole is None and not constant.divides and batch_size > 1:
                raise _Ambiguous(
                    f"a sum over {batch_size} samples was multiplied by {constant.value:.6g}, which is 1 over their "
                    "number or a constant. Divide by the number of samples, len(loss)"
                )
            if whole is None:
                learned.divisors.add("samples")
            if constant.value != 1:
                learned.by_samples.add(abs(constant.value))
            return each, constant
        total = float(term.weights.sum())
        whole_rows = any(math.isclose(number * n, total, rel_tol=constant.precision) for n in term.inner if n > 1)
        if reduction == "token_mean" and whole_rows:
            return term.weights / total, constant  # rows of several values
        learned.constants.add(abs(constant.value))
    return None


def _partly(term: Term) -> bool:
    """Tell whether rows are counted: labels of several places, or rows of which some do not contribute."""
    count = float(term.weights.sum())
    return (term.labels and count > len(term.weights)) or count < term.size


def _totals(terms: Sequence[Term]) -> Totals:
    totals: Totals = {}
    for term in terms:
        for node in {constant.node for constant in term.constants}:
            totals[node] = totals[node] + term.weights if node in totals else term.weights
    return totals


def _extremes(values: Tensor) -> tuple[float, float]:
    known = values[~values.isnan()]
    return (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)


def _distance(parts: LossParts) -> float:
    """How far from 1 a factor is."""
    return math.inf if parts.factors is None else max(abs(extreme - 1) for extreme in _extremes(parts.factors))


def _common_divisor(found: Sequence[_Judged], terms: Sequence[Term]) -> float:
    """What all terms are divided by; 1 where a factor undoes that, as a trainer's adapter does."""
    common = set.intersection(*[set(judged.divisors.items()) for judged in found])
    divisor = math.prod(divisor for _, divisor in common)
    factors = [abs(constant.value) for term in terms for constant in term.constants if not constant.divides]
    return 1.0 if any(math.isclose(divisor, factor, rel_tol=1e-6) for factor in factors) else divisor
