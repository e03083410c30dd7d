"""Which part of a tensor this process holds, and how many others hold the same part."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import local_tensor_of, spec_of, specs_of


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """How one tensor is spread over processes.

    Attributes:
        mesh: The device mesh of a DTensor; None for an ordinary tensor.
        ranks: The processes that the tensor is spread over; empty for an ordinary tensor, which everybody holds.
        replicas: How many of them hold the same part.
        layout: The layout, the same on all processes, in words.
        kinds: The placement along each dimension of the mesh, once sums over processes are added up.
        is_whole: Whether each process holds all elements.
    """

    mesh: Any
    ranks: frozenset[int]
    replicas: int
    layout: str
    kinds: Sequence[Any] = ()
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        """Work out once what is asked of each of thousands of tensors."""
        object.__setattr__(self, "is_whole", self.replicas == max(1, len(self.ranks)))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension of the mesh, by name; empty for an ordinary tensor."""
        if self.mesh is None:
            return {}
        names = self.mesh.mesh_dim_names or [f"dim {k}" for k in range(self.mesh.ndim)]
        return dict(zip(names, self.mesh.shape, strict=True))

    @property
    def place(self) -> tuple[int, int]:
        """The number of this process' part, equal on all that hold it, and which of these copies it has."""
        if self.mesh is None:
            return 0 if self.is_whole else dist.get_rank(), 0
        part = copy = 0
        for size, at, kind in zip(self.mesh.shape, self.mesh.get_coordinate(), self.kinds, strict=True):
            if kind.is_replicate():
                copy = copy * size + at
            else:
                part = part * size + at
        return part, copy


_ORDINARY = {Tensor, Parameter}
_known: dict[tuple[int, tuple], Placement] = {}

WHOLE = Placement(None, frozenset(), 1, "whole")
"""Every process holds the whole tensor."""


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a DTensor, as FSDP2's parameters are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether any of ``tensors`` is a DTensor; looks at each type once."""
    module = sys.modules.get("torch.distributed.tensor")
    kinds = set(map(type, tensors)) - _ORDINARY
    return bool(kinds) and module is not None and any(issubclass(kind, module.DTensor) for kind in kinds)


def refuse_sharded(tensors: Sequence[Tensor]) -> None:
    """Raise if a tensor is a shard.

    Raises:
        UnsupportedGradientError: If any tensor is a DTensor.
    """
    if any_sharded(tensors):
        raise UnsupportedGradientError("a gradient is a DTensor, whose norm all of its processes must take together.")


def placement_of(tensor: Tensor) -> Placement:
    """Return how ``tensor`` is spread: from its device mesh and placements if it is a DTensor, else whole.

    A Partial placement counts as Replicate, which it is once the parts are added up.
    """
    return _placement_by(spec_of(tensor)) if is_sharded(tensor) else WHOLE


def placements_of(tensors: Sequence[Tensor]) -> list[Placement]:
    """Return the `placement_of` each tensor."""
    return [_placement_by(spec) if spec else WHOLE for spec in specs_of(tensors)]


def _placement_by(spec: Any) -> Placement:
    key = id(spec.mesh), spec.placements
    if key not in _known:  # a placement keeps its mesh alive, so that no other gets its identity
        _known[key] = _placement(spec.mesh, spec.placements)
    return _known[key]


def _placement(mesh: Any, placements: Sequence[Any]) -> Placement:
    from torch.distributed.tensor import Replicate

    kinds = tuple(Replicate() if p.is_partial() else p for p in placements)
    names = mesh.mesh_dim_names or range(mesh.ndim)
    words = ", ".join(
        f"{p!r} over mesh dimension {name} of {size}" for p, name, size in zip(kinds, names, mesh.shape, strict=True)
    )
    replicas = math.prod(size for p, size in zip(kinds, mesh.shape, strict=True) if p.is_replicate())
    return Placement(mesh, frozenset(mesh.mesh.flatten().tolist()), replicas, words, kinds)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of ``tensor``, sharing its memory: an ordinary tensor, possibly empty."""
    if not is_sharded(tensor):
        return tensor
    local = local_tensor_of(tensor)
    return local if type(local) is Tensor else tensor.detach().to_local()  # type: ignore[attr-defined]


def gradient_of(parameter: Any) -> Tensor | None:
    """Return the gradient of a parameter: ``grad``, or Megatron's ``main_grad`` where there is none."""
    return parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of ``full``, which every process holds, laid out as ``like`` is; no communication."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def sharded_as(local: Tensor, mesh: Any, placements: Sequence[Any], shape: Any, stride: Any) -> Tensor:
    """Return a DTensor of which ``local`` is this process's part; nothing is compared or sent."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def is_partial(tensor: Any) -> bool:
    """Tell whether a DTensor, or one of this spec, is the sum (average, maximum ...) of what its processes hold."""
    return any([p.is_partial() for p in tensor.placements])


def check_alike(gradient: Tensor, parameter: Tensor, name: str) -> None:
    """Raise if the layout of ``gradient`` cannot be brought in line with that of ``parameter``.

    Raises:
        UnsupportedGradientError: If one of them is a DTensor and the other is not, or they lie on two meshes.
    """
    if is_sharded(gradient) != is_sharded(parameter):
        kinds = "a DTensor and the parameter an ordinary tensor", "an ordinary tensor and the parameter a DTensor"
        advice = "Make the parameter a DTensor too", "Set .grad to a DTensor on the parameter's mesh"
        which = int(is_sharded(parameter))
        raise UnsupportedGradientError(
            f"the gradient of {name} is {kinds[which]}: which part of the gradient this process holds cannot be told. "
            f"{advice[which]}."
        )
    if is_sharded(gradient) and gradient.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        raise UnsupportedGradientError(f"the gradient of {name} lies on another device mesh than the parameter.")


def is_laid_out_as(gradient: Any, parameter: Tensor) -> bool:
    """Tell whether each process holds the same part of two DTensors on one mesh; of a Partial one, none."""
    # A Partial parameter counts as Replicate: whatever it is laid out as, its gradient must have been added up.
    return gradient.placements == placement_of(parameter).kinds
