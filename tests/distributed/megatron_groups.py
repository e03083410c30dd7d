"""Megatron-core's process groups and attributes, as its own layers set them, for the processes of `pool`.

Its real layers need its package; these stand for them. Each whole tensor is known to all, and cut as Megatron cuts it.
"""

import sys
import types
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharded import mesh

STATE = "megatron.core.parallel_state"


class Groups(types.ModuleType):
    """What the package knows: ``tensor`` ranks beside each other, the rest data-parallel; experts over ``expert``."""

    def __init__(self, tensor, expert=None, expert_tensor=None, stages=None):
        super().__init__(STATE)
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        self._tensor, self._stages = tensor or alone, stages or alone
        self._experts, self._expert_tensor = (
            expert or self._tensor,
            expert_tensor or (alone if expert else self._tensor),
        )

    def model_parallel_is_initialized(self):
        return True

    def get_tensor_model_parallel_group(self):
        return self._tensor

    def get_expert_tensor_and_model_parallel_group(self):
        return self._experts

    def get_tensor_model_parallel_world_size(self):
        return self._tensor.size()

    def get_tensor_model_parallel_rank(self):
        return self._tensor.rank()

    def get_expert_tensor_parallel_world_size(self):
        return self._expert_tensor.size()

    def get_expert_tensor_parallel_rank(self):
        return self._expert_tensor.rank()

    def get_pipeline_model_parallel_world_size(self):
        return self._stages.size()


@contextmanager
def megatron(**groups):
    sys.modules[STATE] = Groups(**groups)
    try:
        yield sys.modules[STATE]
    finally:
        del sys.modules[STATE]


def tensor_parallel():
    """Two ranks of four hold each tensor; the other two hold it again."""
    return megatron(tensor=mesh("tp").get_group())


CUTS = {  # of each whole: along which dimension, in how many blocks; None is held whole
    "embedding.weight": ((12, 6), 0, 1),
    "up.weight": ((8, 6), 0, 1),
    "up.bias": ((8,), 0, 1),
    "gated.weight": ((16, 6), 0, 2),
    "down.weight": ((6, 8), 1, 1),
    "down.bias": ((6,), None, 1),
    "norm.weight": ((6,), None, 1),
}


def wholes(step=0):
    draws = torch.Generator().manual_seed(step)
    return {
        name: (torch.randn(shape, generator=draws), torch.randn(shape, generator=draws) * (1 + step))
        for name, (shape, *_) in CUTS.items()
    }


def pieces(whole: Tensor, name: str, ranks: int) -> list[Tensor]:
    """Return the part of each rank, written as Megatron's ``_initialize_affine_weight_cpu`` does it."""
    _, dim, blocks = CUTS[name]
    if dim is None:
        return [whole] * ranks
    small = torch.split(whole, whole.shape[dim] // ranks // blocks, dim)
    return [torch.cat(small[rank::ranks], dim).contiguous() for rank in range(ranks)]


def parameters(state, step=0) -> dict[str, nn.Parameter]:
    """This process' parameters with their gradients."""
    ranks, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    made = {}
    for name, (weight, gradient) in wholes(step).items():
        p = nn.Parameter(pieces(weight, name, ranks)[rank].clone())
        p.grad = pieces(gradient, name, ranks)[rank].clone()
        _, dim, blocks = CUTS[name]
        if dim is not None:
            p.tensor_model_parallel, p.partition_dim, p.partition_stride = True, dim, blocks
        p.allreduce = True
        made[name] = p
    return made
