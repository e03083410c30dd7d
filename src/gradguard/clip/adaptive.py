"""Adaptive gradient clipping (AGC): each unit's gradient is held to a fraction of that unit's weight."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.arguments import check_threshold
from gradguard.clip.adaptive_parts import UnitDecision, decide_units
from gradguard.clip.adaptive_units import by_device, layout_of, rows_in_memory, rows_like, unit_factors, unit_layouts
from gradguard.clip.gradients import (
    ONE_STAGE,
    Gradients,
    Parameters,
    Stages,
    gradients_of,
    host_sees_norms,
    module_of,
    named_tensors,
    nonfinite_in,
    refuse_nonfinite_in,
    to_clip_by,
)
from gradguard.clip.result import ClipResult
from gradguard.clip_events import ClipEvent, announce, is_heard, tell
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.tensors.layout import meeting_device, move, public_dtype
from gradguard.tensors.nonfinite import NonFinitePolicy, check_policy, refuse_nonfinite, zero_if_nonfinite_
from gradguard.tensors.norms import norm_of_norms, total_norm
from gradguard.tensors.units import UnitLayout, scale_units_, unit_norms

Excluded = str | Tensor | nn.Module
"""A name pattern, a parameter or a module."""


def clip_grad_adaptive_(
    parameters: Parameters,
    clipping_threshold: float | Tensor = 0.01,
    *,
    eps: float = 1e-3,
    exclude: Excluded | Iterable[Excluded] = (),
    nonfinite: NonFinitePolicy = "propagate",
    process_group: Any = None,
    mesh: Any = None,
    shared: Any = None,
) -> Tensor:
    r"""Scale each unit's gradient to at most ``clipping_threshold`` times that unit's weight norm, in place.

    .. math:: G_i \leftarrow G_i \cdot \min\Bigl(1,\;
              \frac{\lambda \max(\lVert W_i \rVert_2, \epsilon)}{\lVert G_i \rVert_2}\Bigr)

    A unit i is what feeds one output: a row of a linear weight, a filter of a convolution, an output channel of a
    transposed convolution, a row of an embedding, a row of an attention's fused query-key-value weight, a whole bias
    or gain. Pass the *module*, not its parameters, where it holds transposed convolutions or Hugging Face ``Conv1D``
    layers: a bare tensor does not tell that its output channels lie along dimension 1.

    The paper exempts the last linear layer: ``exclude=model.fc``.

    **Guarantees.** Norms are accumulated in at least float32. No unit's gradient changes another unit's. Memory: no
    more than one tensor's size at a time. On the CPU, a tensor none of whose units binds is not written; on an
    accelerator the host never waits. Weights and gradients that are sharded stay where they are: every unit is
    bounded by its whole norm, whichever processes hold parts of it, in one all-reduce.

    **Edge cases.**

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    zero weights (zero-initialised)   the bound is λ·eps, so that the layer can still learn
    zero gradient                     unchanged, never 0/0
    ``clipping_threshold=0``          gradients become 0
    NaN in a unit                     under ``"propagate"`` that unit stays as it is, all others are clipped
    inf in a unit                     under ``"propagate"`` its inf becomes NaN, its other elements 0
    sparse (COO) embedding gradient   coalesced in place; only the rows that it holds are looked at
    DTensors, on any meshes           as the whole tensors; every process of the meshes must join, also one without
                                      gradients; ordinary tensors are the same on all of them
    ================================  ==========================================================================

    Args:
        parameters: As for `clip_grad_norm_`; preferably the module.
        clipping_threshold: λ, at least 0. The paper uses 0.01 for batches of 1,024 to 4,096 and up to 0.08 for small
            ones; a 0-dim tensor stays on its device.
        eps: ε, the least weight norm that is reckoned with, at least 0.
        exclude: Parameters to leave alone: parameters, modules, or name patterns (``"fc"`` for all in that module,
            ``"*.bias"`` with wildcards). One that matches nothing is an error.
        nonfinite: ``"propagate"``, ``"raise"`` or ``"zero"``, as for `clip_grad_norm_`.
        process_group: Pipeline stages, as for `clip_grad_norm_`. Patterns of ``exclude`` fit names on all stages, and
            parameters and modules those of this one.
        mesh: Pipeline stages, as for `clip_grad_norm_`.
        shared: Weights that several stages hold, as for `clip_grad_norm_`.

    Returns:
        The 2-norm of all gradients that were not excluded, before the clip: 0-dim, float32 or float64.

    Raises:
        InvalidValueError: If a number is negative or NaN, or an excluded thing is not among ``parameters``.
        InvalidTypeError: If an argument is of another type.
        NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity.
        UnsupportedGradientError: If a gradient is sparse in another way than an embedding's, or a layout does not
            tell which elements of a tensor a process holds.
        DistributedError: If processes that hold parts of the gradients do not clip together, or with other lists.

    Example:
        >>> import gradguard as gg, torch
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> layer.weight.data = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> layer.weight.grad = torch.tensor([[30.0, 40.0], [0.0, 1.0]])
        >>> gg.clip_grad_adaptive_(layer, 0.1)
        tensor(50.0100)
        >>> layer.weight.grad
        tensor([[3.0000e-01, 4.0000e-01], [0.0000e+00, 1.0000e-04]])

    Reference:
        Brock, De, Smith, Simonyan (2021), High-performance large-scale image recognition without normalization,
        arXiv 2102.06171.
    """
    stages = Stages.named(process_group, mesh, shared)
    return clip_adaptive(
        parameters, clipping_threshold, eps=eps, exclude=exclude, nonfinite=nonfinite, stages=stages
    ).norm()


def clip_adaptive(
    parameters: Parameters,
    clipping_threshold: float | Tensor,
    *,
    eps: float = 1e-3,
    exclude: Excluded | Iterable[Excluded] = (),
    nonfinite: NonFinitePolicy = "propagate",
    layouts: Mapping[int, UnitLayout] | None = None,
    stages: Stages = ONE_STAGE,
) -> "AdaptiveClip | AdaptiveClipOfParts":
    """Do what `clip_grad_adaptive_` says, and keep what it knew; ``layouts`` stand in for those of a module."""
    threshold = check_threshold("clipping_threshold", clipping_threshold)
    eps = float(check_threshold("eps", eps))
    policy = check_policy(nonfinite)
    module = module_of(parameters)
    if layouts is None:
        layouts = {} if module is None else unit_layouts(module)
    names, tensors = named_tensors(parameters, "parameters")
    found = _without_excluded(exclude, names, tensors, stages, module)
    heard = is_heard()
    if heard:
        announce(tensors)
    if found.part is not None:
        found = to_clip_by(found, "clip_grad_adaptive_", threshold, eps, policy)
        clip: AdaptiveClip | AdaptiveClipOfParts = _clip_parts(found, layouts, threshold, eps, policy)
    else:
        units = [layouts.get(id(p)) or layout_of(p) for p in found.parameters]
        clip = _clip(found, units, threshold, eps, policy)
    if heard:
        result = clip.result()
        tell(ClipEvent("adaptive", found.parameters, threshold, result.norm, result.coefficient, result.norms))
    return clip


@dataclass(frozen=True, slots=True)
class AdaptiveClip:
    """What an adaptive clip knew: unit norms before it, what each was multiplied by, whether the policy zeroed all."""

    found: Gradients
    norms: Sequence[Tensor]
    factors: Sequence[Tensor]
    zeroed: Tensor

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients before the clip."""
        return _total(self.norms).to(public_dtype(self.found.gradients))

    def result(self) -> ClipResult:
        """Return everything that a user may ask for."""
        after = [n * f for n, f in zip(self.norms, self.factors, strict=True)]
        clipped = _together([(f < 1).any() for f in self.factors]).any()
        norm = _total(self.norms)
        return ClipResult(
            norm=self.norm(),
            coefficient=torch.where(self.zeroed, 0.0, torch.where(clipped, _total(after) / norm, 1.0)),
            clipped=clipped | self.zeroed,
            nonfinite=~torch.isfinite(norm),
            norms=_together([torch.linalg.vector_norm(n) for n in self.norms]),
            names=self.found.plain_names(),
        )


