"""`GradGuardCallback` on two processes: each step is that of one process that sees the whole batch."""

import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradguard as gg

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric import strategies as fabric_strategies  # noqa: E402
from lightning.fabric.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from gradguard.integrations.lightning import GradGuardCallback, guard_fabric  # noqa: E402

STEPS, BATCH, BAD, WORLD = 6, 4, 3, 2


class Joined(LightningEnvironment):
    """The two processes are there already, and so is their process group."""

    creates_processes_externally = True

    def world_size(self):
        return dist.get_world_size()

    def global_rank(self):
        return dist.get_rank()

    def local_rank(self):
        return dist.get_rank()


class FSDPOnCPU(FSDPStrategy):
    """Lightning lets only GPUs have the class itself; FSDP1 wants to be told that this is meant."""

    def _setup_model(self, model):
        model.net[0] = FullyShardedDataParallel(model.net[0], device_id=torch.device("cpu"), use_orig_params=True)
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


STRATEGIES = {
    "DDP": lambda: DDPStrategy(process_group_backend="gloo"),
    "FSDP2": lambda: ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1),
    "FSDP1": lambda: FSDPOnCPU(process_group_backend="gloo"),
}
CLIPPERS = {
    "norm": lambda: gg.ClipByGlobalNorm(0.5),
    "median": lambda: gg.ClipByMedian(k=0.0, warmup=2),
}


class Model(pl.LightningModule):
    def __init__(self, shards=False, bad=()):
        super().__init__()
        torch.manual_seed(1)
        self.shards, self.bad = shards, bad
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.rows, self.before = [], None

    def configure_model(self):
        if self.shards and not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx in self.bad and dist.get_rank() == 1:  # a NaN on one process alone
            x = x * math.nan
        return (self.net(x) - y).square().mean() * 10

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Rows(pl.Callback):
    """What is logged after each batch."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        logged = trainer.callback_metrics
        self.rows.append([float(logged[f"gradients/{key}"]) for key in ("norm", "coefficient", "clipped")])


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, 3, generator=generator)
    return x, torch.randn(STEPS * BATCH, 1, generator=generator) * (torch.arange(STEPS * BATCH) % 3 + 1).view(-1, 1)


def part():
    """The batches of this process: rank 0 and 1 together see what one process would see."""
    return [tensor.view(STEPS, WORLD, BATCH // WORLD, -1)[:, dist.get_rank()].flatten(0, 1) for tensor in data()]


def trainer_of(strategy, callbacks, **arguments):
    return pl.Trainer(
        accelerator="cpu", devices=WORLD, strategy=strategy, plugins=[Joined()], callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1,
        use_distributed_sampler=False, **arguments,
    )  # fmt: skip


def train(way, clipper, bad, folder=None, epochs=2):
    """Train in one of two processes: what was logged, the weights, the guard's counts and names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        model, callback, rows = Model(way == "FSDP2", bad), GradGuardCallback(CLIPPERS[clipper]()), Rows()
        loader = DataLoader(TensorDataset(*part()), batch_size=BATCH // WORLD)
        trainer = trainer_of(STRATEGIES[way](), [callback, rows], max_epochs=1 if folder else epochs)
        trainer.fit(model, loader)
        if folder:
            trainer.save_checkpoint(Path(folder) / "half.ckpt")
            model, callback = Model(way == "FSDP2", bad), GradGuardCallback(CLIPPERS[clipper]())
            trainer = trainer_of(STRATEGIES[way](), [callback, rows], max_epochs=epochs)
            trainer.fit(model, loader, ckpt_path=Path(folder) / "half.ckpt")
        guard = callback.guards[0]
        return rows.rows, whole(trainer.strategy.model, model), guard.steps, guard.skipped_steps, list(guard.last.names)


def whole(wrapped, model):
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return [p.detach().clone() for p in model.parameters()]
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def by_hand(clipper, bad, epochs=2):
    model = Model()
    optimizer, (x, y), rows = model.configure_optimizers(), data(), []
    guard = gg.Guard(optimizer, CLIPPERS[clipper](), model=model)
    for step in range(epochs * STEPS):
        batch = slice(step % STEPS * BATCH, (step % STEPS + 1) * BATCH)
        optimizer.zero_grad()
        loss = (model.net(x[batch]) - y[batch]).square().mean() * 10
        (loss * math.nan if step % STEPS in bad else loss).backward()
        optimizer.step()
        clipped = bool(guard.last.clipped) and not bool(guard.last.nonfinite)
        rows.append([float(guard.last.norm), float(guard.last.coefficient), float(clipped)])
    return rows, list(model.parameters()), guard.last.names


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("clipper", CLIPPERS)
@pytest.mark.parametrize("way", STRATEGIES)
def test_each_step_is_that_of_the_whole_batch_on_one_process(pool, way, clipper):
    expected, weights, names = by_hand(clipper, [BAD])
    by_rank = pool(WORLD).run(train, way, clipper, [BAD])
    for rows, found, steps, skipped, its_names in by_rank:
        torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected), rtol=1e-5, atol=1e-7, equal_nan=True)
        assert (steps, skipped) == (2 * STEPS, 2)
        assert [name.replace("_fsdp_wrapped_module.", "") for name in its_names] == list(names)
        torch.testing.assert_close(
            found, [w.detach() for w in weights], rtol=1e-4, atol=1e-5
        )  # rounding, over all steps
    assert by_rank[0][0][-1] == by_rank[1][0][-1]  # bit by bit


