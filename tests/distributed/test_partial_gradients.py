"""Partial gradients are added up, or refused, whatever their parameters are laid out as, by every rule."""

import math

import pytest
import torch
from rules import RULES
from threads import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradguard as gg
from cases import random
from gradguard.errors import UnsupportedGradientError
from gradguard.integrations.timm import dispatch_clip_grad

WORLD = 4

FULL = {"layer0.weight": random(8, 4), "layer1.weight": random(4, 4, seed=1), "layer2.weight": random(8, seed=2)}

PARAMETERS = {
    "Replicate": Replicate(),
    "Shard(0)": Shard(0),
    "Partial(sum)": Partial(),
    "Partial(avg)": Partial("avg"),
    "Partial(max)": Partial("max"),
}

SUMMANDS = {
    "sum": lambda full, rank: full * (1 + rank) / sum(range(1, WORLD + 1)),
    "avg": lambda full, rank: full * (1 + rank) / sum(range(1, WORLD + 1)) * WORLD,
    "max": lambda full, rank: full - float(rank != 2),
    "min": lambda full, rank: full + float(rank != 2),
    "product": lambda full, rank: full if rank == 2 else torch.ones_like(full),
}


class Still(torch.optim.Optimizer):
    """Leaves the parameters as they are: torch 2.11's optimizers cannot change a Partial one in place."""

    def __init__(self, named):
        super().__init__(named, {})

    def step(self, closure=None):
        pass


def guarded(named):
    optimizer = Still(named)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1))
    optimizer.step()
    return guard.last.norm


CALLS = {
    "norm": lambda named: gg.clip_grad_norm_(named, 0.1),
    "norm, inf": lambda named: gg.clip_grad_norm_(named, 0.1, math.inf),
    "norm, measured": lambda named: gg.clip_grad_norm_(named, math.inf),
    "total": lambda named: gg.get_total_norm([p.grad for _, p in named]),
    "value": lambda named: gg.clip_grad_value_(named, 0.5),
    "value, zero": lambda named: gg.clip_grad_value_(named, 0.5, nonfinite="zero"),
    "adaptive": lambda named: gg.clip_grad_adaptive_(named, 0.01),
    "apply, norm": lambda named: gg.apply_gradient_clipping(named, "norm", 0.1).norm,
    "apply, value": lambda named: gg.apply_gradient_clipping(named, "value", 0.1).norm,
    "apply, adaptive": lambda named: gg.apply_gradient_clipping(named, "adaptive", 0.1).norm,
    "dispatch": lambda named: dispatch_clip_grad(named, 0.1),
    "guard": guarded,
    **{f"clipper: {name}": lambda named, make=make: make()(named).norm for name, make in RULES.items()},
    "clipper: adaptive": lambda named: gg.ClipAdaptive(0.01)(named).norm,
}


@pytest.fixture(scope="module")
def run():
    with ranks(WORLD) as threads:
        meshes = threads(lambda rank: init_device_mesh("cpu", (WORLD,)))
        yield lambda function: threads(lambda rank: function(rank, meshes[rank]))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(rank, mesh, call, kind, placement):
    """What the call returns, and the gradients after it; or its error."""
    named = []
    for name, full in FULL.items():
        if placement.is_partial():
            p = DTensor.from_local(torch.ones_like(full), mesh, [placement])
        else:
            p = distribute_tensor(torch.ones_like(full), mesh, [placement], src_data_rank=None)
        p = nn.Parameter(p)
        p.grad = DTensor.from_local(SUMMANDS[kind](full, rank), mesh, [Partial(kind)])
        named.append((name, p))
    try:
        norm = CALLS[call](named)
    except UnsupportedGradientError as error:
        return str(error)
    if call != "total":
        assert not any(kind.is_partial() for _, p in named for kind in p.grad.placements)
    return norm, [whole(p.grad) for _, p in named]


def expected(call):
    named = [(name, nn.Parameter(torch.ones_like(full))) for name, full in FULL.items()]
    for (_, p), full in zip(named, FULL.values(), strict=True):
        p.grad = full.clone()
    return CALLS[call](named), [p.grad for _, p in named]


SAMPLED = "norm", "value", "total", "adaptive", "guard"

CASES = [
    pytest.param(call, kind, marks=() if kind == "sum" or call in SAMPLED else pytest.mark.exhaustive)
    for call in CALLS
    for kind in SUMMANDS
]


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("call", "kind"), CASES)
def test_a_partial_gradient_is_added_up(run, call, kind):
    """Where the parameter is Partial too, its gradient was taken for whole: |G|/W instead of |G|."""
    right = expected(call)
    for name, placement in PARAMETERS.items():
        for found in run(lambda rank, mesh, p=placement: clip(rank, mesh, call, kind, p)):
            if isinstance(found, BaseException):
                raise found
            if "adaptive" in call and placement.is_partial():
                assert "adaptive clipping needs to know which elements a process holds" in found
            else:
                torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def clip_a_shard_of_an_ordinary_parameter(mesh, call):
    p = nn.Parameter(FULL["layer0.weight"].clone())
    p.grad = distribute_tensor(FULL["layer0.weight"], mesh, [Shard(0)], src_data_rank=None)
    CALLS[call]([("layer0.weight", p)])


@pytest.mark.parametrize("call", [call for call in CALLS if call != "total"])
def test_a_sharded_gradient_of_an_ordinary_parameter_is_refused(run, call):
    """The clip computed with DTensors, and returned one."""
    for error in run(lambda rank, mesh: clip_a_shard_of_an_ordinary_parameter(mesh, call)):
        with pytest.raises(
            UnsupportedGradientError,
            match=r"gradient of `layer0\.weight` is a DTensor and the parameter an ordinary tensor: .* a DTensor too",
        ):
            raise error
