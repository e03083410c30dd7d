"""Under a GradScaler: thresholds are for unscaled gradients, skipped steps are counted, a clip too early is noticed."""

import warnings

import pytest
import torch
from guarded import FOLDING, MAX_NORM, assert_same, clipper, held, model, put_gradients, spoil
from torch import nn

from gradguard import ClipByGlobalNorm, ClipByValue, Guard
from gradguard.errors import NonFiniteGradientError

PLAIN = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}
EITHER = {f"{name}, fused": make for name, make in FOLDING.items()} | PLAIN
SCALES = [1024.0, 65536.0]


def backward(net: nn.Module, scaler, step: int, bad: bool = False) -> None:
    """Gradients that the scaler has scaled, as its `scale` does."""
    scaler.scale(torch.zeros(1))  # it makes its scale only here
    put_gradients(net, step, scale=scaler.get_scale())
    if bad:
        spoil(net, float("inf"))


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("unscaled", ["by the scaler's step", "by the user"])
@pytest.mark.parametrize("name", EITHER)
def test_the_same_steps_as_without_a_scaler(name, unscaled, scale):
    ours, theirs = model(), model()
    a, b = EITHER[name](ours.parameters()), EITHER[name](theirs.parameters())
    guard, scaler = Guard(a, clipper()), scaler_of(scale)
    for step in range(4):
        backward(ours, scaler, step)
        if unscaled == "by the user":
            scaler.unscale_(a)
        scaler.step(a)
        scaler.update()
        put_gradients(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        b.step()
        assert float(guard.last.norm) == pytest.approx(float(norm), rel=1e-6, abs=0)
    assert_same(held(ours, a)[0], held(theirs, b)[0], 1e-6)
    assert (guard.steps, guard.skipped_steps) == (4, 0)
    assert not hasattr(a, "grad_scale")


@pytest.mark.parametrize("bad_steps", [(0, 1), (2,)], ids=str)
@pytest.mark.parametrize("unscaled", ["by the scaler's step", "by the user"])
@pytest.mark.parametrize("policy", ["skip", "propagate", "raise", "zero"])
@pytest.mark.parametrize("name", EITHER)
def test_an_overflow_is_skipped_and_counted(name, policy, unscaled, bad_steps):
    """Whatever the policy: a scaler that looks for its scale overflows on purpose."""
    ours, theirs = model(), model()
    a, b = EITHER[name](ours.parameters()), EITHER[name](theirs.parameters())
    guard, scaler = Guard(a, clipper(), model=ours, nonfinite=policy), scaler_of(1024.0)
    for step in range(4):
        backward(ours, scaler, step, bad=step in bad_steps)
        before = held(ours, a)
        if unscaled == "by the user":
            scaler.unscale_(a)
        scaler.step(a)
        scaler.update()
        if step in bad_steps:
            assert_same(held(ours, a), before)
            assert guard.last.culprits() == {"0.weight": 1}
            continue
        put_gradients(theirs, step)
        nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        b.step()
    assert_same(held(ours, a)[0], held(theirs, b)[0], 1e-6)
    assert (guard.steps, guard.skipped_steps) == (4, len(bad_steps))
    assert scaler.get_scale() == 1024.0 / 2 ** len(bad_steps)


@pytest.mark.parametrize("after", ["spoilt", "repaired"])
@pytest.mark.parametrize("name", EITHER)
def test_an_overflow_and_a_nan_are_each_enough_to_skip(name, after):
    """What the script does to gradients that it has unscaled, the scaler does not see."""
    net = model()
    optimizer, scaler = EITHER[name](net.parameters()), scaler_of(1024.0)
    guard = Guard(optimizer, clipper(), model=net)
    backward(net, scaler, 0, bad=after == "repaired")
    scaler.unscale_(optimizer)
    if after == "spoilt":
        spoil(net)
    else:
        for p in net.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
    before = held(net, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert_same(held(net, optimizer), before)
    assert (guard.steps, guard.skipped_steps) == (1, 1)


@pytest.mark.parametrize("name", EITHER)
def test_a_rule_that_is_not_one_number_has_scaled_bounds(name):
    net = model()
    optimizer, scaler = EITHER[name](net.parameters()), scaler_of(1024.0)
    Guard(optimizer, ClipByValue(0.1))
    backward(net, scaler, 0)
    scaler.step(optimizer)
    largest = max(float(p.grad.abs().max()) for p in net.parameters())
    assert largest == pytest.approx(0.1, rel=1e-6, abs=0)  # a fused kernel writes the unscaled gradients back


@pytest.mark.parametrize("name", ["AdamW, fused", "Adam"])
def test_a_disabled_scaler_changes_nothing(name):
    net = model()
    optimizer, scaler = EITHER[name](net.parameters()), torch.amp.GradScaler("cpu", enabled=False)
    guard = Guard(optimizer, clipper())
    put_gradients(net, 0)
    spoil(net)
    scaler.step(optimizer)
    assert guard.skipped_steps == 1


@pytest.mark.parametrize("name", ["AdamW, fused", "Adam"])
def test_the_cap_counts_the_scaler_s_skips(name):
    net = model()
    optimizer, scaler = EITHER[name](net.parameters()), scaler_of(1024.0)
    Guard(optimizer, clipper(), model=net, max_consecutive_skips=1)
    backward(net, scaler, 0, bad=True)
    scaler.step(optimizer)
    scaler.update()
    backward(net, scaler, 0, bad=True)
    with pytest.raises(NonFiniteGradientError, match="2 optimizer steps in a row were skipped"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, fused", "Adagrad, fused"])
def test_the_scaler_s_attributes_are_taken_away_when_the_step_raises(name, monkeypatch):
    net = model()
    optimizer, scaler = EITHER[name](net.parameters()), scaler_of(1024.0)
    Guard(optimizer, clipper())

    def fail(*args, **kwargs):
        raise ZeroDivisionError("in the kernel")

    for kernel in ("_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        monkeypatch.setattr(torch, kernel, fail)
    backward(net, scaler, 0)
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_a_detached_guard_hears_nothing():
    net = model()
    optimizer, scaler = torch.optim.Adam(net.parameters()), scaler_of(1024.0)
    guard = Guard(optimizer, clipper())
    guard.detach()
    backward(net, scaler, 0, bad=True)
    scaler.step(optimizer)
    assert (guard.steps, guard.last) == (0, None)


def clipped_too_early(net, optimizer, scaler, threshold: float, steps: int, unscale: bool = False) -> None:
    for step in range(steps):
        backward(net, scaler, step)
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), threshold)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("name", ["AdamW, fused", "Adam"])
@pytest.mark.parametrize("case", ["after unscale_", "not at all", "without a scaler", "rarely"])
def test_nothing_is_said_of_those_who_do_it_right(case, name):
    net = model()
    optimizer, scaler = EITHER[name](net.parameters()), scaler_of(2.0)
    Guard(optimizer, ClipByGlobalNorm(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if case == "after unscale_":
            clipped_too_early(net, optimizer, scaler, 1.0, steps=6, unscale=True)
        elif case == "not at all":
            clipped_too_early(net, optimizer, scaler, float("1e9"), steps=6)
        elif case == "rarely":
            for threshold in (1.0, 1.0, 1e9, 1.0, 1.0, 2.0):
                clipped_too_early(net, optimizer, scaler, threshold, steps=1)
        else:
            for step in range(6):
                put_gradients(net, step)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()


def test_real_half_precision_training_keeps_up():
    """float16 autocast, scaled: the fused fold against unscale, clip, step."""
    results = []
    for guarded in (True, False):
        net = model()
        optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True), scaler_of(1024.0)
        if guarded:
            Guard(optimizer, ClipByGlobalNorm(0.05))
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.linspace(-1, 1, 12).view(4, 3)).square().mean()
            scaler.scale(loss).backward()
            if not guarded:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in net.parameters()])
    assert_same(*results, 1e-6)
