"""Gradients that nothing has added up are refused at the clip: DDP's, those that FSDP2 ignores, of shared weights."""

import math
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from training import Network, batch

import gradguard as gg
from gradguard.distributed import agreement
from gradguard.distributed.wrappers import follow_backwards
from gradguard.errors import DistributedError, UnsupportedGradientError
from gradguard.torch_private import default_store
from sharded import mesh

CLIPS = {
    "function": lambda m: gg.clip_grad_norm_(m.parameters(), 0.1),
    "module": lambda m: gg.clip_grad_norm_(m, 0.1),
    "clipper": lambda m: gg.ClipByGlobalNorm(0.1)(m),
    "each": lambda m: gg.ClipByNorm(0.1)(m),
}
MORE_CLIPS = {
    **CLIPS,
    "order 1": lambda m: gg.clip_grad_norm_(m, 0.1, 1.0),
    "order 4": lambda m: gg.clip_grad_norm_(m, 0.1, 4.0),
    "order inf": lambda m: gg.clip_grad_norm_(m, 0.1, math.inf),
    "adaptive": lambda m: gg.clip_grad_adaptive_(m, 0.01),
    "total": lambda m: gg.get_total_norm([p.grad for p in m.parameters()]),
    "total of order inf": lambda m: gg.get_total_norm([p.grad for p in m.parameters()], math.inf),
}


def backward(model, rank=None):
    rank = dist.get_rank() if rank is None else rank
    x, y = batch(0)
    F.mse_loss(model(x[rank::2]), y[rank::2]).backward()


def silent(model):
    with model.no_sync():
        backward(model)


def silent_backward(model):
    """The forward is outside: then DDP averages all the same."""
    x, y = batch(0)
    loss = F.mse_loss(model(x[dist.get_rank() :: 2]), y[dist.get_rank() :: 2])
    with model.no_sync():
        loss.backward()


def by_hand(model):
    silent(model)
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)


def accumulated(model):
    silent(model)
    backward(model)


def evaluated(model):
    backward(model)
    with torch.no_grad():
        model(batch(1)[0])


def evaluated_on_one(model):
    backward(model)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.module(batch(1)[0])
            model.require_forward_param_sync = False  # as a forward of the wrapper leaves it


WAYS = {
    "averaged": (backward, True),
    "inside no_sync": (silent, False),
    "only the backward inside no_sync": (silent_backward, True),
    "reduced by hand": (by_hand, True),
    "the last of two averages": (accumulated, True),
    "an evaluation before the clip": (evaluated, True),
    "an evaluation on one rank": (evaluated_on_one, True),
}


def replicated(way, clip):
    torch.manual_seed(0)
    model, found = DistributedDataParallel(Network()), []
    follow_backwards()  # as a Guard does: before its first clip, one process that evaluates alone is not understood
    for how in (way, "averaged", way, way):
        model.zero_grad()
        WAYS[how][0](model)
        before = [p.grad.clone() for p in model.parameters()]
        try:
            MORE_CLIPS[clip](model)
            found.append("")
        except UnsupportedGradientError as error:
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    "clip", ["function", "total", *(pytest.param(c, marks=pytest.mark.exhaustive) for c in list(CLIPS)[1:])]
)
def test_a_backward_inside_no_sync_is_refused_after_it(pool, clip):
    for way, (_, is_right) in WAYS.items():
        for said in pool(2).run(replicated, way, clip):
            assert [bool(one) for one in said] == ([False] * 4 if is_right else [True, False, True, True]), (way, said)
            assert all("last backward of DistributedDataParallel ran inside no_sync()" in one for one in said if one)


def silent_later(zeroes):
    torch.manual_seed(0)
    model, found = DistributedDataParallel(Network()), []
    for how in (backward, silent, None, backward):
        if how is not None:
            if zeroes:
                model.zero_grad(set_to_none=False)  # the gradients stay where they are
            how(model)
        try:
            gg.clip_grad_norm_(model, 0.1)
            found.append("")
        except UnsupportedGradientError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("zeroes", [True, False])
def test_a_silent_backward_into_the_gradients_of_another_is_refused_each_time(pool, zeroes):
    for said in pool(2).run(silent_later, zeroes):
        assert [bool(one) for one in said] == [False, True, True, False]


