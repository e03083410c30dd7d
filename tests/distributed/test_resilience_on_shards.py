"""`Snapshot` and `SpikeRecovery` over processes: each keeps its own part, and all do the same on the same step."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import Network, backward

import gradguard as gg
from gradguard import Snapshot, SpikeRecovery
from sharded import local, mesh


def weights(model, optimizer):
    state = [local(v).clone() for s in optimizer.state.values() for v in s.values()]
    return [local(p).detach().clone() for p in model.parameters()] + state


def sharded():
    torch.manual_seed(0)
    model = Network()
    for part in (model.first, model.second, model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def restored_shards():
    model, optimizer = sharded()
    snapshot = Snapshot(model, optimizer)

    def steps(first, count):
        for step in range(first, first + count):
            optimizer.zero_grad()
            backward(model, "FSDP2", step)
            optimizer.step()
        return weights(model, optimizer)

    before = steps(0, 2)
    snapshot.take()
    size = snapshot.nbytes
    ends = [steps(5, 3)]
    for _ in range(2):
        with torch.no_grad():
            model(torch.randn(2, 4, 6))  # leaves the root gathered
        snapshot.restore()
        torch.testing.assert_close(weights(model, optimizer), before, rtol=0, atol=0)
        ends.append(steps(5, 3))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=0)
    return size


def test_shards_go_back_in_place_and_each_process_keeps_its_own(pool):
    sizes = pool(2).run(restored_shards)
    whole = sum(p.numel() for p in Network().parameters()) * 12
    assert all(whole / 2 * 0.8 < size < whole / 2 * 1.3 for size in sizes)


def ladder(kind):
    """Losses that spike on the last rank alone; what was done, and the weights."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    if kind == "DDP":
        wrapped = DistributedDataParallel(model)
    else:
        wrapped = model = nn.Sequential(model)
        fully_shard(model, mesh=mesh("hsdp") if kind == "HSDP" else mesh("row"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    detector = gg.SpikeDetector(warmup=8, window=16, cap=6, alone=1)
    resilience = SpikeRecovery(model, optimizer, gg.ClipByGlobalNorm(1.0), detector=detector, snapshot_every=10)
    last = dist.get_rank() == dist.get_world_size() - 1
    told = []
    for step in range(60):
        spike = 20 <= step < 32 and last
        optimizer.zero_grad()
        x = torch.ones(2, 3) * (1 + 0.01 * dist.get_rank())
        loss = (1 + 0.1 * wrapped(x).square().mean()) * (50.0 if spike else 1.0)
        resilience.batch([100 * dist.get_rank() + step])
        resilience.record_loss(loss).backward()
        optimizer.step()
        event = resilience.step()
        told.append(None if event is None else (event.what, event.action, event.step, event.to_step))
    return told, weights(model, optimizer), copy.copy(resilience.events[-1].ids)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "world"), [("DDP", 2), ("FSDP2", 2), ("HSDP", 4)])
def test_all_processes_act_on_the_same_step(pool, kind, world):
    found = pool(world).run(ladder, kind)
    told = [one[0] for one in found]
    assert all(one == told[0] for one in told)
    assert [(one[0], one[1]) for one in told[0] if one][-2:] == [("burst", "adopted"), ("burst", "rolled back")]
    if kind == "DDP":
        torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)
    if kind == "HSDP":  # the replicas of a shard
        for rank in (0, 1):
            torch.testing.assert_close(found[rank][1], found[rank + 2][1], rtol=0, atol=0)
    last = 100 * (world - 1)
    for one in found:  # all name those of the process that had the spikes
        assert {*range(last + 20, last + 32)} <= {*one[2]} <= {*range(last, last + 60)}
