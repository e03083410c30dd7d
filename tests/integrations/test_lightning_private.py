"""With PrivateCallback a Lightning Trainer takes the steps of private training, or says why it cannot."""

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402
from private_twin import OPTIONS, SIZE, budget, by_samples, epsilon, network, noise, records, weights  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler  # noqa: E402

from gradguard.integrations.lightning import GradGuardCallback, PerSampleCallback, PrivateCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
}


@pytest.fixture(autouse=True)
def silence():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    def __init__(self, optimizer="SGD"):
        super().__init__()
        self.net, self.optimizer = network(), optimizer

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("loss", self.training_step(batch))

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def loader(batch_size, **options):
    return DataLoader(TensorDataset(*records()), batch_size, shuffle=True, **options)


def make_trainer(callbacks, accumulation=1, **options):
    defaults = {
        "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(callbacks=callbacks, accumulate_grad_batches=accumulation, **(defaults | options))


def private(privacy=None, **options):
    return PrivateCallback(noise() if privacy is None else privacy, **(OPTIONS | options))


def fit(callback, model=None, batch_size=6, accumulation=1, callbacks=(), val=None, ckpt_path=None, **options):
    model, one = model or Classifier(), make_trainer([callback, *callbacks], accumulation, **options)
    one.fit(model, loader(batch_size), val, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return one, model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(6, 1), (3, 2), (1, 3)])
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_the_steps_are_those_of_one_sample_at_a_time(optimizer, batch_size, accumulation, noise_multiplier):
    whole = batch_size * accumulation
    expected, drawn = by_samples(OPTIMIZERS[optimizer], whole, 2, noise_multiplier)
    callback = private(noise(noise_multiplier))
    trainer, model = fit(callback, Classifier(optimizer), batch_size, accumulation)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)
    assert callback.private.steps == trainer.global_step == len(drawn) == 2 * SIZE // whole
    assert len(set(drawn)) > 1  # as Poisson batches do


def test_batches_without_samples_are_steps():
    expected, drawn = by_samples(OPTIMIZERS["SGD"], 1, 2, 1.0)
    assert 0 in drawn
    callback = private()
    trainer, model = fit(callback, batch_size=1)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)
    assert callback.private.steps == trainer.global_step == 2 * SIZE


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_validation_in_between_changes_nothing(accumulation):
    expected, _ = by_samples(OPTIMIZERS["SGD"], 3 * accumulation, 2, 1.0)
    val = DataLoader(TensorDataset(*records()), 5)
    _, model = fit(private(), batch_size=3, accumulation=accumulation, val=val, val_check_interval=1)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)


def test_bf16_is_that_of_single_samples_within_its_rounding():
    start, (expected, _) = weights(network()), by_samples(OPTIMIZERS["SGD"], 6, 2, 0.0)
    _, model = fit(private(noise(0.0)), precision="bf16-mixed")
    assert 1e-5 < float((weights(model) - expected).norm() / (expected - start).norm()) < 0.03


def test_the_noise_is_that_of_the_whole_plan():
    callback = private(budget(2.0))
    fit(callback, max_epochs=3, batch_size=3, accumulation=2)
    assert callback.private.terms.planned == callback.private.steps == 12
    assert 1.99 < callback.private.epsilon() <= 2.0


def test_epsilon_is_logged():
    callback = private()
    trainer, _ = fit(callback, batch_size=3, accumulation=2)
    assert callback.private.epsilon() == epsilon(1.0, 6, 8)
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(callback.private.epsilon(), rel=1e-6)


def test_a_loop_without_a_seed_is_another_each_time():
    models = [fit(private(seed=None))[1] for _ in range(2)]
    assert not torch.equal(weights(models[0]), weights(models[1]))


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("done", [2, 4, 5])  # 4 steps in an epoch
def test_a_resumed_run_goes_on_counting_within_the_epoch(done, tmp_path):
    """Without noise it ends where a run without a stop does: with the seed the batches are the same."""
    expected, _ = by_samples(OPTIMIZERS["AdamW"], 6, 2, 0.0)
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=done, save_top_k=-1, filename="{step}")
    half = private(noise(0.0))
    fit(half, Classifier("AdamW"), 3, 2, [saved], max_steps=done, enable_checkpointing=True)
    resumed = private(noise(0.0))
    path = tmp_path / f"step={done}.ckpt"
    trainer, model = fit(resumed, Classifier("AdamW"), 3, 2, ckpt_path=path)
    assert resumed.private.steps == trainer.global_step == 8
    assert resumed.private.accountant.history == [(0.0, 0.25, 8)]
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)
    state = torch.load(path, weights_only=True)["callbacks"]
    assert next(s for key, s in state.items() if "PrivateCallback" in key)["steps"] == done


