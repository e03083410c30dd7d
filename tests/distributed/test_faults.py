"""Processes that die, hang or are late: the same decision everywhere, or an error that names the rank; never a hang.

The processes of one test are started once and clip together first; what goes wrong goes wrong after that.
"""

import math
import multiprocessing
import os
import re
import signal
import socket
import time
import warnings
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import HANGS, give_up_after
from refusals import refusal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

import gradguard as gg
from gradguard.distributed import agreement
from gradguard.torch_private import default_store
from sharded import LISTS, parameter

TIMEOUT = 2.0
"""Seconds that the process group waits."""

WHO = 1
"""The rank that something happens to."""

FAULTS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}


def clip_with_a_fault(fault, call):
    """What each rank says when rank 1 is gone, and how long it took."""
    agreement._PATIENCE = 3 * TIMEOUT  # the machine may be slow; these processes are used once
    store, victim = default_store(), pid_of(WHO)
    named = [(f"layer{i}", parameter(entry)) for i, entry in enumerate(LISTS["rows, uneven"])]
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.0)
    if call == "guard":
        gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1))
    clip = {"guard": optimizer.step, "function": lambda: gg.clip_grad_norm_(named, 0.1)}[call]
    clip()
    give_up_after(TIMEOUT)
    if dist.get_rank() == WHO:
        os.kill(os.getpid(), FAULTS[fault])
    start = time.monotonic()
    said, seconds = refusal(clip), time.monotonic() - start
    if store.add("told", 1) == dist.get_world_size() - 1:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)  # so that nobody waits for it
    return said, seconds


def pid_of(rank):
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids[rank]


ROWS = [
    (4, "killed", "function"),
    (4, "hung", "guard"),
    pytest.param(4, "killed", "guard", marks=pytest.mark.exhaustive),
    pytest.param(4, "hung", "function", marks=pytest.mark.exhaustive),
    pytest.param(8, "killed", "guard", marks=pytest.mark.exhaustive),
    pytest.param(8, "hung", "function", marks=pytest.mark.exhaustive),
]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("world", "fault", "call"), ROWS)
def test_a_rank_that_is_gone_is_named(pool, world, fault, call):
    with pool.fresh(world) as processes:
        found = processes.outcomes(clip_with_a_fault, fault, call)
    assert "has died" in str(found.pop(WHO))
    for (kind, said), seconds in found:
        assert kind == "DistributedError"
        assert f"rank {WHO} did not come" in said
        assert "Every rank of the group must clip on the same steps" in said
        assert seconds < HANGS / 2, said  # some ten seconds on a machine that does nothing else


def clip_with_a_late_rank(seconds):
    """Rank 1 comes later than the others begin to look for a reason, and well before the time-out."""
    agreement._SLOW, before = 0.2, agreement._SLOW
    try:
        named = [(f"layer{i}", parameter(entry)) for i, entry in enumerate(LISTS["rows, uneven"])]
        norms = []
        for late in (0.0, seconds, 0.0):
            if dist.get_rank() == WHO:
                time.sleep(late)
            norms.append(float(gg.clip_grad_norm_(named, math.inf)))
        return norms
    finally:
        agreement._SLOW = before


