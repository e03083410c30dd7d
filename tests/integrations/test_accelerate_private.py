"""With make_private a loop of Accelerate takes the steps of private training, or says why it cannot."""

import pytest
import torch
import torch.nn.functional as F

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

from accelerate import Accelerator
from private_twin import OPTIONS, SIZE, budget, by_samples, epsilon, network, noise, records, weights
from torch.utils.data import DataLoader, TensorDataset

from gradguard.integrations.accelerate import clip_per_sample, guard, make_private

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
}


def loader(batch_size=6):
    return DataLoader(TensorDataset(*records()), batch_size, shuffle=True)


def prepared(optimizer="SGD", accumulation=1, **options):
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **options), network()
    return accelerator, *accelerator.prepare(model, OPTIMIZERS[optimizer](model.parameters()))


def private(accelerator, model, optimizer, batch_size=6, privacy=None):
    privacy = noise() if privacy is None else privacy
    return make_private(accelerator, model, optimizer, loader(batch_size), privacy, **OPTIONS)


def train(accelerator, model, optimizer, batches, epochs=1, stop=None):
    """Loop as one always does; ``stop`` is the number of steps after which to leave."""
    steps = 0
    for _ in range(epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            if steps == stop:
                return


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(6, 1), (3, 2), (1, 3), (1, 1)])
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_the_steps_are_those_of_one_sample_at_a_time(optimizer, batch_size, accumulation, noise_multiplier):
    whole = batch_size * accumulation
    expected, drawn = by_samples(OPTIMIZERS[optimizer], whole, 2, noise_multiplier)
    parts = prepared(optimizer, accumulation)
    run = private(*parts, batch_size, noise(noise_multiplier))
    assert len(run.loader) == SIZE // whole * accumulation
    train(*parts, run.loader, epochs=2)
    torch.testing.assert_close(weights(parts[1]), expected, rtol=1e-5, atol=1e-5)
    assert run.private.steps == len(drawn) == 2 * SIZE // whole
    assert len(set(drawn)) > 1  # as Poisson batches do


def test_epsilon_is_that_of_the_steps_taken():
    parts = prepared(accumulation=2)
    run = private(*parts, 3, budget(2.0, epochs=2))
    train(*parts, run.loader, epochs=1)
    assert run.private.epsilon() == epsilon(run.private.noise_multiplier, 6, 4) < 2.0
    train(*parts, run.loader, epochs=1)
    assert 1.99 < run.private.epsilon() <= 2.0
    with pytest.raises(InvalidValueError, match="the target epsilon is spent"):
        train(*parts, run.loader)


@pytest.mark.parametrize("done", [2, 4])  # 4 steps in an epoch
def test_a_resumed_run_goes_on_counting_within_the_epoch(tmp_path, done):
    expected, _ = by_samples(OPTIMIZERS["AdamW"], 6, 2, 0.0)
    first = prepared("AdamW", 2)
    run = private(*first, 3, noise(0.0))
    train(*first, run.loader, stop=done)
    first[0].save_state(str(tmp_path))
    again = prepared("AdamW", 2)
    resumed = private(*again, 3, noise(0.0))
    again[0].load_state(str(tmp_path))
    train(*again, resumed.loader, epochs=2 if done < 4 else 1)  # the first is the rest of an epoch
    assert resumed.private.accountant.history == [(0.0, 0.25, 8)]
    torch.testing.assert_close(weights(again[1]), expected, rtol=1e-5, atol=1e-5)


def test_detached_the_loop_is_an_ordinary_one():
    plain, parts = prepared(), prepared()
    train(*plain, DataLoader(TensorDataset(*records()), 6))
    run = private(*parts)
    run.detach()
    run.detach()
    train(*parts, DataLoader(TensorDataset(*records()), 6))
    assert torch.equal(weights(parts[1]), weights(plain[1]))
    private(*parts).detach()


def another_loader(accelerator, model, optimizer, run):
    train(accelerator, model, optimizer, loader())


def no_backward(accelerator, model, optimizer, run):
    for _ in run.loader:
        optimizer.step()


def inner_step(accelerator, model, optimizer, run):
    for x, y in run.loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.optimizer.step()


def no_step(accelerator, model, optimizer, run):
    for x, y in run.loader:
        accelerator.backward(F.cross_entropy(model(x), y))


def second_clip(accelerator, model, optimizer, run):
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def save_with_sums(accelerator, model, optimizer, run):
    for x, y in run.loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        run.state_dict()


ORDERS = {
    another_loader: r"private\.step\(\) without a batch",
    no_backward: "the optimizer is to step within a logical batch, or without one",
    inner_step: r"not yet taken: call private\.pre_step\(\) before it",
    no_step: "the loader was asked for the next batch",
    second_clip: "gradients whose samples are clipped",
    save_with_sums: "within a logical batch would save sums without noise",
}


@pytest.mark.parametrize("wrong", ORDERS, ids=lambda wrong: wrong.__name__)
def test_a_loop_that_would_not_be_private_is_refused(wrong):
    parts = prepared()
    run = private(*parts)
    with pytest.raises(InvalidValueError, match=ORDERS[wrong]):
        wrong(*parts, run)


def test_an_epoch_left_within_an_accumulation_is_refused_at_the_next_step():
    parts = prepared(accumulation=2)
    run = private(*parts, 3)
    for x, y in run.loader:
        with parts[0].accumulate(parts[1]):
            parts[0].backward(F.cross_entropy(parts[1](x), y))
        break
    with pytest.raises(InvalidValueError, match="the optimizer is to step within a logical batch"):
        train(*parts, run.loader)


def test_what_cannot_be_private_is_refused():
    parts = prepared()
    with pytest.raises(InvalidTypeError, match=r"loader is a DataLoaderShard.*the DataLoader before"):
        make_private(*parts, parts[0].prepare(loader()), noise())
    with pytest.raises(InvalidTypeError, match="optimizer is SGD, which no accelerator has prepared"):
        private(*parts[:2], parts[2].optimizer)
    with pytest.raises(InvalidTypeError, match="privacy: expected PrivacyBudget"):
        private(*parts, privacy=1.0)
    clip_per_sample(*parts, gg.FlatNormClipper(1.0))
    with pytest.raises(InvalidValueError, match="has a per-sample clip already"):
        private(*parts)
    guarded = prepared()
    guard(guarded[0], guarded[2], gg.ClipByMedian(), model=guarded[1])
    with pytest.raises(InvalidValueError, match="make_private was called with gradients that a Guard clips"):
        private(*guarded)