@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])  # PyTorch cannot gather a state_dict of FSDP1 on the CPU
def test_a_resumed_run_goes_on_bit_by_bit(pool, way, tmp_path):
    once = pool(WORLD).run(train, way, "median", [BAD])
    resumed = pool(WORLD).run(train, way, "median", [BAD], str(tmp_path))
    for (rows, weights, *counts), (its_rows, its_weights, *its_counts) in zip(once, resumed, strict=True):
        torch.testing.assert_close(torch.tensor(its_rows), torch.tensor(rows), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(its_weights, weights, rtol=0, atol=0)
        assert its_counts == counts


class FabricFSDPOnCPU(fabric_strategies.FSDPStrategy):
    """As above, for Fabric."""

    def setup_module(self, module):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def sharded(module, mesh):
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


FABRIC = {
    "DDP": lambda: fabric_strategies.DDPStrategy(process_group_backend="gloo"),
    "FSDP2": lambda: fabric_strategies.ModelParallelStrategy(sharded, WORLD, 1),
    "FSDP1": lambda: FabricFSDPOnCPU(process_group_backend="gloo"),
}


def train_with_fabric(way):
    """Train with Fabric in one of two processes: the norms, the coefficients, the weights, the names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=FABRIC[way](), plugins=[Joined()])
        fabric.launch()
        net = Model().net
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        guard, rows = guard_fabric(fabric, model, optimizer, CLIPPERS["median"]()), []
        x, y = (tensor.view(STEPS, BATCH // WORLD, -1) for tensor in part())
        for step in range(STEPS):
            optimizer.zero_grad()
            fabric.backward((model(x[step]) - y[step]).square().mean() * 10)
            optimizer.step()
            rows.append([float(guard.last.norm), float(guard.last.coefficient)])
        return rows, whole(model._forward_module, net), list(guard.last.names)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP", "FSDP2", "FSDP1"])
def test_with_fabric_each_step_is_that_of_the_whole_batch_on_one_process(pool, way):
    expected, weights, _ = by_hand("median", [], epochs=1)
    for rows, found, names in pool(WORLD).run(train_with_fabric, way):
        torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected)[:, :2], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found, [w.detach() for w in weights], rtol=1e-5, atol=1e-6)
        plain = [name.removeprefix("_fsdp_wrapped_module.") for name in names]
        assert plain == ["0.weight", "0.bias", "2.weight", "2.bias"]
