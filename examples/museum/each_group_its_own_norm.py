"""One dense weight is clipped ten times harder on one rank than on another, and the copies drift apart.

NVIDIA-NeMo/Automodel#3816: squares of dense weights are reduced, and each rank adds the squares of
its own experts, so each expert-parallel group has another "global" norm::

    torchrun --nproc-per-node 2 each_group_its_own_norm.py
    torchrun --nproc-per-node 2 each_group_its_own_norm.py --healthy
"""

import sys

import torch
import torch.distributed as dist

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dense = torch.nn.Linear(8, 8)
torch.manual_seed(1 + rank)
expert = torch.nn.Linear(8, 8)
model = torch.nn.ModuleDict({"dense": dense, "expert": expert})

x = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
(expert(torch.tanh(dense(x))).square().mean() * 10**rank).backward()
for p in dense.parameters():
    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def norm():
    squares = sum(p.grad.square().sum() for p in dense.parameters())
    experts = sum(p.grad.square().sum() for p in expert.parameters())
    if HEALTHY:
        dist.all_reduce(experts)
    return (squares + experts).sqrt()


audit = gg.audit_norm(model, norm)
if rank == 0:
    print(audit)
dist.destroy_process_group()
