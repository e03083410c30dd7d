"""As on an accelerator, where the host does not look at what was added up: a disagreement is NaN on every rank.

Only that one look is taken away; the processes stay on the CPU.
"""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

import gradguard as gg
from cases import random
from gradguard.distributed import reduction
from gradguard.errors import DistributedError
from sharded import LISTS, Entry, local, mesh, parameter

WHO = 2
"""The rank that does something else."""


def mine(usual, other):
    return other if dist.get_rank() == WHO else usual


def listed(name="rows, uneven"):
    return [(f"layer{i}", parameter(entry)) for i, entry in enumerate(LISTS[name])]


def other_threshold(order):
    return gg.clip_grad_norm_(listed(), mine(1.0, 2.0), order)


def other_choice():
    return gg.Groups({mine("layer0", "layer1"): gg.ClipByGlobalNorm(1.0)}, rest=None)(listed()).norm


def other_order():
    first, second = listed(), [(n, parameter(Entry(random(*p.shape)))) for n, p in listed()]
    for named in (first, second):
        gg.clip_grad_norm_(named, math.inf)
    return gg.clip_grad_norm_(mine(first, second), math.inf)


def a_replica_without_a_gradient():
    entries = [Entry(random(8, 4), "hsdp", absent=(WHO,)), Entry(random(5, seed=1))]
    return gg.clip_grad_norm_([parameter(entry) for entry in entries], math.inf)


WAYS = {
    "threshold": lambda: other_threshold(2.0),
    "threshold of the inf-norm": lambda: other_threshold(math.inf),
    "choice of parameters": other_choice,
    "order of lists": other_order,
    "a replica": a_replica_without_a_gradient,
}


def without_a_look(way):
    with mock.patch.object(reduction, "are_readable", return_value=False):
        found = float(WAYS[way]())
    return found, float(gg.clip_grad_norm_(listed(), math.inf))


@pytest.mark.parametrize("way", WAYS)
def test_a_disagreement_is_nan_on_every_rank(pool, way):
    after = torch.cat([e.gradient.flatten() for e in LISTS["rows, uneven"]]).norm().item()
    for found, norm in pool(4).run(without_a_look, way):
        assert math.isnan(found)
        assert norm == pytest.approx(after, rel=1e-6)  # they go on to work together


def a_sum_on_one():
    """A list that all have measured, in which ``WHO`` alone then has a sum; then all have it."""
    gradients = [p.grad for _, p in listed()] + [None] * 90
    gg.get_total_norm(gradients)
    summed = DTensor.from_local(torch.ones(7, 5), mesh("row"), [Partial()])
    with mock.patch.object(reduction, "are_readable", return_value=False):
        try:
            found = float(gg.get_total_norm([mine(gradients[0], summed), *gradients[1:]]))
        except DistributedError as error:
            found = str(error).partition(" on some")[0]
    return found, [float(gg.get_total_norm([first, *gradients[1:]])) for first in (gradients[0], summed)]


def test_a_total_norm_of_a_sum_that_others_lack_is_nan_on_them(pool):
    whole = [e.gradient.flatten() for e in LISTS["rows, uneven"]]
    after = [float(torch.cat([first, *whole[1:]]).norm()) for first in (whole[0], torch.full((35,), 4.0))]
    for rank, (found, norms) in enumerate(pool(4).run(a_sum_on_one)):
        assert found == "tensor 0 is a Partial sum" if rank == WHO else math.isnan(found)
        assert norms == pytest.approx(after, rel=1e-6)


def agreeing():
    with mock.patch.object(reduction, "are_readable", return_value=False):
        return [float(gg.clip_grad_norm_(listed(name), math.inf, p)) for name in LISTS_ALIKE for p in (2.0, math.inf)]


LISTS_ALIKE = ["rows, uneven", "hsdp", "experts"]


def test_an_agreement_is_the_norm(pool):
    vectors = [torch.cat([e.gradient.flatten() for e in LISTS[name]]) for name in LISTS_ALIKE]
    right = [float(torch.linalg.vector_norm(v, p)) for v in vectors for p in (2.0, math.inf)]
    assert pool(4).run(agreeing) == [pytest.approx(right, rel=1e-6)] * 4


def guarded():
    named = listed()
    optimizer = torch.optim.SGD(named, lr=0.1)
    guard = gg.Guard(optimizer, mine(gg.ClipByGlobalNorm(1.0), gg.ClipByGlobalNorm(2.0)))
    before = [local(p).detach().clone() for _, p in named]
    with mock.patch.object(reduction, "are_readable", return_value=False):
        optimizer.step()
    return int(guard.skipped_steps), all(torch.equal(local(p), w) for (_, p), w in zip(named, before, strict=True))


def test_a_guard_skips_it(pool):
    assert pool(4).run(guarded) == [(1, True)] * 4
