"""What is told of a GradScaler: the steps that it skips, and its methods given back when nobody listens."""

import gc
import inspect
import weakref

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard import grad_scaler
from gradguard.grad_scaler import listen_to_steps, notice_scaled_losses
from gradguard.listeners import Listener, listen
from gradguard.replacements import Replacement

OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "not fused": lambda p: torch.optim.SGD(p, lr=0.1),
}


def scaled(make=OPTIMIZERS["not fused"], bad: bool = False, enabled: bool = True):
    layer = nn.Linear(2, 1)
    optimizer, scaler = make(layer.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    if bad:
        layer.weight.grad.fill_(float("inf"))
    return layer, optimizer, scaler


@pytest.fixture(autouse=True)
def methods_are_given_back(monkeypatch):
    """Each test begins with a GradScaler that nobody listens to, whatever guards of other tests still live."""
    kind = torch.amp.GradScaler
    for name, instead in (("step", grad_scaler._step), ("scale", grad_scaler._scale)):
        monkeypatch.setattr(kind, name, inspect.unwrap(getattr(kind, name)))
        fresh = Replacement("torch.amp.grad_scaler", f"GradScaler.{name}", instead)
        monkeypatch.setattr(grad_scaler, f"_{name}s", fresh)
    before = kind.step, kind.scale
    yield
    gc.collect()
    assert (kind.step, kind.scale) == before


@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_who_listens_is_told_whether_a_step_was_skipped(make, bad):
    _, optimizer, scaler = scaled(make, bad)
    told = []
    end = listen_to_steps(
        lambda one, step: told.append(("before", one is optimizer, step.scale.item(), step.skipped)),
        lambda one, step: told.append(("after", one is optimizer, bool(step.skipped))),
    )
    scaler.step(optimizer)
    assert told == [("before", True, 8.0, None), ("after", True, bad)]
    end()
    end()
    _, optimizer, scaler = scaled(make, bad)
    scaler.step(optimizer)
    assert len(told) == 2


def test_nobody_hears_of_a_step_of_a_disabled_scaler():
    _, optimizer, scaler = scaled(bad=True, enabled=False)
    end = listen_to_steps(pytest.fail, pytest.fail)
    scaler.step(optimizer)
    end()


@pytest.mark.parametrize("policy", ["skip", "propagate", "raise", "zero"])
@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_guard_and_its_event_say_that_the_scaler_skipped(make, bad, policy):
    layer, optimizer, scaler = scaled(make, bad)
    events = []

    class Events(Listener):
        def on_clip(self, call, parameters):
            pytest.fail("a guard's clip is within the step")

        def on_clipped(self, event):
            events.append(event)

    end = listen(Events())
    with gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=layer, nonfinite=policy) as guard:
        assert guard.last_skip is None
        scaler.step(optimizer)
        scaler.update()
    end()
    (event,) = events
    assert event.optimizer is optimizer
    assert (bool(event.skipped), guard.skipped_steps) == (bad, int(bad))
    assert guard.last_skip == ("grad_scaler" if bad else None)
    if bad:
        assert event.skip_reason == "grad_scaler"
        assert not event.norm.isfinite()


def test_a_guard_that_skips_by_itself_says_so():
    layer, optimizer, _ = scaled(bad=True)
    reasons = []

    class Events(Listener):
        def on_clipped(self, event):
            reasons.append((event.skipped, event.skip_reason))

    end = listen(Events())
    with gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0)) as guard:
        optimizer.step()
        assert guard.last_skip == "nonfinite"
        layer.zero_grad()
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert guard.last_skip is None
    end()
    assert reasons == [(True, "nonfinite"), (False, "nonfinite")]


@pytest.mark.parametrize("overflows", [True, False])
def test_a_per_sample_clipper_says_that_the_scaler_will_skip(overflows):
    layer, scaler = nn.Linear(2, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
    clipper = gg.PerSampleGradientClipper(layer, gg.FlatNormClipper(1.0), scaler=scaler, check=False)
    optimizer, events = torch.optim.SGD(layer.parameters(), lr=0.1), []

    class Events(Listener):
        def on_clipped(self, event):
            events.append(event)

    end = listen(Events())
    x = torch.full((3, 2), float("inf") if overflows else 1.0)
    scaler.scale(layer(x).square().mean()).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    scaler.step(optimizer)
    end()
    clipper.detach()
    (event,) = events
    assert (bool(event.skipped), event.skip_reason) == (overflows, "grad_scaler")


def test_the_methods_are_wrapped_only_while_somebody_listens():
    kind = torch.amp.GradScaler
    step, scale = kind.step, kind.scale
    _, optimizer, _ = scaled()
    guard, end = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0)), listen_to_steps(print, print)
    assert kind.step is not step
    guard.detach()
    assert kind.step is not step
    end()
    assert kind.step is step
    end = notice_scaled_losses()
    assert kind.scale is not scale
    end()
    assert kind.scale is scale


def test_an_optimizer_that_is_gone_is_forgotten():
    before = torch.amp.GradScaler.step
    _, optimizer, _ = scaled()
    gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert torch.amp.GradScaler.step is before


def test_who_wraps_in_between_is_left_in_peace(monkeypatch):
    """A patch of somebody else's over ours stays when nobody listens any more, and each is called once."""
    kind, calls = torch.amp.GradScaler, []
    step = kind.step
    end = listen_to_steps(lambda *_: calls.append("listener"), lambda *_: None)
    ours = kind.step

    def theirs(self, *args):
        calls.append("theirs")
        return ours(self, *args)

    monkeypatch.setattr(kind, "step", theirs)
    end()
    assert kind.step is theirs
    _, optimizer, scaler = scaled()
    scaler.step(optimizer)
    assert calls == ["theirs"]
    monkeypatch.setattr(kind, "step", step)
