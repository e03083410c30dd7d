"""Compare a step of Megatron-core's tensor-parallel layers on one rank and on two: gradients, norm and updates.

From torchrun to the verdict (docs/trainers/megatron.md shows the output)::

    torchrun --nproc-per-node 1 megatron_core.py one.safetensors
    torchrun --nproc-per-node 2 megatron_core.py two.safetensors
    gradguard parity one.safetensors two.safetensors

`--sick norm` counts copies once for each rank. `--sick gradient` forgets to reduce the gradients of the last norm, as
sequence parallelism requires. `--sick step` lets the optimizer first make a step with gradients of zero, as an engine
does to create the state into which a checkpoint is loaded.
"""

import argparse
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, mse_loss
from torch.overrides import TorchFunctionMode

import gradguard as gg

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else Megatron-core warns
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels that are not installed
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        param_is_not_tensor_parallel_duplicate,
    )


class OnTheCPU(TorchFunctionMode):
    """Megatron-core's norm makes its buffers on "cuda", whether there is a GPU or not."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        """Call ``func`` with another device."""
        kwargs = {**(kwargs or {})}
        if kwargs.get("device") == "cuda" and not torch.cuda.is_available():
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Block(torch.nn.Module):
    """A layer norm and two layers, of which each rank holds a part."""

    def __init__(self, config: Any):
        super().__init__()
        init = lambda weight: torch.nn.init.normal_(weight, 0, 0.1)  # noqa: E731
        self.norm = torch.nn.LayerNorm(16)
        self.up = ColumnParallelLinear(16, 64, config=config, init_method=init, gather_output=False)
        self.down = RowParallelLinear(
            64, 16, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with what the layers add to it."""
        return x + self.down(gelu(self.up(self.norm(x))[0]))[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--sick", choices=["norm", "gradient", "step"])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(world)
    config = ModelParallelConfig(
        tensor_model_parallel_size=world, use_cpu_initialization=True, params_dtype=torch.float32
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(config), Block(config), torch.nn.LayerNorm(16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0)
    x, y = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        mse_loss(model(x), y).backward()
        if args.sick == "gradient":
            model[2].weight.grad *= 0.5 + rank  # the part of a rank, where the mean of all is right

    def norm() -> float:
        once = [p for p in model.parameters() if args.sick == "norm" or param_is_not_tensor_parallel_duplicate(p)]
        with OnTheCPU():
            return get_grad_norm_fp32(
                [p.grad for p in once], grad_stats_parallel_group=parallel_state.get_model_parallel_group()
            )

    if args.sick == "step":
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    gg.save_gradients(args.file, model, step, optimizer=optimizer)
    step()
    audit = gg.audit_norm(model, norm)
    if rank == 0:
        print(audit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
