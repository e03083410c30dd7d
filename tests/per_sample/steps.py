"""One step of the oracle and one of the clipper, and how far apart they are."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

from gradguard import FlatNormClipper, PerSampleGradientClipper
from per_sample.case import Case
from per_sample.models import build
from reference import per_sample_gradients, sample_norms

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}

Gradients = dict[str, Tensor]


@cache
def oracle(name: str) -> Gradients:
    """The per-sample gradients of a case, by microbatches of one in float64."""
    case = build(name)
    return per_sample_gradients(case.model, lambda sample: case.losses(sample).sum(), case.samples())


def middle_norm(gradients: Gradients) -> float:
    """A threshold that clips half the samples; a single one is clipped."""
    norms = sample_norms(gradients.values()).sort().values
    return (
        float(norms[(len(norms) - 1) // 2] * 0.5 + norms[len(norms) // 2] * 0.5)
        if len(norms) > 1
        else 0.7 * float(norms)
    )


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def filled(model: nn.Module) -> Gradients:
    """Each trained parameter's ``.grad``; one that is unused may have none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained(model).items()}


def reduce(losses: Tensor, reduction: str) -> Tensor:
    return losses.mean() if reduction == "mean" else losses.sum()


def total(clipped: Gradients, reduction: str) -> Gradients:
    """What `pre_step` must fill in."""
    return {name: g.mean(0) if reduction == "mean" else g.sum(0) for name, g in clipped.items()}


def plain(case: Case, reduction: str) -> Gradients:
    case.model.zero_grad()
    reduce(case.losses(case.inputs), reduction).backward()
    gradients = {name: g.to_dense().clone() for name, g in filled(case.model).items()}
    case.model.zero_grad()
    return gradients


def make(case: Case, max_norm: float, reduction: str = "mean", mode: str = "fast") -> PerSampleGradientClipper:
    return PerSampleGradientClipper(case.model, FlatNormClipper(max_norm), case.batch_first, reduction, mode=mode)


def accumulate(case: Case, clipper: PerSampleGradientClipper, reduction: str, start: int, stop: int) -> None:
    reduce(case.losses(case.part(start, stop)), reduction).backward()
    clipper.clip_and_accumulate()


def clipped_step(
    case: Case, max_norm: float, reduction: str = "mean", mode: str = "fast", parts: Iterable = ()
) -> Gradients:
    """The gradients after `pre_step`, from one mini-batch or from the samples of each of ``parts``."""
    clipper = make(case, max_norm, reduction, mode)
    for start, stop in list(parts) or [(0, case.batch_size)]:
        accumulate(case, clipper, reduction, start, stop)
    clipper.pre_step()
    gradients = filled(case.model)
    clipper.detach()
    return gradients


def error(found: Gradients, expected: Gradients) -> float:
    """The largest relative error of a parameter's gradient.

    A gradient that is zero but for rounding (that of a key's bias) is measured by a hundredth of the whole.
    """
    assert found.keys() == expected.keys()
    whole = float(torch.cat([g.double().flatten() for g in expected.values()]).norm())
    errors = [
        float((found[name].to_dense().double() - g.double()).norm())
        / max(float(g.double().norm()), 0.01 * whole, 1e-300)
        for name, g in expected.items()
    ]
    return max(errors, key=lambda e: (e != e, e))
