"""Two replicas of one model train on, each on its own weights; the loss of rank 0 looks fine.

NVIDIA-NeMo/Automodel#3822: each rank draws its own initial weights, and nothing compares
them::

    torchrun --nproc-per-node 2 replicas_drift.py
    torchrun --nproc-per-node 2 replicas_drift.py --healthy
"""

import sys

import torch
import torch.distributed as dist

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0 if HEALTHY else rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
torch.manual_seed(100 + rank)
model(torch.randn(16, 8)).square().mean().backward()
for p in model.parameters():
    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def norm():
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


audit = gg.audit_norm(model, norm, groups={"*": "replicated"})
if rank == 0:
    print(audit)
dist.destroy_process_group()
