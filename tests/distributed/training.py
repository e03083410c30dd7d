"""A small network that is trained under every kind of parallelism, for the processes of `pool`."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from sharded import local, mesh

SAMPLES, LENGTH, WIDTH = 8, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Two blocks and a head; sizes that divide by no number of processes, where the parallelism lets them be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x))).tanh()  # FSDP2 warns of an output that is a view


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
    return x, torch.randn(SAMPLES, LENGTH, 3, generator=generator) * (1 + step % 3)


def _shard(model: nn.Module, **arguments: Any) -> nn.Module:
    for part in (model.first, model.second, model):
        fully_shard(part, **arguments)
    return model


def _of_both_blocks(**plan: Any) -> dict[str, Any]:
    return {f"{block}.{part}": style for block in ("first", "second") for part, style in plan.items()}


def _tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(model, mesh("tp"), _of_both_blocks(up=ColwiseParallel(), down=RowwiseParallel()))


def _sequence_parallel(model: nn.Module) -> nn.Module:
    """Between the linear layers, activations are split along the sequence."""
    plan = _of_both_blocks(
        norm=SequenceParallel(),
        up=ColwiseParallel(input_layouts=Shard(1)),
        down=RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    )
    plan["first"] = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
    )
    plan["head"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    return parallelize_module(model, mesh("tp"), plan)


WAYS: dict[str, Any] = {
    "DDP": lambda m: DistributedDataParallel(m),
    "DDP, gradients as views": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    "FSDP2": lambda m: _shard(m, mesh=mesh("row")),
    "FSDP2, kept gathered": lambda m: _shard(m, mesh=mesh("row"), reshard_after_forward=False),
    "FSDP2, mixed precision": lambda m: _shard(
        m, mesh=mesh("row"), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "FSDP2, offload": lambda m: _shard(m, mesh=mesh("row"), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "HSDP": lambda m: _shard(m, mesh=mesh("hsdp")),
    "TP": lambda m: _tensor_parallel(m),
    "TP, sequence": lambda m: _sequence_parallel(m),
    "FSDP2 x TP": lambda m: _shard(_tensor_parallel(m), mesh=mesh("dp")),
}


def own_samples(way: str) -> slice:
    """Which samples this process computes: those of its data-parallel rank."""
    if way.startswith("TP"):
        size, rank = 1, 0  # all compute the same
    elif way.endswith("TP"):
        size, rank = mesh("dp").size(), mesh("dp").get_local_rank()
    else:
        size, rank = dist.get_world_size(), dist.get_rank()
    part = SAMPLES // size
    return slice(rank * part, (rank + 1) * part)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(model: nn.Module, way: str, step: int, micro_batches: int = 1) -> None:
    """One step's gradients, from one or several backward passes of which only the last one synchronizes."""
    x, y = (t[own_samples(way)] if way != "whole" else t for t in batch(step))
    for i, (a, b) in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)):
        last = i == micro_batches - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        silent = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if silent else nullcontext():
            (F.mse_loss(model(a), b) / micro_batches).backward()


def memory(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of what this process holds of the weights and the optimizer's state."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for p in tensors for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    return [local(t).detach().clone() for t in (*tensors, *states)]


def models(way: str) -> tuple[nn.Module, nn.Module]:
    """The network under ``way``, and its twin on this process alone."""
    torch.manual_seed(0)
    model = Network()
    twin = copy.deepcopy(model)
    return WAYS[way](model), twin
