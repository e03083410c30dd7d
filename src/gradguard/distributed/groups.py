"""Process groups: their ranks, the group over which a model is spread, and sums over a group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradguard.distributed import processes
from gradguard.distributed.fully_sharded import group_of_fully_sharded
from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import is_fsdp1


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def stop_synchronizing(model: nn.Module) -> Callable[[], None]:
    """Keep DistributedDataParallel from communicating in forward and backward.

    Ranks may then run it a different number of times without waiting for one another.

    Returns:
        A function that turns communication on again.
    """
    if not isinstance(model, DistributedDataParallel):
        return lambda: None
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = False

    def restore() -> None:
        model.require_backward_grad_sync, model.require_forward_param_sync = before

    return restore


def process_group_of(model: nn.Module) -> Any:
    """Return the group over which ``model`` is replicated or sharded; None for a plain model.

    Raises:
        UnsupportedGradientError: If FSDP1 has sharded it, or anything but `fully_shard`.
        InvalidValueError: If no process group holds all of the ranks.
    """
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    if any(map(is_fsdp1, model.modules())):
        raise UnsupportedGradientError(
            "FullyShardedDataParallel (FSDP1) flattens parameters, so samples' gradients cannot be told apart: use "
            "torch.distributed.fsdp.fully_shard(model)."
        )
    return group_of_fully_sharded(model)


def rank_and_size(group: Any) -> tuple[int, int]:
    """Return the rank of this process in ``group``, and the group's size; (0, 1) for no group."""
    return (0, 1) if group is None else processes.rank_and_size(group)


def from_first_rank(value: bytes, group: Any) -> bytes:
    """Return the first rank's ``value``, such as the key of the noise, on all ranks. All values have one length."""
    if group is None:
        return value
    told = value if processes.rank_and_size(group)[0] == 0 else bytes(len(value))
    return bytes(processes.sum_over(torch.tensor(list(told), device="cpu"), group, "set private training up").tolist())


def all_reduce_sum(tensors: Sequence[Tensor], group: Any) -> None:
    """Replace each tensor by its sum over all ranks, in one all-reduce; without a group do nothing."""
    if group is None or not tensors:
        return
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])  # float64 if any tensor is
    added = processes.sum_over(together, group, "add up the clipped gradients")
    for tensor, part in zip(tensors, added.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
