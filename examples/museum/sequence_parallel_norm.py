"""With sequence parallelism the weights of the last layer norm differ between ranks after some steps.

NVIDIA/Megatron-LM#1446: each rank has a part of the sequence, so the gradient of a replicated layer
norm must be summed over ranks. The gradient of the last one was not::

    torchrun --nproc-per-node 2 sequence_parallel_norm.py
    torchrun --nproc-per-node 2 sequence_parallel_norm.py --healthy
"""

import sys

import torch
import torch.distributed as dist

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential()
model.add_module("layer", torch.nn.Linear(8, 8))
model.add_module("final_norm", torch.nn.LayerNorm(8))
torch.nn.init.normal_(model.final_norm.weight, 1, 0.1)  # as after some training

sequence = torch.randn(32, 8, generator=torch.Generator().manual_seed(5))
(model(sequence.chunk(world)[rank]).square().sum() / len(sequence)).backward()
for name, p in model.named_parameters():
    if HEALTHY or "final_norm" not in name:
        dist.all_reduce(p.grad)

audit = gg.audit_norm(model, lambda: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
if rank == 0:
    print(audit)
dist.destroy_process_group()
