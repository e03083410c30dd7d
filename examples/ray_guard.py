"""Ray Train on two workers, with a clip that chooses the same threshold on both and skips a non-finite step.

The guard's state is in the checkpoints beside the model's: after workers are lost, training continues from the last one
with the same threshold. ``python examples/ray_guard.py 60`` kills them on purpose, in step 60.
"""

import sys
import tempfile

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import gradguard as gg


def train(config):
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = gg.Guard(optimizer, gg.ClipByMedian(warmup=20), model=model)
    parts, first = {"model": model, "optimizer": optimizer, "guard": guard}, 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt")
        first = saved.pop("step")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(first, 100):
        torch.manual_seed(2 * step + rank)  # each worker has its own samples
        x, y = torch.randn(8, 4), torch.randn(8, 1)
        if step == 30 and rank == 1:
            x[0, 0] = float("nan")
        if step == config["lose_at"] and first == 0:
            raise RuntimeError("lost on purpose")
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            found = [None, None]
            dist.all_gather_object(found, (float(guard.last.norm), guard.skipped_steps, guard.steps))
            with tempfile.TemporaryDirectory() as folder:
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({"step": step + 1, **states}, f"{folder}/state.pt")
                checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                metrics = {"began_at": first, "workers": found, "names": guard.last.names}
                ray.train.report(metrics, checkpoint=checkpoint)


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={"lose_at": int(sys.argv[1]) if len(sys.argv) > 1 else None},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    )
    print("result:", trainer.fit().metrics)
