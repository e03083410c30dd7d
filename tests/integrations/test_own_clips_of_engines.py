"""The clip that each engine makes by itself, and gradguard's: one model, one batch, one step on two processes.

DeepSpeed's engines, which need processes of their own, are in test_deepspeed_engine.py.
"""

import contextlib
import tempfile
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerators import forget_accelerators
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import gradguard as gg
from reference import clip_norm, total_norm

WORLD, SAMPLES, MAX_NORM = 2, 4, 0.5


class Model(nn.Module):
    """What every engine trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def batch():
    return torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)) * 3


def own_part():
    return batch().view(WORLD, SAMPLES // WORLD, 3)[dist.get_rank()]


def loss_of(model, x):
    return 5 * (model(x) - x.sum(1, keepdim=True)).square().mean()


def sgd(model):
    """A step of SGD takes the clipped gradient away from the weights: that is how it is read from every engine."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def whole(model, inner):
    summoned = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model) if summoned else contextlib.nullcontext():
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in inner.parameters()]


def number(norm):
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


# Each function takes one step, clipped by the engine or by gradguard, and returns norm, model and the model inside.


def by_hand(wrap, own, ours):
    inner = Model()
    model = wrap(inner)
    optimizer = sgd(model)
    loss_of(model, own_part()).backward()
    norm = own(model) if own is not None else ours(model)
    optimizer.step()
    return number(norm), model, inner


def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def by_torch(model):
    return clip_grad_norm_(model.parameters(), MAX_NORM)


def by_gradguard(model):
    return gg.clip_grad_norm_(model, MAX_NORM)


def by_torchtitan(model):
    from torchtitan.distributed import utils

    return utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)


def torchtitans_replaced(model):
    from gradguard.integrations.torchtitan import replace_clip

    clip = replace_clip()
    try:
        return by_torchtitan(model)
    finally:
        clip.restore()


def hand(wrap, own, ours=by_gradguard):
    return lambda engine: by_hand(wrap, own if engine else None, ours)


def with_accelerate(engine, way):
    from accelerate import Accelerator
    from test_accelerate import as_launched, shard_on_the_cpu

    from gradguard.integrations.accelerate import guard

    as_launched(dist.get_rank(), WORLD)
    forget_accelerators()
    try:
        accelerator = Accelerator(cpu=True)
        if way != "DDP":
            shard_on_the_cpu(accelerator, version=int(way[-1]))
        inner = Model()
        model, optimizer = accelerator.prepare(inner, sgd(inner))
        attached = None if engine else guard(accelerator, optimizer, gg.ClipByGlobalNorm(MAX_NORM), model=model)
        accelerator.backward(loss_of(model, own_part()))
        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM) if engine else None
        optimizer.step()
        return number(norm if engine else attached.last.norm), model, inner
    finally:
        forget_accelerators()


def with_lightning(engine, way):
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import FSDPStrategy
    from test_lightning_distributed import STRATEGIES, trainer_of

    from gradguard.integrations.lightning import GradGuardCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Model()

        def configure_model(self):
            if way == "FSDP2" and not hasattr(self.net.head.weight, "full_tensor"):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            return loss_of(self.net, batch[0])

        def configure_optimizers(self):
            return sgd(self)

    class OnCPU(FSDPStrategy):
        def _setup_model(self, model):
            return fsdp1(model)

    strategy = OnCPU(process_group_backend="gloo") if way == "FSDP1" else STRATEGIES[way]()
    module, callback = Module(), GradGuardCallback(gg.ClipByGlobalNorm(MAX_NORM))
    options = {"gradient_clip_val": MAX_NORM} if engine else {}
    trainer = trainer_of(strategy, [] if engine else [callback], max_epochs=1, **options)
    trainer.fit(module, DataLoader(TensorDataset(own_part()), batch_size=SAMPLES // WORLD))
    return None if engine else number(callback.guards[0].last.norm), trainer.strategy.model, module.net


def with_fabric(engine, way):
    from lightning.fabric import Fabric
    from test_lightning_distributed import FABRIC, Joined

    from gradguard.integrations.lightning import guard_fabric

    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=FABRIC[way](), plugins=[Joined()])
    fabric.launch()
    inner = Model()
    model = fabric.setup_module(inner)
    optimizer = fabric.setup_optimizers(sgd(model))
    attached = None if engine else guard_fabric(fabric, model, optimizer, gg.ClipByGlobalNorm(MAX_NORM))
    fabric.backward(loss_of(model, own_part()))
    norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM) if engine else None
    optimizer.step()
    return number(norm if engine else attached.last.norm), model._forward_module, inner


