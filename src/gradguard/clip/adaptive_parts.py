r"""Adaptive clipping of gradients that are spread over processes: exactly what one process with all of them would do.

A unit that lies whole on one process is bounded there. Of one that is split, each process adds the squares of its
elements, of the weight's and of the gradient's, to the unit's place in the vector of the one all-reduce:

.. math:: \lVert G_i \rVert_2^2 = \sum_r \frac{1}{k_r} \lVert G_i^{(r)} \rVert_2^2, \qquad
          \lVert W_i \rVert_2^2 = \sum_r \frac{1}{k_r} \lVert W_i^{(r)} \rVert_2^2

over all processes r, of which :math:`k_r` hold the same elements. The same vector carries the norm of every gradient
before and after the clip, so that all processes know what it did.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradguard.clip.adaptive_units import by_device, layout_of, rows_in_memory, rows_like, unit_factors
from gradguard.clip.gradients import Gradients
from gradguard.distributed.agreement import largest_of
from gradguard.distributed.classes import Classes
from gradguard.distributed.placements import local_part
from gradguard.distributed.plan import Part
from gradguard.distributed.reduction import Reducer
from gradguard.distributed.units import ONE_UNIT, HeldUnits, units_held
from gradguard.tensors.layout import meeting_device, move
from gradguard.tensors.norms import norm_of_norms, tensor_norms
from gradguard.tensors.units import UnitLayout, scale_units_, unit_norms


@dataclass(frozen=True, slots=True)
class UnitDecision:
    """What an adaptive clip will do, known on every process before anything is written.

    Attributes:
        norms: The norm of each class of gradients before the clip, or of each whole gradient; float64.
        there: Which of them any process has; as long, bool.
        classes: Which gradients one norm stands for; None where each has its own.
        after: The norm of all gradients after it: 0-dim.
        clipped: Whether any unit is clipped on any process: 0-dim bool.
        write: Does it to the parts that this process holds, in place.
    """

    norms: Tensor
    there: Tensor
    classes: Classes | None
    after: Tensor
    clipped: Tensor
    write: Callable[[], None]


@torch.no_grad()
def decide_units(
    found: Gradients,
    layouts: Mapping[int, UnitLayout],
    kept: Sequence[int],
    threshold: float | Tensor,
    eps: float,
    each: bool = False,
) -> UnitDecision:
    """Return what an adaptive clip will do, from units measured on all processes in one all-reduce.

    Args:
        found: Gradients that are spread over processes; all of them measure at the same time.
        layouts: By identity, the units of parameters that are not what the shape tells.
        kept: The positions of the gradients to clip; the others are measured and left alone.
        threshold: λ, at least 0.
        eps: ε, at least 0.
        each: Whether the norm of each gradient is wanted, which the clip does not need.

    Raises:
        UnsupportedGradientError: If a layout does not tell which elements a process holds.
        DistributedError: If another process does not come, or comes with something else.
    """
    assert found.part is not None
    home, plan = meeting_device(found.gradients), _plan_for(found, layouts, kept)
    units = _measured(found, plan, kept, 0.0 if isinstance(threshold, Tensor) else threshold * eps, eps)
    whole = [i for i in units if not plan.units[i].are_split]
    factors = _factors([units[i] for i in whole], threshold, eps)
    classes = None if each or found.part.reducer.is_alone else found.part.classes
    before, after, binds = _outcome(found, units, dict(zip(whole, factors, strict=True)), home)
    if classes is not None:
        before, after = classes.joined(before, 2.0), classes.joined(after, 2.0)
    vector = torch.cat([before, after, binds, *plan.fill(units, home)])
    weights, shares = plan.weights_and_shares(found.part, classes)
    (added,), there = found.part.reducer.reduce(
        [(vector, 2.0)], weights, shares, found.part.balance, found.part.settings
    )
    count, slots = len(before), plan.offsets[-1]
    before, after, binds, gradients, bounds = added.split([count, count, 1, slots, slots])
    split_factors = unit_factors([gradients], [bounds], threshold, eps)[0]
    held = {**dict(zip(whole, factors, strict=True)), **plan.take(units, split_factors)}
    return UnitDecision(
        before,
        there[:count],
        classes,
        norm_of_norms(torch.cat([after, gradients * split_factors])),
        (binds > 0).any() | (split_factors < 1).any(),
        lambda: _scale([(units[i].rows, plan.units[i].layout, factor) for i, factor in held.items()]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """The part of one tensor that this process holds: its gradient if there is one, and the norms of its units."""

    rows: Tensor | None
    gradient_norms: Tensor
    weight_norms: Tensor


class _UnitPlan:
    """Where the units of one list of parameters that are split between processes stand in the vector.

    Args:
        units: What this process holds of each tensor.
        slots: How many places each needs: the same on all processes.
        weights: One over the number of processes that hold the same part of each.
    """

    def __init__(self, units: Sequence[HeldUnits], slots: Sequence[int], weights: Tensor) -> None:
        self.units = units
        self.offsets = [0, *accumulate(slots)]
        self.split = [i for i, unit in enumerate(units) if unit.are_split]
        self._slots = torch.tensor(list(slots), dtype=torch.int64, device=weights.device)
        self._weights = self._each(weights)
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    def weights_and_shares(self, part: Part, classes: Classes | None) -> tuple[Tensor, Tensor]:
        """Return those of the whole vector, which `Reducer.reduce` wants."""
        one, none = part.weights.new_ones(1), part.weights.new_zeros(1 + self.offsets[-1])
        own, shares = part.weights, part.shares
        if classes is not None:
            own, shares = classes.weights, classes.shares(part.shares)
        weights = torch.cat([own, own, one, self._weights, self._weights])
        # A weight is there whether the gradient is or not.
        return weights, torch.cat([shares, shares, none[:1], self._each(part.shares), none[1:]])

    def _each(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self._slots, output_size=self.offsets[-1])

    def fill(self, units: Mapping[int, _Measured], home: torch.device) -> tuple[Tensor, Tensor]:
        """Return the norms of this process' pieces of split units, of gradients and of weights, in their places."""
        some = [i for i in self.split if i in units]
        with_gradient = [i for i in some if units[i].rows is not None]
        return (
            self._in_slots(with_gradient, [units[i].gradient_norms for i in with_gradient], home),
            self._in_slots(some, [units[i].weight_norms for i in some], home),
        )

    def take(self, units: Mapping[int, _Measured], factors: Tensor) -> dict[int, Tensor]:
        """Return the factors of the pieces that this process holds, by tensor, from those of all split units."""
        some = [i for i in self.split if i in units and units[i].rows is not None]
        devices = [units[i].gradient_norms.device for i in some]
        return {i: move(factors[self._at(i, factors.device)], d) for i, d in zip(some, devices, strict=True)}

    def _in_slots(self, some: Sequence[int], norms: Sequence[Tensor], home: torch.device) -> Tensor:
        """One norm for each slot, of all pieces that belong there; squares are of norms over the largest."""
        empty = torch.zeros(self.offsets[-1], dtype=torch.float64, device=home)
        if not some:
            return empty
        at = torch.cat([self._at(i, home) for i in some])
        pieces = torch.cat([move(x, home, torch.float64) for x in norms])
        largest = empty.scatter_reduce(0, at, pieces, "amax")
        divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
        return divisor * empty.index_add(0, at, (pieces / divisor[at]).square()).sqrt()

    def _at(self, index: int, device: torch.device) -> Tensor:
        if (index, device) not in self._places:
            self._places[index, device] = (self.units[index].places + self.offsets[index]).to(device)
        return self._places[index, device]


