"""SpikeRecovery in the trainers: each does on the same samples what a loop by hand does."""

import contextlib
import copy
import importlib
import logging
import pickle

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


class TestTransformers:
    @pytest.fixture(autouse=True)
    def transformers(self, tmp_path):
        self.folder = str(tmp_path)
        return pytest.importorskip("transformers")

    def callback(self):
        from gradguard.integrations.transformers import ResilienceCallback

        return ResilienceCallback(gg.ClipByGlobalNorm(1.0), options())

    def trainer(self, transformers, callback, sizes=SIZES, model=None, scaler=None, **arguments):
        class InOrder(transformers.Trainer):
            def _get_train_sampler(self, *args, **kwargs):
                return torch.utils.data.SequentialSampler(self.train_dataset)

            def create_accelerator_and_postprocess(self):
                super().create_accelerator_and_postprocess()
                self.accelerator.scaler = scaler

        model = Net() if model is None else model
        data = [{"x": torch.tensor([size])} for size in sizes]
        arguments = transformers.TrainingArguments(
            self.folder, use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=1,
            logging_strategy="no", num_train_epochs=1, **{"save_strategy": "no", **arguments},
        )  # fmt: skip
        return InOrder(model, arguments, train_dataset=data, callbacks=[callback], optimizers=optimizer_of(model))

    @pytest.mark.parametrize("scale", [None, 1024.0])
    def test_a_burst(self, transformers, expected, scale):
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=7)
        trainer = self.trainer(transformers, callback := self.callback(), scaler=scaler)
        trainer.train()
        assert told(callback.resilience) == EXPECTED
        assert trainer.model.layer.weight.item() == expected

    def test_a_roll_back_brings_the_scale_back(self, transformers):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1)  # which doubles at each step
        trainer = self.trainer(transformers, callback := self.callback(), scaler=scaler)
        trainer.train()
        assert told(callback.resilience) == EXPECTED
        assert scaler.get_scale() == 2.0 ** (STEPS - 10)  # at the end of step 32 it was again as at the end of step 22

    @pytest.mark.parametrize("saved", [15, 25])
    def test_a_run_that_is_resumed(self, transformers, expected, saved):
        """Resumed before the burst it ends as an uninterrupted one; within it there is no snapshot to go back to."""
        self.trainer(
            transformers, before := self.callback(), save_strategy="steps", save_steps=saved, max_steps=saved
        ).train()
        trainer = self.trainer(transformers, callback := self.callback())
        trainer.train(resume_from_checkpoint=f"{self.folder}/checkpoint-{saved}")
        assert (callback.guard.steps, callback.resilience.steps) == (STEPS, STEPS)
        if saved < 20:
            assert trainer.model.layer.weight.item() == expected
            assert told(callback.resilience) == EXPECTED
        else:
            assert told(callback.resilience) == [*told(before.resilience), ("burst", "went on", 21)]

    def test_a_second_training_goes_on_with_the_same_model_and_begins_anew_with_another(self, transformers):
        trainer = self.trainer(transformers, callback := self.callback(), [1.0] * 20)
        trainer.train()
        trainer.train()
        assert (callback.guard.steps, callback.resilience.steps) == (40, 40)
        self.trainer(transformers, callback, [100.0] * 20).train()
        assert (told(callback.resilience), callback.resilience.steps) == ([], 20)

    @pytest.mark.parametrize("counted", [False, True])
    def test_a_step_of_fewer_micro_batches_is_no_spike(self, transformers, counted):
        """The Trainer divides losses by the number of micro-batches, or of items; the last step of an epoch has one."""

        class Counting(Net):
            accepts_loss_kwargs = True

            def forward(self, x, num_items_in_batch=None):
                losses = x * (1 + 0.1 * self.layer.weight.square())
                return {"loss": losses.sum() / num_items_in_batch}

        trainer = self.trainer(
            transformers, callback := self.callback(), [1.0] * 41, Counting() if counted else Net(),
            gradient_accumulation_steps=8, max_steps=30,
        )  # fmt: skip
        trainer._get_num_items_in_batch = lambda batches, device: torch.tensor(len(batches)) if counted else None
        trainer.train()
        assert (told(callback.resilience), callback.resilience.steps) == ([], 30)


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
    with pytest.raises(InvalidValueError, match=r"options has 'budgets': expected names of .* budget"):
        resilience(accelerator, model, optimizer, budgets=2)
    with pytest.raises(InvalidValueError, match=r"accelerator\.clip_grad_norm_ was called with gradients that a Guard"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    state = made.state_dict()
    accelerator.save_state(str(tmp_path))
    made.events.clear()
    accelerator.load_state(str(tmp_path))
    assert [str(e) for e in made.events] == [str(gg_event) for gg_event in map(_event, state["events"])]
    made.detach()


def _event(fields):
    from gradguard.resilience.spike_recovery import SpikeEvent

    return SpikeEvent(**fields)


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

    def fit(self, pl, module, callback, sizes=SIZES, checkpoint=None, **arguments):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(sizes)[:, None]))
        trainer = pl.Trainer(
            max_epochs=2 if checkpoint else 1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[callback], **arguments,
        )  # fmt: skip
        trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
        return trainer

    def test_a_burst(self, lightning, expected):
        from gradguard.integrations.lightning import ResilienceCallback

        callback, module = ResilienceCallback(gg.ClipByGlobalNorm(1.0), options()), self.module(lightning)
        self.fit(lightning, module, callback)
        assert told(callback.resilience) == EXPECTED
        assert module.net.layer.weight.item() == expected

    @pytest.mark.parametrize("batches", [1, 4])
    def test_the_loss_is_what_training_step_returns(self, lightning, batches, monkeypatch):
        """Lightning divides it by the number of batches of a step before the backward."""
        from gradguard.integrations.lightning import ResilienceCallback

        seen, record_loss = [], gg.SpikeRecovery.record_loss
        monkeypatch.setattr(
            gg.SpikeRecovery, "record_loss", lambda self, loss: seen.append(loss.item()) or record_loss(self, loss)
        )
        module, returned = self.module(lightning), []
        own = module.training_step
        module.training_step = lambda batch: returned.append(own(batch)) or returned[-1]
        callback = ResilienceCallback(gg.ClipByGlobalNorm(1.0), options())
        self.fit(lightning, module, callback, sizes=SIZES[:8], accumulate_grad_batches=batches)
        assert seen == pytest.approx([loss.item() for loss in returned])

    @pytest.mark.parametrize("scale", [1024.0, 2.0**127])
    def test_a_burst_under_a_scaler(self, lightning, expected, scale):
        """The second scale overflows on the first of each larger gradients; these steps count as well."""
        from lightning.pytorch.plugins import MixedPrecision

        from gradguard.integrations.lightning import ResilienceCallback

        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
        plugin.forward_context = contextlib.nullcontext  # float32, so that weights are those without a scaler
        callback, module = ResilienceCallback(gg.ClipByGlobalNorm(1.0), options()), self.module(lightning)
        self.fit(lightning, module, callback, plugins=[plugin])
        assert (callback.guards[0].steps, callback.resilience.steps) == (STEPS, STEPS)
        if scale == 1024.0:
            assert told(callback.resilience) == EXPECTED
            assert module.net.layer.weight.item() == expected
        else:
            assert [one[1] for one in told(callback.resilience)][-2:] == ["adopted", "rolled back"]

    def test_a_run_that_is_resumed(self, lightning, tmp_path):
        from gradguard.integrations.lightning import ResilienceCallback

        first = ResilienceCallback(gg.ClipByGlobalNorm(1.0), options())
        checkpoint = str(tmp_path / "last.ckpt")
        self.fit(lightning, self.module(lightning), first, SIZES[:30]).save_checkpoint(checkpoint)
        callback = ResilienceCallback(gg.ClipByGlobalNorm(1.0), options())
        self.fit(lightning, self.module(lightning), callback, SIZES, checkpoint)
        assert (callback.guards[0].steps, callback.resilience.steps) == (30 + STEPS, 30 + STEPS)
        assert told(callback.resilience)[:6] == told(first.resilience) == EXPECTED[:-1]
        assert told(callback.resilience)[-1] == ("burst", "rolled back", 30 + 21)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
    def test_a_copy_begins_anew_without_the_module(self, lightning, duplicate, expected):
        """The module is of a class that no pickle can name."""
        from gradguard.integrations.lightning import ResilienceCallback

        callback = ResilienceCallback(gg.ClipByGlobalNorm(1.0), options())
        self.fit(lightning, self.module(lightning), callback)
        twin = duplicate(callback)
        assert twin.resilience is None
        assert "log" not in vars(twin)
        module = self.module(lightning)
        self.fit(lightning, module, twin)
        assert (twin.resilience.steps, told(twin.resilience)) == (STEPS, EXPECTED)
        assert module.net.layer.weight.item() == expected

    def test_several_optimizers_are_refused(self, lightning):
        from gradguard.integrations.lightning import ResilienceCallback

        module = self.module(lightning, 2)
        module.automatic_optimization = False
        with pytest.raises(InvalidValueError, match=r"configure_optimizers returned 2 optimizers, and a spike would"):
            self.fit(lightning, module, ResilienceCallback([gg.ClipByMedian(), gg.ClipByMedian()], options()))
