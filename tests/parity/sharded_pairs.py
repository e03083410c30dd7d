"""Healthy pairs on two processes: a drawn model as it is, and spread as DDP, FSDP2 or tensor parallelism do.

    torchrun --nproc-per-node 2 tests/parity/sharded_pairs.py COUNT SEED

Rank 0 prints each pair that is no PASS, and at last how many there were of each layout.
"""

import copy
import random
import sys
import warnings
from collections import Counter

import torch
import torch.distributed as dist
from test_drawn_set_ups import MODELS, TIMES, loss_of, made, micro_batches, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradguard as gg
from gradguard.parity.compare import compare


def of_this_rank(model, x, y):
    """Each process has half of the samples, and DDP and FSDP2 average over processes."""

    def step():
        a, b = (t.chunk(2)[dist.get_rank()] for t in (x, y))
        (2 * loss_of(model, a, b, "sum") / (y >= 0).sum()).backward()

    return step


def ddp(model, x, y, draws):
    del draws
    return DistributedDataParallel(model), of_this_rank


def fsdp2(model, x, y, draws):
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear) and draws.random() < 0.5]:
        fully_shard(layer)
    return fully_shard(model), of_this_rank


def tensor_parallel(model, x, y, draws):
    """Linear layers cut by rows or by columns, each of which gives whole activations again."""
    styles = (
        lambda: ColwiseParallel(output_layouts=Replicate()),
        lambda: RowwiseParallel(input_layouts=Replicate()),
    )
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    plan = {name: draws.choice(styles)() for name in names}
    return parallelize_module(model, dist.device_mesh.init_device_mesh("cpu", (2,)), plan), draws.choice(
        (whole, micro_batches(2))
    )


LAYOUTS = {"DDP": ddp, "FSDP2": fsdp2, "tensor parallelism": tensor_parallel}


def main(count, seed):
    draws, passed, others = random.Random(seed), Counter(), 0
    kinds = [kind for kind in MODELS if kind != "batch norms"]  # whose statistics are each process' own
    for number in range(count):
        kind, times, layout = draws.choice(kinds), draws.choice([*TIMES]), draws.choice([*LAYOUTS])
        model, x, y = made(kind, times, 10_000 * seed + number)
        spread, step_of = LAYOUTS[layout](copy.deepcopy(model), x, y, draws)
        report = compare(
            gg.save_gradients(None, model, whole(model, x, y)),
            gg.save_gradients(None, spread, step_of(spread, x, y)),
        )
        if report.verdict == "PASS":
            passed[layout] += 1
        else:
            others += 1
            print(f"{kind}, {times}, {layout}, {seed} {number}: {report}", flush=True)
    if dist.get_rank() == 0:
        print(f"{passed.total()} PASS of {count}: {dict(sorted(passed.items()))}", flush=True)
    return others


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    failed = main(int(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
    sys.exit(failed)
