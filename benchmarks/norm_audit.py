"""What an audit of a norm costs, in plain steps of the same model: one process, and four over gloo as plain replicas.

python benchmarks/norm_audit.py [--processes 4]

A plain step is forward, backward, PyTorch's clip and SGD. Both are timed in turn, and the medians' ratio is printed.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gradguard as gg

GOAL = 2.0
PAIRS = 5


def network() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(2000, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 2000))


def ratio(rank: int, world: int) -> float:
    model = network()
    shown = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    tokens = torch.randint(0, 2000, (8, 64), generator=torch.Generator().manual_seed(rank))

    def clip() -> torch.Tensor:
        return clip_grad_norm_(model.parameters(), 1.0)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(shown(tokens).flatten(0, 1), tokens.flatten()).backward()
        clip()
        optimizer.step()

    def audit() -> None:
        assert gg.audit_norm(shown, clip, max_norm=1.0)

    def seconds(call) -> float:
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    step()
    step()
    times = [(seconds(step), seconds(audit)) for _ in range(PAIRS + 1)][1:]
    plain, audited = (statistics.median(column) for column in zip(*times, strict=True))
    if rank == 0:
        elements = sum(p.numel() for p in model.parameters())
        print(
            f"{world} processes, {elements:,} elements: step {plain * 1e3:.0f} ms, audit {audited * 1e3:.0f} ms, "
            f"{audited / plain:.2f} plain steps (goal: at most {GOAL:g})"
        )
    return audited / plain


def work(rank: int, world: int, meeting: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    ratio(rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    processes = parser.parse_args().processes
    torch.set_num_threads(1)
    ratio(0, 1)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (processes, os.path.join(folder, "meeting")), processes)
