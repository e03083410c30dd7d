"""With PrivateCallback a Transformers Trainer takes the steps of private training, or says why it cannot."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

from private_twin import OPTIONS, SIZE, budget, by_samples, epsilon, network, noise, records, weights
from tiny_trainer import InOrder, logged, trainer
from torch.utils.data import IterableDataset
from transformers import Trainer

from gradguard.integrations.transformers import GradGuardCallback, PerSampleCallback, PrivateCallback

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "adamw_torch": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.0),
}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


DATA = [{"x": x, "labels": y} for x, y in zip(*records(), strict=True)]


def private(privacy=None, **options):
    return PrivateCallback(noise() if privacy is None else privacy, **(OPTIONS | options))


def make(
    folder,
    callback,
    batch_size=6,
    accumulation=1,
    optim="sgd",
    callbacks=(),
    data=DATA,
    kind=Trainer,
    collator=None,
    **options,
):
    arguments = {
        "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation, "optim": optim,
        "learning_rate": 0.5 if optim == "sgd" else 0.01, "adam_epsilon": 1e-3, "num_train_epochs": 2, "max_steps": -1,
        "logging_steps": 100,  # epsilon takes a moment
    }  # fmt: skip
    one = trainer(folder, [callback, *callbacks], kind=kind, model=Classifier(), **(arguments | options))
    one.train_dataset, one.data_collator = data, collator or one.data_collator
    return one


def train(folder, callback, *args, resume=None, **options):
    one = make(folder, callback, *args, **options)
    one.train(resume_from_checkpoint=resume)
    return one


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(6, 1), (3, 2), (1, 3)])
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_the_steps_are_those_of_one_sample_at_a_time(tmp_path, optim, batch_size, accumulation, noise_multiplier):
    whole = batch_size * accumulation
    expected, drawn = by_samples(OPTIMIZERS[optim], whole, 2, noise_multiplier)
    callback = private(noise(noise_multiplier))
    done = train(tmp_path, callback, batch_size, accumulation, optim)
    torch.testing.assert_close(weights(done.model), expected, rtol=1e-5, atol=1e-5)
    assert callback.private.steps == done.state.global_step == len(drawn) == 2 * SIZE // whole
    assert len(set(drawn)) > 1  # as Poisson batches do


def test_epsilon_is_logged(tmp_path):
    callback = private()
    done = train(tmp_path, callback, 3, 2, logging_steps=4)
    assert logged(done, "epsilon") == [epsilon(1.0, 6, 4), epsilon(1.0, 6, 8)]
    assert logged(done, "epsilon")[-1] == callback.private.epsilon()


def test_batches_without_samples_are_steps(tmp_path):
    expected, drawn = by_samples(OPTIMIZERS["sgd"], 1, 2, 1.0)
    assert 0 in drawn
    done = train(tmp_path, private(), 1)
    torch.testing.assert_close(weights(done.model), expected, rtol=1e-5, atol=1e-5)
    assert done.state.global_step == 2 * SIZE


def test_evaluation_in_between_changes_nothing(tmp_path):
    expected, _ = by_samples(OPTIMIZERS["sgd"], 6, 2, 1.0)
    one = make(tmp_path, private(), 3, 2, eval_strategy="no")
    one.eval_dataset = DATA[:5]
    one.args.eval_strategy, one.args.eval_steps = "steps", 1
    one.train()
    assert len(logged(one, "eval_loss")) == 8
    torch.testing.assert_close(weights(one.model), expected, rtol=1e-5, atol=1e-5)


def test_bf16_is_that_of_single_samples_within_its_rounding(tmp_path):
    start, (expected, _) = weights(network()), by_samples(OPTIMIZERS["sgd"], 6, 2, 0.0)
    done = train(tmp_path, private(noise(0.0)), bf16=True)
    assert 1e-5 < float((weights(done.model) - expected).norm() / (expected - start).norm()) < 0.03


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", [{"max_steps": 10}, {"num_train_epochs": 2.5}])
def test_the_noise_is_that_of_the_whole_plan(tmp_path, plan):
    callback = private(budget(2.0))
    train(tmp_path, callback, 3, 2, **plan)
    assert callback.private.terms.planned == callback.private.steps == 10
    assert 1.99 < callback.private.epsilon() <= 2.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("done", [2, 4, 5])  # 4 steps in an epoch
def test_a_resumed_run_goes_on_counting_within_the_epoch(tmp_path, done):
    """Without noise it ends where a run without a stop does: with the seed the batches are the same."""
    expected, _ = by_samples(OPTIMIZERS["adamw_torch"], 6, 2, 0.0)
    options = {"batch_size": 3, "accumulation": 2, "optim": "adamw_torch", "save_strategy": "steps", "save_steps": done}
    train(tmp_path, private(noise(0.0)), **options)
    checkpoint, resumed = tmp_path / f"checkpoint-{done}", private(noise(0.0))
    again = train(tmp_path / "again", resumed, **options, resume=str(checkpoint))
    assert resumed.private.steps == again.state.global_step == 8
    assert resumed.private.accountant.history == [(0.0, 0.25, 8)]
    torch.testing.assert_close(weights(again.model), expected, rtol=1e-5, atol=1e-5)
    state = torch.load(checkpoint / "gradguard_private.pt", weights_only=True)
    assert state["steps"] == done
    assert set(state) == {"steps", "accountant", "batches", "norm_clipper"}


def test_model_and_trainer_are_given_back(tmp_path):
    done = train(tmp_path, private())
    done.model(**{name: torch.stack([one[name] for one in DATA[:3]]) for name in DATA[0]})["loss"].backward()
    assert all(p.grad is not None for p in done.model.parameters())
    done.optimizer.step()
    assert "prepare" not in vars(done.accelerator)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_begins_anew(tmp_path, duplicate):
    callback = private()
    train(tmp_path, callback)
    again = duplicate(callback)
    assert again.private is None
    train(tmp_path, again)
    assert again.private.steps == callback.private.steps == 8


def test_a_trainer_without_it_is_as_before(tmp_path):
    plain, beside = (make(tmp_path, PerSampleCallback(gg.FlatNormClipper(1.0)), kind=InOrder) for _ in range(2))
    plain.train()
    private()
    beside.train()
    assert torch.equal(weights(plain.model), weights(beside.model))
    assert not logged(beside, "epsilon")


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(DATA, 6)


class ChangesGradients(Trainer):
    def _get_grad_norm(self, model, grad_norm=None):
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        return grad_norm


class Rows(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def twice(features):
    return {name: torch.stack([one[name] for one in [*features, *features]]) for name in ("x", "labels")}


UNSUPPORTED, WRONG = UnsupportedGradientError, InvalidValueError
REFUSED = {
    "max_grad_norm": ({"max_grad_norm": 0.5}, WRONG, "max_grad_norm=0.5, and there is a PrivateCallback"),
    "guard": ({"callbacks": [GradGuardCallback(gg.ClipByMedian())]}, WRONG, "GradGuardCallback beside the PrivateCall"),
    "fp16": ({"fp16": True}, UNSUPPORTED, "fp16: the scale of the loss follows overflows"),
    "batch size": ({"auto_find_batch_size": True}, UNSUPPORTED, "auto_find_batch_size starts again"),
    "own loader": ({"kind": OwnLoader}, UNSUPPORTED, "the trainer has a loader of its own"),
    "changed": ({"kind": ChangesGradients}, WRONG, r"net\.0\.weight: \.grad was filled or changed after the noise"),
    "iterable": ({"data": Rows(), "max_steps": 2}, UNSUPPORTED, "no sample of an IterableDataset"),
    "rows twice": ({"collator": twice}, WRONG, r"the model saw \d+ samples where \d+ were drawn"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_private_is_refused(tmp_path, case):
    options, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        train(tmp_path, private(), **options)


def test_steps_that_were_not_counted_are_refused(tmp_path):
    train(tmp_path, PerSampleCallback(gg.FlatNormClipper(1.0)), save_strategy="steps", save_steps=3)
    with pytest.raises(InvalidValueError, match="resumes after 3 steps, but the checkpoint has no state"):
        train(tmp_path, private(), resume=str(tmp_path / "checkpoint-3"))


def test_a_checkpoint_of_two_trainings_is_refused(tmp_path):
    train(tmp_path, private(), save_strategy="steps", save_steps=3)
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text(encoding="utf-8")) | {"global_step": 5}))
    with pytest.raises(InvalidValueError, match="after 5 steps, but the private training after 3"):
        train(tmp_path, private(), resume=str(tmp_path / "checkpoint-3"))


def test_a_second_training_is_refused(tmp_path):
    one = train(tmp_path, private())
    with pytest.raises(InvalidValueError, match="has trained for 8 steps already, and the cost of both trainings"):
        one.train()
