"""Finite spikes under data and tensor parallelism: every rank skips the same steps, by the same bits."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import WAYS, backward, memory, models

import gradguard as gg
from sharded import local

SPIKES = {9: "norm", 11: "loss of one rank"}


def train(way, kind):
    """What each rank decided, its detector's state, and whether a skipped step left every bit."""
    model, _ = models(way)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3, fused=kind == "fused", foreach=False)
    clipper = gg.ClipByMedian(warmup=3) if kind != "groups" else gg.Groups({"head*": gg.ClipByNorm(1.0)}, rest=None)
    spikes = gg.SkipSpikes(gg.SpikeDetector(window=16, warmup=4, alone=1))
    guard = gg.Guard(optimizer, clipper, model=inner, spikes=spikes)
    reasons = []
    for step in range(13):
        optimizer.zero_grad()
        backward(model, way, 0)  # the same batch: what changes is only what the test changes
        what = SPIKES.get(step)
        if what == "norm":
            for p in inner.parameters():
                local(p.grad).mul_(100)
        guard.record_loss(
            9.0 if what == "loss of one rank" and dist.get_rank() == 1 else 1.0, weight=1 + dist.get_rank()
        )
        before = copy.deepcopy((memory(optimizer), guard.clipper.state_dict()))
        optimizer.step()
        reasons.append(guard.last_skip)
        if guard.last_skip:
            torch.testing.assert_close((memory(optimizer), guard.clipper.state_dict()), before, rtol=0, atol=0)
    return reasons, {name: tensor.tolist() for name, tensor in spikes.detector.state.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("way", "kind"),
    [("DDP", "plain"), ("FSDP2", "fused"), ("FSDP2", "groups"), ("FSDP2 x TP", "plain"), ("HSDP", "fused")],
)
def test_all_ranks_skip_the_same_steps_by_the_same_bits(pool, way, kind):
    by_rank = pool(4).run(train, way, kind)
    assert all(repr(one) == repr(by_rank[0]) for one in by_rank)
    reasons, state = by_rank[0]
    assert {step: reason for step, reason in enumerate(reasons) if reason} == dict.fromkeys(SPIKES, "spike")
    assert state["history"][0][:11] == [1.0] * 11


def update_spikes(way):
    """What each rank decided, whether the step left every bit, and its detector's state: the rate alone is wrong."""
    model, _ = models(way)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3, foreach=False)
    spikes = gg.SkipSpikes(gg.SpikeDetector(window=16, warmup=4, alone=1), updates=True)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=inner, spikes=spikes)
    reasons = []
    for step in range(11):
        optimizer.zero_grad()
        backward(model, way, 0)
        optimizer.param_groups[0]["lr"] = 0.1 if step == 9 else 1e-3
        before = copy.deepcopy(memory(optimizer))
        optimizer.step()
        reasons.append(guard.last_skip)
        if guard.last_skip:
            torch.testing.assert_close(memory(optimizer), before, rtol=0, atol=0)
    return reasons, {name: tensor.tolist() for name, tensor in spikes.detector.state.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["DDP", "FSDP2", "FSDP2 x TP"])
def test_a_spike_of_the_update_is_skipped_on_all_ranks(pool, way):
    by_rank = pool(4).run(update_spikes, way)
    assert all(repr(one) == repr(by_rank[0]) for one in by_rank)
    assert by_rank[0][0] == [None] * 9 + ["spike", None]


def apart():
    """Each rank trains a model of its own, and says so."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    spikes = gg.SkipSpikes(gg.SpikeDetector(window=16, warmup=4, alone=1), process_group=alone)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), spikes=spikes)
    for _ in range(6 + dist.get_rank()):
        weight.grad = torch.ones(2)
        optimizer.step()
    weight.grad = torch.full((2,), 99.0 if dist.get_rank() else 1.0)
    optimizer.step()
    return guard.last_skip


def test_ranks_that_train_models_of_their_own(pool):
    assert pool(2).run(apart) == [None, "spike"]


def one_is_bad():
    """Ranks whose gradients differ, one with a NaN: nobody's detector remembers the step."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    spikes = gg.SkipSpikes(gg.SpikeDetector(window=16, warmup=4, alone=1))
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), spikes=spikes)
    for step in range(3):
        weight.grad = torch.full((2,), math.nan if step == 1 and dist.get_rank() else 1.0 + dist.get_rank())
        guard.record_loss(2.0)
        optimizer.step()
    return spikes.detector.state["count"].tolist(), spikes.detector.state["history"][:, :2].tolist()


def test_a_step_that_is_bad_on_one_rank_is_remembered_by_none(pool):
    first, second = pool(2).run(one_is_bad)
    assert repr(first) == repr(second)
    assert first[0] == [2, 2]
    assert first[1][1] == pytest.approx([1.5 * 2**0.5] * 2)


def test_the_ways_are_those_of_the_table():
    assert {"DDP", "FSDP2", "FSDP2 x TP"} <= {*WAYS}
