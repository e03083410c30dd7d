"""Kernels that add up a bias's plain gradient inexactly: layers are taken, values beside their outputs are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import gradguard as gg
from gradguard.errors import UnsupportedGradientError


class Channels(nn.Module):
    """Puts the last dimension where a layer has its channels."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.mT).mT


class NormByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return F.layer_norm(x, (8,), self.weight, self.bias)


LAYERS = {
    "conv": lambda: Channels(nn.Conv1d(8, 8, 1)),
    "transposed conv": lambda: Channels(nn.ConvTranspose1d(8, 8, 1)),
    "layer norm": lambda: nn.LayerNorm(8),
    "layer norm by hand": NormByHand,
    "group norm": lambda: Channels(nn.GroupNorm(2, 8)),
    "instance norm": lambda: Channels(nn.InstanceNorm1d(8, affine=True, track_running_stats=True)),
    "batch norm": lambda: Channels(nn.BatchNorm1d(8)).eval(),
}


def model_of(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), LAYERS[layer]())


class Keeping(TorchFunctionMode):
    """Keeps the bias that the last layer computes with."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        if len(given) >= 3 and func.__name__ != "linear":
            self.kept = given[-1] if given[-1].requires_grad else given[2]
        return func(*args, **kwargs or {})


def sample_gradients(model, x):
    """Each sample's gradient, in float64."""
    model, rows = model.double(), []
    for sample in x.double().split(1):
        model.zero_grad()
        model(sample).mean().backward()
        rows.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_mean_over_many_positions_is_exact(layer):
    x, model, plain = torch.randn(3, 60_000, 8), model_of(layer), model_of(layer)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf), mode="exact")
    for size in (3, 2):
        plain(x[:size])
        model(x[:size]).mean().backward()
        found = clipper.per_sample_gradients()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        expected = sample_gradients(model_of(layer), x[:size])
        whole = sum(float(each.norm()) for each in expected.values())
        for name, each in expected.items():
            assert float((found[name] - each).norm()) <= 3e-5 * whole, name
    for own, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_small_value_beside_the_outputs_is_refused(layer):
    x, model = torch.randn(3, 60_000, 8), model_of(layer)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf))
    with Keeping() as mode:
        loss = model(x).mean()
    (loss + 1e-4 * mode.kept.sum()).backward()  # less than the kernel's own rounding
    with pytest.raises(
        UnsupportedGradientError, match=r"do not add up to its plain gradient|by a path that the clipper"
    ):
        clipper.clip_and_accumulate()


class OtherInFloat32(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        if x.dtype is torch.float32:
            weight = weight + (weight - weight.detach())  # the same numbers, and twice the gradient
        return super()._conv_forward(x, weight, bias)


@pytest.mark.parametrize("positions", [20, 20_000])
def test_a_layer_that_has_another_gradient_in_another_dtype_is_refused(positions):
    torch.manual_seed(0)
    model = nn.Sequential(OtherInFloat32(3, 4, 3))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    model(torch.randn(2, 3, positions)).square().mean().backward()
    with pytest.raises(UnsupportedGradientError, match="do not add up"):
        clipper.clip_and_accumulate()
