"""Where a trainer steps the optimizer: as many batches for each step as it counts, and the same steps as `step()`."""

import pytest
import torch
import torch.nn.functional as F

import gradguard as gg
from gradguard.errors import InvalidValueError
from private.runs import data_set, private_run, train, weights


def backward(model, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def train_as_a_trainer(private, model, epochs=1):
    """Fetch all parts of a step, then run them, then step; gradients stay until the next step begins."""
    steps, parts = 0, []
    for _ in range(epochs):
        for batch in private.loader:
            parts.append(batch)
            if len(parts) == 3:
                private.optimizer.zero_grad()
                for k, part in enumerate(parts):
                    backward(model, part)
                    assert private.clip_and_accumulate() is (k == 2)
                private.pre_step()
                private.optimizer.step()
                steps, parts = steps + 1, []
    return steps


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_the_steps_are_those_of_a_loop_of_ones_own(noise_multiplier):
    whole, model = private_run(batch_size=12, noise_multiplier=noise_multiplier)
    train(whole, model, 2)
    in_parts, again = private_run(batch_size=4, noise_multiplier=noise_multiplier, gradient_accumulation_steps=3)
    assert len(in_parts.loader) == 3 * len(whole.loader) == 15
    assert train_as_a_trainer(in_parts, again, 2) == whole.steps == in_parts.steps == 10
    assert in_parts.terms == whole.terms
    assert in_parts.accountant.history == whole.accountant.history
    torch.testing.assert_close(weights(again), weights(model), rtol=1e-5, atol=1e-6)


def test_parts_without_samples_are_given_and_do_not_count():
    """With one sample to be expected many parts have none; the same batches whole are the same steps."""
    whole, model = private_run(batch_size=3, data=data_set(30))
    train(whole, model, 2)
    in_parts, again = private_run(batch_size=1, data=data_set(30), gradient_accumulation_steps=3)
    stand_ins, skip = [], in_parts.clipper.skip_batch
    in_parts.clipper.skip_batch = lambda **options: (stand_ins.append(1), skip(**options))
    assert train_as_a_trainer(in_parts, again, 2) == 20
    assert len(stand_ins) > 5
    torch.testing.assert_close(weights(again), weights(model), rtol=1e-5, atol=1e-6)


def test_parts_without_samples_leave_a_moving_threshold_alone():
    """Parts that do not count neither move the threshold of a quantile within a step nor lose its count."""

    def clipper():
        generator = torch.Generator().manual_seed(1)
        return gg.QuantileNormClipper(0.1, 0.5, learning_rate=0.5, count_noise=2.0, generator=generator)

    whole, model = private_run(batch_size=3, data=data_set(30), norm_clipper=clipper())
    train(whole, model, 2)
    in_parts, again = private_run(
        batch_size=1, data=data_set(30), norm_clipper=clipper(), gradient_accumulation_steps=3
    )
    assert train_as_a_trainer(in_parts, again, 2) == 20
    assert in_parts.clipper.norm_clipper.thresholds == pytest.approx(whole.clipper.norm_clipper.thresholds, rel=1e-6)
    torch.testing.assert_close(weights(again), weights(model), rtol=1e-5, atol=1e-6)


def test_an_epoch_saved_at_its_end_is_over():
    """A trainer never asks for a batch after the last, so nobody else could tell."""
    private, model = private_run(batch_size=4, gradient_accumulation_steps=3)
    train_as_a_trainer(private, model)
    resumed, again = private_run(batch_size=4, gradient_accumulation_steps=3)
    resumed.load_state_dict(private.state_dict())
    assert train_as_a_trainer(resumed, again) == 5
    assert resumed.accountant.history == [(1.0, 0.2, 10)]


def first_batch(private, model):
    for batch in private.loader:
        backward(model, batch)
        private.clip_and_accumulate()
        return


def step_without_noise(private, model):
    first_batch(private, model)
    private.optimizer.step()


def step_twice(private, model):
    first_batch(private, model)
    private.pre_step()
    private.optimizer.step()
    private.optimizer.step()


def second_clip(private, model):
    first_batch(private, model)
    private.pre_step()
    gg.clip_grad_norm_(model.parameters(), 1e-3)
    private.optimizer.step()


def second_loss(private, model):
    first_batch(private, model)
    private.pre_step()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    private.optimizer.step()


def take_up_twice(private, model):
    first_batch(private, model)
    private.clip_and_accumulate()


def fill_twice(private, model):
    first_batch(private, model)
    private.pre_step()
    private.pre_step()


def ask_for_more(private, model):
    for batch in private.loader:
        backward(model, batch)
        private.clip_and_accumulate()


REFUSED = {
    step_without_noise: r"not yet taken: call private\.pre_step\(\) before it",
    step_twice: "before the gradients had noise",
    second_clip: r"0\.weight: \.grad was filled or changed after the noise was added",
    second_loss: r"0\.weight: \.grad was filled or changed after the noise was added",
    take_up_twice: r"private\.step\(\) without a batch",
    fill_twice: "the optimizer is to step within a logical batch, or without one",
    ask_for_more: "the loader was asked for the next batch",
}


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda wrong: wrong.__name__)
def test_an_order_that_would_not_be_private_is_refused(wrong):
    private, model = private_run(gradient_accumulation_steps=1)
    with pytest.raises(InvalidValueError, match=REFUSED[wrong]):
        wrong(private, model)


