"""Two processes, each with a part of the samples, fill `.grad` as one process does, or refuse together."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from distributed.pool import Pools
from gradguard.errors import UnsupportedGradientError


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


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model, parts, reduction):
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.7), loss_reduction=reduction)
    x, y = samples()
    for part in parts:
        F.cross_entropy(model(x[part]), y[part], reduction=reduction).backward()
        clipper.clip_and_accumulate()
    size = clipper.pre_step().batch_size
    grads = [whole(p.grad) for p in model.parameters()]
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


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with Pools(tmp_path_factory.mktemp("pool")).fresh(2) as pool:
        yield pool


@pytest.mark.slow
def test_two_processes_give_what_one_gives(processes):
    expected = {reduction: gradients(Network(), [slice(0, 8)], reduction) for reduction in ("mean", "sum")}
    processes.run(check, expected)


# Models sharded by fully_shard: those that mix samples


class Normalizing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm(dim=1, keepdim=True).clamp(min=1e-9) * 0.1


MOST = [torch.tensor(1.0)]


class Mixing(nn.Module):
    """Mixes samples in one way, from step ``since`` on, where ``flag`` says so."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.kind, self.flag = kind, True
        MOST[0] = torch.tensor(1.0)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.flag:
            h = getattr(self, self.kind)(h, x)
        return self.second(h)

    def plain(self, h, x):
        return h

    def mean(self, h, x):
        return h - h.mean(0)

    def largest(self, h, x):
        return h / h.abs().max()

    def detached_mean(self, h, x):
        return h - h.mean(0).detach()

    def capacity(self, h, x):
        return h * (torch.arange(len(h)) < 4).float()[:, None]

    def running_maximum(self, h, x):
        MOST[0] = torch.maximum(MOST[0], x.detach().abs().max())
        return h / MOST[0]

    def backward_of_a_function(self, h, x):
        return Normalizing.apply(h)

    def previous_sample(self, h, x):
        return h + 0.1 * h.roll(1, 0)


def layers_and_root(model, **arguments):
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def of_replicas(model):
    return layers_and_root(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def of_one_replica(model):
    return layers_and_root(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))


WAYS = {"whole": fully_shard, "layers": layers_and_root, "2 x 1": of_replicas, "1 x 2": of_one_replica}
KINDS = ["mean", "largest", "detached_mean", "capacity", "running_maximum", "backward_of_a_function", "previous_sample"]


def train_mixing(kind, way, since=0, ranks=(0, 1), steps=6):
    """The step that refused, and its words."""
    model = Mixing(kind)
    model = WAYS[way](model) if way else model
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    rank = dist.get_rank() if way else 0
    generator = torch.Generator().manual_seed(rank)
    try:
        for step in range(steps):
            model.flag = step >= since and rank in ranks
            x = torch.randn(6, 6, generator=generator) * (1 + step)
            F.cross_entropy(model(x), torch.randint(0, 3, (6,), generator=generator)).backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
    except UnsupportedGradientError as error:
        return step, str(error)
    finally:
        clipper.detach()
    return steps, ""


def train_all_mixing(cases):
    return [train_mixing(*case) for case in cases]


CASES = [
    *[(kind, way) for kind in KINDS for way in ("layers", "whole")],
    *[(kind, way) for kind in ("detached_mean", "running_maximum") for way in ("2 x 1", "1 x 2")],
    *[(kind, "layers", 2) for kind in KINDS],
    *[(kind, "layers", 3, (1,)) for kind in KINDS],
]


@pytest.mark.slow
def test_a_sharded_model_that_mixes_samples_is_refused_where_a_whole_one_is(processes):
    for case, found in zip(CASES, zip(*processes.run(train_all_mixing, CASES), strict=True), strict=True):
        kind, _, since, ranks = *case, *(0, (0, 1))[len(case) - 2 :]
        expected, _ = train_mixing(kind, "", since)
        assert {step for step, _ in found} == {expected}, (case, expected, found)
        for rank, (_, words) in enumerate(found):
            assert rank in ranks or "refused its mini-batch, so this process did not take its own" in words, (
                case,
                words,
            )
