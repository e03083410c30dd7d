"""Questions to an engine that spreads tensors over processes, which each file of this folder answers for one."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import Placement


class Held(NamedTuple):
    """This process' part of one parameter that an engine keeps elsewhere than in a tensor of its own.

    Attributes:
        name: Name of the parameter, without wrappers.
        holder: Tensor or other object whose ``grad`` has the elements.
        shard: The part.
        offset: Where it begins in the flattened holder, if that holds several; else None.
    """

    name: str
    holder: Any
    shard: LocalShard
    offset: int | None = None


class Engine:
    """An engine: who holds what it has spread, and which elements these are.

    Attributes:
        has_parts: Processes hold different parts or tensors, whose norms add up; copies need no sum.
        is_certain: Whether the layout comes from the engine itself. Attributes that any code may set are a claim.
    """

    has_parts = True
    is_certain = True

    def placements(self, tensors: Sequence[Tensor], module: nn.Module | None) -> dict[int, Placement]:
        """Return, by identity, who holds those of ordinary ``tensors``, of ``module``, that the engine has spread."""
        return {}

    def shard_of(self, tensor: Tensor) -> LocalShard | None:
        """Return which part of a whole ``tensor`` is on this process; None if the engine has not cut it."""
        return None

    def held_apart(self, model: nn.Module) -> Iterable[Held]:
        """Return the parts that it keeps elsewhere than in a tensor of their own."""
        return ()
