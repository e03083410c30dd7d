"""No operation mixes tensors of two devices: tests of the GPU on a device that the CPU pretends to be."""

import functools

import pytest
import torch

import gradguard as gg
import pretend_device
import test_gpu
from gradguard.check import admission
from gradguard.tensors.sketch import in_chunks, sketch_of
from test_gpu import (  # noqa: F401
    test_a_clip_that_does_not_bind_changes_no_bit,
    test_clip_update,
    test_clippers_do_not_wait_after_their_first_step,
    test_error_clip,
    test_gradient_check,
    test_half_precision_beyond_its_range_and_nonfinite_gradients,
    test_norm_clip,
    test_right_modules_pass_the_check,
    test_value_and_adaptive_clip,
)


def made(original, *args, device=None, **kwargs):
    found = original(*args, **kwargs)
    return found if device is None else found.to(device)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(test_gpu, "DEVICE", pretend_device.DEVICE.type)
    ordinary = [*admission._ORDINARY, pretend_device.OnDevice.__torch_dispatch__]  # it stands for plain tensors
    monkeypatch.setattr(admission, "_ORDINARY", ordinary)
    for original in (torch.tensor, torch.as_tensor):  # which no mode sees
        monkeypatch.setattr(torch, original.__name__, functools.partial(made, original))
    with pretend_device.Makes():
        yield pretend_device.DEVICE


def test_the_device_mixes_with_no_tensor_of_the_cpu(device):
    there = torch.ones(3, device=device)
    assert float((there + torch.tensor(1.0)).sum()) == 6
    with pytest.raises(RuntimeError, match="found lazy:0 and cpu in mul"):
        there * torch.ones(3)
    with pytest.raises(RuntimeError, match="found lazy:0 and cpu in add"):
        torch.ones(3).add_(there)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [8, 40, 64])
def test_spikes_are_those_of_the_cpu(device, window):
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(120, 2, generator=generator, dtype=torch.float64) + 1
    rows[30::17] *= 40
    ours, theirs = (gg.SpikeDetector(window=window, warmup=5, recent=8) for _ in range(2))
    there = [bool(ours.observe(row.to(device))) for row in rows]
    assert there == [bool(theirs.observe(row)) for row in rows]
    assert sum(there) >= 2


def test_sketches_are_those_of_the_cpu(device):
    values = torch.randn(700, generator=torch.Generator().manual_seed(0))
    there = sketch_of(in_chunks(values.to(device)), device)
    torch.testing.assert_close(there.cpu(), sketch_of(in_chunks(values), torch.device("cpu")))


@pytest.mark.parametrize("kind", ["two inputs on the device", "one input on each device"])
def test_the_gradient_check_of_inputs_on_devices(device, kind):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(device)
    w = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    found = gg.gradcheck(lambda x, w: torch.tanh(x @ w.to(device)), x, w.to(device) if "two" in kind else w)
    assert found.verdict == "PASS", found


@pytest.mark.parametrize("name", ["convolution", "product", "attention", "layer norm", "softmax"])
def test_right_gradients_pass(name):
    test_gpu.test_right_gradients_pass_the_check(name, torch.float32)