@torch.no_grad()
def _clip(
    found: Gradients, units: Sequence[UnitLayout], threshold: float | Tensor, eps: float, policy: NonFinitePolicy
) -> AdaptiveClip:
    if policy == "raise":
        refuse_nonfinite(total_norm(found.gradients), found.gradients, found.name)
    gradients = [rows_in_memory(p, g) for p, g in zip(found.parameters, found.gradients, strict=True)]
    weights = [rows_like(g, p) for p, g in zip(found.parameters, found.gradients, strict=True)]
    norms: list[Tensor] = [torch.empty(0)] * len(gradients)
    factors = list(norms)
    least_bound = 0.0 if isinstance(threshold, Tensor) else threshold * eps
    devices = by_device(gradients)
    for device, group in devices.items():
        layouts = [units[i] for i in group]
        gradient_norms = unit_norms([gradients[i] for i in group], layouts, floor=least_bound)
        weight_norms = unit_norms([weights[i].to(device) for i in group], layouts, floor=eps)
        parts = unit_factors(gradient_norms, weight_norms, threshold, eps)
        for i, norm, factor in zip(group, gradient_norms, parts, strict=True):
            norms[i], factors[i] = norm, factor
    for group in devices.values():
        scale_units_([gradients[i] for i in group], [units[i] for i in group], [factors[i] for i in group])
    zeroed = ~torch.isfinite(_total(norms)) & (policy == "zero")
    if policy == "zero":
        zero_if_nonfinite_(_total(norms), gradients)
    return AdaptiveClip(found, norms, factors, zeroed)


