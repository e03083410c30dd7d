"""The norm grows with tensor parallelism, 1.36 times at 8 ranks and more, and the clip binds too often.

ROCm/TransformerEngine#715, NVIDIA-NeMo/RL#3788: layer norms and biases are copies on each rank, but
are marked as parts, and count once for each rank::

    torchrun --nproc-per-node 2 replicated_counted_per_rank.py
    torchrun --nproc-per-node 2 replicated_counted_per_rank.py --healthy
"""

import sys

import torch
import torch.distributed as dist

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
norm_layer, whole = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8 * world, bias=False)
part = torch.nn.Linear(8, 8, bias=False)  # of a column-parallel layer, the rows of this rank
part.weight.data = whole.weight.data.chunk(world)[rank].clone()
model = torch.nn.ModuleDict({"norm": norm_layer, "column": part})

x = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
part(norm_layer(x)).square().mean().backward()
for p in norm_layer.parameters():
    dist.all_reduce(p.grad)


def norm():
    parts = part.weight.grad.square().sum()
    copies = sum(p.grad.square().sum() for p in norm_layer.parameters())
    if HEALTHY:
        dist.all_reduce(parts)
        return (parts + copies).sqrt()
    total = parts + copies
    dist.all_reduce(total)
    return total.sqrt()


audit = gg.audit_norm(model, norm)
if rank == 0:
    print(audit)
dist.destroy_process_group()
