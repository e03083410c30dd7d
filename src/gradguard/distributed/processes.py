"""The rank of this process, and gathers and sums over all: each collective names the process that did not come.

Only this folder talks to other processes; the others ask here. A collective waits as long as its process group allows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.agreement import device_of, gather_objects, together
from gradguard.distributed.reduction_group import ReductionGroup, check_alive, several_processes
from gradguard.errors import InvalidValueError
from gradguard.replacements import Replacement
from gradguard.tensors.layout import move


def rank_and_size(group: Any = None) -> tuple[int, int]:
    """Return the number of this process among those of ``group``, and how many there are.

    Args:
        group: A process group; None for all processes, or for this one alone if `torch.distributed` joins no others.

    Returns:
        Both; ``(0, 1)`` where this process is alone.
    """
    if group is None and not several_processes():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def joined_rank_and_size() -> tuple[int, int] | None:
    """Return the number of this process and how many there are; None before `torch.distributed` joins them."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None


def meet_under(name: str) -> None:
    """Let this process meet others under keys of that name: a launcher's store may hold those of an earlier meeting.

    Args:
        name: The prefix of each key; the others must use the same one.
    """

    def apart(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world in original(*args, **kwargs):
            yield dist.PrefixStore(name, store), rank, world

    Replacement("torch.distributed.rendezvous", "rendezvous", apart, everywhere=True).use()


def gather(value: Any, group: Any = None, task: str = "") -> list[Any]:
    """Return the ``value`` of every process of ``group``, by its rank there. A collective; values are pickled.

    Args:
        value: A value of this process.
        group: As in `rank_and_size`.
        task: The purpose, such as "save a snapshot"; a clip if it is empty.

    Raises:
        DistributedError: If a process does not come.
        InvalidValueError: If the group was destroyed.
    """
    if rank_and_size(group)[1] == 1:
        return [value]
    return gather_objects(_union_of(group), value, _signature(task), task)


def sum_over(values: Tensor, group: Any = None, task: str = "") -> Tensor:
    """Return the sum of ``values`` over the processes of ``group``, the same bits on all: one all-reduce.

    Args:
        values: The numbers of this process.
        group: As in `rank_and_size`.
        task: The purpose, such as "save a snapshot"; a clip if it is empty.

    Raises:
        DistributedError: If a process does not come.
        InvalidValueError: If the group was destroyed.
    """
    return _reduced(values, "SUM", group, task)


def largest_over(values: Tensor, group: Any = None, task: str = "") -> Tensor:
    """Return the elementwise maximum of ``values`` over the processes of ``group``: one all-reduce, as `sum_over`."""
    return _reduced(values, "MAX", group, task)


def _reduced(values: Tensor, operation: str, group: Any, task: str) -> Tensor:
    if rank_and_size(group)[1] == 1:
        return values
    chosen = _union_of(group).group
    reduced = move(values, device_of(chosen, values.device)).clone()
    reduce = partial(dist.all_reduce, reduced, op=getattr(dist.ReduceOp, operation), group=chosen)
    run(reduce, group, task, on_host=reduced.is_cpu)
    return move(reduced, values.device)


def numbers_of_all(number: int, group: Any, task: str) -> list[int]:
    """Return the ``number`` of each process of ``group``, by its rank there; whole, below 2**53. A collective."""
    rank, size = rank_and_size(group)
    table = torch.zeros(size, dtype=torch.float64, device="cpu")
    table[rank] = number
    return list(map(int, sum_over(table, group, task).tolist()))


def raise_together(error: Exception | None, group: Any, task: str) -> None:
    """Raise ``error``, or an error where another process of ``group`` has one. A collective.

    Raises:
        InvalidValueError: If another process has an error.
    """
    mine = torch.full((), float(error is not None), dtype=torch.float64, device="cpu")
    others: Tensor = sum_over(mine, group, task)
    if error is not None:
        raise error
    if others > 0:
        raise InvalidValueError(f"another process refuses to {task}, so this one does too: its own error says why.")


def run(collective: Callable[..., Any], group: Any = None, task: str = "", *, on_host: bool = True) -> None:
    """Run a collective of ``group``; if it fails, say which processes did not come.

    Args:
        collective: Starts it; called with ``async_op``.
        group: As in `rank_and_size`; it has several processes.
        task: The purpose, such as "save a snapshot"; a clip if it is empty.
        on_host: Whether the host waits for it.

    Raises:
        DistributedError: If a process does not come.
    """
    together(collective, _union_of(group), _signature(task), on_host=on_host, task=task)


def _signature(task: str) -> list[str]:
    return [task or "loss and norms"]


def _union_of(group: Any) -> ReductionGroup:
    chosen = dist.group.WORLD if group is None else group
    check_alive(chosen)
    return ReductionGroup(chosen, frozenset(dist.get_process_group_ranks(chosen)))
