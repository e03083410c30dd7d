"""The interface of an engine that spreads tensors over ranks; each other file of this folder implements one."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import Placement


class Held(NamedTuple):
    """This rank's part of one parameter that an engine stores outside the parameter's own tensor.

    Attributes:
        name: Name of the parameter, without wrappers.
        holder: Tensor or other object whose ``grad`` has the elements.
        shard: The part.
        offset: The part's first index in the flattened holder, if that holds several; else None.
    """

    name: str
    holder: Any
    shard: LocalShard
    offset: int | None = None


class Engine:
    """An engine: which ranks hold the tensors that it has spread, and which elements they hold.

    Attributes:
        has_parts: Whether ranks hold different parts or tensors, whose norms must be reduced; copies need no reduction.
        is_certain: Whether the layout comes from the engine itself. Attributes that any code may set are only a claim.
    """

    has_parts = True
    is_certain = True

    def placements(self, tensors: Sequence[Tensor], module: nn.Module | None) -> dict[int, Placement]:
        """Return, by id, the placements of those plain ``tensors`` of ``module`` that the engine has spread."""
        return {}

    def shard_of(self, tensor: Tensor) -> LocalShard | None:
        """Return the part of a whole that ``tensor`` is; None if the engine has not sharded it."""
        return None

    def held_apart(self, model: nn.Module) -> Iterable[Held]:
        """Return the parts that the engine stores outside the parameters' own tensors."""
        return ()
