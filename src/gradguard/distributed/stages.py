"""Pipeline stages: processes that hold different parameters, and may share some weights."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from gradguard.distributed.agreement import details_of_stages
from gradguard.distributed.reduction import Reducer
from gradguard.errors import InvalidValueError

Names = Sequence[str] | None
"""The names of parameters; None if they have none."""


def details_of(
    tensors: Sequence[Tensor],
    names: Names,
    shared: Mapping[str, Tensor],
    holders: Sequence[int],
    whole: Sequence[bool],
) -> list[tuple]:
    """Return the facts on this stage that the others need, the same on all of its processes.

    Args:
        tensors: The list of this stage.
        names: Their names, if they have some.
        shared: The weights among them that other stages hold too.
        holders: How many processes of this stage hold the same part of each.
        whole: Whether each of those holds all of it.
    """
    keys = {id(tensor): name for name, tensor in shared.items()}
    return [
        (None if names is None else names[i], keys.get(id(t)), holders[i], whole[i], f"{tuple(t.shape)} {t.dtype}")
        for i, t in enumerate(tensors)
    ]


class StageLists:
    """The lists of all pipeline stages as one: what each stage holds one after the other, shared weights once.

    Args:
        reducer: The reducer that has agreed on the list of each stage and its `details_of`; all make it together.

    Attributes:
        own: The place of each tensor of this stage.
        holders: How many processes of all stages hold the same part of each tensor of all stages.
        whole: Whether each of those holds all of it.
        names: The names of all tensors.
        one_is_empty: Whether a stage has no parameters.

    Raises:
        InvalidValueError: On every process, if a shared weight is on one stage only, or of several shapes.
    """

    def __init__(self, reducer: Reducer) -> None:
        numbers, mine = sorted(reducer.agreement.senders), min(reducer.union.stage)
        lists = dict(zip(numbers, details_of_stages(reducer.union, reducer.agreement, reducer.device), strict=True))
        _check_alike(lists)
        # A stage is known by its parameters: one without any would not see that the others have new ones.
        self.one_is_empty = not all(lists.values())
        self.own: list[int] = []
        self.holders: list[int] = []
        self.whole: list[bool] = []
        entries: list[tuple[int, str | None]] = []
        where: dict[str, int] = {}
        for number, stage in enumerate(sorted(lists)):
            for name, key, its_holders, its_whole, _ in lists[stage]:
                place = len(entries) if key is None else where.setdefault(key, len(entries))
                if place == len(entries):
                    entries.append((number, name))
                    self.holders.append(0)
                    self.whole.append(its_whole)
                self.holders[place] += its_holders
                self.whole[place] &= its_whole
                if stage == mine:
                    self.own.append(place)
        self.names = _names_of_stages(entries)


def _check_alike(lists: Mapping[int, Sequence[tuple]]) -> None:
    found: dict[str, list[tuple[int, str]]] = {}
    for number, stage in enumerate(sorted(lists)):
        for _, key, _, _, kind in lists[stage]:
            if key is not None:
                found.setdefault(key, []).append((number, kind))
    for key, places in found.items():
        if len(places) == 1 < len(lists):
            raise InvalidValueError(
                f"shared has {key!r} on stage {places[0][0]} only: expected the same name on every stage that holds "
                "the weight."
            )
        if len({kind for _, kind in places}) > 1:
            kinds = ", ".join(f"{kind} on stage {number}" for number, kind in places)
            raise InvalidValueError(f"shared[{key!r}] is not one weight: {kinds}.")


def _names_of_stages(entries: Sequence[tuple[int, str | None]]) -> list[str]:
    """Names that tell the parameters of all stages apart: with the stage in front where two have one name, or none."""
    times = Counter(name for _, name in entries)
    return [
        f"stage{number}.{place if name is None else name}" if name is None or times[name] > 1 else name
        for place, (number, name) in enumerate(entries)
    ]
