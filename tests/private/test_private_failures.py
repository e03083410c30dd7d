"""What was drawn is what is clipped; a step that fails adds nothing twice, and what it cost is counted."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from gradguard import QuantileNormClipper
from gradguard.errors import GradguardError, InvalidValueError
from gradguard.per_sample.sample_results import Accumulation
from gradguard.private import GaussianNoise
from private.runs import one_step, private_run, train, weights

OVER = "this pass over private.loader is over"
TOKENS = 5


def quantile():
    return QuantileNormClipper(1.0, count_noise=5.0, generator=torch.Generator().manual_seed(0))


def standing(private, model):
    """All that a step may change."""
    batches = None if private._batches is None else private._batches.state_dict()
    rule = private.clipper.norm_clipper.max_norm
    return weights(model).tolist(), private.steps, private.accountant.history[:], batches, rule


@pytest.fixture
def draws(monkeypatch):
    """The standard deviation of each draw of noise."""
    found, add = [], GaussianNoise.add_
    monkeypatch.setattr(
        GaussianNoise, "add_", lambda self, sums, std, **scale: (found.append(std), add(self, sums, std, **scale))[1]
    )
    return found


@contextmanager
def out_of_memory(error=torch.OutOfMemoryError):
    """Fail when the sum of one parameter has been added and that of the next has not."""
    add, calls = Accumulation.add, []

    def add_once(self, name, total):
        calls.append(name)
        if len(calls) == 2:
            raise error("while adding")
        add(self, name, total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accumulation, "add", add_once)
        with pytest.raises(error, match="while adding"):
            yield


# The number of samples


def rows(batch, change):
    return [change(part) for part in batch[:2]]


WRONG = {
    "twice": lambda part: part.repeat(2, *[1] * (part.dim() - 1)),
    "one left out": lambda part: part[1:],
    "one added": lambda part: torch.cat([part, part[:1]]),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("max_physical", [None, 4])
def test_other_rows_than_were_drawn_are_refused_and_the_right_ones_may_follow(wrong, max_physical, draws):
    options = {"norm_clipper": quantile(), "max_physical_batch_size": max_physical}
    private, model = private_run(**options)
    twin, other = private_run(**{**options, "norm_clipper": quantile()})
    loader, twins = iter(private.loader), iter(twin.loader)
    batch = next(loader)
    before = standing(private, model)
    with pytest.raises(InvalidValueError, match=rf"the model saw \d+ samples where {len(batch[0])} were drawn, so"):
        one_step(private, model, rows(batch, WRONG[wrong]))
    assert standing(private, model) == before
    assert draws == []
    one_step(private, model, batch)
    one_step(twin, other, next(twins))
    for batch, again in zip(loader, twins, strict=True):
        one_step(private, model, batch)
        one_step(twin, other, again)
    assert standing(private, model) == standing(twin, other)
    assert private.steps == private.accountant.steps == 5


def test_a_row_too_few_is_not_made_up_for_by_one_too_many(draws):
    private, model = private_run(max_physical_batch_size=4)
    loader = iter(private.loader)
    with pytest.raises(InvalidValueError, match=r"the model saw \d+ samples where \d+ were drawn"):
        one_step(private, model, rows(next(loader), WRONG["one left out"]))
    with pytest.raises(InvalidValueError, match="was not called for the last one, or has failed"):
        next(loader)
    assert draws == []


def test_rows_that_are_wrong_in_a_later_part_end_the_pass(draws):
    private, model = private_run(norm_clipper=quantile(), max_physical_batch_size=4)
    before = standing(private, model)
    loader = iter(private.loader)
    assert not one_step(private, model, next(loader))
    batch = next(loader)
    with pytest.raises(InvalidValueError, match=r"the model saw \d+ samples where \d+ were drawn"):
        one_step(private, model, rows(batch, WRONG["one left out"]))
    with pytest.raises(InvalidValueError, match="After an error within a logical batch, begin a new pass"):
        one_step(private, model, batch)
    with pytest.raises(InvalidValueError, match=OVER):
        next(loader)
    assert standing(private, model) == before
    assert draws == []
    train(private, model)
    assert private.steps == private.accountant.steps == len(draws) == 5


def test_samples_that_somebody_else_added_are_refused(draws):
    private, model = private_run()
    batch = next(iter(private.loader))
    before = weights(model)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    private.clipper.clip_and_accumulate()
    with pytest.raises(InvalidValueError, match=r"the model saw \d+ samples where \d+ were drawn"):
        one_step(private, model, batch)
    assert torch.equal(weights(model), before)
    assert draws == []


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).tanh()


def step_on(private, model, x):
    model(x).sum((1, 2)).mean().backward()
    return private.step()


def test_tokens_in_place_of_samples_are_refused(draws):
    torch.manual_seed(1)
    private, model = private_run(Tokens(), data=TensorDataset(torch.randn(60, TOKENS, 4)))
    loader = iter(private.loader)
    (x,) = next(loader)
    assert step_on(private, model, x)
    before = standing(private, model)
    (x,) = next(loader)
    assert len(x) > TOKENS
    with pytest.raises(
        GradguardError,
        match=f"rows where {len(x)} samples|saw {TOKENS} samples where {len(x)} were|adds up .* rows of each",
    ):
        step_on(private, model, x.transpose(0, 1))
    assert standing(private, model) == before
    assert private.steps == private.accountant.steps == len(draws) == 1


# What is left of a batch


def test_an_epoch_that_is_left_within_a_batch_moves_no_threshold(draws):
    private, model = private_run(norm_clipper=quantile(), max_physical_batch_size=3)
    twin, other = private_run(norm_clipper=quantile(), max_physical_batch_size=3)
    before = standing(private, model)
    for _ in range(30):
        for batch in private.loader:
            assert not one_step(private, model, batch)
            break
    assert standing(private, model) == before
    assert draws == []
    train(private, model)
    train(twin, other)
    assert standing(private, model) == standing(twin, other)
    assert private.clipper.norm_clipper.max_norm != 1.0


# Errors in the clipper


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("max_physical", [None, 4])
def test_a_first_part_that_failed_may_be_repeated_and_counts_once(error, max_physical):
    runs = [private_run(norm_clipper=quantile(), max_physical_batch_size=max_physical) for _ in range(2)]
    for fails, (private, model) in enumerate(runs):
        ended = True
        for batch in private.loader:
            if fails and ended:
                with out_of_memory(error):
                    one_step(private, model, batch)
            ended = one_step(private, model, batch)
    assert standing(*runs[0]) == standing(*runs[1])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_later_part_that_failed_ends_the_pass_and_nothing_of_its_batch_is_used(error, draws):
    private, model = private_run(norm_clipper=quantile(), max_physical_batch_size=4)
    twin, other = private_run(norm_clipper=quantile(), max_physical_batch_size=4)
    before, loader = standing(private, model), iter(private.loader)
    assert not one_step(private, model, next(loader))
    batch = next(loader)
    with out_of_memory(error):
        one_step(private, model, batch)
    with pytest.raises(InvalidValueError, match="After an error within a logical batch, begin a new pass"):
        one_step(private, model, batch)
    with pytest.raises(InvalidValueError, match=OVER):
        next(loader)
    assert standing(private, model) == before
    assert private.state_dict()["steps"] == 0
    assert draws == []
    train(private, model)
    train(twin, other)
    assert standing(private, model) == standing(twin, other)


def test_a_backward_that_was_forgotten_in_a_first_part_may_follow():
    private, model = private_run()
    batch = next(iter(private.loader))
    with pytest.raises(InvalidValueError, match="no gradients to clip"):
        private.step()
    assert one_step(private, model, batch)


def test_gradients_from_elsewhere_may_be_removed():
    private, model = private_run(max_physical_batch_size=4)
    loader = iter(private.loader)
    assert not one_step(private, model, next(loader))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    batch = next(loader)
    with pytest.raises(InvalidValueError, match=r"0.weight: .grad was filled by something other"):
        one_step(private, model, batch)
    private.optimizer.zero_grad()
    private.step()
    for batch in loader:
        one_step(private, model, batch)
    assert private.steps == 5


def test_an_optimizer_that_failed_was_paid_for_and_leaves_no_gradient(draws):
    private, model = private_run(norm_clipper=quantile())
    loader = iter(private.loader)
    batch = next(loader)
    hook = private.optimizer.register_step_post_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        one_step(private, model, batch)
    hook.remove()
    assert private.steps == private.accountant.steps == private._batches.step == len(draws) == 1
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(InvalidValueError, match=OVER):
        next(loader)
    train(private, model)
    assert private.steps == private.accountant.steps == len(draws) == 6


# Passes that must not go on


@pytest.mark.parametrize("poisson_sampling", [True, False])
@pytest.mark.parametrize("max_physical", [None, 4])
def test_a_pass_ends_where_a_state_is_loaded_and_all_that_follows_is_counted(poisson_sampling, max_physical, draws):
    private, model = private_run(poisson_sampling=poisson_sampling, max_physical_batch_size=max_physical)
    state, loader = private.state_dict(), iter(private.loader)
    while private.steps < 2:
        one_step(private, model, next(loader))
    private.load_state_dict(state)
    assert private.epsilon() == 0.0
    with pytest.raises(InvalidValueError, match=OVER):
        one_step(private, model, next(loader))
    assert len(draws) == 2
    train(private, model)
    assert private.steps == 5
    assert private.accountant.history == [(1.0, 0.2, 5) if poisson_sampling else (1.0, 1.0, 1)]


def test_a_pass_whose_cost_was_rolled_back_is_counted_again():
    private, model = private_run(poisson_sampling=False)
    state = private.state_dict()
    one_step(private, model, next(iter(private.loader)))
    private.load_state_dict(state)
    train(private, model)
    assert private.accountant.history == [(1.0, 1.0, 1)]


def test_of_two_passes_only_the_last_goes_on():
    private, model = private_run()
    first = iter(private.loader)
    one_step(private, model, next(first))
    one_step(private, model, next(iter(private.loader)))
    with pytest.raises(InvalidValueError, match=OVER):
        next(first)


def test_a_pass_that_was_abandoned_at_its_end_says_so():
    private, model = private_run(batch_size=60, max_physical_batch_size=50)
    loader = iter(private.loader)
    one_step(private, model, next(loader))
    batch = next(loader)
    with out_of_memory():
        one_step(private, model, batch)
    with pytest.raises(InvalidValueError, match=OVER):
        next(loader)
    assert private.steps == 0
