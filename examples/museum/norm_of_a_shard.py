"""Reported norms shrink as ranks are added, and each rank clips by a different one.

hiyouga/LLaMA-Factory#10640 in kind: under FSDP1 gradients are sharded, and PyTorch's clip takes the
norm of each rank's own shard. The method of FSDP adds the squares up::

    torchrun --nproc-per-node 2 -m gradguard run --audit-norm norm_of_a_shard.py
    torchrun --nproc-per-node 2 -m gradguard run --audit-norm norm_of_a_shard.py --healthy
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")  # FSDP1 is deprecated
HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

for _step in range(4):
    x = torch.randn(16, 8)
    model(x).square().mean().backward()
    if HEALTHY:
        model.clip_grad_norm_(0.1)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
