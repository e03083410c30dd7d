"""What the clipper attaches to a model: all of it or nothing; and hooks of others stay theirs."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from gradguard import FlatNormClipper, PerLayerNormClipper, PerSampleGradientClipper, grad_scaler
from gradguard.errors import GradguardError, InvalidValueError, UnsupportedGradientError
from gradguard.per_sample import call_tracker, refusals
from gradguard.per_sample import sample_clipper as clipper_file
from gradguard.private import FixedNoise, make_private, set_up
from private.runs import data_set, network


def state_of(model: nn.Module) -> dict:
    """All that is in every module, hooks included, as text; and what is known of it elsewhere."""
    found: dict = {name: {key: repr(value) for key, value in vars(m).items()} for name, m in model.named_modules()}
    for name, parameter in model.named_parameters():
        hooks: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        found[f"hooks of {name}"] = [repr(dict(kind or {})) for kind in hooks]  # none, or none any more
    found["followed"] = sum(m in refusals._followed for m in model.modules())
    found["hooks of steps"] = len(_global_optimizer_pre_hooks)
    found["who listens to scalers"] = grad_scaler._scales._users
    return found


@pytest.fixture(autouse=True)
def no_clippers_of_other_tests(monkeypatch):
    monkeypatch.setattr(refusals, "_watching", weakref.WeakSet())
    monkeypatch.setattr(refusals, "_removals", [])


class Interrupts(FlatNormClipper):
    """A rule that is made while the user presses Ctrl-C."""

    def prepare(self, names):
        raise KeyboardInterrupt("Ctrl-C")


class OnlyWeights(FlatNormClipper):
    """A rule that forgets a parameter."""

    def prepare(self, names):
        super().prepare(names)
        self.groups = [[name for name in names if name.endswith("weight")]]


FAILING_RULES = {
    "thresholds": (PerLayerNormClipper([1.0, 2.0, 3.0]), InvalidValueError, "3 numbers for 2 trained layers"),
    "names": (PerLayerNormClipper({"nothing": 1.0}), InvalidValueError, "missing"),
    "groups": (OnlyWeights(1.0), InvalidValueError, r"missing: \['0.bias', '2.bias'\]"),
    "interrupt": (Interrupts(1.0), KeyboardInterrupt, "Ctrl-C"),
}


@pytest.mark.parametrize(("rule", "kind", "words"), FAILING_RULES.values(), ids=FAILING_RULES)
def test_a_rule_that_fails_leaves_no_trace(rule, kind, words):
    model = network()
    before = state_of(model)
    with pytest.raises(kind, match=words):
        PerSampleGradientClipper(model, rule)
    assert state_of(model) == before
    works(model)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (nn.Module, "register_forward_hook"),
        (call_tracker, "LayerCapture"),
        (clipper_file, "watch_steps_and_scalers"),
        (clipper_file, "Witness"),
    ],
)
def test_an_interrupt_leaves_no_trace(monkeypatch, place, name):
    model, calls = network(), []
    before, original = state_of(model), getattr(place, name)

    def interrupted(*args, **kwargs):
        calls.append(name)
        if name == "register_forward_hook" and len(calls) < 3:
            return original(*args, **kwargs)
        raise KeyboardInterrupt("Ctrl-C")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="Ctrl-C"):  # noqa: PT012
        patch.setattr(place, name, interrupted)
        PerSampleGradientClipper(model, FlatNormClipper(1.0))
    assert calls
    assert state_of(model) == before
    works(model)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), {}, "BatchNorm1d"),
        (nn.Sequential(nn.Linear(4, 3)), {"mode": "quick"}, "'fast' or 'exact'"),
        (nn.Sequential(nn.Linear(4, 3)), {"check": 2}, "check=2"),
    ],
)
def test_a_refusal_leaves_no_trace(model, options, words):
    before = state_of(model)
    with pytest.raises(GradguardError, match=words):
        PerSampleGradientClipper(model, FlatNormClipper(1.0), **options)
    assert state_of(model) == before


def test_synchronisation_goes_on_where_making_the_clipper_fails(monkeypatch):
    model, restored = network(), []
    monkeypatch.setattr(clipper_file, "stop_synchronizing", lambda module: lambda: restored.append(module))
    with pytest.raises(InvalidValueError, match="3 numbers"):
        PerSampleGradientClipper(model, PerLayerNormClipper([1.0, 2.0, 3.0]))
    assert restored == [model]


def works(model: nn.Module) -> None:
    """The corrected call takes a step and gives back the model, whose plain gradients are there again."""
    before = state_of(model)
    clipper = PerSampleGradientClipper(model, PerLayerNormClipper([1.0, 2.0]))
    model(torch.ones(3, 4)).square().mean().backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 3
    model.zero_grad()
    clipper.detach()
    clipper.detach()
    assert state_of(model) == before
    model(torch.ones(3, 4)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()


# Private training


@pytest.mark.parametrize("failing", ["GaussianNoise", "PrivateTraining", "PrivateLoader"])
def test_private_training_that_fails_leaves_no_trace(monkeypatch, failing):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data_set(), batch_size=12, shuffle=True)
    before, restored = (state_of(model), dict(optimizer._optimizer_step_pre_hooks)), []
    monkeypatch.setattr(clipper_file, "stop_synchronizing", lambda module: lambda: restored.append(module))

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt("Ctrl-C")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="Ctrl-C"):  # noqa: PT012
        patch.setattr(set_up, failing, interrupted)
        make_private(model, optimizer, loader, FixedNoise(noise_multiplier=1.0, delta=1e-3))
    assert (state_of(model), dict(optimizer._optimizer_step_pre_hooks)) == before
    assert restored[:1] == [model]
    private = make_private(model, optimizer, loader, FixedNoise(noise_multiplier=1.0, delta=1e-3))
    private.detach()
    assert (state_of(model), dict(optimizer._optimizer_step_pre_hooks)) == before


# Hooks of others


def of_gradient(parameter, hook):
    return parameter.register_hook(hook)


def once_accumulated(parameter, hook):
    return parameter.register_post_accumulate_grad_hook(hook)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("register", [of_gradient, once_accumulated])
@pytest.mark.parametrize("begins", [-1, 0, 2])
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_hook_on_a_trained_parameter_is_refused_on_the_step_where_it_is_there(mode, begins, register):
    """It would never run, as the mask of rows that are to stay would not: no step is taken, and no trial calls it."""
    model, calls = network(), []
    x = torch.linspace(-1, 1, 24).view(6, 4)
    handles = [register(model[2].weight, calls.append)] if begins < 0 else []
    clipper = PerSampleGradientClipper(model, FlatNormClipper(1.0), mode=mode)
    for step in range(4):
        if step == begins:
            handles = [register(model[2].weight, calls.append)]
        model(x).square().mean().backward()
        if step < begins:
            clipper.clip_and_accumulate()
            clipper.pre_step()
            continue
        with pytest.raises(UnsupportedGradientError, match=r"parameter 2\.weight has a hook .* after pre_step\(\)"):
            clipper.clip_and_accumulate()
        with pytest.raises(InvalidValueError, match="found nothing to take"):
            clipper.pre_step()
    assert calls == []
    handles.pop().remove()
    model(x).square().mean().backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 6


def test_a_hook_on_a_frozen_parameter_is_not_the_clippers():
    model = network()
    model[0].weight.register_hook(torch.neg)
    model[0].weight.requires_grad_(False)
    clipper = PerSampleGradientClipper(model, FlatNormClipper(1.0))
    model(torch.ones(6, 4)).square().mean().backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 6


def a_clipper() -> PerSampleGradientClipper:
    return PerSampleGradientClipper(nn.Linear(2, 1), FlatNormClipper(1.0))


def test_scalers_are_noticed_until_the_last_clipper_goes():
    before = grad_scaler._scales._users
    first, second = a_clipper(), a_clipper()
    first.detach()
    assert grad_scaler._scales._users == before + 1
    second.detach()
    assert grad_scaler._scales._users == before


@pytest.mark.parametrize("options", [{}, {"check": False}, {"loss_reduction": "share"}, {"mode": "exact"}], ids=str)
def test_a_clipper_that_is_let_go_is_freed_at_once(options):
    model = nn.Linear(3, 2)
    clipper = PerSampleGradientClipper(model, FlatNormClipper(1.0), **options)
    model(torch.randn(4, 3)).square().mean(1).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    clipper.detach()
    alive = weakref.ref(clipper)
    gc.disable()
    try:
        del clipper
        assert alive() is None
    finally:
        gc.enable()