def first_clip(after):
    """The first clip of a model that was in training before."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Network())
    backward(model)
    for how in after:
        how(model)
    try:
        return float(gg.clip_grad_norm_(model, 0.1))
    except UnsupportedGradientError as error:
        return str(error)


@pytest.mark.parametrize(
    ("after", "is_right"),
    [((), True), ((silent,), False), ((silent, silent), False), ((silent, backward), True), ((by_hand,), True)],
)
def test_the_first_clip_knows_the_last_backward(pool, after, is_right):
    found = pool(2).run(first_clip, after)
    assert all(isinstance(one, float) == is_right for one in found), found
    assert all("ran inside no_sync()" in one for one in found if not is_right)


def measured_alone(by, seconds):
    torch.manual_seed(0)
    model, found = DistributedDataParallel(Network()), []
    store, long = default_store(), agreement._LONG
    usual = store.timeout
    for rank, how in ((None, backward), (by, silent), (None, silent), (by, backward), (None, by_hand)):
        model.zero_grad()
        how(model)
        if rank is not None:  # only then nobody else may come late
            store.set_timeout(timedelta(seconds=seconds))
            agreement._LONG = seconds / 3
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if rank in (None, dist.get_rank()):
                    gg.clip_grad_norm_(model, math.inf)
            found.append("")
        except (DistributedError, UnsupportedGradientError) as error:
            found.append(" after ".join(map(str, (error, *(w.message for w in told)))))
        finally:
            store.set_timeout(usual)
            agreement._LONG = long
        if rank is not None:
            dist.barrier()
    return found


@pytest.mark.parametrize("by", [0, 1])
def test_one_process_that_measures_alone_after_a_silent_backward_is_refused(pool, by):
    found = pool(2).run(measured_alone, by, 0.3)
    alone, other = found[by], found[1 - by]
    assert "only 1 of 2 processes came within 0 s to compare their gradients" in alone[1]
    assert alone[1].count("s for 1 of 2 processes to come. Clip and measure on every rank") == 1
    assert all("ran inside no_sync()" in said[2] for said in found), found  # the next comparison is not out of step
    assert [bool(one) for one in alone] == [False, True, True, False, False]
    assert [bool(one) for one in other] == [False, False, True, False, False]


def one_alone(act, model):
    """What one process does by itself between two clips, which nothing forbids it."""
    if dist.get_rank():
        return
    if act == "measures":
        gg.clip_grad_norm_(model, math.inf)
    else:
        with torch.no_grad():
            model(batch(1)[0])


def clipped_twice(act, clip):
    torch.manual_seed(0)
    model = DistributedDataParallel(Network())
    follow_backwards()
    norms = []
    for _ in range(2):  # the second step begins with what the first has left
        model.zero_grad()
        backward(model)
        one_alone(act, model)
        for _ in range(2):
            CLIPS[clip](model)
            one_alone(act, model)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
    dist.barrier()  # a collective that one process alone has begun would meet this one
    return norms


@pytest.mark.parametrize("act", ["evaluates", "measures"])
@pytest.mark.parametrize(
    "clip", ["function", *(pytest.param(c, marks=pytest.mark.exhaustive) for c in list(CLIPS)[1:])]
)
def test_no_collective_waits_for_what_one_process_does_alone(pool, act, clip):
    first, second = pool(2).run(clipped_twice, act, clip)
    assert first == second


def sharded(reduces, clip):
    torch.manual_seed(0)
    model = Network()
    ignored = [*model.first.norm.parameters(), model.head.bias]
    fully_shard(model, mesh=mesh("row"), ignored_params=set(ignored))
    backward(model)
    if reduces:
        for p in ignored:
            dist.all_reduce(p.grad)
            p.grad /= 2
    MORE_CLIPS[clip](model)
    return math.nan


@pytest.mark.parametrize(
    "clip",
    [
        pytest.param(c, marks=[pytest.mark.exhaustive] if c in ("module", "clipper", "order 4") else [])
        for c in MORE_CLIPS
    ],
)
def test_parameters_that_fsdp_ignores_and_nothing_reduces_are_refused(pool, clip):
    for error in pool(2).outcomes(sharded, False, clip):
        assert isinstance(error, UnsupportedGradientError), error
        assert "differs between the processes that hold all of it" in str(error)
        assert "FSDP ignores a parameter" in str(error)
        assert clip != "module" or "`first.norm.weight`, `first.norm.bias`, `head.bias`" in str(error)
    assert all(math.isnan(one) for one in pool(2).run(sharded, True, clip))


def staged(of_one, missing):
    torch.manual_seed(0)
    own, both = nn.Parameter(torch.ones(3 + dist.get_rank())), nn.Parameter(torch.ones(4))
    own.grad = torch.ones_like(own)
    both.grad = torch.ones(4) * (of_one if dist.get_rank() else 1.0)
    if missing and dist.get_rank():
        both.grad = None
    return float(gg.clip_grad_norm_([own, both], 1.0, process_group=dist.group.WORLD, shared={"both": both}))


def test_shared_weights_whose_gradients_differ_between_stages_are_refused(pool):
    for error in pool(2).outcomes(staged, 1.5, False):
        assert isinstance(error, UnsupportedGradientError), error
        assert "stages share a weight" in str(error)
    assert pool(2).run(staged, 1.0, False) == pytest.approx([math.sqrt(3 + 4 + 4)] * 2)
    assert pool(2).run(staged, 1.0 + 1e-4, False) == pytest.approx([math.sqrt(3 + 4 + 4)] * 2, rel=1e-3)
    assert pool(2).run(staged, 1.0, True) == pytest.approx([math.sqrt(3 + 4 + 4)] * 2)  # one that has it counts once
