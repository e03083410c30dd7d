"""Clip gradients in the CPU's memory: FSDP2 with `CPUOffloadPolicy`, as for a model that a GPU cannot hold.

Weights, gradients and the optimizer's state stay on the CPU, so the clip and the step run there. Run it with one or
several GPUs, or without one, where the CPU does all of the work::

    python examples/offloaded_gradients.py
    torchrun --nproc-per-node 2 examples/offloaded_gradients.py

It trains for a few steps with a guard on a fused AdamW, and then compares the time of one clip with PyTorch's.
"""

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import gradguard as gg


def offloaded(width: int, depth: int) -> nn.Module:
    """Return a model whose parameters are on the CPU, in shards."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=device == "cuda")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def milliseconds(call, repetitions: int = 10) -> float:
    call()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return 1e3 * (time.perf_counter() - start) / repetitions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        meeting = os.path.join(tempfile.mkdtemp(), "meeting")
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=0, world_size=1)
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = offloaded(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for step in range(args.steps):
        x = torch.randn(32, args.width, device=device)
        F.mse_loss(model(x), x.roll(1, 1)).backward()
        optimizer.step()
        norm = float(guard.last.norm)  # of all gradients on all processes, equal on each
        if dist.get_rank() == 0:
            print(f"step {step}: norm {norm:.6f}")
        optimizer.zero_grad()
    F.mse_loss(model(x), x.roll(1, 1)).backward()
    ours = milliseconds(lambda: gg.clip_grad_norm_(model, 1e9))
    theirs = milliseconds(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    if dist.get_rank() == 0:
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"compiled kernels {gg.native.status()}")
        where = model[0][0].weight.grad.device
        print(f"one clip of {size:.1f} M gradients on {where}: {ours:.1f} ms, PyTorch {theirs:.1f}")
    guard.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
