"""The gradient norm is too small as soon as experts are on several processes.

NVIDIA/Megatron-LM#5916, deepspeedai/DeepSpeed#8613: only the experts of the first rank count. The
norm omits all others, and the clip is too weak::

    torchrun --nproc-per-node 2 experts_left_out.py
    torchrun --nproc-per-node 2 experts_left_out.py --healthy
"""

import sys

import torch
import torch.distributed as dist

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
router = torch.nn.Linear(8, 8)  # a copy on each rank
torch.manual_seed(1 + rank)
expert = torch.nn.Linear(8, 8)  # a different one on each rank
model = torch.nn.ModuleDict({"router": router, "expert": expert})

x = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
expert(torch.tanh(router(x))).square().mean().backward()
for p in router.parameters():
    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def norm():
    dense = sum(p.grad.square().sum() for p in router.parameters())
    experts = sum(p.grad.square().sum() for p in expert.parameters())
    if not HEALTHY and rank > 0:
        experts = experts * 0  # they are treated as copies of the first rank's
    dist.all_reduce(experts)
    return (dense + experts).sqrt()


audit = gg.audit_norm(model, norm)
if rank == 0:
    print(audit)
dist.destroy_process_group()