def test_a_step_within_a_logical_batch_is_refused_and_nothing_is_lost():
    private, model = private_run(gradient_accumulation_steps=2)
    first_batch(private, model)
    with pytest.raises(InvalidValueError, match=r"each part that private\.loader yields must be used before"):
        private.pre_step()
    with pytest.raises(InvalidValueError, match=r"state_dict\(\) within a logical batch"):
        private.state_dict()
    assert private.steps == 0


OPTIONS = {
    "parts": (
        {"gradient_accumulation_steps": 0},
        InvalidValueError,
        "gradient_accumulation_steps=0: expected a whole number",
    ),
    "two cuts": (
        {"gradient_accumulation_steps": 2, "max_physical_batch_size": 3},
        InvalidValueError,
        "gradient_accumulation_steps=2 with max_physical_batch_size=3: it cuts",
    ),
    "no Poisson": (
        {"gradient_accumulation_steps": 2, "poisson_sampling": False},
        InvalidValueError,
        "with poisson_sampling=False: it cuts Poisson batches by itself",
    ),
    "two lengths": (
        {"epsilon": 3.0, "epochs": 2, "steps": 10},
        InvalidValueError,
        "epochs=2 and steps=10 both set the length",
    ),
    "no length": ({"epsilon": 3.0}, InvalidValueError, r"PrivacyBudget needs epochs=\.\.\. or steps="),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_contradict_are_refused(case):
    options, error, words = OPTIONS[case]
    with pytest.raises(error, match=words):
        private_run(**options)


def test_steps_share_the_target_as_epochs_do():
    by_steps, _ = private_run(epsilon=3.0, steps=10)
    by_epochs, _ = private_run(epsilon=3.0, epochs=2)
    assert by_steps.terms == by_epochs.terms
    assert by_steps.terms.planned == 10


def test_a_target_that_steps_before_have_made_impossible_is_refused():
    """With more steps to come the noise is chosen anew: those done with less have spent more than their share."""
    short, model = private_run(epsilon=3.0, steps=5)
    train(short, model)
    longer, _ = private_run(epsilon=3.0, steps=10)
    with pytest.raises(InvalidValueError, match=r"with 10 steps in all epsilon would be 3\.\d+, above the target"):
        longer.load_state_dict(short.state_dict())
    same, _ = private_run(epsilon=3.0, steps=5)
    same.load_state_dict(short.state_dict())
    more_noise, again = private_run(epsilon=1.0, steps=10)
    train(more_noise, again)
    more_noise_before, _ = private_run(epsilon=3.0, steps=10)
    more_noise_before.load_state_dict(more_noise.state_dict())
    assert more_noise_before.steps == 5
