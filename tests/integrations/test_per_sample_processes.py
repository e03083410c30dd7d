"""Per-sample and private training on two processes: each step is that of one process with all samples."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerators import forget_accelerators
from private_twin import MAX_NORM, OPTIONS, SIZE, by_samples, network, noise, records, weights
from torch.utils.data import DataLoader, TensorDataset

import gradguard as gg

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

WORLD, BATCH, BOUND, EPOCHS = 2, 3, MAX_NORM, 2
pytestmark = pytest.mark.slow


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def part():
    """The samples of this process: with the other's, batch by batch, they are all samples in order."""
    return [t.unflatten(0, (-1, WORLD, BATCH))[:, dist.get_rank()].flatten(0, 1) for t in records()]


def in_order(accumulation):
    """One sample at a time, plain autograd: the steps of per-sample clipping on one process."""
    model, (x, y), size = network(), records(), BATCH * WORLD * accumulation
    optimizer, parameters = sgd(model.parameters()), list(model.parameters())
    for start in list(range(0, SIZE, size)) * EPOCHS:
        total = [torch.zeros_like(p) for p in parameters]
        for i in range(start, start + size):
            gradients = torch.autograd.grad(F.cross_entropy(model(x[i, None]), y[i, None]), parameters)
            share = min(1.0, BOUND / float(torch.stack([g.norm() for g in gradients]).norm())) / size
            for t, g in zip(total, gradients, strict=True):
                t += share * g
        for p, t in zip(parameters, total, strict=True):
            p.grad = t
        optimizer.step()
    return weights(model)


def coupled(outputs, labels):
    """A loss that is no mean over samples."""
    return torch.logsumexp(F.cross_entropy(outputs, labels, reduction="none"), 0)


def of_coupled_losses(accumulation):
    """Plain autograd on one process: the steps of DistributedDataParallel with a loss of each process' own batch."""
    model, batches = network(), [t.split(BATCH) for t in records()]
    optimizer = sgd(model.parameters())
    count = WORLD * accumulation
    for start in [*range(0, len(batches[0]), count)] * EPOCHS:
        optimizer.zero_grad()
        for x, y in zip(*(of[start : start + count] for of in batches), strict=True):
            (coupled(model(x), y) / count).backward()
        optimizer.step()
    return weights(model)


def of_ddp(kind, accumulation):
    """Train a loop of one's own in one of two processes."""
    net = torch.nn.parallel.DistributedDataParallel(network())
    clipper = gg.PerSampleGradientClipper(net, gg.FlatNormClipper(torch.inf), loss_reduction=kind)
    optimizer = sgd(net.parameters())
    batches = [*DataLoader(TensorDataset(*part()), BATCH)]
    for start in [*range(0, len(batches), accumulation)] * EPOCHS:
        for x, y in batches[start : start + accumulation]:
            (coupled(net(x), y) / accumulation).backward()
            clipper.clip_and_accumulate()
        clipper.pre_step()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net.module), None


def of_lightning(kind, accumulation):
    """Train under Lightning in one of two processes."""
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.fabric.plugins.environments import LightningEnvironment

    from gradguard.integrations.lightning import PerSampleCallback, PrivateCallback

    class Joined(LightningEnvironment):
        creates_processes_externally = True
        world_size = staticmethod(dist.get_world_size)
        global_rank = local_rank = staticmethod(dist.get_rank)

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch):
            return loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return sgd(self.parameters())

    private, loss = kind == "private", coupled if kind == "share" else F.cross_entropy
    callback = PrivateCallback(noise(), **OPTIONS) if private else PerSampleCallback(**of_clip(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        trainer = pl.Trainer(
            accelerator="cpu", devices=WORLD, strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"),
            plugins=[Joined()], callbacks=[callback],
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            use_distributed_sampler=private, accumulate_grad_batches=accumulation, max_epochs=EPOCHS,
        )  # fmt: skip
        data = TensorDataset(*(records() if private else part()))
        model = Classifier()
        trainer.fit(model, DataLoader(data, BATCH, shuffle=private))
    return weights(model), callback.private.accountant.history if private else None


def of_accelerate(kind, accumulation):
    """Train with Accelerate in one of two processes."""
    from accelerate import Accelerator

    from gradguard.integrations.accelerate import clip_per_sample, make_private

    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", WORLD)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)  # what `accelerate launch` sets
    os.environ["OMP_NUM_THREADS"] = "1"
    forget_accelerators()
    try:
        accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=accumulation), network()
        model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
        history = None
        if kind == "private":
            loader = DataLoader(TensorDataset(*records()), BATCH, shuffle=True)
            run = make_private(accelerator, model, optimizer, loader, noise(), **OPTIONS)
            batches, history = run.loader, run.private.accountant.history
        else:
            batches = DataLoader(TensorDataset(*part()), BATCH)
            run = clip_per_sample(accelerator, model, optimizer, **of_clip(kind))
        for _ in range(EPOCHS):
            for x, y in batches:
                with accelerator.accumulate(model):
                    accelerator.backward((coupled if kind == "share" else F.cross_entropy)(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        run.detach()
        return weights(net), history
    finally:
        forget_accelerators()


def of_clip(kind):
    if kind == "share":
        return {"norm_clipper": gg.FlatNormClipper(torch.inf), "loss_reduction": "share"}
    return {"norm_clipper": gg.FlatNormClipper(BOUND)}


TRAINERS = {"lightning": of_lightning, "accelerate": of_accelerate}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("kind", ["per sample", "private"])
def test_two_processes_train_as_one(pool, trainer, accumulation, kind):
    pytest.importorskip(trainer)
    size = BATCH * WORLD * accumulation
    expected = by_samples(sgd, size, EPOCHS, 1.0)[0] if kind == "private" else in_order(accumulation)
    first, second = pool(WORLD).run(TRAINERS[trainer], kind, accumulation)
    torch.testing.assert_close(first[0], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == ([(1.0, size / SIZE, EPOCHS * SIZE // size)] if kind == "private" else None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("trainer", [*TRAINERS, "ddp"])
def test_shares_of_two_processes_are_the_gradient_of_the_mean_of_their_losses(pool, trainer, accumulation):
    if trainer in TRAINERS:
        pytest.importorskip(trainer)
    first, second = pool(WORLD).run({**TRAINERS, "ddp": of_ddp}[trainer], "share", accumulation)
    torch.testing.assert_close(first[0], of_coupled_losses(accumulation), rtol=1e-5, atol=1e-5)
    assert torch.equal(first[0], second[0])
