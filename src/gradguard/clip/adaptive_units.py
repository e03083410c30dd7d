r"""The arithmetic of adaptive clipping: units measured, their factors, and what they do to all gradients.

One path for gradients that this process holds whole and for those that are spread over processes. Of the latter, a unit
that lies whole on one process is bounded there; the norms of one that is split add up in the one all-reduce
(`gradguard.distributed.units`), and the same vector carries the norm of every gradient before and after the clip, so
that all processes know what it did.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradguard.clip.gradients import Gradients
from gradguard.distributed.classes import Classes
from gradguard.distributed.placements import is_sharded, local_part
from gradguard.distributed.units import UnitPlan, unit_plan_for
from gradguard.errors import UnsupportedGradientError
from gradguard.tensors.layout import coalesce_, meeting_device, move
from gradguard.tensors.norms import norm_of_norms, tensor_norms
from gradguard.tensors.scaling import steps_of
from gradguard.tensors.units import UnitLayout, clip_units_, layout_of, scale_units_, unit_norms
from gradguard.torch_private import sparse_indices, sparse_values, transposed_convolutions

_WEIGHTS = ("weight", "parametrizations.weight.original", "parametrizations.weight.original1", "weight_v")


def unit_layouts(module: nn.Module) -> dict[int, UnitLayout]:
    """Return, by parameter identity, the units of every parameter that are not what its shape alone would tell."""
    layouts: dict[int, UnitLayout] = {}
    for layer in module.modules():
        # Not `layer.weight`: where the weight is parametrized, reading it computes it, which may change buffers.
        weights = [p for name, p in layer.named_parameters() if name in _WEIGHTS and p.dim() > 1]
        if isinstance(layer, transposed_convolutions()):
            for p in weights:
                if p.shape[1] > 1:  # the gains of weight_norm have the size of one there
                    layouts[id(p)] = UnitLayout(dim=1, groups=layer.groups)
        elif _is_conv1d_of_hugging_face(layer):
            layouts.update((id(p), UnitLayout(dim=1)) for p in weights if p.dim() == 2)  # [in, out]
    return layouts


def _is_conv1d_of_hugging_face(layer: nn.Module) -> bool:
    """Whether ``layer`` is one, or was until `fully_shard` gave it a class of another name."""
    return not isinstance(layer, nn.Conv1d) and any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)


def rows_of(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor of whole units: of a sparse one the rows that it holds.

    Raises:
        UnsupportedGradientError: If it is sparse in another way, so that it need not hold whole rows.
    """
    if gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1:
        coalesce_(gradient)
        return sparse_values(gradient)
    if gradient.layout is not torch.strided:
        raise UnsupportedGradientError(
            f"adaptive clipping needs whole rows: it takes dense gradients and sparse COO ones with one sparse "
            f"dimension (torch.nn.Embedding(sparse=True)), not {gradient.layout} of shape {tuple(gradient.shape)}."
        )
    return gradient