@dataclass(frozen=True, slots=True)
class AdaptiveClipOfParts:
    """What an adaptive clip of gradients that are spread over processes knew."""

    found: Gradients
    decision: UnitDecision
    zeroed: Tensor
    bad: Tensor | None

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients before the clip."""
        return norm_of_norms(self.decision.norms).to(public_dtype(self.found.gradients))

    def result(self) -> ClipResult:
        """Return everything that a user may ask for."""
        norm, clipped = norm_of_norms(self.decision.norms), self.decision.clipped
        coefficient = torch.where(clipped, self.decision.after / norm, 1.0)
        return ClipResult(
            norm=self.norm(),
            coefficient=torch.where(self.zeroed, 0.0, coefficient),
            clipped=clipped | self.zeroed,
            nonfinite=~torch.isfinite(norm),
            norms=self.decision.norms if self.decision.classes is None else None,
            names=self.found.plain_names(),
            bad=self.bad,
        )


@torch.no_grad()
def _clip_parts(
    found: Gradients, layouts: Mapping[int, UnitLayout], threshold: float | Tensor, eps: float, policy: NonFinitePolicy
) -> AdaptiveClipOfParts:
    decision = decide_units(found, layouts, range(len(found.gradients)), threshold, eps, found.wants_each)
    norm = norm_of_norms(decision.norms)
    if policy == "raise":
        refuse_nonfinite_in(found, norm, decision.norms if decision.classes is None else None)
    bad = None
    if decision.classes is not None and host_sees_norms(found) and not bool(norm.isfinite()):
        bad = nonfinite_in(found)
    decision.write()
    if policy == "zero":
        zero_if_nonfinite_(norm, found.gradients)
    return AdaptiveClipOfParts(found, decision, ~torch.isfinite(norm) & (policy == "zero"), bad)


def _total(norms: Sequence[Tensor]) -> Tensor:
    """The 2-norm over vectors of norms that may lie on several devices."""
    partial = [torch.cat([norms[i] for i in group]) for group in by_device(norms).values()]
    total = torch.linalg.vector_norm(_together([torch.linalg.vector_norm(n) for n in partial]))
    safe = norm_of_norms(_together([norm_of_norms(n) for n in partial]))  # squares of float64 norms may leave its range
    return torch.where(total.isfinite() & (total > 1e-140), total, safe)


def _together(scalars: Sequence[Tensor]) -> Tensor:
    device = meeting_device(scalars)
    return torch.stack([move(x, device) for x in scalars]) if scalars else torch.zeros(0)


def _without_excluded(
    exclude: Excluded | Iterable[Excluded],
    names: Sequence[str] | None,
    tensors: Sequence[Tensor],
    stages: Stages,
    module: nn.Module | None,
) -> Gradients:
    """Return the gradients to clip.

    Raises:
        InvalidTypeError: If pipeline stages are selected by anything but names.
    """
    if stages.group is None:
        excluded = _excluded_ids(exclude, names, tensors)
        kept = [i for i, t in enumerate(tensors) if id(t) not in excluded]
        return gradients_of([names[i] for i in kept] if names else None, [tensors[i] for i in kept], stages, module)
    entries = [exclude] if isinstance(exclude, str | Tensor | nn.Module) else list(exclude)
    if not all(isinstance(entry, str) for entry in entries):
        raise InvalidTypeError(
            "exclude names parameters or modules themselves, which other pipeline stages do not have: expected name "
            "patterns, the same on every stage."
        )
    found = gradients_of(names, tensors, stages, module)  # of all stages, one of which may hold what a pattern fits
    excluded = _excluded_ids(entries, None if names is None else found.plain_names(), found.parameters)
    pairs = zip(found.parameters, found.gradients, strict=True)
    return replace(found, gradients=[g.new_empty(0) if id(p) in excluded else g for p, g in pairs])


def _excluded_ids(
    exclude: Excluded | Iterable[Excluded], names: Sequence[str] | None, tensors: Sequence[Tensor]
) -> set[int]:
    """Return the identities of the tensors that ``exclude`` names.

    Raises:
        InvalidTypeError: If an entry is no pattern, parameter or module.
        InvalidValueError: If an entry matches none of ``tensors``.
    """
    entries = [exclude] if isinstance(exclude, str | Tensor | nn.Module) else list(exclude)
    for entry in entries:
        if not isinstance(entry, str | Tensor | nn.Module):
            raise InvalidTypeError(f"exclude has {entry!r}: expected a name pattern, a parameter or a module.")
    present = {id(t) for t in tensors}
    excluded: set[int] = set()
    for entry in entries:
        if isinstance(entry, str):
            matched = {id(t) for name, t in zip(names or (), tensors, strict=names is not None) if _fits(name, entry)}
        else:
            matched = present & {id(t) for t in ([entry] if isinstance(entry, Tensor) else entry.parameters())}
        if not matched:
            raise InvalidValueError(_no_match(entry, names))
        excluded |= matched
    return excluded


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _no_match(entry: Excluded, names: Sequence[str] | None) -> str:
    shown = f"{entry!r}" if isinstance(entry, str) else f"a {type(entry).__name__}"
    if names is None:
        advice = "the parameters have no names: pass the module or model.named_parameters() to exclude by name."
    else:
        advice = "the parameters are " + ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") + "."
    return f"exclude has {shown}, which matches no parameter; {advice}"
