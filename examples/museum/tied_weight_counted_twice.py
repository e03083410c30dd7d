"""The norm is too large with pipeline parallelism, but right without.

NVIDIA/Megatron-LM#7227: the first stage holds the embedding and the last one the head, which are
one weight. Their gradients are summed on both, and both count::

    torchrun --nproc-per-node 2 tied_weight_counted_twice.py
    torchrun --nproc-per-node 2 tied_weight_counted_twice.py --healthy
"""

import sys

import torch
import torch.distributed as dist

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
tied = torch.nn.Linear(8, 12, bias=False)  # on both stages
torch.manual_seed(1 + rank)
own = torch.nn.Linear(8, 8)  # the layers of this stage
stage = torch.nn.ModuleDict({"tied": tied, "own": own})

x = torch.randn(16, 8)
tied(torch.tanh(own(x))).square().mean().backward()
dist.all_reduce(tied.weight.grad)


def norm():
    squares = sum(p.grad.square().sum() for p in own.parameters())
    if not HEALTHY or rank == 0:
        squares = squares + tied.weight.grad.square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


audit = gg.audit_norm(stage, norm)
if rank == 0:
    print(audit)
dist.destroy_process_group()
