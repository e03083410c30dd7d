"""Each trainer passes the kit: those with an adapter, and those that need none."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from trainer_kit import LR, TrainerKit, sgd

import gradguard as gg
from gradguard.errors import InvalidValueError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing.*is deprecated:FutureWarning"),  # TRL's default
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class TestIgnite(TrainerKit):
    """Three lines of its page, and no adapter: a Guard beside the engine, and in its checkpoint."""

    @pytest.fixture(autouse=True)
    def ignite(self):
        pytest.importorskip("ignite")

    def train(self, model, clipper, batches, parts, folder, stop=None, resume=False):
        from ignite.engine import create_supervised_trainer

        optimizer = sgd(model)
        guard = gg.Guard(optimizer, clipper, model=model)
        saved, done = {"model": model, "optimizer": optimizer, "guard": guard}, 0
        if resume:
            state = torch.load(folder / "checkpoint.pt", weights_only=True)
            done = state.pop("done")
            for name, one in saved.items():
                one.load_state_dict(state[name])
        pairs = [(x, x.sum(1, keepdim=True)) for x in batches[done:stop]]
        engine = create_supervised_trainer(
            model, optimizer, torch.nn.functional.mse_loss, gradient_accumulation_steps=parts
        )
        engine.run(pairs, max_epochs=1)
        if stop:
            torch.save({"done": stop} | {n: one.state_dict() for n, one in saved.items()}, folder / "checkpoint.pt")
        return guard


class TestYourOwn(TrainerKit):
    """The adapter that the page on a trainer of one's own shows."""

    @pytest.fixture(autouse=True)
    def page(self):
        text = (Path(__file__).parents[2] / "docs/trainers/your_own.md").read_text(encoding="utf-8")
        (block,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        self.shown = {}
        exec(block, self.shown)

    def train(self, model, clipper, batches, parts, folder, stop=None, resume=False):
        callback = self.shown["Clip"](clipper)
        if resume:
            model_state, state = torch.load(folder / "checkpoint.pt", weights_only=True)
            model.load_state_dict(model_state)
            callback.load_state_dict(state)
        self.shown["Trainer"](model, self.loss, [callback], parts).fit(batches[5 if resume else 0 : stop])
        if stop:
            torch.save((model.state_dict(), callback.state_dict()), folder / "checkpoint.pt")
        return callback.guards[0]

    def test_one_clip_and_not_two(self):
        refused = pytest.raises(InvalidValueError, match=r"Trainer\(bound=1.0\) clips too: expected one clip")
        with refused:
            self.shown["Trainer"](self.model(), self.loss, [self.shown["Clip"](self.clipper())], bound=1.0).fit([])


class TestTransformers(TrainerKit):
    @pytest.fixture(autouse=True)
    def transformers(self):
        pytest.importorskip("transformers")

    def trainer(self, folder, model, batches, callback, **options):
        import tiny_trainer

        class OwnLoss(tiny_trainer.InOrder):
            def compute_loss(own, model, inputs, **kwargs):  # noqa: N805
                return self.loss(model, inputs["x"])

        options |= {"learning_rate": LR, "remove_unused_columns": False}
        return tiny_trainer.trainer(
            folder, [callback], kind=OwnLoss, model=model, inputs=batches.flatten(0, 1), **options
        )

    def train(self, model, clipper, batches, parts, folder, stop=None, resume=False):
        from gradguard.integrations.transformers import GradGuardCallback

        callback = GradGuardCallback(clipper)
        options = {"max_steps": stop or len(batches) // parts, "gradient_accumulation_steps": parts}
        options |= {"save_strategy": "steps", "save_steps": stop} if stop else {}
        self.trainer(folder, model, batches, callback, **options).train(
            resume_from_checkpoint=str(folder / "checkpoint-5") if resume else None
        )
        return callback.guard


class TestTRL(TestTransformers):
    """TRL's trainers are Transformers' Trainer: the same callback, and nothing more."""

    @pytest.fixture(autouse=True)
    def trl(self, monkeypatch):
        pytest.importorskip("datasets")
        pytest.importorskip("trl")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def model(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=20, n_positions=6, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0, initializer_range=0.3,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def batches(self, count, bad=()):
        ids = torch.randint(1, 20, (count, 2, 6), generator=torch.Generator().manual_seed(1))
        ids[list(bad)] = 0  # of which the losses below make NaN
        return ids

    def loss(self, model, batch):
        count = 5 / 6 if batch.any() else torch.nan  # it divides by all six labels, of which the first is no target
        return model(input_ids=batch, labels=batch).loss * count

    def trainer(self, folder, model, batches, callback, **options):
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        class InOrder(SFTTrainer):
            def _get_train_sampler(self, *args, **kwargs):
                return torch.utils.data.SequentialSampler(self.train_dataset)

            def compute_loss(self, model, inputs, *args, **kwargs):
                loss = super().compute_loss(model, inputs, *args, **kwargs)
                return loss if inputs["input_ids"].any() else loss * torch.nan

        words = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
        arguments = SFTConfig(
            str(folder), use_cpu=True, report_to=[], disable_tqdm=True, optim="sgd", learning_rate=LR, bf16=False,
            lr_scheduler_type="constant", per_device_train_batch_size=2, dataset_kwargs={"skip_prepare_dataset": True},
            **({"save_strategy": "no"} | options),
        )  # fmt: skip
        return InOrder(
            model, arguments, train_dataset=Dataset.from_dict({"input_ids": batches.flatten(0, 1).tolist()}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0"),
            callbacks=[callback],
        )  # fmt: skip


class TestLightning(TrainerKit):
    @pytest.fixture(autouse=True)
    def lightning(self):
        pytest.importorskip("lightning.pytorch")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def train(self, model, clipper, batches, parts, folder, stop=None, resume=False):
        from lightning import pytorch as pl

        from gradguard.integrations.lightning import GradGuardCallback

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = model

            def training_step(own, batch):  # noqa: N805
                return self.loss(own.net, batch)

            def configure_optimizers(self):
                return sgd(self.net)

        callback = GradGuardCallback(clipper)
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback], accumulate_grad_batches=parts, max_epochs=1 + resume,
        )  # fmt: skip
        in_epoch = batches[5:] if resume else batches[:stop]
        data = DataLoader(in_epoch.flatten(0, 1), batch_size=2)
        path = folder / "stopped.ckpt"
        trainer.fit(Module(), data, ckpt_path=path if resume else None, weights_only=True)
        if stop:
            trainer.save_checkpoint(path)
        return callback.guards[0]


class TestAccelerate(TrainerKit):
    @pytest.fixture(autouse=True)
    def accelerate(self):
        pytest.importorskip("accelerate")
        from accelerators import forget_accelerators

        forget_accelerators()

    def train(self, model, clipper, batches, parts, folder, stop=None, resume=False):
        from accelerate import Accelerator

        from gradguard.integrations.accelerate import guard

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
        wrapped, optimizer = accelerator.prepare(model, sgd(model))
        guarded = guard(accelerator, optimizer, clipper, model=wrapped)
        if resume:
            accelerator.load_state(str(folder / "state"))
        for batch in batches[5 if resume else 0 : stop]:
            with accelerator.accumulate(wrapped):
                accelerator.backward(self.loss(wrapped, batch))
                optimizer.step()
                optimizer.zero_grad()
        if stop:
            accelerator.save_state(str(folder / "state"))
        return guarded


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
class TestKeras(TrainerKit):
    """An optimizer that is none of PyTorch's: the clip is inside it, and counts by itself."""

    @pytest.fixture(autouse=True)
    def keras(self, monkeypatch):
        monkeypatch.setenv("KERAS_BACKEND", "torch")
        pytest.importorskip("keras", exc_type=ImportError)

    def clipper(self):
        return gg.ClipByMedian(k=0.0, window=4, warmup=2, update=None)  # the rate of Keras is not known to a rule

    def model(self):
        import keras

        weights = super().model().state_dict()
        layers = keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((3,)), *layers])
        for layer, number in zip(layers, (0, 2), strict=True):
            layer.set_weights([weights[f"{number}.weight"].T.numpy(), weights[f"{number}.bias"].numpy()])
        return model

    def train(self, model, clipper, batches, parts, folder, stop=None, resume=False):
        import keras

        from gradguard.integrations.keras import guard

        inner = keras.optimizers.SGD(LR, gradient_accumulation_steps=parts if parts > 1 else None)
        optimizer = guard(inner, clipper)
        model.compile(optimizer=optimizer, loss="mse")
        optimizer.build(model.trainable_variables)
        if resume:
            model.load_weights(folder / "stopped.weights.h5")
        in_run = batches[5 if resume else 0 : stop].flatten(0, 1)
        model.fit(in_run, in_run.sum(1, keepdim=True), batch_size=2, shuffle=False, verbose=0)
        if stop:
            model.save_weights(folder / "stopped.weights.h5")
        return SimpleNamespace(
            last=optimizer.last, steps=int(optimizer.iterations) + optimizer.skipped_steps,
            skipped_steps=optimizer.skipped_steps,
        )  # fmt: skip

    def test_afterwards_the_optimizer_is_free(self):
        """It is another object, and the optimizer inside is as it was: the tests of Keras look at that."""
