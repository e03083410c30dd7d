"""Train a small transformer that is sharded twice, by FSDP2 and by tensor parallelism, with one guard.

The task: letters that go up by 1, 2, 3 or 4 each time (``adgjmps...``); the model predicts the next one. The processes
form a grid. Along one direction the weights and the batch are sharded (FSDP2); along the other, of two, every matrix
and the sequence (TP). It uses GPUs if there are enough of them, else the CPU, where it takes less than a minute::

    torchrun --nproc-per-node 4 examples/fsdp2_tp.py --check 5

``--check 5`` also trains the same unsharded model for five steps, and compares the norms.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import gradguard as gg

LETTERS, LENGTH, BATCH, WIDTH, HEAD, BLOCKS = 26, 16, 64, 64, 16, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor, following: Tensor) -> Tensor:
        """Return the loss. (FSDP2 would warn of predictions, which are a view of the head's output.)"""
        x = self.letters(letters) + self.places(torch.arange(LENGTH, device=letters.device).expand_as(letters))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the matrices over ``mesh["tp"]``, then everything over ``mesh["dp"]``."""
    matrices = {name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "up")}
    block_plan = matrices | {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {
        "letters": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], block_plan)
        fully_shard(block, mesh=mesh["dp"])
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return letters and, for each, the next one; the same on every process."""
    random = torch.Generator().manual_seed(step)
    start, up = (torch.randint(low, high, (BATCH, 1), generator=random) for low, high in ((0, LETTERS), (1, 5)))
    text = (start + up * torch.arange(LENGTH + 1)) % LETTERS
    return text[:, :-1], text[:, 1:]


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.guard = gg.Guard(self.optimizer, gg.ClipByGlobalNorm(0.5), model=model)

    def step(self, letters: Tensor, following: Tensor) -> Tensor:
        loss = self.model(letters, following)
        loss.backward()
        self.optimizer.step()  # the guard clips here, by one norm of all shards on all processes
        self.optimizer.zero_grad()
        return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10, help="print each so many steps")
    parser.add_argument("--check", type=int, default=0, help="steps on which one process trains it in one piece too")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the matrices are small
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model, twin = Transformer().to(device), None
    if rank == 0 and args.check:
        twin = Trainer(Transformer().to(device))
        twin.model.load_state_dict(model.state_dict())
    shard(model, mesh)
    trainer, differences = Trainer(model), []

    if rank == 0:
        print(f"{world} processes, {mesh}\n{'step':>5}{'loss':>9}{'norm':>11}{'coefficient':>13}")
    for step in range(args.steps):
        letters, following = (x.to(device) for x in batch_of(step))
        part = mesh["dp"].get_local_rank()
        loss = trainer.step(letters.chunk(world // 2)[part], following.chunk(world // 2)[part])
        dist.all_reduce(loss)  # every process has the loss of its part of the batch
        last = trainer.guard.last
        if rank == 0 and step % args.every == 0:
            print(f"{step:5}{loss / world:9.4f}{last.norm:11.6f}{last.coefficient:13.4f}", flush=True)
        if twin is not None and step < args.check:
            twin.step(letters, following)
            differences.append(abs(float(last.norm / twin.guard.last.norm) - 1))
    if differences:
        print(f"norms of {len(differences)} steps, sharded and in one piece, differ by at most {max(differences):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
