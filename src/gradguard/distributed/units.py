"""Which units of a tensor, rows for instance, this process holds, and which of them are split between processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.placements import is_sharded, local_part
from gradguard.errors import UnsupportedGradientError
from gradguard.tensors.units import WHOLE, UnitLayout
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
