"""Check, when a plan is made, that all ranks list the same gradients; name the ranks that are missing."""

import hashlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from gradguard.distributed.reduction_group import MOST_RANKS, ReductionGroup
from gradguard.errors import DistributedError, MissingPackageError
from gradguard.torch_private import default_store, device_types_of
from gradguard.words import listed

_PATIENCE = 5.0
"""Seconds that a rank waits, after a failure, for the other ranks to report theirs."""

_SLOW = 2.0
"""Seconds in a collective after which the waiting ranks publish their lists."""

_LONG = 30.0
"""Seconds in a collective after which a waiting rank warns about the missing ones."""

_LONGEST_BETWEEN = 30.0
"""The longest pause between two reads of the published lists, in seconds."""

_IN_A_WORD = 32
"""How many ranks report their presence in one integer of the store."""

_LISTS = 64
"""How many different lists the store keeps: two that differ are enough for a message."""

_OUT_OF_STEP = (
    "The process group cannot be used any more, because its ranks still wait in different collectives: end the program."
)

_failures: Counter[str] = Counter()  # of each process group
_calls: Counter[str] = Counter()
_last_numbers = [0]
"""The number of the last agreement, in a list so that functions can change it."""


def device_of(group: Any, wanted: torch.device) -> torch.device:
    """Return a device on which ``group`` can all-reduce.

    It is ``wanted`` if the group supports that type, else the CPU if it supports that, else the accelerator's current
    device.
    """
    kinds = device_types_of(group)
    if wanted.type in kinds:
        return wanted
    kind = next(kind for kind in kinds if kind != "cpu") if "cpu" not in kinds else "cpu"
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of all ranks of a union.

    Attributes:
        wishes: The wishes that at least one rank has.
        number: The number of the agreement, new and equal on all ranks.
        senders: One rank of each stage, as its rank in the union; a stage is identified by its first rank.
        lengths: The length of each stage's ``text``.
        text: The list of this rank and its details, as JSON.
    """

    wishes: Sequence[bool]
    number: int
    senders: Mapping[int, int]
    lengths: Mapping[int, int]
    text: bytes


def agree(
    union: ReductionGroup, signature: Sequence[str], wishes: Sequence[bool], device: torch.device, details: Any = None
) -> Agreement:
    """Check that all ranks of a stage have the same list.

    This is one all-gather of a few numbers. Only if they differ, two differing lists are exchanged as well.

    Args:
        union: The ranks that take part.
        signature: A description of each listed tensor, as text that is equal on all ranks of a stage.
        wishes: Wishes of this rank.
        device: The device of the all-gather.
        details: Further values that must be equal on all ranks of a stage; JSON must be able to hold them.

    Returns:
        The agreement.

    Raises:
        DistributedError: On every rank. The message names a rank that differs from the first one of its stage, and the
            difference; or the ranks that are missing.
    """
    text = json.dumps([signature, details]).encode()
    numbers = [min(union.stage), _digest(text), len(text), _last_numbers[0] + 1, *wishes]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    table = mine.repeat(dist.get_world_size(union.group), 1)
    if len(table) > 1:
        gather = partial(dist.all_gather, list(table.unbind()), mine, group=union.group)
        run_collective(gather, union, signature, on_host=table.is_cpu, compares=True)
    table = table.cpu()
    stages, of_stage = table[:, 0].unique(return_inverse=True)  # tensors: the world may have thousands of ranks
    rows = torch.arange(len(table), device="cpu")
    first = torch.full_like(stages, len(table)).scatter_reduce(0, of_stage, rows, "amin")
    others = (table[:, :3] != table[first[of_stage], :3]).any(dim=1).nonzero()
    if len(others):
        other = int(others[0, 0])
        lengths = {at: int(table[at, 2]) for at in (other, int(first[of_stage[other]]))}
        raise DistributedError(_difference(union, text, lengths, device))
    largest = table.amax(dim=0).tolist()
    _last_numbers[0] = largest[3]
    senders = dict(zip(stages.tolist(), first.tolist(), strict=True))
    lengths = dict(zip(stages.tolist(), table[first, 2].tolist(), strict=True))
    return Agreement(list(map(bool, largest[4:])), largest[3], senders, lengths, text)


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


def texts_of(union: ReductionGroup, mine: bytes, lengths: Mapping[int, int], device: torch.device) -> list[bytes]:
    """Return the texts of some ranks on all ranks: one all-reduce, as long as these texts together.

    Args:
        union: The ranks that take part.
        mine: The text of this rank.
        lengths: The lengths of the wanted texts, by the rank in the union.
        device: The device of the all-reduce.

    Returns:
        The texts, in this order.
    """
    sizes = list(lengths.values())
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    me = dist.get_rank(union.group)
    for sender, part in zip(lengths, buffer.split(sizes), strict=True):
        if sender == me:
            part.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    run_collective(partial(dist.all_reduce, buffer, group=union.group), union, [], on_host=buffer.is_cpu)
    return [bytes(part.tolist()) for part in buffer.split(sizes)]


def details_of_stages(union: ReductionGroup, agreement: Agreement, device: torch.device) -> list[Any]:
    """Return the details of every stage, in the order of their first ranks; one rank of each stage sends them."""
    if len(agreement.senders) == 1:
        return [json.loads(agreement.text)[1]]
    lengths = {agreement.senders[stage]: agreement.lengths[stage] for stage in sorted(agreement.senders)}
    return [json.loads(text)[1] for text in texts_of(union, agreement.text, lengths, device)]


def gather_objects(union: ReductionGroup, value: Any, signature: Sequence[str] = (), task: str = "") -> list[Any]:
    """Return the ``value`` of every rank of the union, in order of rank; the rest as for `run_collective`."""
    found: list[Any] = [None] * dist.get_world_size(union.group)
    if len(found) == 1:
        return [value]
    if find_spec("numpy") is None:
        raise MissingPackageError("PyTorch needs NumPy to exchange objects between processes: pip install numpy")
    run_collective(
        lambda async_op: dist.all_gather_object(found, value, group=union.group), union, signature, task=task
    )
    return found


def run_collective(
    collective: Callable[..., Any],
    union: ReductionGroup,
    signature: Sequence[str],
    *,
    known: bool = False,
    on_host: bool = True,
    task: str = "",
    compares: bool = False,
) -> None:
    """Run a collective; if it fails, name the ranks that are missing or came with something else.

    If the host waits for the collective, the wait also ends when ranks are found to wait with different lists.

    Args:
        collective: Starts the collective; called with ``async_op``.
        union: The ranks that take part.
        signature: A description of each listed tensor.
        known: Whether the list was agreed on before.
        on_host: Whether the host waits for the collective.
        task: The purpose, such as "save a snapshot"; a clip if it is empty.
        compares: Whether the collective itself shows every rank whether the lists differ.

    Raises:
        DistributedError: If the collective fails, at the latest after the time-out of the process group.
    """
    name = str(getattr(union.group, "group_name", ""))
    _calls[name] += 1
    try:
        work = collective(async_op=on_host)
        difference = None
        if work is not None:
            difference = _difference_while_waiting(work, union, signature, known, _calls[name], task, compares)
    except RuntimeError as error:  # torch.distributed's own errors are subclasses
        raise DistributedError(_who_is_missing(union, signature, error, task)) from error
    if difference is not None:
        raise DistributedError(f"{difference}. {_what_to_do(task)}. {_OUT_OF_STEP}")


def _difference_while_waiting(
    work: Any, union: ReductionGroup, signature: Sequence[str], known: bool, number: int, task: str, compares: bool
) -> str | None:
    """Wait for ``work``; return a difference if the wait is long and another rank waits with another list."""
    ranks = dist.get_process_group_ranks(union.group)
    store, seconds, waited = None, _SLOW, 0.0
    while True:
        with suppress(RuntimeError):
            work.wait(timedelta(seconds=seconds))
            return None
        if work.is_completed():
            work.wait()  # raises if the collective failed
            return None
        waited += seconds
        with suppress(Exception):  # rank 0 may have ended, and the store with it
            if store is None:
                name = str(getattr(union.group, "group_name", ""))
                store = dist.PrefixStore(f"gradguard/{name}/call/{number}", default_store())
                _report_presence(store, ranks)
                publish_list(store, union, signature, known)
            difference = published_difference(store)
            if difference is not None:
                if compares:  # give all ranks time to compare their lists: a rank that left now would count as missing
                    with suppress(RuntimeError):
                        work.wait(timedelta(seconds=2 * seconds))
                        return None
                return difference
            warn_of_waiting(store, waited, partial(_ranks_missing, store, ranks), _what_to_do(task))
        seconds = min(2 * seconds, _LONGEST_BETWEEN)


def _difference(union: ReductionGroup, text: bytes, lengths: Mapping[int, int], device: torch.device) -> str:
    other, first = lengths
    theirs, expected = (json.loads(t)[0] for t in texts_of(union, text, lengths, device))
    ranks = dist.get_process_group_ranks(union.group)
    return (
        f"rank {ranks[other]} came with another list of gradients than rank {ranks[first]}: "
        f"{_first_difference(theirs, expected)}. Pass the same parameters in the same order on every "
        "rank; if they differ on purpose, as pipeline stages do, name their group: process_group= or mesh=."
    )


def _first_difference(one: Sequence[str], other: Sequence[str]) -> str:
    if one == other:
        return "the names of what stages share differ"
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"parameter {i} is {a} instead of {b}" + (
                f" (of {len(one)} instead of {len(other)})" if len(one) != len(other) else ""
            )
    longer = one if len(one) > len(other) else other
    at = min(len(one), len(other))
    more = "it also has" if longer is one else "it lacks"
    return f"{len(one)} parameters instead of {len(other)}: {more} {longer[at]}"


def _what_to_do(task: str) -> str:
    what = f"{task} at the same place" if task else "clip on the same steps, with the same parameters"
    return f"Every rank of the group must {what}"


def warn_of_waiting(store: Any, waited: float, who: Callable[[], str], what: str) -> None:
    """Warn of a wait of half a minute, on one of the waiting ranks.

    Args:
        store: A store that the ranks of this wait share, and no other wait.
        waited: Seconds so far.
        who: Returns a phrase that names the missing ranks.
        what: The advice: an action that all ranks must take.
    """
    if waited < _LONG or store.add("warned", 1) > 1:
        return
    with suppress(Warning):  # a rank that has reported its presence must stay, even if warnings are errors
        warnings.warn(
            f"gradguard: rank {dist.get_rank()} has waited {waited:.0f} s for {who()} to come. {what}. The wait ends "
            "with an error after the time-out of the process group.",
            stacklevel=2,
        )


def _ranks_missing(store: Any, ranks: Sequence[int]) -> str:
    return f"rank {listed(_missing(store, ranks), MOST_RANKS)}"


def _who_is_missing(union: ReductionGroup, signature: Sequence[str], error: RuntimeError, task: str) -> str:
    """Return an error message, after asking the other ranks through the store what they were about to do."""
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    aim, also = (f"{task} together", "") if task else ("add up their norms", ", also one that has no gradients")
    general = f"the processes could not {aim}. {_what_to_do(task)}{also}. ({cause})"
    me, name = dist.get_rank(), str(getattr(union.group, "group_name", ""))
    try:
        _failures[name] += 1
        store = dist.PrefixStore(f"gradguard/{name}/{_failures[name]}", default_store())
        found = _survey(store, union, signature)
    except dist.DistNetworkError:  # the store ended with the process that hosted it, or with its launcher
        found = {"missing": "0"} if me and 0 in dist.get_process_group_ranks(union.group) else {}
    except Exception:  # report the first error, whatever happened to the survey
        return general
    if found.get("missing"):
        when = f"when rank {me} came to {task}" if task else f"on rank {me}'s clip"
        return f"rank {found['missing']} did not come, or much later, {when}: {general}"
    if "difference" in found:
        return f"{found['difference']}. {general}"
    return general


def _survey(store: Any, union: ReductionGroup, signature: Sequence[str]) -> Mapping[str, Any]:
    """Return which ranks are missing and how lists differ; the first rank here collects this for the others."""
    # Thousands of ranks share one store: each writes and reads a few numbers, however many ranks there are.
    if store.check(["found"]):  # this rank is much later than the others, which have ended their survey
        return {}
    ranks = dist.get_process_group_ranks(union.group)
    _report_presence(store, ranks)
    publish_list(store, union, signature)
    if store.add("came", 1) > 1:
        store.wait(["found"], timedelta(seconds=3 * _PATIENCE))
        return json.loads(store.get("found"))
    _wait_for_all(store, len(ranks))
    found: dict[str, Any] = {"missing": listed(_missing(store, ranks), MOST_RANKS)}
    difference = published_difference(store)
    if difference is not None:
        found["difference"] = difference
    store.set("found", json.dumps(found))
    return found


def _wait_for_all(store: Any, count: int) -> None:
    """Wait until all ranks are here, no rank has come for ``_PATIENCE``, or twice that time is over."""
    start = last = time.monotonic()
    came = 0
    while came < count and time.monotonic() < min(last + _PATIENCE, start + 2 * _PATIENCE):
        time.sleep(0.05)
        before, came = came, store.add("came", 0)
        last = time.monotonic() if came > before else last


def _report_presence(store: Any, ranks: Sequence[int]) -> None:
    at = ranks.index(dist.get_rank())
    store.add(f"here/{at // _IN_A_WORD}", 1 << at % _IN_A_WORD)


def _missing(store: Any, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not reported their presence so far."""
    words = [store.add(f"here/{i}", 0) for i in range((len(ranks) - 1) // _IN_A_WORD + 1)]
    return [rank for i, rank in enumerate(ranks) if not words[i // _IN_A_WORD] >> i % _IN_A_WORD & 1]


def publish_list(store: Any, union: ReductionGroup, signature: Sequence[str], known: bool = False) -> None:
    """Publish this rank's list in ``store``, unless a rank of its stage has published the same one."""
    if not signature:
        return
    stage = min(union.stage)
    if store.add(f"list/{stage}/{_digest(json.dumps([signature, known]).encode())}", 1) > 1:
        return
    number = store.add("lists", 1)
    if number <= _LISTS:
        store.set(f"list/{number}", json.dumps([stage, dist.get_rank(), list(signature), known]))


def published_difference(store: Any) -> str | None:
    """Return how two published lists of one stage differ; None if none do."""
    first_of: dict[int, tuple[int, list[str], bool]] = {}
    for number in range(1, min(store.add("lists", 0), _LISTS) + 1):
        if not store.check([f"list/{number}"]):  # its writer has only reserved the number yet
            continue
        stage, *its = json.loads(store.get(f"list/{number}"))
        if stage in first_of:
            (one, expected, _), (rank, theirs, known) = sorted([first_of[stage], tuple(its)])
            if theirs == expected:
                new, old = (one, rank) if known else (rank, one)
                return (
                    f"rank {new} came with new parameters, rank {old} with those that it has clipped before (or rank "
                    f"{new} has gradients laid out anew, Partial for instance, of which rank {old} has none)"
                )
            return (
                f"rank {rank} came with another list of gradients than rank {one}: "
                f"{_first_difference(theirs, expected)}"
            )
        first_of[stage] = tuple(its)  # type: ignore[assignment]
    return None