_plans: WeakKeyDictionary[Reducer, dict[tuple, _UnitPlan]] = WeakKeyDictionary()


def _plan_for(found: Gradients, layouts: Mapping[int, UnitLayout], kept: Sequence[int]) -> _UnitPlan:
    """The plan for the units of ``found``, made once; with pipeline stages that is a collective."""
    part = found.part
    assert part is not None
    ids = tuple(map(id, found.parameters))  # a plan, and its reducer, end with the first of its parameters
    others = tuple((i, layouts[key]) for i, key in enumerate(ids) if key in layouts)
    known, key = _plans.setdefault(part.reducer, {}), (ids, others, tuple(kept))
    if key not in known:
        chosen = set(kept)
        units = [
            units_held(p, layouts.get(id(p)) or layout_of(p), found.name(i)) if i in chosen else ONE_UNIT
            for i, p in enumerate(found.parameters)
        ]
        known[key] = _UnitPlan(units, _slots_of_all(part.reducer, [unit.slots for unit in units]), part.weights)
    return known[key]


def _slots_of_all(reducer: Reducer, slots: list[int]) -> list[int]:
    """The same for all pipeline stages: this one knows only its own parameters."""
    if reducer.union.stages is None:
        return slots
    return largest_of(reducer.union, slots, reducer.device)


