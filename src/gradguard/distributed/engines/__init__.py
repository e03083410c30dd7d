"""The engines that spread tensors over ranks, one in each file: which rank holds which part.

A new engine is a subclass of `Engine` in its own file, and an entry in `ENGINES`.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from gradguard.distributed.engines.ddp import ReplicatedModules
from gradguard.distributed.engines.dtensor import DTensors
from gradguard.distributed.engines.engine import Engine, Held
from gradguard.distributed.engines.fsdp1 import FlatParameters
from gradguard.distributed.engines.megatron import Megatron
from gradguard.distributed.engines.zero import ZeRO
from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import Placement

ENGINES: Sequence[Engine] = (
    DTensors(),
    ReplicatedModules(),
    FlatParameters(),
    Megatron(),
    ZeRO(),
)


def shard_of(tensor: Tensor) -> LocalShard:
    """Return the part of a whole tensor that ``tensor`` is; all of it if no engine says otherwise."""
    told = (engine.shard_of(tensor) for engine in ENGINES)
    return next(filter(None, told), None) or LocalShard(tuple(tensor.shape), tuple(tensor.shape))


def placements_by(
    tensors: Sequence[Tensor], module: nn.Module | None, is_asked: Callable[[Engine], bool]
) -> dict[int, Placement]:
    """Return, by id, the placements of those plain ``tensors`` that an engine has spread.

    Args:
        tensors: Parameters.
        module: The module that holds them, if known.
        is_asked: Selects the engines.

    Returns:
        The placements; none for DTensors, which carry their own.
    """
    found: dict[int, Placement] = {}
    for engine in filter(is_asked, ENGINES):
        found |= engine.placements(tensors, module)
    return found


def held_apart(model: nn.Module) -> list[Held]:
    """Return the parts of parameters that engines store outside the parameters' own tensors."""
    return [held for engine in ENGINES for held in engine.held_apart(model)]
