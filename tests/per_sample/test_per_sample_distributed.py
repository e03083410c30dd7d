"""Two processes, each with a part of the samples, fill `.grad` as one process does."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradguard as gg
from distributed.pool import Pools


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 3


def gradients(model, parts, reduction):
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.7), loss_reduction=reduction)
    x, y = samples()
    for part in parts:
        F.cross_entropy(model(x[part]), y[part], reduction=reduction).backward()
        clipper.clip_and_accumulate()
    size = clipper.pre_step().batch_size
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    clipper.detach()
    return size, grads


def by_layers(model):
    fully_shard(model.first)
    return fully_shard(model)


def check(expected):
    parts = [slice(0, 3), slice(3, 5)] if dist.get_rank() == 0 else [slice(5, 6), slice(6, 8)]
    for wrap in (DistributedDataParallel, fully_shard, by_layers):
        for reduction, (size, grads) in expected.items():
            found_size, found = gradients(wrap(Network()), parts, reduction)
            assert found_size == size
            torch.testing.assert_close(found, grads, msg=f"{wrap.__name__} {reduction}")


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    expected = {reduction: gradients(Network(), [slice(0, 8)], reduction) for reduction in ("mean", "sum")}
    with Pools(tmp_path).fresh(2) as processes:
        processes.run(check, expected)
