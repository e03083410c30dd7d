r"""Adaptive gradient clipping (AGC): bound each unit's gradient by a fraction of that unit's weight norm.

This file holds the units, the rule, and the communication for sharded gradients. A unit that is whole on one rank is
clipped there. If a unit is split over several ranks, each of them writes the norm of its piece into the unit's entry of
a vector, and one all-reduce combines those entries:

.. math:: \lVert G_i \rVert_2^2 = \sum_r \frac{1}{k_r} \lVert G_i^{(r)} \rVert_2^2

over all ranks r, where :math:`k_r` ranks hold the same elements as r. The vector also carries the norm of every
gradient before and after the clip, so that every rank reports the whole clip.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradguard.arguments import check_threshold
from gradguard.clip.clip_rules import FixedRule, at_scale
from gradguard.clip.clipper import Decision, ListedParameters, choice, describe
from gradguard.clip.gradients import (
    Gradients,
    MeasuredGradients,
    Parameters,
    norms_of,
    total_of,
    with_norms,
)
from gradguard.clip.selection import KnownNames, Selection, Selector
from gradguard.distributed.engines import shard_of
from gradguard.distributed.placements import is_sharded, local_part
from gradguard.distributed.processes import largest_over
from gradguard.distributed.reduction import NormReduction, Reducer
from gradguard.distributed.settings import Settings
from gradguard.errors import UnsupportedGradientError
from gradguard.policies import NonFinitePolicy
from gradguard.tensors.layout import coalesce_, meeting_device, move
from gradguard.tensors.norms import joined_norms, norm_of_norms, tensor_norms
from gradguard.tensors.units import WHOLE, UnitLayout, clip_units_, layout_of, scale_units_, unit_norms
from gradguard.torch_private import (
    flattened_by_fsdp1,
    sparse_indices,
    sparse_values,
    transposed_convolutions,
)

_WEIGHTS = (
    "weight",
    "parametrizations.weight.original",
    "parametrizations.weight.original1",
    "weight_v",
    "weight_orig",
)


def clip_grad_adaptive_(
    parameters: Parameters,
    clipping_threshold: float | Tensor = 0.01,
    *,
    eps: float = 1e-3,
    exclude: Selection = (),
    nonfinite: NonFinitePolicy = "propagate",
    process_group: Any = None,
    mesh: Any = None,
    shared: Any = None,
) -> Tensor:
    r"""Scale each unit's gradient to at most ``clipping_threshold`` times that unit's weight norm, in place.

    .. math:: G_i \leftarrow G_i \cdot \min\Bigl(1,\;
              \frac{\lambda \max(\lVert W_i \rVert_2, \epsilon)}{\lVert G_i \rVert_2}\Bigr)

    A unit i is the set of weights of one output: a row of a linear weight, a filter of a convolution, an output channel
    of a transposed convolution, a row of an embedding, a row of an attention's fused query-key-value weight, a whole
    bias or gain. Pass the *module*, not its parameters, if it has transposed convolutions or Hugging Face ``Conv1D``
    layers: a bare tensor does not show that its output channels are along dimension 1.

    The paper exempts the last linear layer: ``exclude=model.fc``.

    **Guarantees.** Norms are accumulated in at least float32. The gradient of one unit does not affect how another is
    clipped. Temporary memory is at most the size of one tensor. On the CPU, a tensor is written only if one of its
    units exceeds its bound; on an accelerator there is no host sync. Sharded weights and gradients are not gathered:
    one all-reduce combines the norms of the units that are split over processes.

    **Edge cases.**

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    zero weights (zero-initialised)   the bound is λ·eps, so that the layer can still learn
    zero gradient                     unchanged, never 0/0
    ``clipping_threshold=0``          gradients become 0
    NaN in a unit                     under ``"propagate"`` that unit is unchanged, all others are clipped
    inf in a unit                     under ``"propagate"`` its inf becomes NaN, its other elements 0
    sparse (COO) embedding gradient   coalesced in place; only the rows that it holds are measured
    DTensors, on any meshes           clipped as whole tensors; every process of the meshes must call, also one
                                      without gradients; plain tensors are equal on all of them
    ================================  ==========================================================================

    Args:
        parameters: As for `clip_grad_norm_`; preferably the module.
        clipping_threshold: λ, at least 0. The paper uses 0.01 for batches of 1,024 to 4,096 and up to 0.08 for small
            ones; a 0-dim tensor stays on its device.
        eps: ε, at least 0: the smallest weight norm in the bound.
        exclude: Parameters to leave unclipped: parameters, modules, or name patterns (``"fc"`` for all in that module,
            ``"*.bias"`` with wildcards). A selection that matches nothing is an error.
        nonfinite: ``"propagate"``, ``"raise"`` or ``"zero"``, as for `clip_grad_norm_`.
        process_group: Pipeline stages, as for `clip_grad_norm_`. Patterns in ``exclude`` match names on all stages;
            parameters and modules in ``exclude`` are those of this stage.
        mesh: Pipeline stages, as for `clip_grad_norm_`.
        shared: Weights that several stages hold, as for `clip_grad_norm_`.

    Returns:
        The 2-norm of all gradients before the clip, excluded ones included: 0-dim, float32 or float64.

    Raises:
        InvalidValueError: If a number is negative or NaN, or an excluded selection is not among ``parameters``.
        InvalidTypeError: If an argument has another type.
        NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity.
        UnsupportedGradientError: If a sparse gradient is not that of an embedding, or a layout does not determine
            which elements of a tensor a process holds.
        DistributedError: If processes that hold parts of the gradients do not clip together, or clip other lists.

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
    threshold = check_threshold("clipping_threshold", clipping_threshold)
    clipper = ClipAdaptive(threshold, eps, exclude).for_one_step()
    return clipper(parameters, nonfinite=nonfinite, process_group=process_group, mesh=mesh, shared=shared).norm


