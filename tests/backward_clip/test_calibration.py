"""`calibrate_error_clip`: it records N steps, changes nothing, and proposes the size of gradients next to the loss."""

import math
import statistics

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError


def _mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.randn(32, 6)


def _record(calibration, loss, **options):
    with gg.error_clip(loss, calibration, **options):
        (loss * options.get("scale", 1.0)).backward()


def _constant_gradient(size, elements=3):
    """Return a loss whose one intermediate gradient is ``size`` in every element."""
    return (torch.ones(elements, requires_grad=True) * 2 * size).sum()


def _chain(sizes):
    """Return a loss whose intermediate gradients have these sizes, the one next to the loss first."""
    h = torch.ones(1, requires_grad=True) * 1
    for larger, smaller in reversed(list(zip(sizes[1:], sizes, strict=False))):
        h = h * (larger / smaller)
    return (h * sizes[0]).sum()


@pytest.mark.parametrize("counted", [1, 3])
def test_it_records_as_many_steps_as_it_was_told_then_stops(counted):
    calibration = gg.calibrate_error_clip(steps=counted)
    for step in range(5):
        assert calibration.done is (step >= counted)
        _record(calibration, _chain([10.0**step, 10.0**step]))
    assert f"steps: {counted}\n" in str(calibration)
    assert calibration.threshold == pytest.approx(statistics.median(10.0**step for step in range(counted)))


@pytest.mark.parametrize("options", [{}, {"scale": 8.0}, {"leaves": True}], ids=str)
@pytest.mark.parametrize("steps", [1, 20])
def test_it_changes_no_gradient(steps, options):
    model, x = _mlp()
    calibration = gg.calibrate_error_clip(model, steps=steps)
    for _ in range(2):
        loss = model(x).square().mean()
        expected = torch.autograd.grad(options.get("scale", 1.0) * loss, list(model.parameters()), retain_graph=True)
        model.zero_grad()
        _record(calibration, loss, **options)
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected), rtol=0, atol=0)


@pytest.mark.parametrize("factor", [1.0, 0.1, 3])
def test_it_proposes_the_median_over_steps_of_the_largest_next_to_the_loss(factor):
    calibration = gg.calibrate_error_clip(factor=factor)
    for size in (1.0, 4.0, 9.0):
        _record(calibration, _chain([size, 2 * size, size / 2]))
    assert calibration.threshold == pytest.approx(factor * 8.0)
    rule = calibration.rule()
    assert isinstance(rule, gg.ErrorClipByValue)
    assert (rule.max, rule.min) == (calibration.threshold, -calibration.threshold)


def test_next_to_the_loss_are_the_first_ten():
    calibration = gg.calibrate_error_clip()
    _record(calibration, _chain([1.0] * 8 + [2.0] + [1e6] * 5))  # and the 1 that the sum hands on
    assert calibration.threshold == pytest.approx(2.0)
    assert calibration.growth == pytest.approx(5e5)


def test_a_loss_scale_is_taken_out_of_the_proposal():
    """The proposal is in units of the unscaled loss, as the thresholds of all rules are."""
    calibration = gg.calibrate_error_clip()
    _record(calibration, _chain([3.0, 3.0]), scale=1024.0)
    assert calibration.threshold == pytest.approx(3.0)


def test_the_proposal_clips_nothing_in_a_healthy_network():
    model, x = _mlp()
    calibration, stats = gg.calibrate_error_clip(steps=1), gg.ErrorClipStats()
    _record(calibration, model(x).square().mean())
    loss = model(x).square().mean()
    with gg.error_clip(loss, calibration.rule(), stats=stats):
        loss.backward()
    assert sum(int(row.clipped) for row in stats.rows()) == 0


def test_the_table():
    model = nn.Sequential(nn.Identity(), nn.Tanh())
    calibration = gg.calibrate_error_clip(model)
    for factor in (1.0, 2.0):
        h = model(torch.zeros(3, requires_grad=True) * 4)
        _record(calibration, (h * factor * 0.5).sum())
    assert str(calibration).splitlines() == [
        "gradient of the output of  module  largest element",
        "MulBackward0               -                     1",
        "TanhBackward0              1                     1",
        "steps: 2",
        "next to the loss: 1; largest anywhere: 1 (1 times that)",
        "proposed threshold: 1",
    ]


