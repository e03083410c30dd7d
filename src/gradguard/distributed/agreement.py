"""Do all processes mean the same list of gradients? Asked once, when a plan is made; and who is missing, if one is."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from gradguard.distributed.union import Union
from gradguard.errors import DistributedError

_PATIENCE = timedelta(seconds=5)
"""How long, after a failure, the others may take to say that they have failed too."""

_failures = count()


class _Numbers:
    last = 0


_numbers = _Numbers()


def device_of(group: Any, wanted: torch.device) -> torch.device:
    """Return where ``group`` can add up: ``wanted`` if it can there, else its own accelerator, or the CPU."""
    kinds = [device.type for device in group._device_types]
    if wanted.type in kinds:
        return wanted
    kind = next(kind for kind in kinds if kind != "cpu") if "cpu" not in kinds else "cpu"
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


def agree(union: Union, signature: Sequence[str], flag: bool, device: torch.device) -> tuple[bool, int]:
    """Make sure that all processes of a stage have the same list.

    One all-gather of five numbers; only where they differ, what differs is exchanged as well.

    Args:
        union: Who takes part.
        signature: What each listed tensor is, in words that are the same on all processes of a stage.
        flag: A wish of this process.
        device: Where the all-gather happens.

    Returns:
        Whether any process has the wish, and a number for what was agreed on: the same on all, and new.

    Raises:
        DistributedError: On every process, naming one that differs from the first of its stage, and how; or naming
            those that did not come.
    """
    digest = int.from_bytes(hashlib.blake2b("\n".join(signature).encode(), digest_size=7).digest())
    mine = torch.tensor(
        [min(union.stage), len(signature), digest, flag, _numbers.last + 1], dtype=torch.int64, device=device
    )
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(union.group))]
    together(lambda: dist.all_gather(gathered, mine, group=union.group), union.group, signature)
    rows = [tuple(map(int, row.tolist())) for row in gathered]
    first_of = {stage: rows[i] for i, (stage, *_) in reversed(list(enumerate(rows)))}
    if any(row[:3] != first_of[row[0]][:3] for row in rows):
        raise DistributedError(_difference(union, signature, [row[0] for row in rows]))
    _numbers.last = max(row[4] for row in rows)
    return any(row[3] for row in rows), _numbers.last


def gather_objects(union: Union, value: Any) -> list[Any]:
    """Return the ``value`` of every process of the union, by its rank there."""
    found: list[Any] = [None] * dist.get_world_size(union.group)
    together(lambda: dist.all_gather_object(found, value, group=union.group), union.group, [])
    return found


def together(collective: Callable[[], object], group: Any, signature: Sequence[str]) -> None:
    """Run a collective; if it fails, say which processes did not come or came with something else.

    Raises:
        DistributedError: If it fails, after the time-out of the process group at the latest.
    """
    try:
        collective()
    except RuntimeError as error:  # torch.distributed's own errors are subclasses
        raise DistributedError(_who_is_missing(group, signature, error)) from error


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


def _who_is_missing(group: Any, signature: Sequence[str], error: RuntimeError) -> str:
    """Ask the others, through the store that they met in, what they were about to do."""
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    general = (
        "the processes could not add up their norms. Every rank of the group must clip on the same steps, with the "
        f"same parameters, also one that has no gradients. ({cause})"
    )
    try:
        store = dist.PrefixStore(f"gradguard/{next(_failures)}", dist.distributed_c10d._get_default_store())
        store.set(str(dist.get_rank()), json.dumps(list(signature)))
        here = [r for r in dist.get_process_group_ranks(group) if _answers(store, r)]
        missing = sorted(set(dist.get_process_group_ranks(group)) - set(here))
        if missing:
            ranks = ", ".join(map(str, missing))
            return f"rank {ranks} did not come, on rank {dist.get_rank()}'s clip: {general}"
        for rank in here:
            theirs = json.loads(store.get(str(rank)))
            if theirs != list(signature) and theirs and signature:
                return (
                    f"rank {rank} came with another list of gradients than rank {dist.get_rank()}: "
                    f"{_first_difference(theirs, signature)}. {general}"
                )
    except Exception:  # the store may have gone with rank 0
        return general
    return general


def _answers(store: Any, rank: int) -> bool:
    with suppress(Exception):
        store.wait([str(rank)], _PATIENCE)
        return True
    return False