def test_the_module_and_the_strategy_are_given_back():
    callback = private()
    trainer, model = fit(callback)
    model.training_step([t[:3] for t in records()]).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.configure_optimizers().step()
    assert "process_dataloader" not in vars(trainer.strategy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_begins_anew(duplicate):
    callback = private()
    fit(callback)
    again = duplicate(callback)
    assert again.private is None
    fit(again)
    assert again.private.steps == callback.private.steps == 8


class Two(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]

    automatic_optimization = False


class ManyLoaders(Classifier):
    def train_dataloader(self):
        return [loader(6), loader(6)]


class StepsByItself(Classifier):
    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class NoLoss(Classifier):
    def training_step(self, batch):
        return None


class Rows(IterableDataset):
    def __iter__(self):
        return iter(records()[0])


class Doubled(Classifier):
    def training_step(self, batch):
        x, y = (torch.cat([t, t]) for t in batch)
        return F.cross_entropy(self.net(x), y)


WEIGHTED = DataLoader(TensorDataset(*records()), 6, sampler=WeightedRandomSampler(torch.ones(SIZE), SIZE))
UNSUPPORTED, WRONG = UnsupportedGradientError, InvalidValueError
REFUSED = {
    "gradient_clip_val": ({"gradient_clip_val": 0.5}, WRONG, r"clips too, beside the PrivateCallback"),
    "guard": ({"beside": [GradGuardCallback(gg.ClipByMedian())]}, WRONG, "GradGuardCallback beside the PrivateCall"),
    "per sample": ({"beside": [PerSampleCallback(gg.FlatNormClipper(1.0))]}, WRONG, "Callback beside the P"),
    "part of a step": ({"limit_train_batches": 3, "accumulation": 2}, WRONG, "3 batches, which are no whole number"),
    "overfit": ({"overfit_batches": 2}, UNSUPPORTED, "overfit_batches changes which samples are drawn from"),
    "reload": ({"reload_dataloaders_every_n_epochs": 1}, UNSUPPORTED, "reload_dataloaders_every_n_epochs changes"),
    "scheduled": (
        {"beside": [GradientAccumulationScheduler({1: 2})]},
        UNSUPPORTED,
        "GradientAccumulationScheduler changes the sampling rate",
    ),
    "by hand": ({"model": Two}, UNSUPPORTED, "Two optimizes manually"),
    "no plan": ({"privacy": budget(1.0), "max_epochs": -1}, WRONG, "a trainer that knows how many steps"),
    "changed after the noise": ({"model": StepsByItself}, WRONG, r"net\.0\.weight: \.grad was filled or changed after"),
    "no loss": ({"model": NoLoss}, WRONG, "the optimizer is to step within a logical batch, or without one"),
    "rows twice": ({"model": Doubled}, WRONG, r"the model saw \d+ samples where \d+ were drawn"),
    "two loaders": ({"loader": [loader(6), loader(6)]}, UNSUPPORTED, "several training loaders"),
    "weighted": ({"loader": WEIGHTED}, WRONG, "its sampler is a WeightedRandomSampler"),
    "iterable": (
        {"loader": DataLoader(Rows(), 6)},
        UNSUPPORTED,
        "no sample of an IterableDataset can be drawn by its number",
    ),
    "batch sampler": (
        {"loader": DataLoader(TensorDataset(*records()), batch_sampler=[[0, 1], [2]])},
        WRONG,
        "from one DataLoader with a batch_size",
    ),
}


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None")
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_private_is_refused(case):
    options, error, words = REFUSED[case]
    options = dict(options)
    model = options.pop("model", Classifier)()
    batches, beside = options.pop("loader") if "loader" in options else loader(6), options.pop("beside", [])
    one = make_trainer([private(options.pop("privacy", None)), *beside], **options)
    with pytest.raises(error, match=words):
        one.fit(model, batches)


def test_a_checkpoint_within_an_accumulation_is_refused():
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.save_checkpoint("unused")

    with pytest.raises(InvalidValueError, match=r"state_dict\(\) within a logical batch would save sums"):
        fit(private(), accumulation=2, callbacks=[Saves()])


def test_steps_that_were_not_counted_are_refused(tmp_path):
    plain, model = make_trainer([], max_epochs=1), Classifier()
    plain.fit(model, loader(6))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(InvalidValueError, match="resumes after 4 steps, but the checkpoint has no state"):
        fit(private(), ckpt_path=tmp_path / "plain.ckpt")


def test_a_second_training_is_refused():
    callback = private()
    fit(callback)
    with pytest.raises(InvalidValueError, match="has trained for 8 steps already, and the cost of both trainings"):
        fit(callback)


def test_wrong_arguments_are_refused_at_once():
    with pytest.raises(InvalidValueError, match="trainer knows how many steps it will take"):
        PrivateCallback(budget(1.0, epochs=3))
    with pytest.raises(InvalidTypeError, match="norm_clipper: expected a NormClipper"):
        PrivateCallback(noise(), 1.0)
