"""The norm is 7.24 where 10.95 is right: ranks with other experts average their norms.

deepspeedai/DeepSpeed#8475, #8478 (AutoEP in float32): each rank takes the norm of what it holds,
and the norms are averaged although their squares should be added up::

    torchrun --nproc-per-node 2 experts_averaged.py
    torchrun --nproc-per-node 2 experts_averaged.py --healthy
"""

import sys

import torch
import torch.distributed as dist

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))  # different ones on each rank
x = torch.randn(16, 8) * (1 + 2 * rank)
experts[1](torch.tanh(experts[0](x))).square().mean().backward()


def norm():
    squares = sum(p.grad.square().sum() for p in experts.parameters())
    if HEALTHY:
        dist.all_reduce(squares)
        return squares.sqrt()
    average = squares.sqrt()
    dist.all_reduce(average)
    return average / world


audit = gg.audit_norm(experts, norm)
if rank == 0:
    print(audit)
dist.destroy_process_group()
