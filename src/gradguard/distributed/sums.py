"""A sum over all processes that train one model, of numbers that each has its own of, such as a loss."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.agreement import device_of, together
from gradguard.distributed.reduction_group import ReductionGroup, check_alive, several_processes
from gradguard.tensors.layout import move


def number_of_processes(group: Any) -> int:
    """Return how many processes `sum_over` adds up over."""
    if group is not None:
        return dist.get_world_size(group)
    return dist.get_world_size() if several_processes() else 1


def sum_over(values: Tensor, group: Any = None, task: str = "") -> Tensor:
    """Return the sum of ``values`` over the processes of ``group``, the same bits on all: one all-reduce.

    Args:
        values: The numbers of this process.
        group: A process group; None for all processes, or for this one alone if `torch.distributed` joins no others.
        task: What the processes need it for, such as "save a snapshot"; a clip if it is empty.

    Raises:
        DistributedError: If a process does not come.
        InvalidValueError: If the group was destroyed.
    """
    if number_of_processes(group) == 1:
        return values
    chosen = dist.group.WORLD if group is None else group
    check_alive(chosen)
    union = ReductionGroup(chosen, frozenset(dist.get_process_group_ranks(chosen)))
    added = move(values, device_of(chosen, values.device)).clone()
    signature = [task or "loss and norms"]
    together(partial(dist.all_reduce, added, group=chosen), union, signature, on_host=added.is_cpu, task=task)
    return move(added, values.device)