def writable(parameter: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of the gradient of ``parameter`` such that each has memory of its own."""
    gradient = parameter.grad
    if 0 not in rows.stride() or rows.numel() <= 1 or gradient is None or gradient.layout is not torch.strided:
        return rows
    whole = gradient if is_sharded(parameter) else rows
    parameter.grad = whole.clone(memory_format=torch.contiguous_format)  # expanded rows may need different factors
    return local_part(parameter.grad)


def rows_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the weights that belong to what `rows_of` returns for ``gradient``."""
    if gradient.layout is torch.sparse_coo and parameter.dim() > 1:
        return parameter.detach().index_select(0, sparse_indices(gradient)[0])
    return parameter.detach()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an adaptive clip does to all gradients.

    Attributes:
        norms: The norm of each gradient, or of each class of gradients, before the clip.
        after: The norm of all gradients after it: 0-dim.
        clipped: Whether any unit is clipped on any process: 0-dim bool.
        there: Which of ``norms`` any process has, bool; None where that is all of them.
        classes: Which gradients one norm stands for; None where each has its own.
    """

    norms: Tensor
    after: Tensor
    clipped: Tensor
    there: Tensor | None = None
    classes: Classes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Of the tensors whose units are bounded, by position: the part that this process holds.

    Attributes:
        parameters: All parameters that were listed.
        rows: Their gradients; of those that have one here.
        layouts: The units of each.
        gradient_norms: Their norms, one vector for each of ``rows``.
        weight_norms: The same of the weights, also where the gradient of a split unit is missing.
    """

    parameters: Sequence[Tensor]
    rows: dict[int, Tensor]
    layouts: Mapping[int, UnitLayout]
    gradient_norms: dict[int, Tensor]
    weight_norms: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class UnitDecision:
    """What an adaptive clip will do, known on every process before anything is written.

    Attributes:
        norm: The norm of all gradients before the clip: 0-dim.
        outcome: Tells what it does to all of them, before it is done or after.
        units: What it does that to.
        steps: What each unit held here is multiplied by, one after the other, by the position of its tensor: one factor
            mostly, as `steps_of` says.
    """

    norm: Tensor
    outcome: Callable[[], Outcome]
    units: Units
    steps: Mapping[int, Sequence[Tensor]]

    @torch.no_grad()
    def write(self) -> Sequence[Tensor]:
        """Clip the gradients in place, and return what was written."""
        units = self.units
        rows = {i: writable(units.parameters[i], units.rows[i]) for i in self.steps}
        for group in _by_device(rows):
            for k in range(max([len(self.steps[i]) for i in group])):
                each = [(rows[i], units.layouts[i], self.steps[i][k]) for i in group if k < len(self.steps[i])]
                scale_units_(*map(list, zip(*each, strict=True)))
        return list(rows.values())


@torch.no_grad()
def decide_units(
    grads: Gradients,
    layouts: Mapping[int, UnitLayout],
    kept: Sequence[int],
    threshold: float | Tensor,
    eps: float,
    each: bool = False,
) -> UnitDecision:
    """Return what an adaptive clip will do; where gradients are spread over processes, in one all-reduce.

    Args:
        grads: The gradients; if they are spread, all processes decide at the same time.
        layouts: By identity, the units of parameters that are not what the shape tells.
        kept: The positions of the gradients to clip; the others are measured and left alone.
        threshold: λ, at least 0.
        eps: ε, at least 0.
        each: Whether the norm of each gradient is wanted where processes hold parts, which the clip does not need.

    Raises:
        UnsupportedGradientError: If a gradient is sparse in another way than an embedding's, or a layout does not
            tell which elements a process holds.
        DistributedError: If another process does not come, or comes with something else.
    """
    plan = None
    if grads.reduction is not None:
        plan = unit_plan_for(grads.reduction, grads.parameters, layouts, kept, grads.name)
    units = _measured(grads, plan, layouts, kept, 0.0 if isinstance(threshold, Tensor) else threshold * eps, eps)
    whole = [i for i in units.rows if plan is None or not plan.units[i].are_split]
    factors, steps = _factors(units, whole, threshold, eps)
    if plan is None:
        norm, outcome = _outcome_here(grads, units, factors)
    else:
        spread, split = _outcome_everywhere(grads, plan, units, factors, threshold, eps, each)
        norm, outcome, steps = norm_of_norms(spread.norms), lambda: spread, steps | split
    return UnitDecision(norm, outcome, units, steps)


@torch.no_grad()
def clip_units_at_once(
    grads: Gradients, layouts: Mapping[int, UnitLayout], threshold: float | Tensor, eps: float
) -> UnitDecision | None:
    """Clip in one pass over memory, where nobody needs to know the decision before.

    Args:
        grads: The gradients, which this process holds whole, all of which are clipped.
        layouts: By identity, the units of parameters that are not what the shape tells.
        threshold: λ, at least 0.
        eps: ε, at least 0.

    Returns:
        What was done; None, and nothing done, where that takes more than one pass.
    """
    if grads.reduction is not None or isinstance(threshold, Tensor):
        return None
    places = [i for i, g in enumerate(grads.gradients) if g.numel()]
    parameters, rows = [grads.parameters[i] for i in places], [grads.gradients[i] for i in places]
    units = [layouts.get(id(p)) or layout_of(p) for p in parameters]
    done = clip_units_(rows, parameters, units, threshold, eps) if rows else None
    if done is None:
        return None
    norm, norms, factors = done
    multiplied = dict(zip(places, factors, strict=True))
    layouts = dict(zip(places, units, strict=True))
    held = Units(
        grads.parameters, {i: grads.gradients[i] for i in places}, layouts, dict(zip(places, norms, strict=True)), {}
    )
    return UnitDecision(norm, lambda: _outcome_here(grads, held, multiplied)[1](), held, {})  # nothing is left to write


def _measured(
    grads: Gradients,
    plan: UnitPlan | None,
    layouts: Mapping[int, UnitLayout],
    kept: Sequence[int],
    gradient_floor: float,
    weight_floor: float,
) -> Units:
    """Measure the units of what this process holds; of a weight also where the gradient of a split unit is missing."""
    rows: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    for i in kept:
        parameter, gradient = grads.parameters[i], grads.gradients[i]
        part = parameter if plan is None else local_part(parameter)
        if gradient.numel():
            rows[i] = rows_of(gradient)
            weights[i] = rows_like(gradient, part).to(gradient.device)
        elif plan is not None and plan.units[i].are_split and part.numel():
            weights[i] = part.detach()
    if plan is None:
        units = {i: layouts.get(id(grads.parameters[i])) or layout_of(grads.parameters[i]) for i in rows}
    else:
        units = {i: plan.units[i].layout for i in weights}
    return Units(
        grads.parameters,
        rows,
        units,
        _norms_by_device(rows, units, gradient_floor),
        _norms_by_device(weights, units, weight_floor),
    )


def _norms_by_device(
    tensors: Mapping[int, Tensor], layouts: Mapping[int, UnitLayout], floor: float
) -> dict[int, Tensor]:
    norms: dict[int, Tensor] = {}
    for group in _by_device(tensors):
        measured = unit_norms([tensors[i] for i in group], [layouts[i] for i in group], floor)
        norms.update(zip(group, measured, strict=True))
    return norms


def _factors(
    units: Units, whole: Sequence[int], threshold: float | Tensor, eps: float
) -> tuple[dict[int, Tensor], dict[int, Sequence[Tensor]]]:
    """The factors of units that lie whole here, and the steps in which they are applied."""
    factors: dict[int, Tensor] = {}
    steps: dict[int, Sequence[Tensor]] = {}
    for group in _by_device({i: units.gradient_norms[i] for i in whole}):
        norms = [units.gradient_norms[i] for i in group]
        joined = torch.cat(norms), torch.cat([units.weight_norms[i] for i in group])
        found, together = unit_factors(*joined, threshold, eps)
        sizes = [n.shape[0] for n in norms]
        factors.update(zip(group, found.split(sizes), strict=True))
        steps.update(zip(group, zip(*[step.split(sizes) for step in together], strict=True), strict=True))
    return factors, steps


def unit_factors(
    norms: Tensor, weights: Tensor, threshold: float | Tensor, eps: float
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return what units of these norms are multiplied by, and the steps in which that is done."""
    fraction = move(threshold, norms.device) if isinstance(threshold, Tensor) else threshold
    bound = weights.clamp(min=eps) * fraction
    factors = torch.where(norms > bound, bound / norms, 1.0)
    return factors, steps_of(factors, bound, norms, epsilon=0.0)


def _outcome_here(
    grads: Gradients, units: Units, factors: Mapping[int, Tensor]
) -> tuple[Tensor, Callable[[], Outcome]]:
    """The norm of all gradients, which this process holds whole, and what tells the rest if somebody asks."""
    alone = [g for i, g in enumerate(grads.gradients) if i not in units.rows and g.numel()]
    others = [tensor_norms(alone)] if alone else []
    groups = _by_device(factors)
    norms = [torch.cat([units.gradient_norms[i] for i in group]) for group in groups]
    norm = _total([*norms, *others])

    def outcome() -> Outcome:
        joined = [torch.cat([factors[i] for i in group]) for group in groups]
        after = _total([*[n * f for n, f in zip(norms, joined, strict=True)], *others])
        each = tensor_norms([units.gradient_norms.get(i, g) for i, g in enumerate(grads.gradients)])
        binds = [move((f < 1).any(), norm.device) for f in joined]
        return Outcome(each, after, torch.stack(binds).any() if binds else norm > norm)

    return norm, outcome


def _total(vectors: Sequence[Tensor]) -> Tensor:
    """The 2-norm over vectors of norms that may lie on several devices."""
    if not vectors:
        return torch.zeros(())
    device = meeting_device(vectors)
    total = torch.linalg.vector_norm(torch.stack([move(torch.linalg.vector_norm(n), device) for n in vectors]))
    safe = norm_of_norms(torch.stack([move(norm_of_norms(n), device) for n in vectors]))
    # squares of float64 norms may leave its range
    return torch.where(total.isfinite() & (total > 1e-140), total, safe)


def _outcome_everywhere(
    grads: Gradients,
    plan: UnitPlan,
    units: Units,
    factors: Mapping[int, Tensor],
    threshold: float | Tensor,
    eps: float,
    each: bool,
) -> tuple[Outcome, dict[int, Sequence[Tensor]]]:
    """Add up what all processes hold; return what the clip does, and the steps of the split units held here."""
    part, home = grads.reduction, meeting_device(grads.gradients)
    assert part is not None
    classes = None if each or part.reducer.is_alone else part.classes
    before, after, binds = _outcome_of_part(grads, units, factors, home)
    if classes is not None:
        before, after = classes.joined(before, 2.0), classes.joined(after, 2.0)
    slots = plan.place(units.gradient_norms, home), plan.place(units.weight_norms, home)
    vector = torch.cat([before, after, binds, *slots])
    weights, shares = plan.weights_and_shares(part, classes)
    (added,), there = part.reducer.reduce([(vector, 2.0)], weights, shares, part.balance, part.settings)
    count = len(before)
    before, after, binds, gradients, bounds = added.split([count, count, 1, *map(len, slots)])
    split, steps = unit_factors(gradients, bounds, threshold, eps)
    total = norm_of_norms(torch.cat([after, gradients * split]))
    clipped = (binds > 0).any() | (split < 1).any()
    devices = {i: rows.device for i, rows in units.rows.items()}
    taken = [plan.take(step, devices) for step in steps]
    return Outcome(before, total, clipped, there[:count], classes), {i: [one[i] for one in taken] for i in taken[0]}


def _outcome_of_part(
    grads: Gradients, units: Units, factors: Mapping[int, Tensor], home: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of what this process holds: the norm of each gradient before, after (without split units), and 1 if it binds."""
    before, after = list(grads.gradients), list(grads.gradients)
    for i, norms in units.gradient_norms.items():
        before[i] = norms
        after[i] = norms * factors[i] if i in factors else norms[:0]
    joined = [torch.cat([factors[i] for i in group]) for group in _by_device(factors)]
    binds = [move((vector < 1).any(), home, torch.float64).view(1) for vector in joined]
    zero = torch.zeros(1, dtype=torch.float64, device=home)
    return move(tensor_norms(before), home), move(tensor_norms(after), home), torch.cat([zero, *binds]).amax(0, True)


def _by_device(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """The keys of the tensors of each device."""
    groups: dict[torch.device, list[int]] = {}
    for key, tensor in tensors.items():
        groups.setdefault(tensor.device, []).append(key)
    return list(groups.values())