@pytest.mark.parametrize("read", [str, lambda c: c.threshold, lambda c: c.growth, lambda c: c.rule()])
def test_nothing_recorded_is_an_error(read):
    with pytest.raises(InvalidValueError, match=r"nothing was recorded: run some backwards in `with gg.error_clip"):
        read(gg.calibrate_error_clip())


def test_a_block_without_a_backward_is_no_step():
    calibration, loss = gg.calibrate_error_clip(steps=1), _chain([1.0, 1.0])
    with gg.error_clip(loss, calibration):
        pass
    assert not calibration.done
    _record(calibration, loss)
    assert calibration.done


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("read", [str, lambda c: c.threshold, lambda c: c.growth, lambda c: c.rule()])
def test_only_nonfinite_gradients_are_an_error(bad, read):
    calibration, h = gg.calibrate_error_clip(), torch.ones(2, requires_grad=True) * 2
    with gg.error_clip([h], calibration):
        (h * bad).sum().backward()
    with pytest.raises(InvalidValueError, match="no step had finite gradients other than 0 next to the loss"):
        read(calibration)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_gradient_far_from_the_loss_is_infinite_growth(bad):
    calibration = gg.calibrate_error_clip()
    h = torch.ones(2, requires_grad=True) * 1
    _record(calibration, (((h * 1) * bad).exp() * 0.0 + h * 3.0).sum())
    assert calibration.growth == math.inf
    assert calibration.threshold < math.inf
    assert "largest anywhere: inf (inf times that)" in str(calibration)


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": -1}, {"factor": 0.0}, {"factor": -1.0}, {"factor": math.nan}]
)
def test_steps_and_factor_must_be_above_0(options):
    with pytest.raises(InvalidValueError, match="expected numbers above 0"):
        gg.calibrate_error_clip(**options)


def test_a_calibration_takes_no_statistics():
    loss = _chain([1.0, 1.0])
    with (
        pytest.raises(InvalidTypeError, match="a calibration is its own statistics: leave stats= out"),
        gg.error_clip(loss, gg.calibrate_error_clip(), stats=gg.ErrorClipStats()),
    ):
        pass


def test_it_may_watch_a_module():
    model, x = _mlp()
    calibration = gg.calibrate_error_clip(model, steps=2)
    for _ in range(3):
        with gg.error_clip(model, calibration):
            model(x).square().mean().backward()
    assert calibration.done
    assert "AddmmBackward0" in str(calibration)


def test_detach_removes_the_hooks_that_name_modules():
    model, _ = _mlp()
    calibration = gg.calibrate_error_clip(model)
    assert all(m._forward_hooks and m._forward_pre_hooks for m in model)
    calibration.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    gg.calibrate_error_clip().detach()


def _echo_loss(gain, steps=100, hidden=64, batch=16):
    """Return the loss of a tanh RNN with an orthogonal recurrence times ``gain`` that repeats inputs 3 steps later."""
    torch.manual_seed(0)
    recurrence = nn.Parameter(gain * nn.init.orthogonal_(torch.empty(hidden, hidden)))
    into, out = nn.Linear(1, hidden), nn.Linear(hidden, 1)
    x, h, outputs = 2 * torch.rand(steps, batch, 1) - 1, torch.zeros(batch, hidden), []
    for step in range(steps):
        h = torch.tanh(into(x[step]) + h @ recurrence.t())
        outputs.append(out(h))
    return (torch.stack(outputs[3:]) - x[:-3]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("gain", "explodes"), [(2.5, True), (0.8, False)])
def test_growth_tells_an_exploding_rnn_from_a_healthy_one(gain, explodes):
    calibration = gg.calibrate_error_clip()
    _record(calibration, _echo_loss(gain))
    assert (calibration.growth > 1e3) is explodes
    assert calibration.threshold < 1e-2


def test_growth_is_small_in_a_healthy_mlp():
    model, x = _mlp()
    calibration = gg.calibrate_error_clip()
    _record(calibration, model(x).square().mean())
    assert 1 <= calibration.growth < 10
