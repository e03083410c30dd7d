"""Sharded parameters whose optimizers step inside the backward pass: as on one process, or refused in words."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import whole

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from sharded import mesh

STEPS = 3
CLIPPERS = {
    "norm": lambda: gg.ClipByNorm(0.05),
    "value": lambda: gg.ClipByValue(0.01),
    "adaptive": lambda: gg.ClipAdaptive(0.01),
    "AdaGC": lambda: gg.AdaGC(absolute=math.inf, warmup=2),
}


def shard(model, name):
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh(name))
    return model


WAYS = {
    "FSDP2": lambda model: shard(model, "row"),
    "HSDP": lambda model: shard(model, "hsdp"),
    "TP": lambda model: parallelize_module(model, mesh("row"), {"0": ColwiseParallel(), "2": RowwiseParallel()}),
}


def models(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3, bias=False), nn.Tanh())
    twin = copy.deepcopy(model)
    return WAYS[way](model), twin


def step_in_backward(model, make):
    """An optimizer and a guard for each parameter; returns the guards."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    guards = [gg.Guard(o, make(), model=model) for o in optimizers.values()]

    def step(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return guards


def loss_of(model, step, own):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)) * (1 + step)
    return model(x[own]).square().mean()


def train(way, names):
    """For each clipper: the norms of each step and the weights in the end, here and on the twin."""
    return {name: train_with(way, CLIPPERS[name]) for name in names}


def train_with(way, make):
    model, twin = models(way)
    share = 8 // (1 if way == "TP" else dist.get_world_size())
    own = slice(None) if way == "TP" else slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    ours, theirs, bound = [], [], 0
    guards = step_in_backward(model, make)
    twins = step_in_backward(twin, make)
    for step in range(STEPS):
        loss_of(model, step, own).backward()
        loss_of(twin, step, slice(None)).backward()
        ours += [float(guard.last.norm) for guard in guards]
        theirs += [float(guard.last.norm) for guard in twins]
        bound += sum(bool(guard.last.clipped) for guard in guards)
    return ours, theirs, [whole(p).detach() for p in model.parameters()], [*twin.parameters()], bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "way", "names"),
    [(2, "FSDP2", [*CLIPPERS]), (2, "TP", ["norm"]), (4, "HSDP", ["norm"])],
)
def test_each_step_is_that_of_one_process(pool, world, way, names):
    for outcome in pool(world).run(train, way, names):
        for name, (ours, theirs, weights, twin, bound) in outcome.items():
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)
            torch.testing.assert_close(weights, twin, rtol=1e-4, atol=1e-6, msg=name)
            assert bound, name


def refused(way):
    """What the backward says, and whether a weight has moved."""
    model, _ = models("FSDP2") if way == "FSDP2" else (None, None)
    options, clipper = {}, gg.ClipByNorm(1.0)
    if way == "FSDP2":
        clipper = gg.ClipByGlobalNorm(1.0)
    elif way == "DDP":
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(5, 3))
    elif way == "stages":
        model, options = nn.Linear(5, 3), {"process_group": dist.group.WORLD}
    before = [whole(p).detach().clone() for p in model.parameters()]
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        gg.Guard(optimizer, copy.deepcopy(clipper), **options)
        p.register_post_accumulate_grad_hook(lambda p, step=optimizer.step: step())
    try:
        model(torch.ones(2, 5)).sum().backward()
    except UnsupportedGradientError as error:
        after = [whole(p).detach() for p in model.parameters()]
        return str(error), all(map(torch.equal, before, after))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("FSDP2", "ClipByGlobalNorm has the gradients of this optimizer"),
        ("DDP", "DistributedDataParallel has not yet added up"),
        ("stages", "pipeline stages run theirs at different times"),
    ],
)
def test_what_would_be_wrong_is_refused_before_a_weight_moves(pool, way, words):
    for said, unmoved in pool(2).run(refused, way):
        assert words in said
        assert unmoved
