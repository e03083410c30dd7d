r"""Which units of a tensor, rows for instance, this process holds, and how those that are split are put together.

Of a unit that is split, each process adds the squares of its elements to the unit's place in the vector of the one
all-reduce:

.. math:: \lVert G_i \rVert_2^2 = \sum_r \frac{1}{k_r} \lVert G_i^{(r)} \rVert_2^2

over all processes r, of which :math:`k_r` hold the same elements.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradguard.distributed.agreement import largest_of
from gradguard.distributed.classes import Classes
from gradguard.distributed.placements import is_sharded, local_part
from gradguard.distributed.plan import NormReduction
from gradguard.distributed.reduction import Reducer
from gradguard.errors import UnsupportedGradientError
from gradguard.tensors.layout import move
from gradguard.tensors.units import WHOLE, UnitLayout, layout_of
from gradguard.torch_private import flattened_by_fsdp1, has_usual_shard_order


@dataclass(frozen=True, slots=True, eq=False)
class HeldUnits:
    """The units of a process' part of a tensor, and which units of the whole tensor they are pieces of.

    Attributes:
        layout: The units of the part.
        slots: How many units the whole tensor has, if they are split between processes; 0 if each lies whole on one.
        places: For each unit of the part, which of the ``slots`` it is a piece of; empty if none is split.
    """

    layout: UnitLayout
    slots: int
    places: Tensor

    @property
    def are_split(self) -> bool:
        """Whether other processes hold pieces of the same units."""
        return self.slots > 0


_NOWHERE = torch.empty(0, dtype=torch.int64, device="cpu")

ONE_UNIT = HeldUnits(WHOLE, 0, _NOWHERE)
"""What nobody asks about the units of."""


def units_held(tensor: Tensor, layout: UnitLayout, name: str) -> HeldUnits:
    """Return how the units of this process' part of ``tensor`` relate to those of all of it; no communication.

    Whether units are split follows from the placements alone, so that all processes say the same.

    Args:
        tensor: A parameter, sharded or not.
        layout: The units of all of it.
        name: What it is called, for messages.

    Raises:
        UnsupportedGradientError: If its layout does not tell which elements a process holds.
    """
    if any(flattened_by_fsdp1([tensor])):
        raise UnsupportedGradientError(
            f"{name} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters, so that adaptive clipping "
            "cannot tell their rows: use torch.distributed.fsdp.fully_shard(model)."
        )
    cut = _cut_dimensions(tensor, name)
    if not cut or cut == {layout.dim}:
        return HeldUnits(layout, 0, _NOWHERE)
    if layout.dim is None:
        return HeldUnits(layout, 1, torch.zeros(1, dtype=torch.int64, device="cpu"))
    columns, count = _numbers_along(tensor, layout.dim, name), tensor.shape[layout.dim]
    if layout.groups == 1:
        return HeldUnits(layout, count, columns)
    # A unit spans the rows of one group, and a part need not hold the same number of rows of each: its pieces are the
    # entries of dimension 0, each by itself.
    rows = _numbers_along(tensor, 0, name)
    group = rows // (tensor.shape[0] // layout.groups)
    pieces = UnitLayout(dim=layout.dim, groups=max(1, len(rows)))
    return HeldUnits(pieces, layout.groups * count, (group[:, None] * count + columns).flatten())


def _cut_dimensions(tensor: Tensor, name: str) -> set[int]:
    """The dimensions of ``tensor`` along which processes hold different parts."""
    if not is_sharded(tensor):
        return set()
    sizes, placements = tensor.device_mesh.shape, tensor.placements  # type: ignore[attr-defined]
    cutting = [p for p, size in zip(placements, sizes, strict=True) if size > 1 and not p.is_replicate()]
    for placement in cutting:
        if not hasattr(placement, "dim"):
            raise UnsupportedGradientError(
                f"{name} is laid out as {placement}: adaptive clipping needs to know which elements of it a process "
                "holds, so expected Shard(...) or Replicate(). Redistribute it, or exclude it."
            )
    return {p.dim % tensor.dim() for p in cutting}


def _numbers_along(tensor: Tensor, dim: int, name: str) -> Tensor:
    """Which entries of dimension ``dim`` this process holds: their numbers, cut in the same way."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    alike = [_along(p, tensor, dim) or Replicate() for p in tensor.placements]  # type: ignore[attr-defined]
    everything = torch.arange(tensor.shape[dim], device="cpu")
    numbers = distribute_tensor(everything, tensor.device_mesh, alike, src_data_rank=None)  # type: ignore[attr-defined]
    held = local_part(numbers).cpu()
    if len(held) != local_part(tensor.detach()).shape[dim] or _in_another_order(tensor, alike):
        raise UnsupportedGradientError(
            f"{name} is laid out as {tensor.placements} in an order that does not tell which of "  # type: ignore[attr-defined]
            f"the entries of dimension {dim} this process holds. Use the placements that distribute_tensor, "
            "fully_shard or parallelize_module make, or exclude it from adaptive clipping."
        )
    return held