def selector_of(exclude: Selection) -> Selector | None:
    """Return the selector of ``exclude``; None if ``exclude`` is empty."""
    if not isinstance(exclude, str | Tensor | nn.Module | Mapping) and isinstance(exclude, Iterable):
        exclude = list(exclude)
        if not exclude:
            return None
    return Selector(exclude, "exclude")


class ClipAdaptive(FixedRule):
    r"""Bound each unit's gradient by a fraction of that unit's weight norm: `clip_grad_adaptive_` as an object.

    .. math:: G_i \leftarrow G_i \cdot \min\Bigl(1,\;
              \frac{\lambda \max(\lVert W_i \rVert_2, \epsilon)}{\lVert G_i \rVert_2}\Bigr)

    Call it with the *module* (or give the `Guard` the model): only the module shows the output channels of transposed
    convolutions and Hugging Face ``Conv1D`` layers.

    **Guarantees.** The gradients become those of `clip_grad_adaptive_`. The result covers all gradients: excluded ones
    are measured but not changed. One all-reduce combines the norms of sharded gradients and of their units. `Groups`
    and `Chain` reduce the gradients' norms first; the units then need a second all-reduce.

    **Edge cases.** Those of `clip_grad_adaptive_`.

    Args:
        threshold: λ, at least 0. The paper uses 0.01 for batches of 1,024 to 4,096 and up to 0.08 for small ones.
        eps: ε, at least 0: the smallest weight norm in the bound.
        exclude: Parameters to leave unclipped, as for `clip_grad_adaptive_`: the paper exempts the last linear layer.

    Raises:
        InvalidValueError: If a number is negative or NaN.
        InvalidTypeError: If an argument has another type.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.data, layer.weight.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([[30.0, 40.0]])
        >>> result = gg.ClipAdaptive(threshold=0.1)(layer)
        >>> layer.weight.grad
        tensor([[0.3000, 0.4000]])

    Reference:
        Brock, De, Smith, Simonyan (2021), High-performance large-scale image recognition without normalization,
        arXiv 2102.06171.
    """

    measures_itself = True

    _per_tensor = True

    def __init__(
        self,
        threshold: float | Tensor = 0.01,
        eps: float = 1e-3,
        exclude: Selection = (),
    ) -> None:
        super().__init__()
        self.threshold, self.eps = check_threshold("threshold", threshold), float(check_threshold("eps", eps))
        self._exclude = selector_of(exclude)
        self.exclude = "" if self._exclude is None else str(self._exclude)
        self._names, self._learned = KnownNames(), False
        self._layouts: dict[int, tuple[weakref.ref, UnitLayout]] = {}

    def _shown(self) -> dict[str, str]:
        shown = {name: text for name, text in super()._shown().items() if name != "exclude"}
        return shown if self._exclude is None else shown | {"exclude": repr(self._exclude)}

    def choices(self, grads: Gradients) -> Settings:
        """Return which parameters are excluded."""
        return () if self._exclude is None else (choice(self._excluded(grads)),)

    def learn(self, parameters: Parameters) -> None:
        """Find the layers of a module whose units run along another dimension, and check the names in ``exclude``."""
        if self._exclude is not None:
            if isinstance(parameters, ListedParameters):
                self._exclude.refuse_identities()
            names, tensors = self._names.learn(parameters)
            self._exclude.require_match(tensors, names, complete=True)
            self._learned = True
        if isinstance(parameters, ListedParameters) and parameters.module is not None:
            parameters = parameters.module
        if isinstance(parameters, nn.Module):
            self._layouts = unit_layouts(parameters)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the unit layouts of one model: a copy finds its own."""
        return vars(self) | {"_layouts": {}}

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure all gradients and their units, and choose a factor for each unit."""
        return self._decide(grads, scale, at_once=False)

    @torch.no_grad()
    def decide_at_once(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure and clip in one pass over memory, if nothing is measured yet and no gradient is sharded."""
        is_refined = type(self).decide is not ClipAdaptive.decide
        at_once = not is_refined and not isinstance(grads, MeasuredGradients)
        return self._decide(grads, scale, at_once=True) if at_once else self.decide(grads, scale)

    def _decide(self, grads: Gradients, scale: float | Tensor, *, at_once: bool) -> Decision:
        limit = check_threshold("threshold", self.threshold)
        kept = [i for i, out in enumerate(self._excluded(grads)) if not out]
        # Skip dead parameters: another object may have their id now.
        layouts = {i: layout for i, (parameter, layout) in self._layouts.items() if parameter() is not None}
        clip = decide_units(grads, layouts, kept, at_scale(limit, scale), self.eps, at_once=at_once)
        if not isinstance(grads, MeasuredGradients):
            grads = with_norms(grads, clip.norms, there=clip.there)
        norms = norms_of(grads, scale)
        norm = total_of(norms)
        coefficient = torch.where(
            clip.clipped, clip.after / (norm if norms is grads.norms else total_of(grads.norms)), 1.0
        )
        locked_in = self._is_locked_in(clip.clipped, limit, norm.isfinite())
        result = describe(grads, norms, coefficient, clip.clipped, norm=norm, threshold=limit, locked_in=locked_in)
        return Decision(grads, result, None, clip.write)

    def _excluded(self, grads: Gradients) -> list[bool]:
        if self._exclude is None:
            return [False] * len(grads.parameters)
        if not self._learned:
            self._exclude.require_match(grads.parameters, grads.names, complete=False)
        ids, names = self._exclude.ids(), self._names.of(grads)
        return [id(p) in ids or self._exclude.fits(n) for p, n in zip(grads.parameters, names, strict=True)]


# Units.


def unit_layouts(module: nn.Module) -> dict[int, tuple[weakref.ref, UnitLayout]]:
    """Return, by id, each parameter whose units do not follow from its shape alone, with its units."""
    found: dict[int, tuple[weakref.ref, UnitLayout]] = {}
    for layer in module.modules():
        is_transposed = isinstance(layer, transposed_convolutions())
        # Hugging Face's Conv1D has a weight of shape [in, out]; `fully_shard` renames the class, so check all bases.
        is_conv1d = not isinstance(layer, nn.Conv1d) and any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)
        if not is_transposed and not is_conv1d:
            continue
        layout = UnitLayout(dim=1, groups=layer.groups if is_transposed else 1)  # type: ignore[arg-type]
        # Not `layer.weight`: reading a parametrized weight computes it, which may change buffers.
        for name, p in layer.named_parameters():
            # The gains of weight_norm have size 1 in dimension 1.
            if name in _WEIGHTS and p.dim() > 1 and (p.shape[1] > 1 if is_transposed else p.dim() == 2):
                found[id(p)] = weakref.ref(p), layout
    return found


def rows_of(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor of whole units; for a sparse gradient, the rows that it holds.

    Raises:
        UnsupportedGradientError: If the gradient is sparse in another way, so that it need not hold whole rows.
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
    """Return the rows of the gradient of ``parameter``, copied if several elements share memory."""
    gradient = parameter.grad
    if 0 not in rows.stride() or rows.numel() <= 1 or gradient is None or gradient.layout is not torch.strided:
        return rows
    whole = gradient if is_sharded(parameter) else rows
    parameter.grad = whole.clone(memory_format=torch.contiguous_format)  # expanded rows may need different factors
    return local_part(parameter.grad)


# The rule.


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """This rank's part of the tensors whose units are clipped, by position.

    Attributes:
        rows: The gradients that this rank holds.
        layouts: The units of each tensor.
        norms: The norms of the gradients' units, one vector for each of ``rows``.
        weights: The norms of the weights' units, also for a split unit whose gradient is missing here.
        left: The factors by which ``rows`` must still be multiplied; empty after that.
        joined: The tensors whose units are whole on this rank, by device.
    """

    rows: Mapping[int, Tensor]
    layouts: Mapping[int, UnitLayout]
    norms: Mapping[int, Tensor]
    weights: Mapping[int, Tensor]
    left: Mapping[int, Tensor]
    joined: "Sequence[WholeUnits]"


class WholeUnits(NamedTuple):
    """The units of several tensors on one device, concatenated.

    Attributes:
        at: The positions of the tensors.
        counts: How many units each tensor has.
        norms: The gradient norm of each unit.
        factors: The factor of each unit.
    """

    at: Sequence[int]
    counts: Sequence[int]
    norms: Tensor
    factors: Tensor

    def each(self, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each tensor's position with its slice of ``values``."""
        return zip(self.at, values.split(self.counts), strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class UnitClip:
    """An adaptive clip of all gradients: either decided on every rank before anything is written, or already written.

    Attributes:
        grads: The gradients.
        units: The units that are clipped.
        norms: The norm of each gradient before the clip.
        after: The norm of all gradients after the clip: 0-dim.
        clipped: Whether any unit is clipped on any rank: 0-dim bool.
        there: Whether any rank has each gradient, bool; None if every gradient exists.
    """

    grads: Gradients
    units: Units
    norms: Tensor
    after: Tensor
    clipped: Tensor
    there: Tensor | None = None

    @torch.no_grad()
    def write(self) -> None:
        """Clip the gradients in place, unless they are clipped already."""
        units = self.units
        rows = {i: writable(self.grads.parameters[i], units.rows[i]) for i in units.left}
        for group in _by_device(rows):
            scale_units_([rows[i] for i in group], [units.layouts[i] for i in group], [units.left[i] for i in group])


@torch.no_grad()
def decide_units(
    grads: Gradients,
    layouts: Mapping[int, UnitLayout],
    kept: Sequence[int],
    threshold: float | Tensor,
    eps: float,
    *,
    at_once: bool = False,
) -> UnitClip:
    """Return the effect of an adaptive clip; for sharded gradients this takes one all-reduce.

    Args:
        grads: The gradients; if they are sharded, all ranks must call.
        layouts: By id, the units of parameters that do not follow from the shape.
        kept: The positions of the gradients to clip; all others are only measured.
        threshold: λ, at least 0.
        eps: ε, at least 0.
        at_once: Whether to clip in the same pass over memory if possible, which requires whole gradients on this rank.

    Raises:
        UnsupportedGradientError: If a sparse gradient is not that of an embedding, or a layout does not determine
            which elements a rank holds.
        DistributedError: If another rank does not call, or calls with other gradients.
    """
    parameters, home, plan = grads.parameters, meeting_device(grads.gradients), None
    if grads.reduction is None:
        cut, split = {i: layouts.get(id(parameters[i])) or layout_of(parameters[i]) for i in kept}, []
    else:
        plan = unit_plan_for(grads.reduction, parameters, layouts, kept, grads.name)
        cut, split = {i: plan.units[i].layout for i in kept}, plan.split
    units = _clipped_at_once(grads, cut, threshold, eps) if at_once and plan is None else None
    units = units or _measured(grads, cut, set(split), threshold, eps)
    before = tensor_norms([units.norms.get(i, g) for i, g in enumerate(grads.gradients)])
    shrunk = [whole.norms * whole.factors for whole in units.joined]
    binds = [torch.zeros((), dtype=torch.bool, device=home)]
    bound = torch.stack(binds + [move((whole.factors < 1).any(), home) for whole in units.joined]).any()
    if plan is None:
        others = [g for i, g in enumerate(grads.gradients) if i not in units.norms]
        left_alone = [tensor_norms(others)] if others or not shrunk else []
        after = torch.cat([move(norms, home) for norms in (*shrunk, *left_alone)])
        return UnitClip(grads, units, before, norm_of_norms(after), bound)
    left = {i: units.norms[i][:0] for i in split if i in units.norms}
    for whole, norms in zip(units.joined, shrunk, strict=True):
        left.update(whole.each(norms))
    after = tensor_norms([left.get(i, g) for i, g in enumerate(grads.gradients)])
    here = move(before, home), move(after, home), bound.to(torch.float64).view(1)
    return _added_up(grads, plan, units, here, (threshold, eps))


def _clipped_at_once(
    grads: Gradients, layouts: Mapping[int, UnitLayout], threshold: float | Tensor, eps: float
) -> Units | None:
    """Clip in one pass over memory, and return the units; None if no kernel can, with nothing clipped."""
    if isinstance(threshold, Tensor):
        return None
    rows = {i: g for i in layouts if (g := grads.gradients[i]).numel()}
    rows.update((i, writable(grads.parameters[i], g)) for i, g in rows.items() if 0 in g.stride())
    if not rows:
        return None
    parameters, cut = [grads.parameters[i] for i in rows], [layouts[i] for i in rows]
    counts = [layout.units(row) for row, layout in zip(rows.values(), cut, strict=True)]
    done = clip_units_(list(rows.values()), parameters, cut, counts, threshold, eps)
    if done is None:
        return None
    whole = WholeUnits(list(rows), counts, *done)
    return Units(rows, layouts, dict(whole.each(whole.norms)), {}, {}, [whole])


def _measured(
    grads: Gradients, layouts: Mapping[int, UnitLayout], split: Container[int], threshold: float | Tensor, eps: float
) -> Units:
    """Measure the units of this rank's gradients and weights; a split unit's weight even without a gradient here."""
    rows: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    for i in layouts:
        gradient, part = grads.gradients[i], local_part(grads.parameters[i]).detach()
        if gradient.numel():
            rows[i] = rows_of(gradient)
            if gradient.layout is torch.sparse_coo and part.dim() > 1:
                part = part.index_select(0, sparse_indices(gradient)[0])
            weights[i] = part.to(gradient.device)
        elif i in split and part.numel():
            weights[i] = part
    norms = _norms_by_device(rows, layouts)
    bounds = _norms_by_device(weights, layouts)
    here = {i: n for i, n in norms.items() if i not in split}
    joined = []
    for at in _by_device(here):
        own, limits = torch.cat([here[i] for i in at]), torch.cat([bounds[i] for i in at])
        joined.append(WholeUnits(at, [len(here[i]) for i in at], own, unit_factors(own, limits, threshold, eps)))
    factors = {i: one for whole in joined for i, one in whole.each(whole.factors)}
    return Units(rows, layouts, norms, bounds, factors, joined)


def _norms_by_device(tensors: Mapping[int, Tensor], layouts: Mapping[int, UnitLayout]) -> dict[int, Tensor]:
    norms: dict[int, Tensor] = {}
    for group in _by_device(tensors):
        measured = unit_norms([tensors[i] for i in group], [layouts[i] for i in group])
        norms.update(zip(group, measured, strict=True))
    return norms


def unit_factors(norms: Tensor, weights: Tensor, threshold: float | Tensor, eps: float) -> Tensor:
    """Return the factor of each unit, from the norms of its gradient and its weight."""
    fraction = move(threshold, norms.device) if isinstance(threshold, Tensor) else threshold
    bound = weights.clamp(min=eps) * fraction
    return torch.where(norms > bound, bound / norms, 1.0)


def _added_up(
    grads: Gradients,
    plan: "UnitPlan",
    units: Units,
    here: tuple[Tensor, Tensor, Tensor],
    rule: tuple[float | Tensor, float],
) -> UnitClip:
    """Return the effect of the clip on all ranks: one all-reduce combines their measurements.

    Args:
        grads: The gradients, of which each rank holds parts.
        plan: The positions of split units in the vector.
        units: The units of this rank.
        here: The norm of each gradient before and after the clip, without split units, and whether a unit is clipped.
        rule: λ and ε.
    """
    home = here[0].device
    assert grads.reduction is not None
    slots = plan.place(units.norms, home), plan.place(units.weights, home)
    (added,), there = plan.extended(grads.reduction).measure((torch.cat([*here, *slots]), 2.0))
    before, after, binds, gradients, bounds = added.split([*map(len, here), *map(len, slots)])
    factors = unit_factors(gradients, bounds, *rule)
    left = norm_of_norms(torch.cat([after, gradients * factors]))
    clipped = (binds > 0).any() | (factors < 1).any()
    done = replace(units, left={**units.left, **plan.take(factors, units.rows)})
    return UnitClip(grads, done, before, left, clipped, there[: len(before)])


def _by_device(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Group the keys of ``tensors`` by the device of the tensor."""
    groups: dict[torch.device, list[int]] = {}
    for key, tensor in tensors.items():
        groups.setdefault(tensor.device, []).append(key)
    return list(groups.values())


# Units that are split between ranks.


@dataclass(frozen=True, slots=True, eq=False)
class HeldUnits:
    """The units in a rank's part of a tensor, and the units of the whole tensor to which they belong.

    Attributes:
        layout: The units of the part.
        slots: How many units the whole tensor has, if they are split between ranks; 0 if none is split.
        places: For each unit of the part, the index among the ``slots``; empty if none is split.
    """

    layout: UnitLayout
    slots: int = 0
    places: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))


ONE_UNIT = HeldUnits(WHOLE)
"""A placeholder for a tensor whose units do not matter."""


def units_held(tensor: Tensor, layout: UnitLayout, name: str) -> HeldUnits:
    """Return how the units in this rank's part of ``tensor`` relate to the units of the whole; no communication.

    The placements alone determine whether units are split, so all ranks agree.

    Args:
        tensor: A parameter, sharded or not.
        layout: The units of the whole tensor.
        name: The parameter's name, for messages.

    Raises:
        UnsupportedGradientError: If the layout does not determine which elements a rank holds.
    """
    if any(flattened_by_fsdp1([tensor])):
        raise UnsupportedGradientError(
            f"{name} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters: adaptive clipping cannot "
            "find their rows. Use torch.distributed.fsdp.fully_shard(model)."
        )
    shard = shard_of(tensor)
    for operation, _ in shard.reduced:
        raise UnsupportedGradientError(
            f"{name} is the {operation} of what its processes hold, but adaptive clipping needs to know which elements "
            "a process holds: expected Shard(...) or Replicate(). Redistribute it, or exclude it."
        )
    cut = {dim for dim, entries in enumerate(shard.along) if entries is not None}
    if not cut or cut == {layout.dim}:
        return HeldUnits(layout)
    if layout.dim is None:
        return HeldUnits(layout, 1, torch.zeros(1, dtype=torch.int64, device="cpu"))
    if not shard.is_known:
        raise UnsupportedGradientError(
            f"{name} is laid out as {shard.placement.layout}, in an order that does not determine which entries of "
            f"dimension {layout.dim} this process holds. Use the placements that distribute_tensor, fully_shard or "
            "parallelize_module make, or exclude it from adaptive clipping."
        )
    columns, count = shard.entries(layout.dim), shard.shape[layout.dim]
    if layout.groups == 1:
        return HeldUnits(layout, count, columns)
    # A unit spans the rows of one group, and a part may hold a different number of rows of each group. The pieces are
    # therefore single entries of dimension 0.
    rows = shard.entries(0)
    group = rows // (shard.shape[0] // layout.groups)
    pieces = UnitLayout(dim=layout.dim, groups=max(1, len(rows)))
    return HeldUnits(pieces, layout.groups * count, (group[:, None] * count + columns).flatten())


class UnitPlan:
    """Positions in the reduced vector of all split units of one parameter list.

    Args:
        units: The units that this rank holds of each tensor.
        slots: How many entries each tensor needs: equal on all ranks.
        weights: One over the number of ranks that hold the same part of each tensor.
    """

    def __init__(self, units: Sequence[HeldUnits], slots: Sequence[int], weights: Tensor) -> None:
        self.units = units
        self.offsets = [0, *accumulate(slots)]
        self.split = [i for i, unit in enumerate(units) if unit.slots]
        self._slots = torch.tensor(list(slots), dtype=torch.int64, device=weights.device)
        self._weights = self._each(weights)
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    def extended(self, part: NormReduction) -> NormReduction:
        """Return the reduction of the whole vector; ``part`` is the reduction of the gradients' norms alone."""
        one, none = part.weights.new_ones(1), part.weights.new_zeros(1 + self.offsets[-1])
        weights = torch.cat([part.weights, part.weights, one, self._weights, self._weights])
        # A weight exists whether or not its gradient does.
        shares = torch.cat([part.shares, part.shares, none[:1], self._each(part.shares), none[1:]])
        return replace(part, weights=weights, shares=shares)

    def _each(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self._slots, output_size=self.offsets[-1])

    def place(self, norms: Mapping[int, Tensor], home: torch.device) -> Tensor:
        """Return one norm for each slot, from the norms of this rank's pieces of split units, by tensor."""
        some = [i for i in self.split if i in norms]
        if not some:
            return torch.zeros(self.offsets[-1], dtype=torch.float64, device=home)
        pieces = torch.cat([move(norms[i], home, torch.float64) for i in some])
        return joined_norms(pieces, torch.cat([self._at(i, home) for i in some]), self.offsets[-1])

    def take(self, factors: Tensor, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the factors of the pieces of ``rows``, each on its device, from the factors of all split units."""
        some = [i for i in self.split if i in rows]
        return {i: move(factors[self._at(i, factors.device)], rows[i].device) for i in some}

    def _at(self, index: int, device: torch.device) -> Tensor:
        if (index, device) not in self._places:
            self._places[index, device] = (self.units[index].places + self.offsets[index]).to(device)
        return self._places[index, device]


_plans: WeakKeyDictionary[Reducer, dict[tuple, UnitPlan]] = WeakKeyDictionary()


def unit_plan_for(
    reduction: NormReduction,
    tensors: Sequence[Tensor],
    layouts: Mapping[int, UnitLayout],
    kept: Sequence[int],
    name: Callable[[int], str],
) -> UnitPlan:
    """Return the plan for the units of ``tensors``, made once; with pipeline stages, making it is a collective.

    Args:
        reduction: The reduction of the norms of ``tensors``.
        tensors: The parameters.
        layouts: By id, the units of parameters that do not follow from the shape.
        kept: The positions of the parameters to clip.
        name: Returns the name of the parameter at a position, for messages.

    Raises:
        UnsupportedGradientError: If the units of a parameter to clip cannot be determined.
    """
    ids = tuple(map(id, tensors))  # unique: the death of any of the parameters drops the reducer and its plans
    others = tuple((i, layouts[key]) for i, key in enumerate(ids) if key in layouts)
    known, key = _plans.setdefault(reduction.reducer, {}), (ids, others, tuple(kept))
    if key not in known:
        chosen, all_units = set(kept), list[HeldUnits]()
        for i, tensor in enumerate(tensors):
            try:
                held = units_held(tensor, layouts.get(id(tensor)) or layout_of(tensor), name(i))
            except UnsupportedGradientError:  # an excluded parameter's units do not matter
                if i in chosen:
                    raise
                held = ONE_UNIT
            all_units.append(held)
        # Every tensor gets its slots, excluded or not: vectors are equally long on ranks that exclude other parameters,
        # and the comparison of settings can report the difference.
        slots, union = [unit.slots for unit in all_units], reduction.reducer.union
        if union.stages is not None:  # each stage knows the slots of its own parameters only
            numbers = torch.tensor(slots, dtype=torch.int64, device=reduction.reducer.device)
            slots = largest_over(numbers, union.group).tolist()
        units = [unit if i in chosen else ONE_UNIT for i, unit in enumerate(all_units)]
        known[key] = UnitPlan(units, slots, reduction.weights)
    return known[key]
