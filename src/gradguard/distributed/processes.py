"""The rank of this process, and gathers and sums over ranks: each collective names the ranks that are missing.

Only this folder communicates; other folders call these functions. A collective waits as long as its process group
allows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.agreement import device_of, gather_objects, run_collective
from gradguard.distributed.reduction_group import ReductionGroup, check_alive, several_processes
from gradguard.errors import InvalidValueError
from gradguard.replacements import Replacement
from gradguard.tensors.layout import move


def rank_and_size(group: Any = None) -> tuple[int, int]:
    """Return the rank of this process in ``group``, and the group's size.

    Args:
        group: A process group; None for all processes, or for this one alone if `torch.distributed` joins no others.

    Returns:
        Rank and size; ``(0, 1)`` if this process is alone.
    """
    if group is None and not several_processes():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def joined_rank_and_size() -> tuple[int, int] | None:
    """Return rank and world size; None before `torch.distributed` is initialized."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None


def meet_under(name: str) -> None:
    """Prefix the keys by which this process meets others: a launcher's store may still hold an earlier meeting's keys.

    Args:
        name: The prefix of each key; the other processes must use the same one.
    """

    def apart(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world in original(*args, **kwargs):
            yield dist.PrefixStore(name, store), rank, world

    Replacement("torch.distributed.rendezvous", "rendezvous", apart, everywhere=True).use()


def gather(value: Any, group: Any = None, task: str = "") -> list[Any]:
    """Return the ``value`` of every rank of ``group``, in order of rank. A collective; values are pickled.

    Args:
        value: A value of this rank.
        group: As in `rank_and_size`.
        task: The purpose, such as "save a snapshot"; a clip if it is empty.

    Raises:
        DistributedError: If a rank is missing.
        InvalidValueError: If the group was destroyed.
    """
    if rank_and_size(group)[1] == 1:
        return [value]
    return gather_objects(_union_of(group), value, _signature(task), task)


def sum_over(values: Tensor, group: Any = None, task: str = "") -> Tensor:
    """Return the sum of ``values`` over the ranks of ``group``, bit-identical on all: one all-reduce.

    Args:
        values: The numbers of this rank.
        group: As in `rank_and_size`.
        task: The purpose, such as "save a snapshot"; a clip if it is empty.

    Raises:
        DistributedError: If a rank is missing.
        InvalidValueError: If the group was destroyed.
    """
    return _reduced(values, "SUM", group, task)


def largest_over(values: Tensor, group: Any = None, task: str = "") -> Tensor:
    """Return the elementwise maximum of ``values`` over the ranks of ``group``: one all-reduce, as `sum_over`."""
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
    """Return the ``number`` of each rank of ``group``, in order of rank; integers below 2**53. A collective."""
    rank, size = rank_and_size(group)
    table = torch.zeros(size, dtype=torch.float64, device="cpu")
    table[rank] = number
    return list(map(int, sum_over(table, group, task).tolist()))


def raise_together(error: Exception | None, group: Any, task: str) -> None:
    """Raise ``error``, or another error if another rank of ``group`` has one. A collective.

    Raises:
        InvalidValueError: If another rank has an error.
    """
    mine = torch.full((), float(error is not None), dtype=torch.float64, device="cpu")
    others: Tensor = sum_over(mine, group, task)
    if error is not None:
        raise error
    if others > 0:
        raise InvalidValueError(f"another process refuses to {task}, so this one does too: its own error says why.")


def run(collective: Callable[..., Any], group: Any = None, task: str = "", *, on_host: bool = True) -> None:
    """Run a collective of ``group``; if it fails, name the ranks that are missing.

    Args:
        collective: Starts the collective; called with ``async_op``.
        group: As in `rank_and_size`; it must have several ranks.
        task: The purpose, such as "save a snapshot"; a clip if it is empty.
        on_host: Whether the host waits for the collective.

    Raises:
        DistributedError: If a rank is missing.
    """
    run_collective(collective, _union_of(group), _signature(task), on_host=on_host, task=task)


def _signature(task: str) -> list[str]:
    return [task or "loss and norms"]


def _union_of(group: Any) -> ReductionGroup:
    chosen = dist.group.WORLD if group is None else group
    check_alive(chosen)
    return ReductionGroup(chosen, frozenset(dist.get_process_group_ranks(chosen)))
