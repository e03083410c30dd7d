"""Replicas must have a gradient or lack it alike: else their norm is refused, whatever is missing where."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from refusals import check_refusals
from threads import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradguard as gg
from cases import random
from gradguard.errors import DistributedError
from reference import total_norm

WORLD = 4


@pytest.fixture(scope="module")
def run():
    with ranks(WORLD) as threads:
        meshes = threads(lambda rank: init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        yield lambda function: threads(lambda rank: function(meshes[rank]))


FULL = random(8, 3)

CALLS = {
    "function": lambda named: gg.clip_grad_norm_(named, math.inf),
    "clipper": lambda named: gg.ClipByNorm(1e9)(named).norm,
    "adaptive": lambda named: gg.ClipAdaptive(1e9)(named).norm,
    "total": lambda named: gg.get_total_norm([p.grad for _, p in named]),
}


def clip_without(mesh, call, layout, absent):
    """Beside a gradient that all have, one that some ranks lack."""
    named = []
    slices = {
        "hsdp": (mesh, [Replicate(), Shard(0)]),
        "a slice": (mesh["shard"], [Shard(0)]),
        "copies": (mesh, 2 * [Replicate()]),
    }
    for name, (where, placements) in {"all": slices["hsdp"], "some": slices[layout]}.items():
        p = nn.Parameter(distribute_tensor(torch.zeros_like(FULL), where, placements, src_data_rank=None))
        p.grad = distribute_tensor(FULL.clone(), where, placements, src_data_rank=None)
        if name == "some" and dist.get_rank() in absent:
            p.grad = None
        named.append((name, p))
    try:
        return float(CALLS[call](named))
    except DistributedError as error:
        return type(error).__name__, str(error)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", ["hsdp", "a slice", "copies"])
@pytest.mark.parametrize("call", CALLS)
def test_replicas_that_lack_a_gradient(run, call, layout):
    """A part that one of two replicas lacked counted half."""
    for missing in product([False, True], repeat=WORLD):
        absent = [rank for rank in range(WORLD) if missing[rank]]
        found = run(lambda mesh, absent=absent: clip_without(mesh, call, layout, absent))
        # Ranks 0 and 2 hold one half, 1 and 3 the other.
        if layout == "copies" or (missing[0] == missing[2] and missing[1] == missing[3]):
            half = FULL.view(2, 4, 3)
            there = [FULL] if layout == "copies" and not all(missing) else []
            if layout != "copies":
                there = [half[k] for k in range(2) if not missing[k]]
            assert found == pytest.approx([total_norm([FULL, *there])] * WORLD, rel=1e-6), absent
        else:
            check_refusals(found, "DistributedError", "is None on some of the ranks that hold the same part of it")


def clip_unlike(mesh, own, placements, absent):
    """A gradient that is laid out unlike its parameter, where some ranks have none."""
    p = nn.Parameter(distribute_tensor(torch.zeros_like(FULL), mesh, own, src_data_rank=None))
    if dist.get_rank() not in absent:
        p.grad = distribute_tensor(FULL.clone(), mesh, placements, src_data_rank=None)
    try:
        return float(gg.clip_grad_norm_([p], math.inf))
    except DistributedError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("own", [(Replicate(), Shard(0)), (Shard(0), Shard(0))], ids=["hsdp", "no two alike"])
@pytest.mark.parametrize(
    "placements", [(Replicate(), Replicate()), (Shard(0), Shard(1)), (Replicate(), Partial("avg"))]
)
def test_a_gradient_laid_out_unlike_its_parameter_that_some_lack(run, placements, own):
    """They joined with zeros, so that what others had for them was lost."""
    right = total_norm([FULL])
    assert run(lambda mesh: clip_unlike(mesh, own, placements, [])) == pytest.approx([right] * WORLD, rel=1e-6)
    found = run(lambda mesh: clip_unlike(mesh, own, placements, [1]))
    check_refusals(found, "DistributedError", "is laid out unlike its parameter and None on some of the ranks")


SUMS = {
    "1": lambda named: gg.clip_grad_norm_(named, 1.0, 1.0),
    "2": lambda named: gg.clip_grad_norm_(named, 1.0),
    "inf": lambda named: gg.clip_grad_norm_(named, 1.0, math.inf),
    "adaptive": lambda named: gg.ClipAdaptive(1e9)(named).norm,
}


def clip_sums_without(mesh, call, absent):
    """A sum over a slice of the mesh, so that two replicas of it have summands 1 and 2."""
    rank, tp = dist.get_rank(), mesh["shard"]
    a = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate(), Shard(0)], src_data_rank=None))
    w = nn.Parameter(distribute_tensor(torch.zeros(2, 2), tp, [Shard(1)], src_data_rank=None))
    if rank not in absent:
        w.grad = DTensor.from_local(torch.full((2, 2), 1.0 + rank % 2), tp, [Partial()], run_check=False)
    try:
        return float(SUMS[call]([("a", a), ("w", w)]))
    except DistributedError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("call", SUMS)
def test_replicas_of_a_sum_that_lack_a_summand(run, call):
    """A replica that lacked a summand got zeros for it, and the norm was that of neither replica."""
    whole = run(lambda mesh: clip_sums_without(mesh, call, []))
    assert whole == pytest.approx([{"1": 12.0, "inf": 3.0}.get(call, 6.0)] * WORLD, rel=1e-6)
    both = run(lambda mesh: clip_sums_without(mesh, call, [0, 2]))
    assert both == pytest.approx([{"1": 8.0, "inf": 2.0}.get(call, 4.0)] * WORLD, rel=1e-6)
    for absent in ([2], [1], [2, 3], [0, 3]):
        found = run(lambda mesh, absent=absent: clip_sums_without(mesh, call, absent))
        check_refusals(found, "DistributedError", "`w`, a sum over processes, is None on some of the ranks")
