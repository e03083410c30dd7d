"""Private training step by step: what it adds, what it divides by, when it steps, and what it costs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from gradguard import AutoNormClipper, FlatNormClipper, PerLayerNormClipper, QuantileNormClipper
from gradguard.errors import InvalidValueError
from gradguard.private import GaussianNoise
from private.runs import (
    COMMON,
    SIZE,
    WIDTH,
    clipped_sum,
    data_set,
    made_private,
    network,
    one_step,
    private_run,
    train,
    weights,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("max_physical", [None, 1, 5])
def test_without_noise_a_step_is_the_clipped_sum_over_the_expected_batch_size(reduction, max_physical):
    twin = network()
    private, model = private_run(
        noise_multiplier=0.0, max_norm=0.5, loss_reduction=reduction, max_physical_batch_size=max_physical
    )
    pending, steps = [], 0
    for batch in private.loader:
        twin.load_state_dict(model.state_dict()) if not pending else None
        pending.append(batch)
        before = weights(model)
        stepped = one_step(private, model, batch, reduction)
        if not stepped:
            assert torch.equal(weights(model), before)
            continue
        expected = before - 0.5 * clipped_sum(twin, pending, 0.5) / (12 if reduction == "mean" else 1)
        torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-6)
        assert all(p.grad is None for p in model.parameters())
        pending, steps = [], steps + 1
    assert steps == private.steps == len(private.loader) == 5


def test_any_cut_into_micro_batches_gives_the_same_with_one_draw_of_noise_each_step(monkeypatch):
    draws = []
    add = GaussianNoise.add_
    monkeypatch.setattr(
        GaussianNoise, "add_", lambda self, sums, std, **scale: (draws.append(std), add(self, sums, std, **scale))[1]
    )
    found = {}
    for size in (None, 100, 7, 1):
        private, model = private_run(max_physical_batch_size=size, max_norm=0.7)
        train(private, model, epochs=2)
        found[size] = weights(model)
    assert draws == [0.7] * 40
    for size in (100, 7, 1):
        torch.testing.assert_close(found[size], found[None], rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("rule", "sensitivity"),
    [(None, 1.0), (FlatNormClipper(0.3), 0.3), (AutoNormClipper(0.2), 0.2), (PerLayerNormClipper(0.5), 0.5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_is_scaled_by_the_sensitivity_in_each_dtype(monkeypatch, rule, sensitivity, dtype):
    model = nn.Linear(1000, 1000, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    data = TensorDataset(torch.zeros(50, 1000, dtype=dtype))
    private, _ = private_run(model, batch_size=50, data=data, lr=1.0, noise_multiplier=2.0, norm_clipper=rule)
    monkeypatch.setattr(private._batches, "draw", lambda step: torch.zeros(0, dtype=torch.int64))
    assert list(private.loader) == []
    values = model.weight.detach().double() * (50 / 2.0 / sensitivity)
    assert abs(float(values.std()) - 1) < 4 / math.sqrt(2 * values.numel())
    assert len(model.weight.unique()) > (800_000 if dtype is torch.float64 else 2000)


def test_the_quantile_clipper_gets_more_noise_than_is_accounted_for():
    rule = QuantileNormClipper(1.0, count_noise=2.0)
    private, model = private_run(norm_clipper=rule)
    assert private.terms.gradient_noise_multiplier == rule.noise_multiplier_for_gradients(1.0) > 1.0
    assert rule.expected_batch_size == 12
    train(private, model)
    assert private.accountant.history == [(1.0, 0.2, 5)]
    assert rule.max_norm != 1.0


def test_a_seed_repeats_a_run_and_no_seed_does_not():
    first, again, other, free = (
        weights((run := private_run(seed=seed), train(*run))[0][1]) for seed in (7, 7, 8, None)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, free)


def test_secure_noise_trains_and_refuses_a_seed():
    private, model = private_run(secure=True, seed=None)
    assert train(private, model).count(True) == private.steps
    with pytest.raises(InvalidValueError, match="secure noise takes every bit from the operating system"):
        private_run(secure=True)


# Empty batches


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("max_physical", [None, 1])
def test_empty_batches_are_steps_of_noise_that_the_loop_never_sees(workers, max_physical):
    loader = DataLoader(data_set(40), batch_size=1, num_workers=workers)
    private, model = private_run(loader=loader, max_physical_batch_size=max_physical)
    before, seen = weights(model), 0
    for batch in private.loader:
        seen += len(batch[0]) > 0
        one_step(private, model, batch)
    drawn = [len(private._batches.draw(step)) for step in range(40)]
    assert seen == sum(drawn) if max_physical else seen == sum(size > 0 for size in drawn)
    assert drawn.count(0) > 5
    assert private.steps == private.accountant.steps == 40
    assert not torch.equal(weights(model), before)


def test_an_epoch_of_empty_batches_still_adds_noise(monkeypatch):
    private, model = private_run()
    monkeypatch.setattr(private._batches, "draw", lambda step: torch.zeros(0, dtype=torch.int64))
    before = weights(model)
    assert train(private, model) == []
    assert private.steps == 5
    assert float((weights(model) - before).abs().min()) > 0


# Accounting


def test_a_target_epsilon_is_reached_and_not_passed():
    private, model = private_run(epsilon=4.0, epochs=2)
    assert private.epsilon() == 0.0
    train(private, model)
    assert 0 < private.epsilon() < 4.0
    train(private, model)
    assert 3.99 <= private.epsilon() <= 4.0
    before = weights(model)
    with pytest.raises(InvalidValueError, match="the target epsilon is spent: noise was chosen for 10 steps"):
        train(private, model)
    assert torch.equal(weights(model), before)


def test_shuffled_batches_are_accounted_for_without_a_gain_from_sampling():
    shuffled, model = private_run(poisson_sampling=False)
    sampled, other = private_run()
    seen = []
    for batch in shuffled.loader:
        seen += batch[2].tolist()
        one_step(shuffled, model, batch)
    train(sampled, other)
    assert sorted(seen) == list(range(SIZE))
    assert shuffled.accountant.history == [(1.0, 1.0, 1)]
    assert sampled.accountant.history == [(1.0, 0.2, 5)]
    assert shuffled.epsilon() > 1.2 * sampled.epsilon()


def test_shuffled_batches_may_be_calibrated_and_cut_too():
    private, model = private_run(poisson_sampling=False, epsilon=4.0, epochs=2, max_physical_batch_size=5)
    assert train(private, model, epochs=2).count(True) == 10
    assert 3.99 <= private.epsilon() <= 4.0
    with pytest.raises(InvalidValueError, match="the target epsilon is spent"):
        train(private, model)


# Half precision and scaled losses


def test_a_scaled_loss_changes_nothing_and_the_scale_stays():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    private, model = private_run(scaler=scaler)
    plain, other = private_run()
    for (x, y, _), batch in zip(private.loader, plain.loader, strict=True):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        private.step()
        one_step(plain, other, batch)
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == 1024.0
    with pytest.raises(InvalidValueError, match=r"call private.step\(\)"):
        private.optimizer.step()


# An audit with a canary


def released(with_canary, runs, sabotage=None):
    """Projections of what a step releases on the canary's gradient, at sampling rate 1."""
    model = nn.Linear(WIDTH, 1, bias=False)
    nn.init.zeros_(model.weight)
    x = torch.zeros(4, WIDTH)
    x[0, 0] = 100.0 * with_canary
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    private = made_private(model, optimizer, loader, loss_reduction="sum", **{**COMMON, "delta": 1e-2})
    if sabotage:
        sabotage(private)
    values = []
    for _ in range(runs):
        nn.init.zeros_(model.weight)
        for (batch,) in private.loader:
            (-model(batch).sum()).backward()
            private.step()
        values.append(float(model.weight[0, 0].detach()))
    return torch.tensor(values)


def effective_noise_multiplier(sabotage=None, runs=300):
    """Standard deviation over distance of the two distributions: what an attacker would measure."""
    with_canary, without = released(1, runs, sabotage), released(0, runs, sabotage)
    deviation = torch.cat([with_canary - with_canary.mean(), without - without.mean()]).std()
    return float(deviation / (with_canary.mean() - without.mean()))


def half_the_noise(private):
    add = private.noise.add_
    private.noise.add_ = lambda sums, deviation, **scale: add(sums, deviation / 2, **scale)


def no_clipping(private):
    private.clipper.norm_clipper.max_norm = 100.0
    private.clipper.sensitivity = lambda relation="add_or_remove_one": 1.0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_audit_finds_the_promised_noise_and_catches_sabotage():
    assert abs(effective_noise_multiplier() - 1) < 0.25
    assert effective_noise_multiplier(half_the_noise) < 0.7
    assert effective_noise_multiplier(no_clipping) < 0.1
