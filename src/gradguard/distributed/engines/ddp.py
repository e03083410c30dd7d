"""DistributedDataParallel: every rank of its group holds all of each parameter."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradguard.distributed.engines.engine import Engine
from gradguard.distributed.placements import Placement


class ReplicatedModules(Engine):
    """The parameters inside DistributedDataParallel, which has made their gradients equal."""

    has_parts = False

    def placements(self, tensors: Sequence[Tensor], module: nn.Module | None) -> dict[int, Placement]:
        """Return, by id, the ranks over which each parameter is replicated."""
        found: dict[int, Placement] = {}
        for part in () if module is None else module.modules():
            if isinstance(part, DistributedDataParallel):
                ranks = frozenset(dist.get_process_group_ranks(part.process_group))
                found |= {id(p): Placement(None, ranks, len(ranks), "replicated") for p in part.parameters()}
        return found
