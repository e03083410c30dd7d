"""Do all processes mean the same list of gradients? Asked once, when a plan is made; and who is missing, if one is."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradguard.distributed.union import Union
from gradguard.errors import DistributedError
from gradguard.torch_private import default_store, device_types_of

_PATIENCE = 5.0
"""Seconds that, after a failure, the others may take to say that they have failed too."""

_failures: Counter[str] = Counter()  # of each process group


class _Numbers:
    last = 0


_numbers = _Numbers()


def device_of(group: Any, wanted: torch.device) -> torch.device:
    """Return where ``group`` can add up: ``wanted`` if it can there, else its own accelerator, or the CPU."""
    kinds = device_types_of(group)
    if wanted.type in kinds:
        return wanted
    kind = next(kind for kind in kinds if kind != "cpu") if "cpu" not in kinds else "cpu"
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


def agree(
    union: Union, signature: Sequence[str], wishes: Sequence[bool], device: torch.device
) -> tuple[list[bool], int]:
    """Make sure that all processes of a stage have the same list.

    One all-gather of a few numbers; only where they differ, what differs is exchanged as well.

    Args:
        union: Who takes part.
        signature: What each listed tensor is, in words that are the same on all processes of a stage.
        wishes: Wishes of this process.
        device: Where the all-gather happens.

    Returns:
        Which of the wishes any process has, and a number for what was agreed on: the same on all, and new.

    Raises:
        DistributedError: On every process, naming one that differs from the first of its stage, and how; or naming
            those that did not come.
    """
    digest = int.from_bytes(hashlib.blake2b("\n".join(signature).encode(), digest_size=7).digest())
    numbers = [min(union.stage), len(signature), digest, _numbers.last + 1, *wishes]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(union.group))]
    together(lambda: dist.all_gather(gathered, mine, group=union.group), union, signature)
    rows = [tuple(map(int, row.tolist())) for row in gathered]
    first_of = {stage: rows[i] for i, (stage, *_) in reversed(list(enumerate(rows)))}
    if any(row[:3] != first_of[row[0]][:3] for row in rows):
        raise DistributedError(_difference(union, signature, [row[0] for row in rows]))
    _numbers.last = max(row[3] for row in rows)
    return [any(wish) for wish in zip(*(row[4:] for row in rows), strict=True)], _numbers.last


def gather_objects(union: Union, value: Any) -> list[Any]:
    """Return the ``value`` of every process of the union, by its rank there."""
    found: list[Any] = [None] * dist.get_world_size(union.group)
    if len(found) == 1:
        return [value]
    together(lambda: dist.all_gather_object(found, value, group=union.group), union, [])
    return found


def together(collective: Callable[[], object], union: Union, signature: Sequence[str]) -> None:
    """Run a collective; if it fails, say which processes did not come or came with something else.

    Raises:
        DistributedError: If it fails, after the time-out of the process group at the latest.
    """
    try:
        collective()
    except RuntimeError as error:  # torch.distributed's own errors are subclasses
        raise DistributedError(_who_is_missing(union, signature, error)) from error


def _difference(union: Union, signature: Sequence[str], stages: Sequence[int]) -> str:
    lists: list[Any] = [None] * len(stages)
    dist.all_gather_object(lists, list(signature), group=union.group)
    ranks = dist.get_process_group_ranks(union.group)
    for i, stage in enumerate(stages):
        first = stages.index(stage)
        if lists[i] != lists[first]:
            return (
                f"rank {ranks[i]} came with another list of gradients than rank {ranks[first]}: "
                f"{_first_difference(lists[i], lists[first])}. Pass the same parameters in the same order on every "
                "rank; if they differ on purpose, as pipeline stages do, name their group: process_group= or mesh=."
            )
    return "the processes came with different lists of gradients."


def _first_difference(one: Sequence[str], other: Sequence[str]) -> str:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"parameter {i} is {a} instead of {b}" + (
                f" (of {len(one)} instead of {len(other)})" if len(one) != len(other) else ""
            )
    longer = one if len(one) > len(other) else other
    at = min(len(one), len(other))
    more = "it also has" if longer is one else "it lacks"
    return f"{len(one)} parameters instead of {len(other)}: {more} {longer[at]}"


def _who_is_missing(union: Union, signature: Sequence[str], error: RuntimeError) -> str:
    """Ask the others, through the store that they met in, what they were about to do."""
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    general = (
        "the processes could not add up their norms. Every rank of the group must clip on the same steps, with the "
        f"same parameters, also one that has no gradients. ({cause})"
    )
    me, name = dist.get_rank(), str(getattr(union.group, "group_name", ""))
    try:
        _failures[name] += 1
        store = dist.PrefixStore(f"gradguard/{name}/{_failures[name]}", default_store())
        store.set(str(me), json.dumps([min(union.stage), list(signature)]))
        ranks = dist.get_process_group_ranks(union.group)
        here = _answering(store, ranks)
        missing = ", ".join(str(rank) for rank in ranks if rank not in here)
        if missing:
            return f"rank {missing} did not come, or much later, on rank {me}'s clip: {general}"
        for rank in here:
            stage, theirs = json.loads(store.get(str(rank)))
            if stage == min(union.stage) and theirs and signature and theirs != list(signature):
                return (
                    f"rank {rank} came with another list of gradients than rank {me}: "
                    f"{_first_difference(theirs, signature)}. {general}"
                )
    except Exception:  # the store may have gone with rank 0
        return general
    return general


def _answering(store: Any, ranks: Sequence[int]) -> list[int]:
    """The ranks that have failed as well, by now or in a moment."""
    until = time.monotonic() + _PATIENCE
    while True:
        here = [rank for rank in ranks if store.check([str(rank)])]
        if len(here) == len(ranks) or time.monotonic() > until:
            return here
        time.sleep(0.05)
