"""A step that an error ends did not happen: it leaves no count, no loss, and nothing in the rules' memory."""

import math

import pytest
import torch
from guarded import ALL, assert_same, held, model, put_gradients, spoil

import gradguard as gg

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


class StopError(Exception):
    """The error of a user's hook, closure or step."""


class Run:
    """Training on the same batches, with steps that raise in between; a spike where ``size`` is large."""

    def __init__(self, name, watch):
        self.net = model()
        self.optimizer = OPTIMIZERS[name](self.net.parameters())
        detector = gg.SpikeDetector(warmup=4, window=16, cap=3)
        self.recovery = None
        if watch == "recovery":
            self.recovery = gg.SpikeRecovery(self.net, self.optimizer, gg.ClipByMedian(warmup=2), detector=detector)
            self.guard = self.recovery.guard
        else:
            spikes = gg.SkipSpikes(detector) if watch == "spikes" else None
            self.guard = gg.Guard(self.optimizer, gg.ClipByMedian(warmup=2), model=self.net, spikes=spikes)
        self.record = (self.recovery or self.guard).record_loss if watch else (lambda loss: loss)
        self.fails = False
        self.optimizer.register_step_pre_hook(self.hook)  # behind that of the guard

    def hook(self, *_):
        if self.fails:
            raise StopError("on purpose")

    def closure(self, step, size, raises=False):
        def evaluate():
            self.optimizer.zero_grad()
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            loss = size * (self.net(x) - x[:, :2]).square().mean()
            self.record(loss).backward()
            if raises:
                raise StopError("on purpose")
            return loss

        return evaluate

    def step(self, step, size=1.0):
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(self.closure(step, size))
        else:
            self.closure(step, size)()
            self.optimizer.step()
        if self.recovery is not None:
            self.recovery.step()

    def raising_step(self, how, size):
        if how == "closure":
            with pytest.raises(StopError, match="on purpose"):
                self.optimizer.step(self.closure(90, size, raises=True))
            return
        self.fails = how == "hook"
        with pytest.raises(StopError, match="on purpose"):
            self.step(90, size)
        self.fails = False

    def seen(self):
        state = self.guard.state_dict()
        learnt = [state["clipper"], *([state["spikes"]] if "spikes" in state else [])]
        return [state["steps"], state["skipped"], state["skipped_in_a_row"], learnt]


