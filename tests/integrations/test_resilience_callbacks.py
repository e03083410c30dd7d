"""SpikeRecovery in the trainers: each does on the same samples what a loop by hand does."""

import importlib
import logging

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidValueError

STEPS = 60
SIZES = [1.0] * 20 + [30.0] * 10 + [1.0] * (STEPS - 30)
"""How large the loss of each step is: from step 21 to 30 there is a burst."""

EXPECTED = [
    *[("spike", "skipped", step) for step in range(21, 26)],
    ("burst", "adopted", 21),
    ("burst", "rolled back", 21),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1.0)

    def forward(self, x):
        return {"loss": (x * (1 + 0.1 * self.layer.weight.square())).mean()}


def options():
    return {"detector": gg.SpikeDetector(warmup=8, window=16, cap=6, alone=1), "snapshot_every": 10}


def optimizer_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)


def by_hand():
    model = Net()
    optimizer, scheduler = optimizer_of(model)
    resilience = gg.SpikeRecovery(model, optimizer, gg.ClipByGlobalNorm(1.0), extra_state=[scheduler], **options())
    for size in SIZES:
        optimizer.zero_grad()
        resilience.record_loss(model(torch.full((1, 1), size))["loss"]).backward()
        optimizer.step()
        resilience.step()
        scheduler.step()
    return resilience, model.layer.weight.item()


def told(resilience):
    return [(e.what, e.action, e.step) for e in resilience.events]


@pytest.fixture(scope="module")
def expected():
    resilience, weight = by_hand()
    assert told(resilience) == EXPECTED
    return weight


def test_transformers(expected, tmp_path):
    transformers = pytest.importorskip("transformers")
    from gradguard.integrations.transformers import ResilienceCallback

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = Net()
    callback = ResilienceCallback(gg.ClipByGlobalNorm(1.0), options())
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=STEPS,
        per_device_train_batch_size=1, logging_strategy="no",
    )  # fmt: skip
    data = [{"x": torch.tensor([size])} for size in SIZES]
    trainer = InOrder(model, arguments, train_dataset=data, callbacks=[callback], optimizers=optimizer_of(model))
    trainer.train()
    assert told(callback.resilience) == EXPECTED
    assert model.layer.weight.item() == expected


@pytest.mark.parametrize("name", ["every", "guard_options"])
@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
def test_options_that_spike_recovery_does_not_take_are_refused_at_once(trainer, name):
    pytest.importorskip(trainer)
    callback = importlib.import_module(f"gradguard.integrations.{trainer}").ResilienceCallback
    with pytest.raises(InvalidValueError, match=rf"options has '{name}': expected names of .*snapshot_every"):
        callback(gg.ClipByGlobalNorm(1.0), {name: {}, "snapshot_every": 10})


def test_accelerate(expected, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from gradguard.integrations.accelerate import resilience

    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    model, optimizer, scheduler = accelerator.prepare(net, *optimizer_of(net))
    made = resilience(accelerator, model, optimizer, gg.ClipByGlobalNorm(1.0), extra_state=[scheduler], **options())
    for size in SIZES:
        optimizer.zero_grad()
        accelerator.backward(made.record_loss(model(torch.full((1, 1), size))["loss"]))
        optimizer.step()
        made.step()
        scheduler.step()
    assert told(made) == EXPECTED
    assert net.layer.weight.item() == expected
    with pytest.raises(InvalidValueError, match=r"accelerator\.clip_grad_norm_ was called with gradients that a Guard"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    state = made.state_dict()
    accelerator.save_state(str(tmp_path))
    made.events.clear()
    accelerator.load_state(str(tmp_path))
    assert [str(e) for e in made.events] == [str(gg_event) for gg_event in map(_event, state["events"])]
    made.detach()


def _event(fields):
    from gradguard.resilience.ladder import Event

    return Event(**fields)


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
class TestLightning:
    @pytest.fixture(autouse=True)
    def lightning(self):
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        return pytest.importorskip("lightning.pytorch")

    def module(self, pl, count=1):
        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = Net()

            def training_step(self, batch):
                return self.net(batch[0])["loss"]

            def configure_optimizers(self):
                optimizer, scheduler = optimizer_of(self)
                if count > 1:
                    return [optimizer, optimizer_of(self)[0]]
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        return Module()

    def fit(self, pl, module, callback):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(SIZES)[:, None]))
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback],
        )  # fmt: skip
        trainer.fit(module, loader)

    def test_a_burst(self, lightning, expected):
        from gradguard.integrations.lightning import ResilienceCallback

        callback, module = ResilienceCallback(gg.ClipByGlobalNorm(1.0), options()), self.module(lightning)
        self.fit(lightning, module, callback)
        assert told(callback.resilience) == EXPECTED
        assert module.net.layer.weight.item() == expected

    def test_several_optimizers_are_refused(self, lightning):
        from gradguard.integrations.lightning import ResilienceCallback

        module = self.module(lightning, 2)
        module.automatic_optimization = False
        with pytest.raises(InvalidValueError, match=r"configure_optimizers returned 2 optimizers, and a spike would"):
            self.fit(lightning, module, ResilienceCallback(gg.ClipByMedian, options()))
