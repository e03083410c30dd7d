"""The source line of the operation that made the first gradient that is not finite, where PyTorch remembers lines."""

import linecache
import re

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import NonFiniteGradientError


class Distance(nn.Module):
    def forward(self, x):
        length = (x - x.detach()).square().sum(1).sqrt()  # an infinite slope at 0
        return length.mean()


def backward(loss, policy):
    """What is told of the first gradient that is not finite."""
    stats = gg.ErrorClipStats()
    try:
        with gg.error_clip(loss, gg.rules.ErrorClipNonfinite(policy), stats=stats):
            loss.backward()
    except NonFiniteGradientError as error:
        return str(error)
    return str(stats.first_nonfinite)


@pytest.mark.parametrize("policy", ["keep", "raise"])
def test_the_line_is_that_of_the_operation_whose_backward_made_it(policy):
    x = torch.ones(3, 2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        loss = Distance()(x * 1)
    told = backward(loss, policy)
    found = re.search(r"the backward of SqrtBackward0 \(test_source_lines.py, line (\d+), in forward: (.*)", told)
    assert found is not None, told
    assert linecache.getline(__file__, int(found[1])).strip().startswith("length = ")
    assert found[2].startswith("length = (x - x.detach())")


def test_of_several_operations_each_has_its_line():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        zero = torch.ones(2, requires_grad=True) * 0
        root = zero.sqrt()
        other = zero.abs().log()
        loss = (root + other).sum()
    told = backward(loss, "keep")
    assert "line" in told
    assert "root = zero.sqrt()" in told or "other = zero.abs().log()" in told
    assert "loss = (root + other)" not in told


@pytest.mark.parametrize("policy", ["keep", "raise"])
def test_without_anomaly_detection_there_is_no_line(policy):
    told = backward(Distance()(torch.ones(3, 2, requires_grad=True) * 1), policy)
    assert "made by the backward of SqrtBackward0" in told
    assert "line" not in told


def test_an_operation_of_a_library_layer_is_told_by_the_line_that_called_the_model():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(3e38)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        hidden = torch.ones(1, 2, requires_grad=True) * 1
        loss = (model(hidden) * 1e-38).sum()
    line = r"AddmmBackward0 \(test_source_lines.py, line \d+, in .*: loss = \(model\(hidden\)"
    raising = gg.rules.ErrorClipNonfinite("raise")
    with gg.error_clip(loss, raising), pytest.raises(NonFiniteGradientError, match=line):
        (loss * 1e38).backward()