def _measured(
    found: Gradients, plan: _UnitPlan, kept: Sequence[int], gradient_floor: float, weight_floor: float
) -> dict[int, _Measured]:
    """Measure the units of what this process holds; of a weight also where the gradient of a split unit is missing."""
    rows: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    for i in kept:
        parameter, gradient = local_part(found.parameters[i]), found.gradients[i]
        if gradient.numel():
            rows[i] = rows_in_memory(found.parameters[i], gradient)
            weights[i] = rows_like(gradient, parameter).to(gradient.device)
        elif plan.units[i].are_split and parameter.numel():
            weights[i] = parameter.detach()
    layouts = {i: plan.units[i].layout for i in weights}
    gradient_norms = _norms_by_device(rows, layouts, gradient_floor)
    weight_norms = _norms_by_device(weights, layouts, weight_floor)
    return {i: _Measured(rows.get(i), gradient_norms.get(i, norms[:0]), norms) for i, norms in weight_norms.items()}


def _norms_by_device(
    tensors: Mapping[int, Tensor], layouts: Mapping[int, UnitLayout], floor: float
) -> dict[int, Tensor]:
    norms: dict[int, Tensor] = {}
    for group in _keys_by_device(tensors):
        measured = unit_norms([tensors[i] for i in group], [layouts[i] for i in group], floor)
        norms.update(zip(group, measured, strict=True))
    return norms


def _factors(units: Sequence[_Measured], threshold: float | Tensor, eps: float) -> list[Tensor]:
    """The factors of units that lie whole here."""
    factors = [unit.gradient_norms for unit in units]
    for group in by_device(factors).values():
        norms = [units[k].gradient_norms for k in group], [units[k].weight_norms for k in group]
        for k, factor in zip(group, unit_factors(*norms, threshold, eps), strict=True):
            factors[k] = factor
    return factors


def _outcome(
    found: Gradients, units: Mapping[int, _Measured], factors: Mapping[int, Tensor], home: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of what this process holds: the norm of each gradient before, after (without split units), and 1 if it binds."""
    before, after = list(found.gradients), list(found.gradients)
    for i, unit in units.items():
        before[i] = unit.gradient_norms
        after[i] = unit.gradient_norms * factors[i] if i in factors else unit.gradient_norms[:0]
    together = [torch.cat([factors[i] for i in group]) for group in _keys_by_device(factors)]
    binds = [move((vector < 1).any(), home, torch.float64).view(1) for vector in together]
    zero = torch.zeros(1, dtype=torch.float64, device=home)
    return move(tensor_norms(before), home), move(tensor_norms(after), home), torch.cat([zero, *binds]).amax(0, True)


def _keys_by_device(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    keys = list(tensors)
    return [[keys[k] for k in group] for group in by_device(list(tensors.values())).values()]


def _scale(pieces: Sequence[tuple[Tensor | None, UnitLayout, Tensor]]) -> None:
    held = [(rows, layout, factor) for rows, layout, factor in pieces if rows is not None]
    for group in by_device([rows for rows, *_ in held]).values():
        scale_units_([held[k][0] for k in group], [held[k][1] for k in group], [held[k][2] for k in group])
