"""What `SpikeRecovery` notices beside spikes: weights that something else has changed, and steps it did not see."""

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidValueError
from gradguard.state.weight_watch import WeightWatch


def regression(seed, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options.setdefault("detector", gg.SpikeDetector(warmup=16, window=32, cap=5))
    return model, optimizer, gg.SpikeRecovery(model, optimizer, gg.ClipByGlobalNorm(1.0), snapshot_every=20, **options)


def train(model, optimizer, resilience, steps, change=None, at=0):
    for step in range(steps):
        x = torch.randn(16, 4)
        if step == at and change is not None:
            change(model)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        resilience.record_loss(loss).backward()
        optimizer.step()
        resilience.step()


def counted(model):
    with torch.no_grad():
        model[2].weight[0, 3] = 128.0


def behind(model):
    model[2].weight.data[0, 3] = 128.0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", [counted, behind])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_that_something_else_changed_bring_older_ones_in(change, lag, seed):
    model, optimizer, resilience = regression(seed, detection_delay=lag)
    train(model, optimizer, resilience, 100, change, at=70)
    event = resilience.events[-1]
    assert (event.what, event.action, event.changed) == ("burst", "rolled back", True)
    assert event.to_step < 70
    assert float(model[2].weight.detach().abs().max()) < 10
    assert "after weights had changed outside of the optimizer, rolled back to the weights after step" in str(event)


def test_a_burst_of_bad_data_is_no_change_of_the_weights():
    model, optimizer, resilience = regression(0)
    train(model, optimizer, resilience, 60)
    for step in range(40):
        x = torch.randn(16, 4)
        loss = (model(x) - x.sum(1, keepdim=True) - (200 if step < 9 else 0)).square().mean()
        optimizer.zero_grad()
        resilience.record_loss(loss).backward()
        optimizer.step()
        resilience.step()
    assert [event.action for event in resilience.events][-1] == "rolled back"
    assert not any(event.changed for event in resilience.events)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_change_is_seen_and_a_step_is_none(dtype):
    weights = [torch.randn(5, 3, dtype=dtype), torch.randn(7, dtype=dtype)]
    watch = WeightWatch(torch.optim.SGD(weights, lr=0.1))
    assert not watch.changed()
    weights[1].data[2] = 9.0
    assert not watch.were_written()
    assert watch.changed()
    watch.keep()
    assert not watch.changed()
    weights[0].neg_()
    assert watch.were_written()
    watch.keep()
    weights[0].data[0, 0] = torch.nan
    assert watch.changed()
    watch.keep()
    assert not watch.changed()


def flipped(weights):
    array = weights[1].numpy()  # the memory, behind torch's back
    array[4] *= -1


def swapped(weights):
    weights[0].data[[0, 1]] = weights[0].data[[1, 0]]


def exchanged(weights):
    weights[0].data, weights[2].data = weights[2].data.clone(), weights[0].data.clone()


def two_flipped(weights):
    weights[1].data[:2] *= -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", [flipped, swapped, exchanged, two_flipped])
@pytest.mark.parametrize("length", [7, 20_000, 300_001])
def test_a_change_that_keeps_the_norm_is_seen(dtype, change, length):
    if change is flipped and dtype is torch.bfloat16:
        pytest.skip("NumPy has no bfloat16")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in [(5, 3), (length,), (5, 3)]]
    watch = WeightWatch(torch.optim.SGD(weights, lr=0.1))
    assert not watch.changed()
    change(weights)
    assert not watch.were_written()
    assert watch.changed()
    watch.keep()
    assert not watch.changed()


def steps(resilience, model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        resilience.record_loss(model(torch.randn(16, 4)).square().mean()).backward()
        optimizer.step()


def test_a_step_that_is_never_called_is_an_error_before_anything_changes():
    model, optimizer, resilience = regression(0)
    steps(resilience, model, optimizer, 4)
    before = model[0].weight.clone()
    with pytest.raises(InvalidValueError, match=r"taken 4 steps since resilience.step\(\) was last called, .* Call"):
        steps(resilience, model, optimizer, 1)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(("every", "calls"), [(2, 2), (3, 1)])
def test_a_step_that_is_called_too_rarely_is_an_error(every, calls):
    model, optimizer, resilience = regression(0)
    for _ in range(calls - 1):
        steps(resilience, model, optimizer, every)
        resilience.step()
    steps(resilience, model, optimizer, every)
    with pytest.raises(InvalidValueError, match=rf"the optimizer has taken {every} steps since resilience.step\(\)"):
        resilience.step()


def test_a_loss_of_an_evaluation_is_of_no_step():
    model, optimizer, resilience = regression(0)
    train(model, optimizer, resilience, 40)
    model.eval()
    with torch.no_grad():
        resilience.record_loss(torch.tensor(1e6))
    model.train()
    train(model, optimizer, resilience, 5)
    assert resilience.events == []
    with torch.no_grad():  # of a training step, as the model says
        resilience.record_loss(torch.tensor(1e6))
    train(model, optimizer, resilience, 1)
    assert [event.action for event in resilience.events] == ["skipped"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_told_where_the_gradients_are(value):
    model, optimizer, resilience = regression(0)
    train(model, optimizer, resilience, 2)
    resilience.record_loss(value)
    with pytest.warns(RuntimeWarning, match="a loss that is NaN or infinite, and all gradients of its step are finite"):
        optimizer.step()
    resilience.step()
    assert resilience.guard.skipped_steps == 0
    resilience.record_loss(value)  # said once
    optimizer.step()
    resilience.step()


class Counting(torch.optim.Optimizer):
    """An optimizer with a state of its own in plain attributes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.count, self.log, self.mean, self.of = 0, [], torch.zeros(2), {"last": 0}

    def step(self, closure=None):
        self.count += 1
        self.log.append(self.count)
        self.mean += 1
        self.of["last"] = self.count
        self.new = True
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


def attributes(optimizer):
    return optimizer.count, list(optimizer.log), optimizer.mean.tolist(), dict(optimizer.of), hasattr(optimizer, "new")


@pytest.mark.parametrize("first", [True, False])
def test_a_skip_gives_plain_attributes_back_as_a_snapshot_does(first):
    model = nn.Linear(2, 1)
    optimizer = Counting(model.parameters())
    gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    if not first:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    before, log, mean = attributes(optimizer), optimizer.log, optimizer.mean
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert attributes(optimizer) == before
    assert optimizer.log is log
    assert optimizer.mean is mean
