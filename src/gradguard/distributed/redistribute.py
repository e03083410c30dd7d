"""Communication of DTensors: reduce Partial sums, change a layout, gather the whole. A missing rank is named."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradguard.distributed.placements import is_partial, is_sharded, local_part, placement_of, sharded_as
from gradguard.distributed.processes import run
from gradguard.distributed.reduction_group import group_of


def whole_of(tensor: Tensor, task: str = "") -> Tensor:
    """Return all of ``tensor`` on each of its ranks: a collective if it is a DTensor.

    Args:
        tensor: Any tensor.
        task: The purpose, such as "save a snapshot"; a clip if it is empty. As for all functions here.

    Raises:
        DistributedError: If a rank is missing. As for all functions here.
    """
    return _sent(tensor, tensor.full_tensor, task) if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def added_up(tensor: Tensor, task: str = "") -> Tensor:
    """Return ``tensor`` with its Partial sums reduced, which is a collective if it has any."""
    if not is_sharded(tensor) or not is_partial(tensor):
        return tensor
    return redistributed(tensor, placement_of(tensor).kinds, task)


def redistributed(tensor: Any, placements: Sequence[Any], task: str = "") -> Tensor:
    """Return a DTensor in another layout, by a reduce-scatter if possible, which exists for sums and averages only."""
    tensor, mesh = tensor.detach(), tensor.device_mesh

    def send() -> Tensor:
        one = tensor
        if any(p.is_partial() and getattr(p, "reduce_op", None) not in ("sum", "avg") for p in tensor.placements):
            one = one.redistribute(mesh, placement_of(tensor).kinds)
        return one.redistribute(mesh, placements)

    return _sent(tensor, send, task)


def part_in_layout_of(now: Any, values: Tensor, before: Any, task: str = "") -> Tensor | None:
    """Return this rank's part, in the layout of ``now``, of a tensor with the layout of ``before``.

    Args:
        now: A tensor of the same shape.
        values: This rank's part in the old layout.
        before: A tensor in the old layout.
        task: As in `whole_of`.

    Returns:
        The part, which is ``values`` if the layouts are equal; None if the two layouts cannot be converted.
    """
    if not is_sharded(now) and not is_sharded(before):
        return values
    if is_sharded(now) != is_sharded(before) or now.device_mesh != before.device_mesh:
        return None
    if now.placements == before.placements:
        return values
    if is_partial(now):
        return None
    whole = sharded_as(values, before.device_mesh, before.placements, before.shape, before.stride())
    return local_part(redistributed(whole, now.placements, task))


def laid_out_as(gradient: Tensor | None, parameter: Any, placements: Sequence[Any]) -> Tensor:
    """Return ``gradient`` in the layout of ``parameter``, a DTensor on the same mesh: a collective.

    If the parameter is Partial, the gradient becomes Replicate.

    Args:
        gradient: The gradient; with None this rank joins the others with zeros.
        parameter: The parameter.
        placements: The wrong layout of the other ranks' gradients.
    """
    if gradient is None:
        from torch.distributed.tensor import zeros

        mesh = parameter.device_mesh
        gradient = zeros(parameter.shape, dtype=parameter.dtype, device_mesh=mesh, placements=placements)
    return redistributed(gradient, placement_of(parameter).kinds)


def _sent(tensor: Any, send: Callable[[], Tensor], task: str) -> Tensor:
    group, found = group_of(frozenset(tensor.device_mesh.mesh.flatten().tolist())), list[Tensor]()
    if group is None:  # a mesh of several dimensions communicates along each, without a group of all ranks
        return send()
    run(lambda async_op: found.append(send()), group, task)
    return found[0]
