"""After a step with a bad loss the replicas are no longer equal, without an error.

ecmwf/WeatherGenerator#2726: the loss of rank 0 alone decides whether a step is skipped, and only
rank 0 skips it::

    torchrun --nproc-per-node 2 skipped_on_rank_0.py
    torchrun --nproc-per-node 2 skipped_on_rank_0.py --healthy
"""

import sys

import torch
import torch.distributed as dist

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(100 + rank)

for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean() * (1e3 if step == 2 and rank == 0 else 1)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    is_bad = (loss.detach() > 10).float()
    if HEALTHY:
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    if not is_bad:
        optimizer.step()


def norm():
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


audit = gg.audit_norm(model, norm, groups={"*": "replicated"})
if rank == 0:
    print(audit)
dist.destroy_process_group()
