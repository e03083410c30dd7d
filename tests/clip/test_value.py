"""`clip_grad_value_`: PyTorch where it is right, and the rows of the table where it is not."""

import math

import pytest
import torch

import gradguard as gg
from cases import DTYPES, parameter, random, sparse_with_duplicates
from gradguard.errors import InvalidValueError


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.0, 0.5, 100.0, math.inf])
def test_agrees_with_pytorch(bound, dtype, path):
    ours = [parameter(random(*shape, dtype=dtype)) for shape in ((3, 4), (7,), (300, 100))]
    theirs = [parameter(p.grad.clone()) for p in ours]
    assert gg.clip_grad_value_(ours, bound) is None
    torch.nn.utils.clip_grad_value_(theirs, bound)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs], rtol=0, atol=0)


def test_an_asymmetric_interval(path):
    p = parameter(torch.tensor([-3.0, -0.5, 2.0]))
    gg.clip_grad_value_(p, 1.0, min_value=-2.0)
    assert p.grad.tolist() == [-2.0, -0.5, 1.0]


@pytest.mark.parametrize(("low", "high"), [(1.0, -1.0), (math.nan, 1.0), (0.0, math.nan)])
def test_bounds_that_are_no_interval_raise_before_anything_changes(low, high):
    p = parameter(torch.tensor([3.0]))
    with pytest.raises(InvalidValueError, match="expected min_value <= clip_value"):
        gg.clip_grad_value_(p, high, min_value=low)
    assert p.grad.item() == 3.0


def test_propagate_keeps_nan_and_bounds_infinity_as_pytorch_does(path):
    p = parameter(torch.tensor([3.0, math.nan, math.inf]))
    gg.clip_grad_value_(p, 1.0)
    torch.testing.assert_close(p.grad, torch.tensor([1.0, math.nan, 1.0]), equal_nan=True)


def test_sparse_gradients_are_coalesced_then_clamped(path):
    p = parameter(sparse_with_duplicates(), torch.zeros(4))
    gradient = p.grad
    gg.clip_grad_value_(p, 2.5)
    assert p.grad is gradient
    assert p.grad.to_dense().tolist() == [2.5, 2.5, 0.0, 0.0]


def test_complex_parts_are_clamped_each_by_itself(path):
    p = parameter(torch.tensor([3 - 4j, 0.5 + 0.25j]))
    gg.clip_grad_value_(p, 1.0)
    assert p.grad.tolist() == [1 - 1j, 0.5 + 0.25j]


def test_the_bound_may_be_a_tensor(path):
    p = parameter(torch.tensor([3.0, -0.5]))
    gg.clip_grad_value_(p, torch.tensor(1.0))
    assert p.grad.tolist() == [1.0, -0.5]


def test_complex_gradients_beside_a_transposed_one(path):
    params = [parameter(torch.tensor([[3.0, -0.5], [0.25, -4.0]]).T), parameter(torch.tensor([3 - 4j, 0.5 + 0.25j]))]
    gg.clip_grad_value_(params, 1.0)
    assert params[0].grad.tolist() == [[1.0, 0.25], [-0.5, -1.0]]
    assert params[1].grad.tolist() == [1 - 1j, 0.5 + 0.25j]


@pytest.mark.parametrize(("largest", "clipped"), [(1.0, False), (1.0 + 2**-23, True)])
@pytest.mark.parametrize("bound", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_an_element_at_the_bound_is_not_clipped(bound, largest, clipped, path):
    for sign in (1, -1):
        result = gg.ClipByValue(bound)([parameter(torch.tensor([0.5, sign * largest]))])
        assert bool(result.clipped) == clipped


def test_only_what_exceeds_is_written():
    params = [parameter(random(50_000)), parameter(torch.full((50_000,), 99.0))]
    versions = [p.grad._version for p in params]
    gg.clip_grad_value_(params, 50.0)
    assert params[0].grad._version == versions[0]
    assert params[1].grad._version > versions[1]