@pytest.mark.parametrize("watch", ["spikes", "recovery"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loss_of_a_closure_that_raised_is_not_that_of_the_next_step(name, watch):
    plain, broken = Run(name, watch), Run(name, watch)
    for step in range(10):
        plain.step(step)
        if step == 6:
            broken.raising_step("closure", 1000.0)
        broken.step(step)
    assert broken.guard.skipped_steps == 0
    assert_same(held(broken.net, broken.optimizer), held(plain.net, plain.optimizer))
    assert_same(broken.seen(), plain.seen())


def test_the_loss_of_a_closure_that_raised_is_gone_where_the_next_step_has_none():
    run = Run("SGD", "spikes")
    for step in range(10):
        run.step(step)
    run.raising_step("closure", 1000.0)
    put_gradients(run.net, 0, 0.1)
    run.optimizer.step()  # judged by the norm alone
    assert run.guard.spikes is not None
    assert run.guard.spikes.detector.last is not None
    assert torch.isnan(run.guard.spikes.detector.last.scores[0])


@pytest.mark.parametrize("watch", [None, "spikes", "recovery"])
@pytest.mark.parametrize("name", ["SGD", "Adam, fused"])
def test_a_step_that_the_hook_of_another_ends_is_not_counted(name, watch):
    run = Run(name, watch)
    for step in range(6):
        run.step(step)
    before, weights = run.seen(), held(run.net, run.optimizer)
    run.raising_step("hook", 1.1)
    after = run.seen()
    assert (run.guard.steps, run.guard.skipped_steps) == (6, 0)
    assert_same(held(run.net, run.optimizer), weights)
    assert_same(after[:3], before[:3])
    if watch:
        assert_same(after[3], before[3])  # the memory of the clipper and of the detector
    run.step(6)
    assert run.guard.steps == 7


@pytest.mark.parametrize("size", [1.0, 1000.0], ids=["ordinary", "a spike"])
@pytest.mark.parametrize("watch", ["spikes", "recovery"])
@pytest.mark.parametrize("name", ["SGD", "Adam, fused"])
def test_a_run_with_steps_that_raised_is_the_run_without_them(name, watch, size):
    plain, broken = Run(name, watch), Run(name, watch)
    for step in range(12):
        plain.step(step)
        if step in (1, 6, 7, 9):
            broken.raising_step("hook", size)
        broken.step(step)
    assert_same(held(broken.net, broken.optimizer), held(plain.net, plain.optimizer))
    assert_same(broken.seen(), plain.seen())


@pytest.mark.parametrize("name", ["AdamW, fused", "Adam", "a foreign one"])
def test_a_step_that_raise_refuses_is_not_counted(name):
    net = model()
    optimizer = ALL[name](net.parameters())
    guard = gg.Guard(optimizer, gg.ClipByMedian(), nonfinite="raise")
    for step, bad in enumerate([True, False, True, False]):
        put_gradients(net, step)
        if bad:
            spoil(net)
            with pytest.raises(gg.errors.NonFiniteGradientError, match="gradients are not finite"):
                optimizer.step()
        else:
            optimizer.step()
    assert (guard.steps, guard.skipped_steps) == (2, 0)


@pytest.mark.parametrize("bad", [False, True])
def test_a_step_whose_own_code_raises_is_not_counted(bad):
    class Raises(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            result = super().step(closure)
            if self.fails:
                raise StopError("on purpose")
            return result

    net = model()
    optimizer = Raises(net.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    for step, optimizer.fails in enumerate([False, True, False]):
        put_gradients(net, step)
        if not optimizer.fails:
            optimizer.step()
            continue
        if bad:
            spoil(net)
        with pytest.raises(StopError, match="on purpose"):
            optimizer.step()
        assert (guard.steps, guard.skipped_steps) == (1, 0)
    assert (guard.steps, guard.skipped_steps) == (2, 0)


def test_a_state_that_is_loaded_after_a_step_that_raised_stays():
    run, other = Run("SGD", "spikes"), Run("SGD", "spikes")
    for step in range(8):
        run.step(step)
        if step < 3:
            other.step(step)
    other.raising_step("hook", 1.0)
    other.guard.load_state_dict(run.guard.state_dict())
    assert_same(other.seen(), run.seen())


def test_a_loss_whose_batch_is_left_out_is_dropped_by_hand():
    plain, other = Run("SGD", "spikes"), Run("SGD", "spikes")
    assert other.guard.spikes is not None
    for step in range(10):
        plain.step(step)
        if step == 6:
            other.guard.record_loss(1e6)
            other.guard.spikes.forget_loss()
        other.step(step)
    assert_same(other.seen(), plain.seen())


@pytest.mark.parametrize("last", [0.1, 70.0, math.nan], ids=["ordinary", "a spike", "unknown"])
@pytest.mark.parametrize("row", [[], [90.0], [90.0, 80.0]], ids=["calm", "one spike before", "two before"])
def test_a_detector_takes_its_last_step_back_bit_by_bit(row, last):
    detector = gg.SpikeDetector(warmup=4, window=8, recent=4, cap=3)
    for value in [*[0.1, 0.3, 0.7] * 4, *row]:
        detector.observe(torch.tensor([value, value / 3], dtype=torch.float64), weight=value)
    state, verdict = detector.state_dict(), detector.last
    detector.observe(torch.tensor([last, last / 7], dtype=torch.float64), weight=1 / 3)
    assert detector.take_back()
    assert_same(detector.state_dict(), state)
    assert detector.last is verdict
    assert not detector.take_back()
    assert_same(detector.state_dict(), state)


@pytest.mark.parametrize("act", [True, False], ids=["skipped", "seen only"])
def test_a_spike_that_is_taken_back_is_not_counted_where_ranks_add_up_their_norms(act, monkeypatch):
    """Then the count is a tensor, though the detector reads its values on the CPU."""
    monkeypatch.setattr("gradguard.spikes.skip.are_readable", lambda *tensors: False)
    spikes = gg.SkipSpikes(gg.SpikeDetector(warmup=4, window=8, recent=4, cap=3), act=act)
    for norm in [1.0] * 12 + [900.0]:
        spikes.judge(torch.tensor([norm], dtype=torch.float64), torch.tensor(False))
    assert (spikes.seen, spikes.skipped) == (1, act)
    spikes.take_back()
    assert (spikes.seen, spikes.skipped) == (0, 0)
    spikes.take_back()
    assert (spikes.seen, spikes.skipped) == (0, 0)
