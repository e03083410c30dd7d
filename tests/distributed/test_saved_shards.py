"""A snapshot of FSDP2 shards in files: each process writes its own, and all go on with the same bits or none does."""

import pytest
import torch
import torch.distributed as dist
from test_resilience_on_shards import sharded, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training import Network, backward

import gradguard as gg
from gradguard.errors import GradguardError


class Run:
    """A run of shards, its guard and its schedule."""

    def __init__(self, seed):
        self.model, self.optimizer = sharded()
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(1 + seed)
        self.guard = gg.Guard(
            self.optimizer, gg.ClipByMedian(warmup=1), spikes=gg.SkipSpikes(gg.SpikeDetector(warmup=1))
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def steps(self, first, count):
        for step in range(first, first + count):
            self.optimizer.zero_grad()
            self.guard.loss(1.0 + step + dist.get_rank())
            backward(self.model, "FSDP2", step)
            self.optimizer.step()
            self.schedule.step()
        return weights(self.model, self.optimizer), self.guard.state_dict(), float(torch.rand(()))

    @property
    def parts(self):
        return self.model, self.optimizer


def there_and_back(folder):
    run = Run(0)
    torch.manual_seed(dist.get_rank())
    run.steps(0, 2)
    snapshot = gg.Snapshot(*run.parts, more=[run.schedule, run.guard])
    snapshot.take()
    expected = run.steps(2, 3)
    snapshot.save(folder)
    run = Run(1)
    loaded = gg.Snapshot.load(folder, *run.parts, more=[run.schedule, run.guard])
    for _ in range(2):
        loaded.restore()
        found = run.steps(2, 3)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    moment = next(iter(run.optimizer.state.values()))["exp_avg"]
    assert isinstance(moment, DTensor)
    assert (loaded.nbytes, loaded.weights().keys()) == (snapshot.nbytes, snapshot.weights().keys())
    for name, weight in loaded.weights().items():
        torch.testing.assert_close(weight.full_tensor(), snapshot.weights()[name].full_tensor(), rtol=0, atol=0)


def test_shards_go_on_with_the_same_bits(pool, tmp_path):
    pool(2).run(there_and_back, str(tmp_path / "a"))


def plain():
    model = Network()
    return model, torch.optim.AdamW(model.parameters())


def same_on_one():
    model, optimizer = sharded()
    return model, optimizer if dist.get_rank() == 0 else torch.optim.Adam(model.parameters())


def other_dimension():
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    model = Network()
    for part in (model.first, model.second, model):
        fully_shard(part, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


OTHERS = {
    "not sharded": (plain, ["parameters differ", "parameters differ"]),
    "another optimizer on rank 1": (
        same_on_one,
        ["another process refuses to load a snapshot", "here a module, Adam."],
    ),
    "sharded along another dimension": (other_dimension, ["Shard(dim=1)", "Shard(dim=1)"]),
}


def refused(folder, kind):
    model, optimizer = sharded()
    snapshot = gg.Snapshot(model, optimizer)
    snapshot.take()
    snapshot.save(folder)
    model, optimizer = OTHERS[kind][0]()
    try:
        gg.Snapshot.load(folder, model, optimizer)
    except GradguardError as error:
        return str(error)


@pytest.mark.parametrize("kind", OTHERS)
def test_no_process_takes_what_another_refuses(pool, tmp_path, kind):
    for told, words in zip(pool(2).run(refused, str(tmp_path / "a"), kind), OTHERS[kind][1], strict=True):
        assert words in told


def other_number(folder, group_of_one):
    model, optimizer = plain()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    snapshot = gg.Snapshot(model, optimizer)
    snapshot.take()
    own = f"{folder}/{dist.get_rank()}" if group_of_one else folder
    snapshot.save(own, process_group=alone if group_of_one else None)
    gg.Snapshot.load(own, model, optimizer, process_group=alone if group_of_one else None)
    try:
        gg.Snapshot.load(own, model, optimizer, process_group=None if group_of_one else alone)
    except GradguardError as error:
        return str(error)


@pytest.mark.parametrize("group_of_one", [False, True])
def test_another_number_of_processes_is_refused(pool, tmp_path, group_of_one):
    was, here = (1, 2) if group_of_one else (2, 1)
    for told in pool(2).run(other_number, str(tmp_path / "a"), group_of_one):
        assert f"is a snapshot of {was} processes, and here are {here}" in told


def one_cannot_write(folder):
    model, optimizer = plain()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["rule"] = lambda step: step
    snapshot = gg.Snapshot(model, optimizer)
    snapshot.take()
    try:
        snapshot.save(folder)
    except GradguardError as error:
        return str(error)


def test_none_writes_where_one_cannot(pool, tmp_path):
    first, second = pool(2).run(one_cannot_write, str(tmp_path / "a"))
    assert "another process refuses to save a snapshot" in first
    assert "cannot be written to a file" in second
    assert not (tmp_path / "a").exists()


def two_groups(folder):
    """Two models of two processes each, which save at the same time, each to its own place."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    own, name = mesh["shard"].get_group(), f"{folder}/{mesh['model'].get_local_rank()}"
    ends = []
    for seed in (mesh["model"].get_local_rank(), 5):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 3)
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters())
        if seed != 5:
            snapshot = gg.Snapshot(model, optimizer)
            snapshot.take()
            snapshot.save(name, process_group=own)
        else:
            gg.Snapshot.load(name, model, optimizer, process_group=own).restore()
        ends.append(model.weight.full_tensor().tolist())
    return ends


def test_groups_of_processes_save_what_is_theirs(pool, tmp_path):
    found = pool(4).run(two_groups, str(tmp_path))
    assert all(before == after for before, after in found)
    assert found[0] == found[1] != found[2] == found[3]
