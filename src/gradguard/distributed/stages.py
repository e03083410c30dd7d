"""Pipeline stages: ranks that hold different parameters, and may share some weights."""

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
    """Return the facts about this stage that other stages need, equal on all ranks of the stage.

    Args:
        tensors: The list of this stage.
        names: Their names, or None.
        shared: The weights among them that other stages hold too.
        holders: For each tensor, how many ranks of this stage hold the same part.
        whole: For each tensor, whether each of those ranks holds all of it.
    """
    keys = {id(tensor): name for name, tensor in shared.items()}
    return [
        (None if names is None else names[i], keys.get(id(t)), holders[i], whole[i], f"{tuple(t.shape)} {t.dtype}")
        for i, t in enumerate(tensors)
    ]


class StageLists:
    """The concatenated lists of all pipeline stages, with each shared weight once.

    Args:
        reducer: The reducer that has agreed on each stage's list and `details_of`; all ranks construct this together.

    Attributes:
        own: The position of each tensor of this stage.
        holders: For each tensor of all stages, how many ranks hold the same part.
        whole: For each of them, whether each of those ranks holds all of it.
        names: The names of all tensors.
        one_is_empty: Whether a stage has no parameters.

    Raises:
        InvalidValueError: On every rank, if a shared weight is on one stage only, or has several shapes.
    """

    def __init__(self, reducer: Reducer) -> None:
        numbers, mine = sorted(reducer.agreement.senders), min(reducer.union.stage)
        lists = dict(zip(numbers, details_of_stages(reducer.union, reducer.agreement, reducer.device), strict=True))
        _check_alike(lists)
        # A plan is found by a stage's parameters: a stage without any would not notice that other stages have new ones.
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
    """Return distinct names for the parameters of all stages; a stage prefix marks a name that is shared or missing."""
    times = Counter(name for _, name in entries)
    return [
        f"stage{number}.{place if name is None else name}" if name is None or times[name] > 1 else name
        for place, (number, name) in enumerate(entries)
    ]
