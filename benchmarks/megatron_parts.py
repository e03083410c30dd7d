"""Every rule on Megatron-core's own layers: tensor-parallel on two gloo processes beside one process, on the CPU.

pip install --no-deps megatron-core && python benchmarks/megatron_parts.py

Prints the largest difference of a clipped gradient, relative to the largest element of its tensor, of the norm, and of
the weights after three guarded steps whose updates are clipped; then what `gg.save_gradients` says of the two.
"""

import math
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradguard as gg

RULES = {
    "ClipByGlobalNorm": lambda: gg.ClipByGlobalNorm(0.5),
    "ClipByGlobalNorm, p = 1": lambda: gg.ClipByGlobalNorm(0.5, 1.0),
    "ClipByGlobalNorm, p = inf": lambda: gg.ClipByGlobalNorm(0.5, math.inf),
    "ClipByNorm": lambda: gg.ClipByNorm(0.3),
    "ClipByRMS": lambda: gg.ClipByRMS(0.01),
    "ClipByValue": lambda: gg.ClipByValue(0.5),
    "ClipAdaptive": lambda: gg.ClipAdaptive(0.01),
    "ClipByMedian": lambda: gg.ClipByMedian(k=0.0, warmup=1),
    "AdaGC": lambda: gg.AdaGC(warmup=2),
    "ZClip": lambda: gg.ZClip(warmup=1),
    "Groups": lambda: gg.Groups({"up": gg.ClipByGlobalNorm(0.1)}, rest=gg.ClipByNorm(0.2)),
}
TOKENS = torch.arange(20).reshape(4, 5)


def network(ranks):
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    config = ModelParallelConfig(tensor_model_parallel_size=ranks, use_cpu_initialization=True)
    shared = {"config": config, "init_method": lambda weight: nn.init.normal_(weight, 0, 0.1)}

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = VocabParallelEmbedding(32, 16, **shared)
            self.up = ColumnParallelLinear(16, 24, gather_output=False, **shared)
            self.down = RowParallelLinear(24, 16, input_is_parallel=True, bias=True, skip_bias_add=False, **shared)
            self.norm = nn.LayerNorm(16)

        def forward(self, tokens):
            hidden, _ = self.up(self.embedding(tokens))
            return self.norm(self.down(hidden.relu())[0])

    return Network()


def backward(model, size=1.0):
    model.zero_grad()
    output = model(TOKENS)
    loss = size * output.square().mean() + output[..., 0].sum()
    loss.backward()
    return loss.detach()


def whole(parameter, part, ranks):
    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return part.detach().clone()
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts, parameter.partition_dim)


def worker(folder):
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    found = {}
    model = network(ranks)
    for name, make in RULES.items():
        rule, norms, gradients = make(), [], []
        for step in range(3):
            backward(model, step + 1.0)
            norms.append(float(rule(model).norm))
            gradients += [whole(p, p.grad, ranks) for p in model.parameters()]
        found[name] = norms, gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=model)
    update, norms = gg.ClipUpdate(optimizer, model=model), []
    for step in range(3):
        backward(model, step + 1.0)
        optimizer.step()
        norms.append(float(update.last.norm))
    found["Guard and ClipUpdate"] = norms, [whole(p, p, ranks) for p in model.parameters()]
    model = network(ranks)
    gg.save_gradients(Path(folder) / f"{ranks}.safetensors", model, lambda: backward(model))
    if dist.get_rank() == 0:
        torch.save(found, Path(folder) / f"{ranks}.pt")
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, __file__, folder], check=True, env=environment)
        alone, shared = (torch.load(Path(folder) / f"{ranks}.pt") for ranks in (1, 2))
        print(f"{'rule':28}{'tensors':>10}{'norm':>10}")
        for name, (norms, tensors) in alone.items():
            others, theirs = shared[name]
            apart = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(tensors, theirs, strict=True))
            print(f"{name:28}{apart:10.0e}{max(abs(a / b - 1) for a, b in zip(norms, others, strict=True)):10.0e}")
        files = [f"{folder}/{ranks}.safetensors" for ranks in (1, 2)]
        subprocess.run([sys.executable, "-m", "gradguard", "parity", *files], check=False)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    worker(sys.argv[1]) if len(sys.argv) > 1 else main()
