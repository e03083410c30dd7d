"""`dispatch_clip_grad` is the call that it names, and says what it does not know."""

import math

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import GradguardError, InvalidValueError
from gradguard.integrations.timm import dispatch_clip_grad


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ConvTranspose1d(4, 2, 2))
    layers[2](layers[:2](torch.ones(2, 5, 3)).transpose(1, 2)).square().sum().backward()
    return layers


def gradients(layers: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in layers.parameters()]


@pytest.mark.parametrize(
    ("arguments", "same_as"),
    [
        ((0.5,), lambda m: gg.clip_grad_norm_(m, 0.5)),
        ((0.5, "norm", 1.0), lambda m: gg.clip_grad_norm_(m, 0.5, 1.0)),
        ((0.5, "norm", math.inf), lambda m: gg.clip_grad_norm_(m, 0.5, math.inf)),
        ((0.01, "value"), lambda m: gg.clip_grad_value_(m, 0.01)),
        ((0.01, "agc"), lambda m: gg.clip_grad_adaptive_(m, 0.01)),
    ],
)
def test_each_mode_is_the_function_that_it_names(arguments, same_as):
    ours, theirs = model(), model()
    before = gradients(ours)
    returned, expected = dispatch_clip_grad(ours, *arguments), same_as(theirs)
    assert (returned is None) == (expected is None)
    if expected is not None:
        torch.testing.assert_close(returned, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=0, atol=0)
    assert not torch.equal(gradients(ours)[0], before[0])


def test_the_keywords_are_those_of_timm():
    layers = model()
    dispatch_clip_grad(layers.parameters(), value=0.5, mode="norm", norm_type=2.0)
    torch.testing.assert_close(gg.get_total_norm(gradients(layers)), torch.tensor(0.5), rtol=1e-5, atol=0)


def test_a_module_gives_agc_the_units_of_its_layers():
    as_module, as_tensors = model(), model()
    dispatch_clip_grad(as_module, 0.001, "agc")
    dispatch_clip_grad(as_tensors.parameters(), 0.001, "agc")
    with pytest.raises(AssertionError, match="not close"):  # a transposed convolution: dimension 0 is the wrong one
        torch.testing.assert_close(as_module[2].weight.grad, as_tensors[2].weight.grad)


@pytest.mark.parametrize("mode", ["norm", "agc"])
@pytest.mark.parametrize("keyword", ["process_group", "mesh"])
def test_the_stages_are_passed_on(mode, keyword):
    with pytest.raises((GradguardError, ValueError, TypeError), match=keyword):
        dispatch_clip_grad(model(), 1.0, mode, **{keyword: "pp"})


def test_a_value_clip_asks_nobody():
    layers = model()
    assert dispatch_clip_grad(layers, 0.01, "value", process_group="pp") is None
    assert max(float(g.abs().max()) for g in gradients(layers)) <= 0.01


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1.0, "adaptive"), "mode='adaptive': expected 'norm', 'value' or 'agc'"),
        ((1.0, None), "mode=None: expected"),
        ((0.01, "agc", 1.0), "norm_type=1.0 with mode='agc'"),
        ((-1.0,), "max_norm"),
        ((-1.0, "agc"), "clipping_threshold"),
    ],
)
def test_what_it_does_not_know_changes_nothing(arguments, words):
    layers = model()
    before = gradients(layers)
    with pytest.raises(InvalidValueError, match=words):
        dispatch_clip_grad(layers, *arguments)
    torch.testing.assert_close(gradients(layers), before, rtol=0, atol=0)
