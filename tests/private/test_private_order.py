"""What private training refuses: loaders it cannot sample, calls out of order, arguments that contradict."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from gradguard import FlatNormClipper, PerSampleGradientClipper, QuantileNormClipper
from gradguard.errors import GradguardError, InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.private import FixedNoise, make_private
from private.runs import SIZE, WIDTH, data_set, network, one_step, private_run, train, weights

NOISE = FixedNoise(noise_multiplier=1.0, delta=1e-3)


class Rows(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.full((WIDTH,), float(index)), index % 3


def as_dict(rows):
    return {"x": torch.stack([x for x, _ in rows]), "y": torch.tensor([y for _, y in rows])}


def test_the_users_options_are_kept():
    loader = DataLoader(Rows(), batch_size=12, collate_fn=as_dict, num_workers=1, prefetch_factor=3, timeout=200)
    private, _ = private_run(loader=loader)
    made = private.loader.loader
    assert (made.collate_fn, made.num_workers, made.prefetch_factor, made.timeout) == (as_dict, 1, 3, 200)
    assert len(private.loader) == 5


def test_the_batches_are_those_of_the_sampler():
    private, model = private_run()
    expected = [private._batches.draw(step).tolist() for step in range(5)]
    found = []
    for batch in private.loader:
        found.append(batch[2].tolist())
        one_step(private, model, batch)
    assert found == expected


def test_workers_that_stay_alive_start_each_epoch_anew():
    loader = DataLoader(data_set(), batch_size=12, num_workers=1, persistent_workers=True)
    private, model = private_run(loader=loader)
    found = []
    for steps in (2, 5, 5):
        for k, batch in enumerate(private.loader, 1):
            found.append(batch[2].tolist())
            one_step(private, model, batch)
            if k == steps:
                break
    assert found == [private._batches.draw(step).tolist() for step in range(12)]


class _Stream(IterableDataset):
    def __iter__(self):
        return iter([])


LOADERS = {
    "iterable": (lambda: DataLoader(_Stream(), batch_size=2), UnsupportedGradientError, "Use a data set with"),
    "list": (lambda: [1], InvalidTypeError, "expected a torch.utils.data.DataLoader, got list"),
    "no batches": (lambda: DataLoader(Rows(), batch_size=None), InvalidValueError, "made with batch_size="),
    "batch sampler": (
        lambda: DataLoader(Rows(), batch_sampler=[[1]]),
        InvalidValueError,
        "batch_sampler of its own",
    ),
    "weighted": (
        lambda: DataLoader(Rows(), batch_size=2, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
        InvalidValueError,
        "its sampler is a WeightedRandomSampler. Every sample must be drawn with the same probability",
    ),
    "replacement": (
        lambda: DataLoader(Rows(), batch_size=2, sampler=RandomSampler(Rows(), replacement=True)),
        InvalidValueError,
        "draws with replacement",
    ),
}


@pytest.mark.parametrize("case", LOADERS)
def test_loaders_that_cannot_be_sampled_are_refused(case):
    make, error, words = LOADERS[case]
    with pytest.raises(error, match=words):
        private_run(loader=make())


# Wrong order


def test_the_users_own_optimizer_step_is_refused_until_detached():
    private, model = private_run()
    with pytest.raises(InvalidValueError, match=r"call private.step\(\) after each backward instead"):
        private.optimizer.step()
    private.detach()
    private.detach()
    private.optimizer.step()
    F.cross_entropy(model(torch.ones(1, WIDTH)), torch.zeros(1, dtype=torch.int64)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_step_without_a_batch_is_refused():
    private, model = private_run()
    with pytest.raises(InvalidValueError, match=r"private.step\(\) without a batch: iterate over private.loader"):
        private.step()
    batch = next(iter(private.loader))
    one_step(private, model, batch)
    with pytest.raises(InvalidValueError, match="without a batch"):
        private.step()


def test_a_batch_without_a_step_is_refused():
    private, _ = private_run()
    loader = iter(private.loader)
    next(loader)
    with pytest.raises(InvalidValueError, match=r"private.step\(\) was not called for the last one"):
        next(loader)


def test_the_last_batch_without_a_step_is_refused():
    private, _ = private_run(batch_size=SIZE)
    with pytest.raises(InvalidValueError, match=r"private.step\(\) was not called for the last one"):
        for _ in private.loader:
            pass


def test_a_step_without_a_backward_is_refused():
    private, _ = private_run()
    next(iter(private.loader))
    with pytest.raises(GradguardError, match="backward"):
        private.step()


def test_more_samples_than_were_drawn_are_refused():
    private, model = private_run()
    x, y, _ = next(iter(private.loader))
    before = weights(model)
    with pytest.raises(InvalidValueError, match="so one sample may count more than once"):
        one_step(private, model, (x.repeat(2, 1), y.repeat(2)))
    assert torch.equal(weights(model), before)


def test_gradients_from_elsewhere_are_refused():
    private, model = private_run()
    batch = next(iter(private.loader))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(InvalidValueError, match=r"0.weight: .grad was filled by something other"):
        one_step(private, model, batch)


def test_what_is_left_of_an_epoch_is_dropped_and_costs_nothing():
    private, model = private_run(max_physical_batch_size=3)
    for batch in private.loader:
        one_step(private, model, batch)
        break
    assert private.accountant.steps == 0
    twin, other = private_run(max_physical_batch_size=3)
    train(private, model)
    train(twin, other)
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 0.0, "epochs": 1}, "epsilon=0.0: expected a number above 0"),
        ({"epsilon": 1.0}, "PrivacyBudget needs epochs="),
        ({"epsilon": 1.0, "epochs": 0}, "epochs=0: expected a whole number >= 1"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0: expected a finite number"),
        ({"delta": 0.0}, "delta=0.0: expected a probability above 0"),
        ({"accountant": "gdp"}, "reports less than is spent"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size=0: expected a whole number >= 1"),
        ({"norm_clipper": QuantileNormClipper(1.0)}, "count_noise=0.0 spends more than"),
        ({"loss_reduction": "share"}, "a share of a loss depends on the other samples"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(InvalidValueError, match=words):
        private_run(**options)


def test_a_delta_that_allows_publishing_a_sample_is_warned_of():
    with pytest.warns(UserWarning, match="not below 1 / 60 samples"):
        private_run(delta=0.1)


def test_an_unbounded_sensitivity_is_refused():
    private, model = private_run(max_norm=math.inf)
    with pytest.raises(InvalidValueError, match="the sensitivity is inf: no noise hides"):
        train(private, model)


def test_parameters_outside_the_model_are_refused():
    model, head = network(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    loader = DataLoader(data_set(), batch_size=12)
    with pytest.raises(InvalidValueError, match=r"2 parameters, of shapes .* that are not the model's"):
        make_private(model, optimizer, loader, NOISE)
    with pytest.raises(InvalidTypeError, match=r"expected a torch.optim.Optimizer, got float"):
        make_private(model, 0.1, loader, NOISE)
    with pytest.raises(InvalidTypeError, match=r"privacy: expected PrivacyBudget.* or FixedNoise.*, got 1\.0"):
        make_private(model, optimizer, loader, 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # no hook is left


def test_an_optimizer_that_needs_a_closure_is_refused_before_anything_is_attached():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UnsupportedGradientError, match=r"got LBFGS, whose step\(\) requires closure"):
        make_private(model, optimizer, DataLoader(data_set(), batch_size=12, shuffle=True), NOISE)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # no hook is left


def test_trained_parameters_that_the_optimizer_lacks_are_refused():
    model, loader = network(), DataLoader(data_set(), batch_size=12)
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([first], lr=0.1)
    with pytest.raises(InvalidValueError, match=r"lacks \d of the model's \d trained parameters, such as \['0.bias'"):
        make_private(model, optimizer, loader, NOISE)
    for parameter in others:
        parameter.requires_grad_(False)
    make_private(model, optimizer, loader, NOISE).detach()


@pytest.mark.parametrize(("prepare", "words"), [("unchecked", "check=False"), ("used", "clipped already")])
def test_a_clipper_whose_bound_is_not_known_is_refused(prepare, words):
    model = network()
    clipper = PerSampleGradientClipper(model, FlatNormClipper(1.0), check=prepare != "unchecked")
    if prepare == "used":
        F.cross_entropy(model(torch.ones(2, WIDTH)), torch.zeros(2, dtype=torch.int64)).backward()
        clipper.clip_and_accumulate()
        clipper.discard()
    loader = DataLoader(data_set(), batch_size=12)
    with pytest.raises(InvalidValueError, match=words):
        make_private(clipper, torch.optim.SGD(model.parameters(), lr=0.1), loader, NOISE)


def test_a_secure_run_refuses_a_generator_of_the_rule():
    rule = QuantileNormClipper(1.0, count_noise=2.0, generator=torch.Generator())
    with pytest.raises(InvalidValueError, match="make the rule without a generator"):
        private_run(norm_clipper=rule, secure=True, seed=None)
