"""A snapshot of FSDP2 shards in files: each process writes its own, and all go on with the same bits or none does."""

import errno
import shutil

import pytest
import torch
import torch.distributed as dist
from test_resilience_on_shards import sharded, weights
from torch.distributed import checkpoint as checkpoint_of_all
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import Network, backward

import gradguard as gg
from cases import comparable
from gradguard.distributed import agreement, checkpoint
from gradguard.errors import GradguardError
from gradguard.state import saved_snapshot
from sharded import local


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
            self.guard.record_loss(1.0 + step + dist.get_rank())
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
    snapshot = gg.Snapshot(*run.parts, extra_state=[run.schedule, run.guard])
    snapshot.take()
    expected = run.steps(2, 3)
    snapshot.save(folder)
    run = Run(1)
    loaded = gg.Snapshot.load(folder, *run.parts, extra_state=[run.schedule, run.guard])
    for _ in range(2):
        loaded.restore()
        found = run.steps(2, 3)
        torch.testing.assert_close(comparable(found), comparable(expected), rtol=0, atol=0)
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
        assert f"is a snapshot of {was} processes, but here are {here}" in told


def carried_over(folder):
    """What the error advises: two processes restore a snapshot and save a checkpoint, from which each goes on alone."""
    parts = model, optimizer = sharded()
    backward(model, "FSDP2", 0)
    optimizer.step()
    snapshot = gg.Snapshot(*parts)
    snapshot.take()
    snapshot.save(folder / "snapshot")
    right, parts = weights(*parts), sharded()
    gg.Snapshot.load(folder / "snapshot", *parts).restore()
    torch.testing.assert_close(weights(*parts), right, rtol=0, atol=0)
    checkpoint_of_all.save(dict(zip(KEYS, get_state_dict(*parts), strict=True)), checkpoint_id=folder / "checkpoint")
    alone = plain()
    state = dict(zip(KEYS, get_state_dict(*alone), strict=True))
    with pytest.warns(UserWarning, match="load in a single process"):
        checkpoint_of_all.load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    set_state_dict(*alone, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return [
        (whole(p).tolist(), *(whole(moment).tolist() for moment in optimizer.state[p].values()))
        for model, optimizer in (parts, alone)
        for p in model.parameters()
    ]


KEYS = "model", "optimizer"


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_another_number_of_processes_goes_on_from_a_checkpoint(pool, tmp_path):
    for found in pool(2).run(carried_over, tmp_path):
        half = len(found) // 2
        assert found[:half] == found[half:]


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


def replicated():
    torch.manual_seed(0)
    model = DistributedDataParallel(Network())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


MIXED = "has files of two different saves"
MIXTURES = {  # files of the later save over the earlier one: what the two processes say, or after how many steps it is
    "none": ((), [2, 2]),
    "of rank 1": (("process-1.safetensors",), [MIXED, MIXED]),
    "of rank 0": (("process-0.safetensors",), [MIXED, MIXED]),
    "all": (("process-0.safetensors", "process-1.safetensors"), [3, 3]),
}


def two_saves(folder, way):
    """Two saves of one run, at least a step apart, whose files have the same lengths: no length tells them apart."""
    model, optimizer = {"FSDP2": sharded, "DDP": replicated}[way]()
    snapshot, sizes = gg.Snapshot(model, optimizer), []
    for step in range(40):
        optimizer.zero_grad()
        backward(model, way, step)
        optimizer.step()
        if step:
            snapshot.take()
            snapshot.save(folder / str(step + 1))
            sizes.append({file.name: file.stat().st_size for file in (folder / str(step + 1)).iterdir()})
            dist.barrier()
            if sizes[-1] in sizes[:-1]:
                return model, optimizer, sizes.index(sizes[-1]) + 2, step + 1
    raise AssertionError(f"no two saves of one size: {sizes}")


def loaded(folder, model, optimizer):
    """What it says, or the steps that Adam has counted then."""
    before = weights(model, optimizer)
    try:
        gg.Snapshot.load(folder, model, optimizer).restore()
    except GradguardError as error:
        torch.testing.assert_close(weights(model, optimizer), before, rtol=0, atol=0)
        return str(error)
    return int(local(next(iter(optimizer.state.values()))["step"]))


def mixtures(folder, way):
    model, optimizer, early, late = two_saves(folder, way)
    if dist.get_rank() == 0:
        for name, (files, _) in MIXTURES.items():
            shutil.copytree(folder / str(early), folder / name)
            for file in files:
                shutil.copy(folder / str(late) / file, folder / name)
    dist.barrier()
    found = {name: loaded(folder / name, model, optimizer) for name in MIXTURES}
    found["each its own"] = loaded(folder / str([early, late][dist.get_rank()]), model, optimizer)
    return found, {2: early, 3: late}


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_files_of_two_saves_are_refused_by_all(pool, tmp_path, way):
    """Each process loaded its part, of step 10 on one and of step 20 on the other, in silence."""
    expected = {name: words for name, (_, words) in MIXTURES.items()} | {"each its own": [MIXED, MIXED]}
    for rank, (found, steps) in enumerate(pool(2).run(mixtures, tmp_path, way)):
        for name, told in found.items():
            wanted = expected[name][rank]
            assert told == steps[wanted] if wanted in steps else wanted in str(told), (name, rank, told)


def saved_apart(folder, late):
    """Each process writes to a directory of its own; or to one which shows its files ``late``."""
    model, optimizer = plain()
    snapshot = gg.Snapshot(model, optimizer)
    snapshot.take()
    before, first_missing = checkpoint._PATIENCE, checkpoint.first_missing
    looks = []

    def slow(directory, sizes):
        looks.append(directory)
        return first_missing(directory, sizes) or ("process-0.safetensors" if len(looks) < 4 else None)

    checkpoint._PATIENCE, saved_snapshot.first_missing = (30.0, slow) if late else (0.0, first_missing)
    try:
        snapshot.save(folder / ("one" if late else str(dist.get_rank())))
    except GradguardError as error:
        return str(error)
    finally:
        checkpoint._PATIENCE, saved_snapshot.first_missing = before, first_missing
    return len(looks)


def test_a_directory_that_processes_do_not_share_is_refused(pool, tmp_path):
    """`save` returned on all, and nobody could load what it had written."""
    first, second = pool(2).run(saved_apart, tmp_path, False)
    assert "another process refuses to save a snapshot" in first
    assert "does not find 'process-0.safetensors' in it: the processes do not write to one directory" in second
    assert [*tmp_path.iterdir()] == []
    assert pool(2).run(saved_apart, tmp_path, True) == [4, 4]


def full_on_one(folder):
    """The disk of rank 1 is full; then it is not any more."""
    model, optimizer = plain()
    snapshot, told, before = gg.Snapshot(model, optimizer), "", saved_snapshot.sync
    snapshot.take()

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    saved_snapshot.sync = full if dist.get_rank() == 1 else before
    try:
        snapshot.save(folder)
    except (GradguardError, OSError) as error:
        told = str(error)
    finally:
        saved_snapshot.sync = before
    dist.barrier()
    left = [path.name for path in folder.parent.iterdir()]
    dist.barrier()
    snapshot.save(folder)
    gg.Snapshot.load(folder, *plain()).restore()
    return told, left


def test_where_one_disk_is_full_nothing_is_left(pool, tmp_path):
    (first, left), (second, _) = pool(2).run(full_on_one, tmp_path / "a")
    assert "another process refuses to save a snapshot" in first
    assert "no snapshot was written" in second
    assert "No space left on device. No part of it is left there" in second
    assert left == []


def cut_short(folder):
    """A file that was not written to its end, as another process sees it."""
    model, optimizer = plain()
    snapshot = gg.Snapshot(model, optimizer)
    snapshot.take()
    snapshot.save(folder)
    dist.barrier()
    size = (folder / "process-1.safetensors").stat().st_size
    missing = [checkpoint.first_missing(folder, [("process-1.safetensors", size + more)]) for more in (0, 1)]
    dist.barrier()
    return missing


def test_a_file_that_lacks_its_end_is_missed(pool, tmp_path):
    assert pool(2).run(cut_short, tmp_path / "a") == [[None, "process-1.safetensors"]] * 2


def without_the_other(folder):
    """The connection breaks as soon as rank 0 saves; rank 1 has gone."""
    model, optimizer = plain()
    snapshot = gg.Snapshot(model, optimizer)
    snapshot.take()
    if dist.get_rank() == 1:
        return None

    def broken(*arguments, **options):
        raise RuntimeError("connection closed by peer")

    dist.all_reduce, agreement._PATIENCE = broken, 0.2  # these processes are used once
    try:
        snapshot.save(folder)
    except GradguardError as error:
        return str(error)


@pytest.mark.slow
def test_who_dies_before_a_save_is_named_without_a_word_of_clips(pool, tmp_path):
    with pool.fresh(2) as processes:
        told, _ = processes.run(without_the_other, tmp_path / "a")
    assert told == (
        "rank 1 did not come, or much later, when rank 0 came to save a snapshot: the processes could not save a "
        "snapshot together. Every rank of the group must save a snapshot at the same place. (connection closed by peer)"
    )