@pytest.mark.parametrize("seconds", [1.0, pytest.param(10.0, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_a_rank_that_is_late_changes_nothing(pool, seconds):
    expected = torch.cat([e.gradient.flatten() for e in LISTS["rows, uneven"]]).norm().item()
    for norms in pool(4).run(clip_with_a_late_rank, seconds):
        assert norms == [pytest.approx(expected, rel=1e-6)] * 3


def clip_until_a_warning():
    """Rank 1 comes when another has warned that it has not."""
    store, told, before = default_store(), [], (agreement._SLOW, agreement._LONG)
    named = [(f"layer{i}", parameter(entry)) for i, entry in enumerate(LISTS["rows, uneven"])]

    def shown(message, *place):
        told.append(str(message))
        store.set("warned", "")

    agreement._SLOW, agreement._LONG = 0.1, 0.5
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = shown
            if dist.get_rank() == WHO:
                store.wait(["warned"], timedelta(seconds=HANGS / 2))
            gg.clip_grad_norm_(named, math.inf)
    finally:
        agreement._SLOW, agreement._LONG = before
    if dist.get_rank() == WHO:
        store.delete_key("warned")
    return told


def test_a_rank_that_does_not_come_for_long_is_named_once(pool):
    (told,) = [one for of_rank in pool(4).run(clip_until_a_warning) for one in of_rank]
    assert re.search(
        r"rank [023] has waited \d+ s for rank .*\b1\b.* to come\. Every rank .* must clip on the same", told
    )


STEPS, RESTART = 6, 3


def join_by_rank_0(pipe, rank, port):
    """Clip twice with processes that meet at a store in rank 0, which is killed between; tell what the second said."""
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=HANGS))
    agreement._PATIENCE = 0.5  # of one that is dead
    named = [("layer", parameter(LISTS["rows, uneven"][0]))]
    gg.clip_grad_norm_(named, 0.1)
    give_up_after(TIMEOUT)
    store.set(f"past the last meeting: {rank}", "")
    if rank == 0:
        store.wait([f"past the last meeting: {other}" for other in (1, 2)])
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send(refusal(lambda: gg.clip_grad_norm_(named, 0.1)))


@pytest.mark.slow
def test_a_rank_0_that_took_the_store_with_it_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe() for _ in range(3)]
    processes = [
        context.Process(target=join_by_rank_0, args=(theirs, rank, port), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        for ours, _ in pipes[1:]:
            assert ours.poll(HANGS)
            kind, said = ours.recv()
            assert kind == "DistributedError"
            assert "rank 0 did not come, or much later, on rank" in said
            assert "Every rank of the group must clip on the same steps" in said
    finally:
        for process in processes:
            process.kill()


def guarded_steps(state, first, steps):
    """Some steps of a guard whose clipper remembers, on as many processes as there are; its state, and what it did."""
    entries = LISTS["rows, uneven"]
    named = [(f"layer{i}", parameter(entry)) for i, entry in enumerate(entries)]
    optimizer = torch.optim.SGD(named, lr=0.0)
    guard = gg.Guard(optimizer, gg.Groups({"layer0": gg.AdaGC(warmup=2)}, rest=gg.ClipByMedian(k=0.0, warmup=2)))
    guard = guard if state is None else restored(guard, state)
    told = []
    for step in range(first, first + steps):
        for (_, p), entry in zip(named, entries, strict=True):
            p.grad = parameter(entry).grad
            p.grad.to_local().mul_(1.0 + 0.3 * math.sin(step))
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            named[0][1].grad.to_local().fill_(math.nan)
            named[1][1].grad.to_local().fill_(math.nan)
        optimizer.step()
        told.append((float(guard.last.norm), float(guard.last.coefficient), guard.skipped_steps))
    return guard.state_dict(), told


def restored(guard, state):
    guard.load_state_dict(state)
    return guard


@pytest.mark.sampled(1)
@pytest.mark.parametrize("later", [1, 2])
def test_a_run_goes_on_with_another_number_of_processes(pool, later):
    """What a guard remembers belongs to no rank: 4 processes, a checkpoint, then fewer."""
    through = pool(4).run(guarded_steps, None, 0, STEPS)
    before = pool(4).run(guarded_steps, None, 0, RESTART)
    after = pool(later).run(guarded_steps, before[0][0], RESTART, STEPS - RESTART)
    expected = [pytest.approx(numbers, rel=1e-6, nan_ok=True) for numbers in through[0][1]]
    assert through[0][1][-1][2] == 1
    for _, told in after:
        assert before[0][1] + told == expected


def linear_everywhere():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def clip_samples_of(model, x):
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    model(x).square().mean(1).mean().backward()
    clipper.clip_and_accumulate()
    return clipper.pre_step


def other_collectives(folder):
    """All that processes do together beside clipping, each ready to be called, and the purpose that it names."""
    x, model = torch.ones(4, 3), linear_everywhere()
    batches = gg.resilience.Batches()
    for step in range(2):
        batches.saw([step])
        batches.record_loss(torch.tensor(1.0))
        batches.end_step()
    snapshot = gg.Snapshot(model, torch.optim.SGD(model.parameters(), lr=0.0))
    snapshot.take()
    model(x).sum().backward()
    bad = gg.resilience.BadSamples()
    replicated = torch.nn.parallel.DistributedDataParallel(linear_everywhere())
    spread = linear_everywhere()
    fully_shard(spread)
    partial, mesh = torch.nn.Parameter(torch.ones(4)), init_device_mesh("cpu", (2,))
    partial = torch.nn.Parameter(DTensor.from_local(partial.data, mesh, [Replicate()], run_check=False))
    partial.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    gg.get_total_norm([partial.grad])
    culprit = gg.resilience.find_culprit(batches, 1)
    return {
        "clip": lambda: gg.get_total_norm([partial.grad]),
        "gather the weights": lambda: gg.resilience.write_evidence(folder / "spike", batches, culprit, spread),
        "take a step of per-sample clipping": clip_samples_of(replicated, x),
        "compare gradients": lambda: gg.save_gradients(None, model, lambda: model(x).sum()),
        "audit a norm": lambda: gg.audit_norm(model, lambda: 1.0),
        "share bad samples": lambda: bad.add([1], gather=True),
        "look for the culprit of a spike": lambda: gg.resilience.find_culprit(batches, 1),
        "save a snapshot": lambda: snapshot.save(folder / "snapshot"),
    }


def call_without_the_other(folder):
    """What rank 0 says when rank 1 has been killed before each of the calls."""
    agreement._PATIENCE = 0.5  # of one that is dead
    ready = other_collectives(folder)
    give_up_after(TIMEOUT)
    if dist.get_rank() == WHO:
        os.kill(os.getpid(), signal.SIGKILL)
    return {task: refusal(call) for task, call in ready.items()}


@pytest.mark.slow
def test_every_collective_names_a_rank_that_is_gone(pool, tmp_path):
    with pool.fresh(2) as processes:
        said, gone = processes.outcomes(call_without_the_other, tmp_path)
    assert "has died" in str(gone)
    for task, (kind, words) in said.items():
        assert kind == "DistributedError", (task, words)
        assert f"rank {WHO} did not come" in words
        assert task in words
