"""The part of a tensor that this rank holds, and the number of ranks that hold the same part."""

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
    """How one tensor is spread over ranks.

    Attributes:
        mesh: The device mesh of a DTensor; None for a plain tensor.
        ranks: The ranks over which the tensor is spread; empty for a plain tensor, which every rank holds.
        replicas: How many of these ranks hold the same part.
        layout: The layout as text, equal on all ranks.
        kinds: The placement along each mesh dimension, after Partial sums are reduced.
        is_whole: Whether each rank holds all elements.
    """

    mesh: Any
    ranks: frozenset[int]
    replicas: int
    layout: str
    kinds: Sequence[Any] = ()
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute once what is read for each of thousands of tensors."""
        object.__setattr__(self, "is_whole", self.replicas == max(1, len(self.ranks)))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh dimension, by name; empty for a plain tensor."""
        if self.mesh is None:
            return {}
        names = self.mesh.mesh_dim_names or [f"dim {k}" for k in range(self.mesh.ndim)]
        return dict(zip(names, self.mesh.shape, strict=True))

    @property
    def place(self) -> tuple[int, int]:
        """The index of this rank's part, equal on all ranks that hold it, and the index of this rank among them."""
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
    """Tell whether ``tensor`` is a DTensor, such as a parameter of FSDP2."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether any of ``tensors`` is a DTensor; checks each type once."""
    module = sys.modules.get("torch.distributed.tensor")
    kinds = set(map(type, tensors)) - _ORDINARY
    return bool(kinds) and module is not None and any(issubclass(kind, module.DTensor) for kind in kinds)


def refuse_sharded(tensors: Sequence[Tensor]) -> None:
    """Raise if any tensor is a DTensor.

    Raises:
        UnsupportedGradientError: If any is.
    """
    if any_sharded(tensors):
        raise UnsupportedGradientError("a gradient is a DTensor: all of its processes must compute its norm together.")


def placement_of(tensor: Tensor) -> Placement:
    """Return the placement of ``tensor``: from mesh and placements if it is a DTensor, else whole.

    A Partial placement counts as Replicate, which it becomes when the parts are reduced.
    """
    return _placement_by(spec_of(tensor)) if is_sharded(tensor) else WHOLE


def placements_of(tensors: Sequence[Tensor]) -> list[Placement]:
    """Return the `placement_of` each tensor."""
    return [_placement_by(spec) if spec else WHOLE for spec in specs_of(tensors)]


def _placement_by(spec: Any) -> Placement:
    key = id(spec.mesh), spec.placements
    if key not in _known:  # the stored placement keeps its mesh alive, so the mesh's id stays unique
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
    """Return this rank's part of ``tensor``, sharing its memory: a plain tensor, possibly empty."""
    if not is_sharded(tensor):
        return tensor
    local = local_tensor_of(tensor)
    return local if type(local) is Tensor else tensor.detach().to_local()  # type: ignore[attr-defined]


def gradient_of(parameter: Any) -> Tensor | None:
    """Return the gradient of a parameter: ``grad``, or else Megatron's ``main_grad``."""
    return parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of ``full``, which every rank holds, in the layout of ``like``; no communication."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def sharded_as(local: Tensor, mesh: Any, placements: Sequence[Any], shape: Any, stride: Any) -> Tensor:
    """Return a DTensor whose shard on this rank is ``local``; nothing is compared or sent."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def is_partial(tensor: Any) -> bool:
    """Tell whether a DTensor, or the tensor of a spec, is a reduction (sum, avg, max ...) over what its ranks hold."""
    return any([p.is_partial() for p in tensor.placements])


def check_alike(gradient: Tensor, parameter: Tensor, name: str) -> None:
    """Raise if ``gradient`` cannot be brought into the layout of ``parameter``.

    Raises:
        UnsupportedGradientError: If only one of them is a DTensor, or they have different meshes.
    """
    if is_sharded(gradient) != is_sharded(parameter):
        kinds = "a DTensor and the parameter an ordinary tensor", "an ordinary tensor and the parameter a DTensor"
        advice = "Make the parameter a DTensor too", "Set .grad to a DTensor on the parameter's mesh"
        which = int(is_sharded(parameter))
        raise UnsupportedGradientError(
            f"the gradient of {name} is {kinds[which]}: which part of the gradient this process holds is unknown. "
            f"{advice[which]}."
        )
    if is_sharded(gradient) and gradient.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        raise UnsupportedGradientError(f"the gradient of {name} lies on another device mesh than the parameter.")


def is_laid_out_as(gradient: Any, parameter: Tensor) -> bool:
    """Tell whether each rank holds the same part of two DTensors on one mesh; False if the gradient is Partial."""
    # A Partial parameter counts as Replicate: its gradient must be reduced, too.
    return gradient.placements == placement_of(parameter).kinds
