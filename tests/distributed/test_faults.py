"""Processes that die, hang or are late: the same decision everywhere, or an error that names the rank; never a hang.

The processes of one test are started once and clip together first; what goes wrong goes wrong after that.
"""

import math
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import give_up_after
from refusals import refusal

import gradguard as gg
from gradguard.distributed import agreement
from sharded import LISTS, parameter

TIMEOUT = 2.0
"""Seconds that the process group waits."""

WHO = 1
"""The rank that something happens to."""

FOUND_OUT = 10.0
"""Seconds after the time-out in which an error must come, as documented; the machine may be slow."""

FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hung": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def clip_with_a_fault(fault, call):
    """What each rank says when rank 1 is gone, and how long it took."""
    agreement._PATIENCE = 3 * TIMEOUT  # the machine may be slow; these processes are used once
    named = [(f"layer{i}", parameter(entry)) for i, entry in enumerate(LISTS["rows, uneven"])]
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.0)
    if call == "guard":
        gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1))
    clip = {"guard": optimizer.step, "function": lambda: gg.clip_grad_norm_(named, 0.1)}[call]
    clip()
    give_up_after(TIMEOUT)
    if dist.get_rank() == WHO:
        FAULTS[fault]()
    start = time.monotonic()
    said = refusal(clip)
    return said, time.monotonic() - start


def check(found, allowed):
    for (kind, said), seconds in found:
        assert kind == "DistributedError", said
        assert f"rank {WHO} did not come" in said
        assert "Every rank of the group must clip on the same steps" in said
        assert seconds < allowed, said


def with_a_fault(pool, world, fault, call):
    with pool.fresh(world) as processes:
        found = continued_after(processes, 120.0, clip_with_a_fault, fault, call)
    assert len(found) == world
    check([one for rank, one in enumerate(found) if rank != WHO], 60.0)


def continued_after(processes, seconds, *call):
    """The outcomes, where a process that was stopped is killed once the others have come back."""
    end = threading.Event()

    def kill():
        pid = processes._processes[WHO].pid
        others = [p for rank, p in enumerate(processes._pipes) if rank != WHO]
        until = time.monotonic() + seconds
        while time.monotonic() < until and not end.wait(0.1):
            if all(pipe.poll() for pipe in others):
                break
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        return processes.outcomes(*call)
    finally:
        end.set()
        thread.join()