def with_transformers(engine):
    from test_accelerate import as_launched
    from tiny_trainer import logged, trainer

    from gradguard.integrations.transformers import GradGuardCallback

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Model()

        def forward(self, x):
            return {"loss": loss_of(self.net, x)}

    as_launched(dist.get_rank(), WORLD)
    forget_accelerators()
    try:
        model, callback = WithLoss(), GradGuardCallback(gg.ClipByGlobalNorm(MAX_NORM))
        options = {"max_grad_norm": MAX_NORM if engine else 0.0, "learning_rate": 1.0, "max_steps": 1}
        with tempfile.TemporaryDirectory() as folder:
            done = trainer(
                folder, [] if engine else [callback], model=model, inputs=batch(), ddp_backend="gloo", **options
            )
            # Of the samples in order, Accelerate gives a process every second batch.
            done.train()
        norm = logged(done, "grad_norm")[0] if engine else number(callback.guard.last.norm)
        return norm, model, model.net
    finally:
        forget_accelerators()


RIGHT, WRONG = "right", "wrong"

ENGINES = {  # a function of whether the engine clips, and what its own clip does
    "torch, DDP": (hand(DistributedDataParallel, by_torch), RIGHT),
    "torch, FSDP2": (hand(fully_shard, by_torch), RIGHT),
    "torch, FSDP1": (hand(fsdp1, by_torch), WRONG),  # the norm of this process' part: its documentation warns of it
    "FSDP1's method": (hand(fsdp1, lambda model: model.clip_grad_norm_(MAX_NORM)), RIGHT),
    "torchtitan, FSDP2": (hand(fully_shard, by_torchtitan, torchtitans_replaced), RIGHT),
    "Accelerate, DDP": (partial(with_accelerate, way="DDP"), RIGHT),
    "Accelerate, FSDP2": (partial(with_accelerate, way="FSDP2"), RIGHT),
    "Accelerate, FSDP1": (partial(with_accelerate, way="FSDP1"), RIGHT),
    "Lightning, DDP": (partial(with_lightning, way="DDP"), RIGHT),
    "Lightning, FSDP2": (partial(with_lightning, way="FSDP2"), RIGHT),
    "Lightning, FSDP1": (partial(with_lightning, way="FSDP1"), "not supported"),
    "Fabric, DDP": (partial(with_fabric, way="DDP"), RIGHT),
    "Fabric, FSDP2": (partial(with_fabric, way="FSDP2"), RIGHT),
    "Fabric, FSDP1": (partial(with_fabric, way="FSDP1"), RIGHT),
    "Transformers, DDP": (with_transformers, RIGHT),
}
NEEDS = {"torchtitan": "torchtitan", "Accelerate": "accelerate", "Lightning": "lightning", "Fabric": "lightning"}
NEEDS |= {"Transformers": "transformers"}


def step(name, engine):
    """The norm that is told, and the gradient that the optimizer saw; or what the engine says instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engines' advice, and deprecation of FSDP1
        try:
            norm, model, inner = ENGINES[name][0](engine)
        except Exception as error:
            if not engine:
                raise
            return f"{type(error).__name__}: {error}", None
        after = whole(model, inner)
    return norm, [before.detach() - p for before, p in zip(Model().parameters(), after, strict=True)]


def both(name):
    return step(name, True), step(name, False)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_own_clip_and_ours(pool, name):
    package = NEEDS.get(name.partition(",")[0])
    if package:
        pytest.importorskip(package, reason=f"{package} is not installed")
    model = Model()
    loss_of(model, batch()).backward()
    gradients = [p.grad for p in model.parameters()]
    norm, clipped = total_norm(gradients), clip_norm(gradients, MAX_NORM)
    assert norm > 2 * MAX_NORM
    for (told, left), (ours, left_by_us) in pool(WORLD).run(both, name):
        assert ours == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close([g.double() for g in left_by_us], clipped, rtol=1e-4, atol=1e-6)
        does = ENGINES[name][1]
        if does == RIGHT:
            assert told is None or told == pytest.approx(norm, rel=1e-5)
            torch.testing.assert_close([g.double() for g in left], clipped, rtol=1e-4, atol=1e-6)
        elif does == WRONG:
            assert told < 0.999 * norm
            assert total_norm(left) > 1.05 * MAX_NORM
        else:
            assert does in told
