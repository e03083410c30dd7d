"""The engines that spread tensors over processes, one in each file: what each holds where.

A new engine is a subclass of `Engine` in a file of its own, and its name in `ENGINES`.
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
    """Return which part of a whole ``tensor`` is on this process; all of it if no engine says otherwise."""
    told = (engine.shard_of(tensor) for engine in ENGINES)
    return next(filter(None, told), None) or LocalShard(tuple(tensor.shape), tuple(tensor.shape))


def placements_by(
    tensors: Sequence[Tensor], module: nn.Module | None, is_asked: Callable[[Engine], bool]
) -> dict[int, Placement]:
    """Return, by identity, who holds those of ordinary ``tensors`` that an engine has spread.

    Args:
        tensors: Parameters.
        module: The module that they come from, if it is known.
        is_asked: Tells which engines count.

    Returns:
        The placements; of DTensors, which carry their own, none.
    """
    found: dict[int, Placement] = {}
    for engine in filter(is_asked, ENGINES):
        found |= engine.placements(tensors, module)
    return found


def held_apart(model: nn.Module) -> list[Held]:
    """Return the parts of parameters that engines keep elsewhere than in a tensor of their own."""
    return [held for engine in ENGINES for held in engine.held_apart(model)]
