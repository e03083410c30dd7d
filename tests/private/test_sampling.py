"""Poisson batches: each sample joins each batch with probability q, whatever else happens."""

import itertools
import math

import pytest
import torch

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.private import PoissonBatches
from gradguard.private.sampling import MicroBatches

SIZE, RATE, STEPS = 200, 0.1, 3000


@pytest.fixture(scope="module")
def drawn():
    """[STEPS, SIZE]: whether the sample was drawn."""
    batches = PoissonBatches(SIZE, RATE, seed=0)
    table = torch.zeros(STEPS, SIZE, dtype=torch.float64)
    for step in range(STEPS):
        table[step, batches.draw(step)] = 1
    return table


def test_each_sample_is_drawn_as_often_as_it_should_be(drawn):
    error = math.sqrt(RATE * (1 - RATE) / STEPS)
    assert float((drawn.mean(0) - RATE).abs().max()) < 4.5 * error
    assert abs(float(drawn.mean()) - RATE) < 4 * error / math.sqrt(SIZE)


def test_the_size_of_a_batch_has_the_variance_of_independent_draws(drawn):
    expected = SIZE * RATE * (1 - RATE)
    assert abs(float(drawn.sum(1).var()) / expected - 1) < 4 * math.sqrt(2 / STEPS)


def test_samples_and_steps_are_independent(drawn):
    between_samples = torch.corrcoef(drawn.T) - torch.eye(SIZE)
    assert float(between_samples.abs().max()) < 5.5 / math.sqrt(STEPS)
    from_step_to_step = torch.corrcoef(torch.stack([drawn[:-1].flatten(), drawn[1:].flatten()]))[0, 1]
    assert abs(float(from_step_to_step)) < 4 / math.sqrt(STEPS * SIZE)


def test_an_epoch_has_one_over_q_batches_and_epochs_differ():
    batches = PoissonBatches(50, 0.3, seed=1)
    assert len(batches) == 3
    first, second = list(batches), list(batches)
    assert len(first) == len(second) == 3
    assert first != second
    assert len(list(PoissonBatches(50, 0.3, steps=7))) == 7


def test_a_rate_of_one_draws_everything():
    assert list(PoissonBatches(4, 1.0)) == [[0, 1, 2, 3]]


def test_without_a_seed_runs_differ_and_with_one_they_agree():
    assert list(PoissonBatches(500, 0.5)) != list(PoissonBatches(500, 0.5))
    assert list(PoissonBatches(500, 0.5, seed=4)) == list(PoissonBatches(500, 0.5, seed=4))


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_one_sample(world_size):
    whole = PoissonBatches(101, 0.2, seed=5)
    parts = [PoissonBatches(101, 0.2, seed=5, rank=r, world_size=world_size) for r in range(world_size)]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert sorted(itertools.chain(*shares)) == batch
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_saved_sampler_goes_on_where_it_was():
    batches, resumed = PoissonBatches(100, 0.1, seed=6), PoissonBatches(100, 0.1, seed=6)
    epochs = [list(batches), list(batches)]
    half = iter(resumed)
    for _ in range(4):
        next(half)
    fresh = PoissonBatches(100, 0.1, seed=6)
    fresh.load_state_dict(resumed.state_dict())
    assert list(fresh) == epochs[0][4:]
    assert list(fresh) == epochs[1]


def test_a_resumed_sampler_without_a_seed_repeats_no_draw_and_saves_no_secret():
    batches = PoissonBatches(100, 0.1)
    before = [batches.draw(step).tolist() for step in range(10)]
    assert batches.state_dict() == {"step": 0, "position": 0}
    batches.load_state_dict({"step": 0, "position": 0})
    assert [batches.draw(step).tolist() for step in range(10)] != before


def cut(batches, max_size, stand_in=None):
    """The micro-batches, each with whether it ends a logical batch; None for those without data."""
    micro = MicroBatches(lambda: iter(batches), max_size, stand_in)
    shown = iter(micro)
    yielded = list(shown)
    return [(yielded.pop(0) if m.has_data else None, m.size, m.ends) for m in micro.plan]


TABLE = {
    "whole": ([([1, 2, 3], 3)], None, None, [([1, 2, 3], 3, True)]),
    "two parts": ([([1, 2, 3], 3)], 2, None, [([1, 3], 2, False), ([2], 1, True)]),
    "exact": ([([1, 2], 2), ([3], 1)], 2, None, [([1, 2], 2, True), ([3], 1, True)]),
    "empty": ([([], 0), ([1], 1)], 2, None, [(None, 0, True), ([1], 1, True)]),
    "empty for everybody": ([([], 0)], 2, 9, [(None, 0, True)]),
    "another process has one": ([([], 1)], 2, None, [(None, 0, True)]),
    "stand-in": ([([], 1)], 2, 9, [([9], 0, True)]),
    "as many parts as another": ([([1], 2)], 1, None, [([1], 1, False), (None, 0, True)]),
    "as many parts, stand-in": ([([1], 2)], 1, 9, [([1], 1, False), ([9], 0, True)]),
}


@pytest.mark.parametrize("case", TABLE)
def test_logical_batches_are_cut_and_their_ends_are_known(case):
    batches, max_size, stand_in, expected = TABLE[case]
    assert cut(batches, max_size, stand_in) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"size": 0}, InvalidValueError, "size=0: expected a whole number >= 1"),
        ({"size": 1.5}, InvalidTypeError, "size=1.5: expected a whole number"),
        ({"sample_rate": 0.0}, InvalidValueError, "sample_rate=0.0: expected a number above 0"),
        ({"sample_rate": 1.1}, InvalidValueError, "sample_rate=1.1: expected a number"),
        ({"steps": 0}, InvalidValueError, "steps=0: expected a whole number >= 1"),
        ({"rank": 1}, InvalidValueError, "expected 0 <= rank < world_size"),
        ({"world_size": 2}, InvalidValueError, "all processes must draw the same sample"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        PoissonBatches(**{"size": 10, "sample_rate": 0.5, **arguments})


@pytest.mark.parametrize("state", [{}, {"step": 1}, {"step": 1, "position": 11}])
def test_a_wrong_state_is_refused(state):
    with pytest.raises(InvalidValueError, match="expected the state of a PoissonBatches with 10 batches"):
        PoissonBatches(100, 0.1).load_state_dict(state)
