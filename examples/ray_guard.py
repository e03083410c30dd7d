"""Ray Train on two workers: a clip that chooses its threshold, the same on both, and skips a step that is not finite.

The guard's state is in the checkpoint, so that a run that Ray restarts goes on with the same threshold.
"""

import tempfile

import ray.train
import torch
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import gradguard as gg


def train():
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = gg.Guard(optimizer, gg.ClipByMedian(), model=model)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            guard.load_state_dict(torch.load(f"{folder}/guard.pt"))
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)  # each worker has samples of its own
    for step in range(100):
        x, y = torch.randn(8, 4), torch.randn(8, 1)
        if step == 50 and rank == 1:
            x[0, 0] = float("nan")
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {"norm": float(guard.last.norm), "skipped": guard.skipped_steps, "names": guard.last.names}
    print(f"rank {rank}: {found}")
    with tempfile.TemporaryDirectory() as folder:
        torch.save(guard.state_dict(), f"{folder}/guard.pt")
        ray.train.report(found, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


if __name__ == "__main__":
    print(TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit().metrics)
