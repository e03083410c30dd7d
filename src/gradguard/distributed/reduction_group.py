"""The one process group in which every part of a list of gradients lies, so that one all-reduce is enough."""

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
"""So many ranks, or parameters, are named in an error."""


@dataclass(frozen=True, slots=True)
class ReductionGroup:
    """The processes that take part in a reduction.

    Attributes:
        group: The process group of all of them.
        stage: The global ranks that hold parts of the same parameters as this process; all of ``group`` unless it
            spans pipeline stages.
        stages: The process group along which parameters differ, if one was given.
    """

    group: Any
    stage: frozenset[int]
    stages: Any = None


@dataclass(frozen=True, slots=True)
class Stages:
    """Pipeline stages: processes that hold different parameters, and may share some weights.

    Attributes:
        group: The process group along which parameters differ; None where all processes have the same list.
        root: The device mesh that it is one dimension of, if it was given as a mesh.
        shared: Weights that several stages hold, by a name that is the same on all of them.
    """

    group: Any = None
    root: Any = None
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def named(process_group: Any, mesh: Any, shared: Any) -> "Stages":
        """Return the stages that a user names by these arguments.

        Raises:
            InvalidValueError: If there are two groups, or shared weights and none; if this process is not in the group,
                or the mesh has several dimensions.
            InvalidTypeError: If an argument is of another type.
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
                "shared says which weights several pipeline stages hold: name the stages with process_group= or mesh=. "
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
            "leave process_group and mesh out on one process."
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
            "destroy_process_group(), and make meshes and parameters anew after initializing again."
        )


def reduction_group_of(placements: Iterable[Placement], stages: Stages = ONE_STAGE) -> ReductionGroup | None:
    """Return the processes that must add up gradients placed like this; None if this one holds all of them.

    Args:
        placements: The placements of all listed tensors.
        stages: The pipeline stages.

    Raises:
        InvalidValueError: If no process group holds all of them, or one is destroyed, or ``stages`` says that
            parameters differ between processes over which they are spread.
    """
    spread = list({id(p): p for p in placements if p.ranks}.values())  # sets of thousands of ranks: each once
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
                f"which one is spread: {p.layout}. Pass the group that has one rank of each pipeline stage, mesh['pp'] "
                "for instance; where there are no stages, leave the argument out."
            )
    if stages.root is not None:  # then a stage without shards knows as well where those of others lie
        grid = stages.root.mesh
        own = _slice_at(grid, dist.get_rank(), [not is_stages for is_stages in varies_along(grid, along)])
        everybody = frozenset(grid.flatten().tolist())
        if stage <= own and group_of(everybody) is not None:
            return ReductionGroup(_group_of(everybody), own, stages.group)
    return ReductionGroup(_group_of(_spanned([stage, along], meshes)), stage, stages.group)


_PIPELINE = {"pp", "pipe", "pipeline", "stage", "stages"}
"""The name of pipeline stages as a dimension of a device mesh."""


def refuse_unnamed_stages(placements: Iterable[Placement], union: ReductionGroup) -> None:
    """Raise if the meshes of some gradients are slices of one that has pipeline stages, which no argument names.

    Along any other dimension that they do not lie on, as along ``dp`` beside tensor parallelism, they are replicated.

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
                    "stages with parameters of their own, so that their norm would be that of this stage alone: pass "
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
    """Return the ranks whose coordinates are those of ``rank`` along all dimensions that do not vary."""
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
    except Exception as error:  # what a mesh raises whose groups are gone differs between versions
        raise InvalidValueError(
            f"a gradient lies on {mesh}, whose process group cannot be found any more: make the mesh and the "
            "parameters anew after initializing torch.distributed again."
        ) from error
    for group in groups:
        check_alive(group)


def _spanned(parts: Sequence[frozenset[int]], meshes: Iterable[Any]) -> frozenset[int]:
    """The smallest set that holds all ``parts`` and looks the same from each of its members."""
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
        "are no slices of one: which processes must add up cannot be told. Slice all meshes from one "
        "init_device_mesh(...)."
    )


def _group_of(ranks: frozenset[int]) -> Any:
    """The process group of exactly ``ranks``."""
    if (group := group_of(ranks)) is None:
        raise InvalidValueError(
            f"the gradients lie on the ranks {sorted(ranks)} together, which no process group holds: make one, once, "
            f"on every rank: torch.distributed.new_group({sorted(ranks)}), or mesh[...]._flatten()."
        )
    return group


def group_of(ranks: frozenset[int]) -> Any:
    """Return the process group of exactly ``ranks``: of several the first, on all ranks; None where there is none."""
    groups = process_groups().items()  # in the order in which they were made, WORLD first
    found = (g for g, its in groups if isinstance(g, dist.ProcessGroup) and len(its) == len(ranks) and ranks == {*its})
    return next(found, None)
