"""A resumed run goes on where it was, with the same counts and never with the same noise."""

import pytest
import torch

from gradguard import QuantileNormClipper
from gradguard.errors import InvalidValueError
from private.runs import one_step, private_run, train, weights


def saved(private, model):
    return {"model": {k: v.clone() for k, v in model.state_dict().items()}, "private": private.state_dict()}


def resumed(state, **options):
    private, model = private_run(**options)
    model.load_state_dict(state["model"])
    private.load_state_dict(state["private"])
    return private, model


@pytest.mark.parametrize("steps", [0, 2, 5, 7])
def test_a_resumed_run_without_noise_is_the_same_as_one_that_never_stopped(steps):
    options = {"noise_multiplier": 0.0, "max_physical_batch_size": 5}
    private, model = private_run(**options)
    state = None if steps else saved(private, model)
    for _ in range(2):
        for batch in private.loader:
            if one_step(private, model, batch) and private.steps == steps:
                state = saved(private, model)
    again, other = resumed(state, **options)
    while again.steps < 10:
        train(again, other)
    assert torch.equal(weights(model), weights(other))
    assert again.state_dict() == private.state_dict()
    assert again.accountant.history == [(0.0, 0.2, 10)]


@pytest.mark.parametrize("seed", [7, None])
def test_a_resumed_run_never_repeats_noise(seed):
    private, model = private_run(seed=seed)
    state = saved(private, model)
    runs = [resumed(state, seed=seed) for _ in range(2)] + [(private, model)]
    for run in runs:
        train(*run)
    for i in range(3):
        for j in range(i):
            assert float((weights(runs[i][1]) - weights(runs[j][1])).abs().min()) > 0


def test_a_checkpoint_holds_no_secret():
    rule = QuantileNormClipper(1.0, count_noise=2.0, generator=torch.Generator())
    private, model = private_run(norm_clipper=rule)
    train(private, model)
    state = private.state_dict()
    assert state["norm_clipper"]["generator"] is None
    assert state["batches"] == {"step": 5, "position": 0}
    before = rule.generator.get_state()
    private.load_state_dict(state)
    assert not torch.equal(rule.generator.get_state(), before)


def test_a_checkpoint_within_a_logical_batch_is_refused():
    private, model = private_run(max_physical_batch_size=2)
    one_step(private, model, next(iter(private.loader)))
    with pytest.raises(InvalidValueError, match="would save sums without noise"):
        private.state_dict()


def test_a_state_of_another_kind_is_refused():
    private, _ = private_run()
    other, _ = private_run(poisson_sampling=False)
    for state in ({}, other.state_dict()):
        with pytest.raises(InvalidValueError, match="expected the state of a private training with Poisson"):
            private.load_state_dict(state)
