"""The process group that holds all parts of a list of gradients, so that one all-reduce is enough."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.placements import Placement
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.torch_private import process_groups, root_mesh_of
from gradguard.words import listed

MOST_RANKS = 20
"""The largest number of ranks, or parameters, in an error message."""


@dataclass(frozen=True, slots=True)
class ReductionGroup:
    """The ranks that take part in a reduction.

    Attributes:
        group: The process group of all of them.
        stage: The global ranks that hold parts of the same parameters as this rank; all of ``group`` unless the group
            spans pipeline stages.
        stages: The process group along which parameters differ, if one was given.
    """

    group: Any
    stage: frozenset[int]
    stages: Any = None


@dataclass(frozen=True, slots=True)
class Stages:
    """Pipeline stages: ranks that hold different parameters, and may share some weights.

    Attributes:
        group: The process group along which parameters differ; None if all ranks have the same list.
        root: The root of the device mesh that named the stages, if a mesh did.
        shared: Weights that several stages hold, by a name that is equal on all of them.
    """

    group: Any = None
    root: Any = None
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def named(process_group: Any, mesh: Any, shared: Any) -> "Stages":
        """Return the stages that a user names by these arguments.

        Raises:
            InvalidValueError: If both a group and a mesh are given, or shared weights without either; if this process
                is not in the group, or the mesh has several dimensions.
            InvalidTypeError: If an argument has another type.
        """
        shared = {} if shared is None else shared
        if not isinstance(shared, Mapping) or not all(isinstance(t, Tensor) for t in shared.values()):
            raise InvalidTypeError(
                f"shared is {type(shared).__name__}: expected a mapping from a name, the same on every stage, to a "
                "parameter, such as shared={'embedding': model.embedding.weight}."
            )
        group = _stages_group(process_group, mesh)
        if shared and group is None:
            raise InvalidValueError(
                "shared lists weights that several pipeline stages hold: name the stages with process_group= or mesh=. "
                "On one process, tied weights count once by themselves."
            )
        return Stages(group, None if mesh is None else root_mesh_of(mesh), shared)


ONE_STAGE = Stages()


def several_processes() -> bool:
    """Tell whether `torch.distributed` joins this process with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _stages_group(process_group: Any, mesh: Any) -> Any:
    if process_group is None and mesh is None:
        return None
    if process_group is not None and mesh is not None:
        raise InvalidValueError("process_group and mesh both name the pipeline stages: leave one out.")
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidValueError(
            "a process group was given, but torch.distributed is not initialized: call init_process_group first, or "
            "omit process_group and mesh on one process."
        )
    if mesh is not None:
        if not hasattr(mesh, "get_group"):
            raise InvalidTypeError(f"mesh is {type(mesh).__name__}: expected a DeviceMesh, such as mesh['pp'].")
        if mesh.ndim != 1:
            raise InvalidValueError(
                f"mesh has {mesh.ndim} dimensions: expected the one along which parameters differ, such as mesh['pp']."
            )
        process_group = mesh.get_group()
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidValueError(
            f"process_group does not contain this process (rank {dist.get_rank()}): pass the group of its own stage "
            "chain, and call on the members only."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise InvalidTypeError(
            f"process_group is {type(process_group).__name__}: expected what dist.new_group or mesh.get_group returned."
        )
    check_alive(process_group)
    return process_group


def is_alive(group: Any) -> bool:
    """Tell whether ``group`` is a process group that has not been destroyed."""
    return dist.is_initialized() and group in process_groups()


def check_alive(group: Any) -> None:
    """Raise if ``group`` was destroyed.

    Raises:
        InvalidValueError: If it was.
    """
    if not is_alive(group):
        raise InvalidValueError(
            "a process group that the gradients or the call need is destroyed: expected a live one. Clip before "
            "destroy_process_group(), and make meshes and parameters again after a new init_process_group()."
        )


def reduction_group_of(placements: Iterable[Placement], stages: Stages = ONE_STAGE) -> ReductionGroup | None:
    """Return the ranks that must reduce gradients with these placements; None if this rank holds all of them whole.

    Args:
        placements: The placements of all listed tensors.
        stages: The pipeline stages.

    Raises:
        InvalidValueError: If no process group holds all of the ranks, or one is destroyed, or ``stages`` contradicts
            the placements: parameters cannot differ between ranks over which they are spread.
    """
    spread = list({id(p): p for p in placements if p.ranks}.values())  # each placement once: it may hold many ranks
    if not spread and stages.group is None:
        return None
    meshes = _meshes_of(spread)
    for mesh in meshes:
        _check_mesh(mesh)
    me = frozenset([dist.get_rank()])
    parts = {p.ranks for p in spread}
    stage = _spanned([me, *parts], meshes)
    if stages.group is None:
        return ReductionGroup(_group_of(stage), stage)
    along = frozenset(dist.get_process_group_ranks(stages.group))
    for p in spread:
        if len(both := sorted(p.ranks & along)) > 1:
            raise InvalidValueError(
                f"process_group or mesh says that parameters differ between the ranks {listed(both, MOST_RANKS)}, over "
                f"which one is spread: {p.layout}. Pass the group that has one rank of each pipeline stage, such as "
                "mesh['pp']; without pipeline stages, omit the argument."
            )
    if stages.root is not None:  # a root mesh shows even a stage without shards where the shards of others are
        grid = stages.root.mesh
        own = _slice_at(grid, dist.get_rank(), [not is_stages for is_stages in varies_along(grid, along)])
        everybody = frozenset(grid.flatten().tolist())
        if stage <= own and group_of(everybody) is not None:
            return ReductionGroup(_group_of(everybody), own, stages.group)
    return ReductionGroup(_group_of(_spanned([stage, along], meshes)), stage, stages.group)


_PIPELINE = {"pp", "pipe", "pipeline", "stage", "stages"}
"""Usual names of the mesh dimension of pipeline stages."""


def refuse_unnamed_stages(placements: Iterable[Placement], union: ReductionGroup) -> None:
    """Raise if the gradients' meshes are slices of a mesh with pipeline stages that no argument names.

    Along any other dimension of the root mesh, such as ``dp`` beside tensor parallelism, the gradients are replicated.

    Args:
        placements: The placements of all listed tensors.
        union: The result of `reduction_group_of` for them.

    Raises:
        InvalidValueError: If they are: the norm would be that of this stage alone.
    """
    taking_part = dist.get_process_group_ranks(union.group)
    for root in _roots_of(_meshes_of(placements)):
        for dim, name in enumerate(root.mesh_dim_names or ()):
            is_pipeline = name.lower() in _PIPELINE and root.size(dim) > 1
            if is_pipeline and not varies_along(root.mesh, taking_part)[dim]:
                raise InvalidValueError(
                    f"the gradients lie on slices of {root}, whose dimension {name!r} has {root.size(dim)} pipeline "
                    "stages with different parameters: their norm would be that of this stage alone. Pass "
                    f"mesh=mesh[{name!r}], with shared= for weights that several stages hold."
                )


def _meshes_of(placements: Iterable[Placement]) -> list[Any]:
    return list({id(p.mesh): p.mesh for p in placements if p.mesh is not None}.values())


def _roots_of(meshes: Iterable[Any]) -> list[Any]:
    return list({id(root): root for root in map(root_mesh_of, meshes)}.values())


def varies_along(grid: Tensor, ranks: Iterable[int]) -> list[bool]:
    """Tell for each dimension of a mesh whether ``ranks`` have several coordinates along it."""
    where = torch.isin(grid, torch.tensor(sorted(ranks), device="cpu")).nonzero()
    return [len(set(column.tolist())) > 1 for column in where.unbind(dim=1)]


def _slice_at(grid: Tensor, rank: int, varies: Iterable[bool]) -> frozenset[int]:
    """Return the ranks that have the coordinates of ``rank`` along all dimensions that do not vary."""
    at = (grid == rank).nonzero()[0].tolist()
    index = tuple(slice(None) if is_free else i for is_free, i in zip(varies, at, strict=True))
    return frozenset(grid[index].flatten().tolist())


def _check_mesh(mesh: Any) -> None:
    if not dist.is_initialized():
        raise InvalidValueError(
            "a gradient lies on a device mesh whose process group is destroyed: clip before destroy_process_group()."
        )
    if mesh.get_coordinate() is None:
        raise InvalidValueError(
            f"this process (rank {dist.get_rank()}) is not on {mesh}, on which a gradient lies: clip such gradients on "
            "the processes of their mesh only, or list parameters that all processes hold."
        )
    try:
        groups = [mesh.get_group(i) for i in range(mesh.ndim)]
    except Exception as error:  # the exception for a destroyed group differs between torch versions
        raise InvalidValueError(
            f"a gradient lies on {mesh}, whose process group cannot be found any more: make the mesh and the "
            "parameters anew after initializing torch.distributed again."
        ) from error
    for group in groups:
        check_alive(group)


def _spanned(parts: Sequence[frozenset[int]], meshes: Iterable[Any]) -> frozenset[int]:
    """Return a set of ranks that contains all ``parts``, such that each rank in it arrives at the same set."""
    union = frozenset().union(*parts)
    if union in parts:
        return union
    for root in _roots_of(meshes):
        if union <= set(root.mesh.flatten().tolist()):
            return _slice_at(root.mesh, min(union), varies_along(root.mesh, union))
    world = frozenset(range(dist.get_world_size()))
    if len(world) == math.prod(len(part) for part in parts):
        return world
    raise InvalidValueError(
        f"the gradients lie on the ranks {' and '.join(str(sorted(p)) for p in parts if len(p) > 1)}, on meshes that "
        "are no slices of one, so the processes that must reduce them are unknown. Slice all meshes from one "
        "init_device_mesh(...)."
    )


def _group_of(ranks: frozenset[int]) -> Any:
    """Return the process group of exactly ``ranks``, or raise."""
    if (group := group_of(ranks)) is None:
        raise InvalidValueError(
            f"the gradients lie on the ranks {sorted(ranks)} together, for which there is no process group: make one, "
            f"once, on every rank: torch.distributed.new_group({sorted(ranks)}), or mesh[...]._flatten()."
        )
    return group


def group_of(ranks: frozenset[int]) -> Any:
    """Return the process group of exactly ``ranks``: of several the first, the same on all ranks; None if none."""
    groups = process_groups().items()  # in order of creation, WORLD first
    found = (g for g, its in groups if isinstance(g, dist.ProcessGroup) and len(its) == len(ranks) and ranks == {*its})
    return next(found, None)
