"""Norm clip of DTensors on four gloo processes, beside `torch.nn.utils.clip_grad_norm_`. Prints medians, ratios, goals.

python benchmarks/sharded.py [--only 500] [--alone] [--profile]
python benchmarks/sharded.py --world 16384 --tensors 723   # one rank of many, with a process group that sends nothing

The first call on a list of parameters, later calls, and calls after the set of present gradients has changed, which
makes PyTorch derive the layout of its list operators anew. Both clip in the same processes, pair by pair, on equal
gradients; the times are those of rank 0, from a barrier to the return, and hold the waiting for the other ranks, which
is long where there are fewer cores than processes: "busy" is the calling thread's own share.
PyTorch's first call and its first for each number of gradients happen once in a process: one sample, seconds long.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import gradguard as gg
from shapes import gpt2_small

PROCESSES, NARROWER = 4, 4
TINY = [(8 * PROCESSES,)]
SETS: dict[str, list[tuple[int, ...]]] = {
    "500 x 8 a shard": 500 * TINY,
    "2,000 x 8 a shard": 2000 * TINY,
    "GPT-2 small, 1/4 as wide": [tuple(max(1, n // NARROWER) for n in shape) for shape in gpt2_small()],
}
GOALS = {"500 x 8 a shard": (50.0, 2.0), "2,000 x 8 a shard": (200.0, 15.0)}
"""Milliseconds of the first call and of a steady one."""

FIRST_CALLS = 5
"""Of ours, each on parameters of its own."""


def parameters(shapes: list[tuple[int, ...]], mesh: DeviceMesh) -> list[nn.Parameter]:
    """As `fully_shard` leaves them: dimension 0 in equal shards, uneven ones whole."""

    def spread(shape: tuple[int, ...], value: float) -> DTensor:
        even = shape[0] % PROCESSES == 0
        local = torch.full((shape[0] // PROCESSES if even else shape[0], *shape[1:]), value)
        return DTensor.from_local(local, mesh, [Shard(0) if even else Replicate()], run_check=False)

    made = [nn.Parameter(spread(shape, 1.0)) for shape in shapes]
    for p, shape in zip(made, shapes, strict=True):
        p.grad = spread(shape, 0.01)
    return made


class Time(NamedTuple):
    """Milliseconds: from a barrier to the return, and those in which the calling thread computed."""

    wall: float
    busy: float


class Row(NamedTuple):
    call: str
    ours: Time
    theirs: Time
    goal: float | None


def timed(call: Callable[[], object]) -> Time:
    dist.barrier()
    start, busy = time.perf_counter(), time.thread_time()
    call()
    return Time(1e3 * (time.perf_counter() - start), 1e3 * (time.thread_time() - busy))


def bare_all_reduce() -> float:
    """Return the milliseconds of an all-reduce of eight numbers, below which no clip can get."""
    numbers = torch.zeros(8, dtype=torch.float64)
    return median([timed(lambda: dist.all_reduce(numbers)) for _ in range(101)]).wall


def median(times: Sequence[Time]) -> Time:
    return Time(*map(statistics.median, zip(*times, strict=True)))


def steady(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> tuple[Time, Time]:
    """Return the medians, over pairs in turn."""
    times = []
    for k in range(pairs):
        first, second = (ours, theirs) if k % 2 else (theirs, ours)
        pair = timed(first), timed(second)
        times.append(pair if k % 2 else pair[::-1])
    mine, other = zip(*times, strict=True)
    return median(mine), median(other)


def measure(name: str, mesh: DeviceMesh, pairs: int, alone: bool) -> list[Row]:
    shapes = SETS[name]
    first_goal, steady_goal = GOALS.get(name, (None, None))
    a, b = parameters(shapes, mesh), parameters(shapes, mesh)
    stock: Callable = (lambda parameters, max_norm: None) if alone else nn.utils.clip_grad_norm_
    ours, theirs = lambda: gg.clip_grad_norm_(a, 1e9), lambda: stock(b, 1e9)
    bind_ours, bind_theirs = lambda: gg.clip_grad_norm_(a, 1e-3), lambda: stock(b, 1e-3)

    fresh = [parameters(shapes, mesh) for _ in range(FIRST_CALLS)]
    first = median([timed(lambda p=p: gg.clip_grad_norm_(p, 1e9)) for p in [a, *fresh]])
    rows = [Row("first call", first, timed(theirs), first_goal)]
    bind_ours(), bind_theirs()  # the first multiply is slow as well
    rows.append(Row("later, does not bind", *steady(ours, theirs, pairs), steady_goal))
    for p in (*a, *b):
        p.grad.to_local().fill_(0.01)
    rows.append(Row("later, binds at first", *steady(bind_ours, bind_theirs, pairs), steady_goal))

    for absent in (1, 2):
        a[-absent].grad = b[-absent].grad = None
        rows.append(Row(f"first after {absent} of them went", timed(ours), timed(theirs), steady_goal))
    rows.append(Row("later, with 2 absent", *steady(ours, theirs, pairs), steady_goal))
    return rows


def profile(name: str, mesh: DeviceMesh, calls: int = 50) -> None:
    """Print where rank 0 spends the time of a steady call."""
    made = parameters(SETS[name], mesh)
    gg.clip_grad_norm_(made, 1e9)
    profiler = cProfile.Profile()
    for _ in range(calls):
        dist.barrier()
        profiler.enable()
        gg.clip_grad_norm_(made, 1e9)
        profiler.disable()
    if dist.get_rank() == 0:
        print(f"{name}: {calls} calls")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def work(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES, timeout=timedelta(minutes=10)
    )
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for clip in (gg.clip_grad_norm_, nn.utils.clip_grad_norm_):  # imports and connections are nobody's first call
        clip(parameters(3 * TINY, mesh), 1e-3)
    names = [name for name in SETS if args.only in name]
    if args.profile:
        for name in names:
            profile(name, mesh)
    else:
        bare = bare_all_reduce()
        if rank == 0:
            print(f"torch {torch.__version__}, {PROCESSES} gloo processes of one thread, {os.cpu_count()} cores")
            print(f"a bare all-reduce: {bare:.2f} ms")
        report({name: measure(name, mesh, args.pairs, args.alone) for name in names}, args.alone)
    dist.destroy_process_group()


def simulate(world: int, count: int) -> None:
    """Print the processor's milliseconds of one rank of ``world``, all others being alike."""
    import torch.distributed.fsdp  # as in a run that shards
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from gradguard.distributed.reduction import NormReduction

    def gather(rows: list[torch.Tensor], mine: torch.Tensor, **_: object) -> None:
        table = rows[0]._base
        assert table is not None
        table.copy_(mine)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    dist.all_gather = gather
    sent, reduce = [], dist.all_reduce

    def noted(numbers: torch.Tensor, *args: object, **options: object) -> object:
        sent.append(numbers.numel())
        return reduce(numbers, *args, **options)

    dist.all_reduce = noted
    NormReduction._checked = lambda _, norms, *__: norms  # sums of nothing are not what all others would have sent
    mesh = init_device_mesh("cpu", (world // 8, 8), mesh_dim_names=("dp", "tp"))
    layouts = [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(0), Shard(0)]]

    def tensor(number: int) -> DTensor:
        return DTensor.from_local(torch.full((2, 4), 0.1), mesh, layouts[number % 3], run_check=False)

    made = [nn.Parameter(tensor(i)) for i in range(count)]
    clipper = gg.ClipByGlobalNorm(1e9)

    def renew(together: int) -> None:
        """Make new gradients, as a backward pass does: ``together`` of them views of one buffer, as FSDP2's are."""
        for start in range(0, count, together):
            buffer = torch.full((8 * together,), 0.1)
            for i, p in enumerate(made[start : start + together]):
                local = buffer[8 * i : 8 * i + 8].view(2, 4) if together > 1 else buffer.view(2, 4)
                p.grad = DTensor(local, p._spec, requires_grad=False)

    def busy(call: Callable[[], object], together: int = 1) -> float:
        renew(together)
        start = time.thread_time()
        call()
        return 1e3 * (time.thread_time() - start)

    gg.clip_grad_norm_(made[:3], 1e9)  # imports
    print(f"{world:,} ranks, {count:,} tensors, ms of the processor")
    print(f"  first plan       {busy(lambda: gg.clip_grad_norm_(made, 1e9)):10.1f}")
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "later": (lambda: gg.clip_grad_norm_(made, 1e9), 1),
        "of buffers": (lambda: gg.clip_grad_norm_(made, 1e9), 16),
        "clipper": (lambda: clipper(made), 1),
        "binds": (lambda: gg.clip_grad_norm_(made, 1e-3), 1),
        "get_total_norm": (lambda: gg.get_total_norm([p.grad for p in made]), 1),
    }
    for name, (call, together) in calls.items():
        busy(call, together)
        sent.clear()
        call()
        best = min(busy(call, together) for _ in range(7))
        each = f"{1e3 * best / count:5.2f} µs a tensor"
        print(f"  {name:17} {best:9.1f} {each}   all-reduce of {sent[0]:,} numbers")


def report(found: dict[str, list[Row]], alone: bool) -> None:
    if dist.get_rank() != 0:
        return
    table = Table("gradients", "call", "ours ms", "of it busy", "theirs ms", "times faster", "goal ms")
    for name, rows in found.items():
        for call, ours, theirs, goal in rows:
            colour = "default" if goal is None else "green" if ours.wall <= goal else "red"
            mine, wanted = f"[{colour}]{ours.wall:.2f}[/]", "" if goal is None else f"{goal:g}"
            other = ("", "") if alone else (f"{theirs.wall:.2f}", f"{theirs.wall / ours.wall:.1f}")
            table.add_row(name, call, mine, f"{ours.busy:.2f}", *other, wanted)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="sets whose name contains this")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--alone", action="store_true", help="ours only, in seconds instead of minutes")
    parser.add_argument("--profile", action="store_true", help="where a steady call of ours spends its time")
    parser.add_argument("--world", type=int, help="measure one rank of so many, without a network")
    parser.add_argument("--tensors", type=int, default=723)
    args = parser.parse_args()
    if args.world:
        torch.set_num_threads(1)
        simulate(args.world, args.tensors)
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, args=(f"{folder}/store", args), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
