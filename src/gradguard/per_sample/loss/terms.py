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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.graph import (
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
from gradguard.per_sample.loss.rows import Coupled, Term, mean_of, term_of
from gradguard.per_sample.loss.separation import Outputs

Verdict = Literal["right", "wrong", "unknown", "unverified"]

NO_PART = "the loss does not depend on the module's outputs"
"""The reason for a loss of something else."""

_CLOSE = 1e-4
"""How far a factor may be from 1."""


class _Ambiguous(Exception):  # noqa: N818
    """A constant may be the user's, or a number of samples."""


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
    """

    verdict: Verdict
    reason: str = ""
    factors: Tensor | None = None
    divided_by: float = 1.0
    terms: int = 1


def loss_parts(roots: Sequence[Root], outputs: Outputs, reduction: str, *, scale: float = 1.0) -> LossParts:
    """Compare each sample's part in a loss with the sample's own loss; before the backward, which frees the graph.

    Args:
        roots: What backward starts from; their sum is the loss.
        outputs: What the module returned for a batch of B samples.
        reduction: What the loss is said to be: ``"mean"`` or ``"sum"``.
        scale: What a GradScaler, or a trainer, multiplied the loss by.

    Returns:
        What was found; nothing is raised for a loss that is wrong, or cannot be read.
    """
    if outputs.batch_size < 2:
        return LossParts("unknown", "a batch of one sample does not tell a mean from a sum")
    try:
        depends = Dependence()
        found_paths = list(paths(roots, depends, outputs.values, outputs.numbers))
        terms = [_readable_term(path, outputs, scale, depends) for path in found_paths]
        terms = _averaged_together(_joined(found_paths, terms))
        if not terms:
            return LossParts("unknown", NO_PART)
        totals = _totals(terms)
        found = [_judged(term, totals, reduction) for term in terms]
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
    return LossParts(
        "right", factors=found[0].parts.factors, divided_by=_common_divisor(found, terms), terms=len(found)
    )


def _readable_term(path: Path, outputs: Outputs, scale: float, depends: Dependence) -> Term:
    """Return what lies at the end of a path.

    Raises:
        Coupled: If samples are mixed there.
        Unreadable: If that cannot be told.
        _Ambiguous: Likewise, within the module, of which two samples were looked at.
    """
    try:
        return term_of(path, outputs, scale, depends)
    except Unreadable as unreadable:
        if path.output is not None:
            return term_of(path.output, outputs, scale, depends, is_output=True)
        if path.inside:
            raise _Ambiguous(str(unreadable)) from unreadable
        raise


def explain(parts: LossParts, reduction: str) -> str:
    """Return the message that refuses a loss, or says why it could not be told."""
    if parts.verdict == "unknown":
        return f"whether the loss is the {reduction} over samples cannot be told: {parts.reason}."
    if parts.verdict == "unverified":
        return (
            f"whether the loss is the {reduction} over samples cannot be told: {parts.reason}. Nothing was clipped. "
            "Compute one loss for each sample, of shape [B], by PyTorch's own operations, uncompiled, and take its "
            f"{reduction}. (check='warn' accepts it as it is: then nothing shows that a sample's gradient does not "
            "depend on the others.)"
        )
    extent = ""
    if parts.factors is not None:
        smallest, largest = _extremes(parts.factors)
        same = math.isclose(smallest, largest, rel_tol=_CLOSE)
        numbers = f"{smallest:.3g}" if same else f"{smallest:.3g} to {largest:.3g}"
        extent = f"each sample's part is {numbers} of its own loss: "
    return (
        f"the loss is not the {reduction} over samples: {extent}{parts.reason}. Nothing was clipped. (check='warn' "
        "accepts it: the bound on each sample holds, but norms are in that scale.)"
    )


Totals = dict[Node, Tensor]
"""The weights of all terms that share a constant, by sample."""

_ADVICE = (
    "Average within each sample first, (loss * mask).sum(1) / mask.sum(1), and then over samples, .mean(), so that no "
    "sample's part depends on what others have"
)


def _joined(found: Sequence[Path], terms: Sequence[Term]) -> list[Term]:
    """Join terms of one sample each to one of all: those of ``torch.stack([loss(o[i]) for i in range(B)]).mean()``.

    Returns:
        All terms.

    Raises:
        Unreadable: If how much of a mean they are cannot be told.
    """
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
        joined.append(Term(counts, float(counts.sum()), True, False, share, [], constants))
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
    """What is found of one term, and what it is divided by besides."""

    parts: LossParts
    divisors: dict[Node, float]


def _judged(term: Term, totals: Totals, reduction: str) -> _Judged:
    """Compare one term with what it would be for each sample alone."""
    divisors = {c.node: abs(1 / c.value) for c in term.constants if c.divides}
    if term.share is not None:
        return _Judged(_judged_mean(term, term.share, reduction), divisors)
    match = _match(term, totals)
    if match is not None:
        share, constant, factor = match
        if constant is not None and constant.divides:
            divisors[constant.node] = factor
        elif constant is not None and reduction == "sum" and not math.isclose(abs(1 / constant.value), len(share)):
            reason = f"a sum over samples was multiplied by {constant.value:.3g}, a constant or 1 over the rows"
            return _Judged(LossParts("unknown", reason), divisors)
        return _Judged(_compared(term, share, reduction), divisors)
    return _Judged(_judged_sum(term, divisors, reduction), divisors)


def _judged_mean(term: Term, share: Tensor, reduction: str) -> LossParts:
    """Judge a term that a mean over the batch reduced."""
    batch_size = len(share)
    factors = [abs(c.value) for c in term.constants if not c.divides]
    if reduction == "mean" and any(math.isclose(factor, batch_size, rel_tol=1e-6) for factor in factors):
        return LossParts("unknown", f"a mean was multiplied by {batch_size}, which may be the number of samples")
    if reduction == "sum":
        for count in (float(term.weights.sum()), term.size):
            if any(math.isclose(factor, count, rel_tol=1e-6) for factor in factors):
                return LossParts("right", factors=torch.ones_like(share))
        if any(math.isclose(factor, batch_size, rel_tol=1e-6) for factor in factors):
            return _compared(term, share, "mean")
    return _compared(term, share, reduction)


def _compared(term: Term, share: Tensor, reduction: str) -> LossParts:
    """Judge a term by each sample's share of a mean."""
    factors = (share if reduction == "sum" else share * len(share)).where(share > 0, math.nan)
    if reduction == "sum":
        return LossParts("wrong", "it is a mean. Use loss_reduction='mean', or a loss that adds samples up", factors)
    if _distance(LossParts("right", factors=factors)) <= _CLOSE:
        return LossParts("right", factors=factors)
    rows = "labels" if term.labels else "weights of the rows" if not term.even else "rows"
    counts = [f"{count:.4g}" for count in _extremes(term.weights)]
    reason = f"it is a mean over {float(term.weights.sum()):.4g} {rows}, of which samples have {' to '.join(counts)}"
    return LossParts("wrong", f"{reason}. {_ADVICE}", factors)


def _judged_sum(term: Term, divisors: dict[Node, float], reduction: str) -> LossParts:
    """Judge a term that a sum over the batch reduced, and that was not divided by any number of rows or samples."""
    batch_size, count = len(term.weights), float(term.weights.sum())
    divisor = math.prod(divisors.values())
    rows = "labels" if term.labels else "rows"
    counted = float(divisor).is_integer() and divisor >= 2
    if counted and (reduction == "mean" or (_partly(term) and divisor >= count / 2)):
        reason = (
            f"a sum over {count:.4g} {rows} was divided by {divisor:.6g}, which is neither their number nor the number "
            f"of samples ({batch_size})"
        )
        hint = " (counted before the shift, or for several mini-batches?)" if term.labels else ""
        own = term.weights if _partly(term) else 1.0  # a sum of a sample's own, or its mean where rows are counted
        factors = torch.full_like(term.weights, batch_size / divisor) * own
        factors = factors.where(term.weights > 0, math.nan)
        return LossParts("wrong", f"{reason}{hint}. {_ADVICE}", factors)
    if reduction == "sum":
        return LossParts("right", factors=torch.ones_like(term.weights))
    if not term.even:
        return LossParts("unknown", f"a sum over samples has unequal weights, which may hold 1/{batch_size}")
    factor = math.prod(abs(c.value) for c in term.constants)
    if factor * batch_size < 1:
        return LossParts("unknown", f"a sum over samples was multiplied by {factor:.3g}, which may hold 1/{batch_size}")
    factors = torch.full_like(term.weights, batch_size)
    return LossParts("wrong", "it is a sum. Use loss_reduction='sum', or divide by the number of samples", factors)


def _match(term: Term, totals: Totals) -> tuple[Tensor, Constant | None, float] | None:
    """Find the constant by which a sum was made a mean, each sample's share of it, and what else the constant holds."""
    batch_size, count = len(term.weights), float(term.weights.sum())
    each = torch.full_like(term.weights, 1 / batch_size)
    if not term.even and math.isclose(count, 1, rel_tol=1e-5):  # weights that add up to 1
        return term.weights / count, None, 1.0
    for constant in term.constants:
        number = abs(1 / constant.value)
        for weights in (term.weights, totals[constant.node], *[level.counts for level in term.levels]):
            if math.isclose(number, float(weights.sum()), rel_tol=constant.precision):
                share = weights / weights.sum()
                if math.isclose(number, batch_size) and not torch.allclose(share, each):
                    raise _Ambiguous(f"{batch_size} is the number of samples and that of the rows")
                return share, constant, 1.0
        sizes = [] if term.labels else [term.size, *[level.size for level in term.levels]]
        whole = any(math.isclose(number, size, rel_tol=constant.precision) for size in sizes)
        if whole or math.isclose(number, batch_size, rel_tol=constant.precision):
            if not constant.divides and math.isclose(number, 2, rel_tol=1e-6):
                raise _Ambiguous("a sum over 2 samples was multiplied by 0.5, which may be a mean or a constant")
            return each, constant, 1.0
    for constant in term.constants:
        times = abs(1 / constant.value) / batch_size
        counted = _partly(term) and times * batch_size >= count / 2
        if constant.divides and times >= 2 and float(times).is_integer() and not counted:
            return each, constant, times
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
