"""`apply_gradient_clipping` and what its result tells."""

import math

import pytest
import torch
from torch import nn

import gradguard as gg
from cases import parameter
from gradguard.errors import InvalidValueError


def model() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.data = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    layer.weight.grad = torch.tensor([[30.0, 40.0], [0.0, 0.0]])
    layer.bias.grad = torch.zeros(2)
    return layer


@pytest.mark.parametrize(
    ("kind", "threshold", "after", "coefficient"),
    [
        ("norm", 5.0, [3.0, 4.0], 0.1),
        ("norm", 500.0, [30.0, 40.0], 1.0),
        ("value", 6.0, [6.0, 6.0], 6 * 2**0.5 / 50),
        ("value", 40.0, [30.0, 40.0], 1.0),
        ("adaptive", 0.1, [0.3, 0.4], 0.01),
        ("adaptive", 100.0, [30.0, 40.0], 1.0),
    ],
)
def test_each_rule_and_its_result(kind, threshold, after, coefficient, path):
    layer = model()
    result = gg.apply_gradient_clipping(layer, kind, threshold)
    assert layer.weight.grad[0].tolist() == pytest.approx(after, rel=1e-6, abs=0)
    assert float(result.norm) == 50.0
    assert result.norm.dtype == torch.float32
    assert float(result.coefficient) == pytest.approx(coefficient, rel=1e-6, abs=0)
    assert bool(result.clipped) == (coefficient < 1)
    assert not bool(result.nonfinite)
    assert result.names == ("weight", "bias")
    assert result.tensor_norms.tolist() == [50.0, 0.0]


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_nonfinite_gradients_are_told(kind, path):
    result = gg.apply_gradient_clipping(parameter(torch.tensor([1.0, math.nan])), kind, 1.0, nonfinite="zero")
    assert bool(result.nonfinite)
    assert bool(result.clipped)
    assert float(result.coefficient) == 0
    assert result.names == ("0",)


def test_sparse_duplicates_count_as_what_they_add_up_to(path):
    for values, clipped in (([0.6, 0.6], True), ([3.0, -3.0], False)):
        indices = torch.tensor([[0, 0]])
        p = parameter(
            torch.sparse_coo_tensor(indices, torch.tensor(values), (2,), check_invariants=True), torch.zeros(2)
        )
        result = gg.apply_gradient_clipping(p, "value", 1.0)
        assert bool(result.clipped) == clipped
        assert float(result.coefficient) == pytest.approx(1 / 1.2 if clipped else 1.0)


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_nothing_to_clip(kind, path):
    result = gg.apply_gradient_clipping(nn.Linear(2, 2), kind, 1.0)
    assert float(result.norm) == 0
    assert not bool(result.clipped)
    assert float(result.coefficient) == 1
    assert result.names == ()


def test_an_unknown_rule_lists_the_known():
    with pytest.raises(InvalidValueError, match="expected 'norm', 'value' or 'adaptive'"):
        gg.apply_gradient_clipping(model(), "agc", 1.0)


def test_a_bad_threshold_changes_nothing():
    layer = model()
    with pytest.raises(InvalidValueError, match=r"clipping_threshold=-1\.0"):
        gg.apply_gradient_clipping(layer, "norm", -1)
    assert layer.weight.grad[0].tolist() == [30.0, 40.0]


def test_the_result_is_frozen():
    with pytest.raises(AttributeError, match="cannot assign to field"):
        gg.apply_gradient_clipping(model(), "norm", 1.0).norm = torch.zeros(())
