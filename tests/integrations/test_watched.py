"""Each trainer's clip, its own and gradguard's callback in its place, as `gradguard run` sees it: one step each."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradguard as gg
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.record.file import read_record
from gradguard.script_events import listening

MAX_NORM = 0.5
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)) * 3


class Model(nn.Module):
    """What every trainer trains: it gives its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        return {"loss": (self.head(torch.tanh(self.body(x))) - x.sum(1, keepdim=True)).square().mean()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02)


def clipper():
    return gg.ClipByGlobalNorm(MAX_NORM)


def transformers(ours, folder):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tiny_trainer import trainer

    from gradguard.integrations.transformers import GradGuardCallback

    options = {"max_grad_norm": 0.0 if ours else MAX_NORM, "max_steps": 1}
    trainer(folder, [GradGuardCallback(clipper())] if ours else [], model=Model(), inputs=X, **options).train()


def lightning(ours, folder):
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from gradguard.integrations.lightning import GradGuardCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Model()

        def training_step(self, batch):
            return self.net(batch[0])["loss"]

        def configure_optimizers(self):
            return sgd(self.net)

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[GradGuardCallback(clipper())] if ours else [],
        gradient_clip_val=None if ours else MAX_NORM,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(X), batch_size=len(X)))


def fabric(ours, folder):
    package = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    from gradguard.integrations.lightning import guard_fabric

    engine = package.Fabric(accelerator="cpu", devices=1)
    model = Model()
    model, optimizer = engine.setup(model, sgd(model))
    if ours:
        guard_fabric(engine, model, optimizer, clipper())
    engine.backward(model(X)["loss"])
    if not ours:
        engine.clip_gradients(model, optimizer, max_norm=MAX_NORM)
    optimizer.step()


def accelerate(ours, folder):
    package = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from gradguard.integrations.accelerate import guard

    accelerator = package.Accelerator(cpu=True)
    model = Model()
    model, optimizer = accelerator.prepare(model, sgd(model))
    if ours:
        guard(accelerator, optimizer, clipper(), model=model)
    accelerator.backward(model(X)["loss"])
    if not ours:
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()


def torchtitan(ours, folder):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from torchtitan.distributed import utils

    from gradguard.integrations.torchtitan import replace_clip

    clip = replace_clip(clipper())
    try:
        model = Model()
        optimizer = sgd(model)
        model(X)["loss"].backward()
        utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
    finally:
        clip.restore()


def composer(ours, folder):
    from test_composer_algorithm import Trainer

    from gradguard.integrations.composer import GradientClipping

    class Loss(Model):
        def forward(self, x):
            return (super().forward(x)["loss"] * len(x)).sqrt()  # whose square that Trainer adds up

    Trainer(Loss(), [GradientClipping("norm", MAX_NORM)], rate=0.02).fit([X])


def expected():
    model = Model()
    model(X)["loss"].backward()
    return float(gg.get_total_norm([p.grad for p in model.parameters()]))


OWN = [transformers, lightning, fabric, accelerate]


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
@pytest.mark.parametrize(
    ("train", "ours"), [*[(t, True) for t in (*OWN, torchtitan, composer)], *[(t, False) for t in OWN]]
)
def test_the_clip_of_a_trainer_is_in_the_record(train, ours, tmp_path):
    observer = Observer(tmp_path / "run.jsonl", {})
    try:
        with listening(observer):
            train(ours, str(tmp_path))
    finally:
        observer.close(0, False)
    record = read_record(tmp_path / "run.jsonl")
    (step,) = record.steps
    assert record.events == []
    assert (step["rule"], step["threshold"]) == ("norm", MAX_NORM)
    assert step["norm"] == pytest.approx(expected(), rel=1e-4)
    assert step["coefficient"] == pytest.approx(MAX_NORM / expected(), rel=1e-4)
    assert "clips" not in step