def _along(placement: Any, tensor: Tensor, dim: int) -> Any:
    """The placement of a vector that is cut as dimension ``dim`` is; None if that dimension is not cut here."""
    from torch.distributed.tensor import Shard

    if getattr(placement, "dim", None) is None or placement.dim % tensor.dim() != dim:
        return None
    if hasattr(placement, "split_factor"):  # what fully_shard makes of a dimension that tensor parallelism has cut
        return type(placement)(0, split_factor=placement.split_factor)
    return Shard(0)


def _in_another_order(tensor: Tensor, alike: Sequence[Any]) -> bool:
    """Whether a dimension is cut several times, from the right to the left, which its placements do not tell."""
    return sum(not p.is_replicate() for p in alike) > 1 and not has_usual_shard_order(tensor)


class UnitPlan:
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

    def weights_and_shares(self, part: NormReduction, classes: Classes | None) -> tuple[Tensor, Tensor]:
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

    def place(self, norms: Mapping[int, Tensor], home: torch.device) -> Tensor:
        """Return one norm for each slot, from the norms of this process' pieces of split units, by tensor."""
        some = [i for i in self.split if i in norms]
        empty = torch.zeros(self.offsets[-1], dtype=torch.float64, device=home)
        if not some:
            return empty
        at = torch.cat([self._at(i, home) for i in some])
        pieces = torch.cat([move(norms[i], home, torch.float64) for i in some])
        largest = empty.scatter_reduce(0, at, pieces, "amax")
        divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)  # so that no square leaves the range
        return divisor * empty.index_add(0, at, (pieces / divisor[at]).square()).sqrt()

    def take(self, factors: Tensor, devices: Mapping[int, torch.device]) -> dict[int, Tensor]:
        """Return the factors of the pieces that this process holds, from those of all split units.

        Args:
            factors: One for each slot.
            devices: Where the factors of each tensor are wanted; those that are not split are left out.
        """
        some = [i for i in self.split if i in devices]
        return {i: move(factors[self._at(i, factors.device)], devices[i]) for i in some}

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
    """Return the plan for the units of ``tensors``, made once; with pipeline stages that is a collective.

    Args:
        reduction: How the norms of ``tensors`` add up.
        tensors: The parameters.
        layouts: By identity, the units of parameters that are not what the shape tells.
        kept: The positions of those whose units are asked for.
        name: What to call the one at a position, for messages.
    """
    ids = tuple(map(id, tensors))  # a plan, and its reducer, end with the first of its parameters
    others = tuple((i, layouts[key]) for i, key in enumerate(ids) if key in layouts)
    known, key = _plans.setdefault(reduction.reducer, {}), (ids, others, tuple(kept))
    if key not in known:
        chosen = set(kept)
        all_units = [_units_of(i, p, layouts, name, must=i in chosen) for i, p in enumerate(tensors)]
        # All have their slots, so that the vectors of processes that exclude others are as long, and tell who does.
        slots = _slots_of_all(reduction.reducer, [unit.slots for unit in all_units])
        units = [unit if i in chosen else ONE_UNIT for i, unit in enumerate(all_units)]
        known[key] = UnitPlan(units, slots, reduction.weights)
    return known[key]


def _units_of(
    index: int, tensor: Tensor, layouts: Mapping[int, UnitLayout], name: Callable[[int], str], must: bool
) -> HeldUnits:
    """The units of one tensor; of one that is left out they need not be known."""
    try:
        return units_held(tensor, layouts.get(id(tensor)) or layout_of(tensor), name(index))
    except UnsupportedGradientError:
        if must:
            raise
        return ONE_UNIT


def _slots_of_all(reducer: Reducer, slots: list[int]) -> list[int]:
    """The same for all pipeline stages: this one knows only its own parameters."""
    if reducer.union.stages is None:
        return slots
    return largest_of(reducer.union, slots, reducer.device)
