"""What an argument says of pipeline stages must not contradict where the parameters lie; nor may it be missing."""

import math

import pytest
import torch
import torch.distributed as dist
from refusals import check_refusals, refusal
from rules import RULES
from threads import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gradguard as gg
from cases import random
from gradguard.integrations.timm import dispatch_clip_grad
from reference import total_norm

WORLD = 4
ROOTS = {"pp": ("pp", "dp"), "Pipeline": ("Pipeline", "data"), "tp": ("tp", "batch")}
"""Slices of different names: torch takes equal slices of two meshes for one another."""


@pytest.fixture(scope="module")
def run():
    with ranks(WORLD) as threads:
        meshes = threads(
            lambda rank: {name: init_device_mesh("cpu", (2, 2), mesh_dim_names=dims) for name, dims in ROOTS.items()}
        )
        yield lambda function: threads(lambda rank: function(meshes[rank]))


def layer(mesh, placements, full):
    p = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, placements, src_data_rank=None))
    p.grad = distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)
    return [("layer0.weight", p)]


def guarded(named, **stages):
    optimizer = torch.optim.SGD(named, lr=0.0)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), **stages)
    optimizer.step()
    return guard.last.norm


NORM = {
    "norm": lambda named, **stages: gg.clip_grad_norm_(named, 1.0, **stages),
    "adaptive": lambda named, **stages: gg.clip_grad_adaptive_(named, 0.1, **stages).norm,
    "dispatch": lambda named, **stages: dispatch_clip_grad(named, 1.0, **stages),
    "guard": guarded,
    "clipper: adaptive": lambda named, **stages: gg.ClipAdaptive(0.1)(named, **stages).norm,
    **{
        f"clipper: {name}": lambda named, make=make, **stages: make()(named, **stages).norm
        for name, make in RULES.items()
        if name != "groups"  # one of whose patterns fits nothing here
    },
}

# --- Arguments that contradict the layout -----------------------------------------------------------------------------

OVER_STAGES = {
    "copies over the stages": lambda root: (root["pp"], [Replicate()]),
    "shards over the stages": lambda root: (root["pp"], [Shard(0)]),
    "shards over everything": lambda root: (root, [Shard(0), Shard(0)]),
}

NAMED_BY = {
    "mesh": lambda root: {"mesh": root["pp"]},
    "process_group": lambda root: {"process_group": root.get_group("pp")},
    "everybody": lambda root: {"process_group": dist.group.WORLD},
}


def contradict(meshes, call, layout, named_by):
    named = layer(*OVER_STAGES[layout](meshes["pp"]), random(8, 4))
    before = named[0][1].grad.to_local().clone()
    said = refusal(lambda: NORM[call](named, **NAMED_BY[named_by](meshes["pp"])))
    assert torch.equal(named[0][1].grad.to_local(), before)
    return said


@pytest.mark.parametrize("named_by", NAMED_BY)
@pytest.mark.parametrize("call", NORM)
def test_parameters_that_are_spread_over_the_stages(run, call, named_by):
    """Replicas over mesh["pp"] beside ``mesh=mesh["pp"]`` had half of their norm."""
    for layout in OVER_STAGES:
        found = run(lambda meshes, layout=layout: contradict(meshes, call, layout, named_by))
        match = r"parameters differ between the ranks [0-3, ]+, over which one is spread: .* over mesh dimension"
        check_refusals(found, "InvalidValueError", match)


# --- Arguments that are missing ---------------------------------------------------------------------------------------


def forget(meshes, root, call, placements):
    """A stage whose parameters lie on the data parallel slice of the root mesh; nobody says that there are others."""
    stage = meshes[root].get_local_rank(0)
    return refusal(lambda: call(layer(meshes[root][ROOTS[root][1]], placements, random(8, 4, seed=stage))))


@pytest.mark.parametrize("root", ["pp", "Pipeline"])
@pytest.mark.parametrize("call", NORM)
def test_stages_that_no_argument_names(run, call, root):
    """Each stage clipped by its own norm."""
    for placements in ([Shard(0)], [Replicate()]):
        found = run(lambda meshes, p=placements: forget(meshes, root, NORM[call], p))
        check_refusals(found, "InvalidValueError", rf"{root}.* has 2 pipeline stages.*Pass mesh=mesh\['{root}'\]")


OF_ONE_STAGE = {
    "norm beside another dimension": ("tp", NORM["norm"]),
    "get_total_norm": ("pp", lambda named: gg.get_total_norm([p.grad for _, p in named])),
    "clip_grad_value_": ("pp", lambda named: gg.clip_grad_value_(named, 0.1)),
}


@pytest.mark.parametrize("name", OF_ONE_STAGE)
def test_what_needs_no_other_stage(run, name):
    """Along a dimension that is not called a pipeline parameters are replicated; a list of gradients is just that."""
    root, call = OF_ONE_STAGE[name]
    assert run(lambda meshes: forget(meshes, root, call, [Shard(0)])) == [("no error", "")] * WORLD


def clip_stages(meshes, call):
    stage = meshes["pp"].get_local_rank(0)
    return float(NORM[call](layer(meshes["pp"]["dp"], [Shard(0)], random(8, 4, seed=stage)), mesh=meshes["pp"]["pp"]))


@pytest.mark.parametrize("call", ["norm", "guard", "clipper: value", "clipper: adaptive"])
def test_stages_that_are_named(run, call):
    right = total_norm([random(8, 4, seed=stage) for stage in range(2)])
    assert run(lambda meshes: clip_stages(meshes, call)) == pytest.approx([right] * WORLD, rel=1e-6)


# --- A weight that stages share ---------------------------------------------------------------------------------------

SHARED = {
    "sharded, sharded": ([Shard(0)], [Shard(0)]),
    "sharded in two ways": ([Shard(0)], [Shard(1)]),
    "sharded, whole": ([Shard(0)], [Replicate()]),
    "whole, sharded": ([Replicate()], [Shard(0)]),
    "whole, whole": ([Replicate()], [Replicate()]),
}


def share(meshes, layouts, order):
    """Every stage holds the weight, each laid out in its own way, and one of its own."""
    root = meshes["pp"]
    stage = root.get_local_rank(0)
    shared = layer(root["dp"], layouts[stage], random(8, 4))
    own = layer(root["dp"], [Shard(0)], random(6, seed=1 + stage))
    weight = shared[0][1]
    calls = [
        lambda: gg.clip_grad_norm_([weight, own[0][1]], math.inf, order, mesh=root["pp"], shared={"weight": weight}),
        lambda: gg.ClipByGlobalNorm(1e9, order)([weight, own[0][1]], mesh=root["pp"], shared={"weight": weight}).norm,
    ]
    return [float(call()) for call in calls]


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("name", SHARED)
def test_a_shared_weight_counts_once_however_it_is_laid_out(run, name, order):
    """Where the first stage alone held all of it, its norm was too small."""
    right = total_norm([random(8, 4), random(6, seed=1), random(6, seed=2)], order)
    for norms in run(lambda meshes: share(meshes, SHARED[name], order)):
        assert norms == pytest.approx([right] * 2, rel=1e-6)
