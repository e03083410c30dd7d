"""A plan is never used for a layout that it was not made for, though the parameter is the same object."""

import math

import pytest
import torch
import torch.distributed as dist
from rules import RULES
from threads import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradguard as gg
from cases import random
from reference import total_norm

WORLD = 4


@pytest.fixture(scope="module")
def run():
    with ranks(WORLD) as threads:
        meshes = threads(
            lambda rank: {
                "row": init_device_mesh("cpu", (WORLD,)),
                "grid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
            }
        )
        yield lambda function: threads(lambda rank: function(meshes[rank]))


def spread(mesh, placements, full):
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


LAYOUTS = {
    "Shard(0)": lambda meshes: (meshes["row"], [Shard(0)]),
    "Shard(1)": lambda meshes: (meshes["row"], [Shard(1)]),
    "Replicate": lambda meshes: (meshes["row"], [Replicate()]),
    "a new mesh": lambda meshes: (meshes["grid"], [Replicate(), Shard(0)]),
}

FULL = random(8, 4)


class GuardOfOne:
    """What `Guard` measures, called as a clipper is."""

    def __init__(self):
        self.optimizer = None

    def __call__(self, named):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(named, lr=0.0)
            self.guard = gg.Guard(self.optimizer, gg.ClipByGlobalNorm(1e9), nonfinite="propagate")
        self.optimizer.step()
        return self.guard.last


CALLS = {
    "function": lambda: lambda named: gg.clip_grad_norm_(named, 1e9),
    "function, inf": lambda: lambda named: gg.clip_grad_norm_(named, 1e9, math.inf),
    "adaptive": lambda: lambda named: gg.clip_grad_adaptive_(named, 1e9),
    "guard": GuardOfOne,
    "ClipAdaptive": lambda: gg.ClipAdaptive(1e9),
    **{name: RULES[name] for name in ("global norm", "norm", "value", "median", "AdaGC", "chain")},
}


def norms_before_and_after(meshes, call, before, after):
    """Swap the contents of a parameter; its old part lives on, as it does in a state dict."""
    p = nn.Parameter(spread(*LAYOUTS[before](meshes), torch.zeros_like(FULL)))
    twin = nn.Parameter(torch.zeros_like(FULL))
    ours, theirs, found = CALLS[call](), CALLS[call](), []
    for layout in (before, after):
        p.grad, twin.grad = spread(*LAYOUTS[layout](meshes), FULL.clone()), FULL.clone()
        norms = [clip([("layer0.weight", q)]) for clip, q in ((ours, p), (theirs, twin))]
        whole = [p.grad.full_tensor(), twin.grad]
        found.append([*[n if isinstance(n, torch.Tensor) else n.norm for n in norms], *whole])
        kept = p._local_tensor
        p.grad = None
        torch.utils.swap_tensors(p, nn.Parameter(spread(*LAYOUTS[after](meshes), torch.zeros_like(FULL))))
    del kept
    return found


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_parameter_whose_contents_are_swapped(run, call, before, after):
    """The plan of the old layout went on: |G| came out as sqrt(2) |G|."""
    for found in run(lambda meshes: norms_before_and_after(meshes, call, before, after)):
        if isinstance(found, BaseException):
            raise found
        for norm, right, gradient, expected in found:
            torch.testing.assert_close(norm, right, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def clip_what_came_in_its_place(meshes):
    """A list in which one parameter is replaced, and one of another dtype comes in the place of an ordinary one."""
    norms = []
    first, plain = nn.Parameter(spread(meshes["row"], [Shard(0)], FULL)), nn.Parameter(torch.zeros(3))
    first.grad, plain.grad = spread(meshes["row"], [Shard(0)], FULL.clone()), torch.ones(3)
    norms.append(float(gg.clip_grad_norm_([first, plain], math.inf)))
    first = nn.Parameter(spread(meshes["row"], [Replicate()], FULL))
    first.grad = spread(meshes["row"], [Replicate()], FULL.clone())
    norms.append(float(gg.clip_grad_norm_([first, plain], math.inf)))
    plain.grad = None
    plain.data = plain.data.double()
    plain.grad = torch.full((3,), 1e200, dtype=torch.float64)
    norms.append(float(gg.clip_grad_norm_([first, plain], math.inf)))
    return norms


def test_a_parameter_that_is_replaced(run):
    right = [total_norm([FULL, torch.ones(3)])] * 2 + [math.sqrt(3) * 1e200]
    for norms in run(clip_what_came_in_its_place):
        assert norms == pytest.approx(right, rel=1e-6)


def clip_gradients_that_lie_otherwise_each_time(meshes):
    """A sum, then the parts of the parameter itself, of which one process alone has one, then copies of the whole."""
    row, rank, norms = meshes["row"], dist.get_rank(), []
    parameter = nn.Parameter(spread(row, [Shard(0)], FULL))
    parts = spread(row, [Shard(0)], FULL.clone())
    copies = spread(row, [Replicate()], FULL.clone())
    for gradient in (DTensor.from_local(FULL / WORLD, row, [Partial()]), parts if rank == 1 else None, copies, parts):
        parameter.grad = gradient
        norms.append(float(gg.clip_grad_norm_([parameter], math.inf)))
    return norms


def test_a_gradient_that_is_laid_out_anew_at_each_step(run):
    """Processes whose gradient is right, or missing, once waited for those that add theirs up, or were waited for."""
    part = FULL.chunk(WORLD)[1]
    right = [total_norm([FULL]), total_norm([part]), total_norm([FULL]), total_norm([FULL])]
    for norms in run(clip_gradients_that_lie_otherwise_each_time):
        assert norms == pytest.approx(right, rel=1e-6)
