"""On an accelerator a loss is judged as on the CPU: tried on a device that the CPU pretends to be."""

import functools
import types

import pytest
import torch
from test_shared_values import OF_THE_BATCH, Batch, clipper_of, step
from torch import Tensor

import pretend_device
from gradguard.errors import UnsupportedGradientError
from test_pretended_device import made

RIGHT = {
    "mse": lambda c, out, b: (out - b.y).square().mean(),
    "a number": lambda c, out, b: (out - 0.3).abs().mean(),
    "a number behind a function": lambda c, out, b: torch.exp(out - 0.3).mean(),
    "own weights": lambda c, out, b: ((out - b.y).square().mean(1) * b.y[:, 0]).mean(),
    "an exponent": lambda c, out, b: ((out - b.y).abs() + 0.1).pow(1.5).mean(),
    "labels": lambda c, out, b: torch.nn.functional.cross_entropy(out, b.labels),
}
NUMBERS = {name: loss for name, loss in OF_THE_BATCH.items() if "number" in name or name == "a mean"}
LOSSES = {**NUMBERS, **RIGHT}
"""The device has no memory of its own, by whose place a tensor is known again: these share numbers, or nothing."""


@pytest.fixture
def device(monkeypatch):
    """Let the device have a random generator, autocast and what makes tensors of numbers, as a real one has."""
    kind = pretend_device.DEVICE.type
    module = types.ModuleType(kind)
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    monkeypatch.setattr(torch, kind, module, raising=False)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda asked="cpu", one=original: one("cpu" if asked == kind else asked))
    start = torch.autocast.__init__
    monkeypatch.setattr(
        torch.autocast, "__init__", lambda self, asked, *a, **k: start(self, "cpu" if asked == kind else asked, *a, **k)
    )
    for original in (torch.tensor, torch.as_tensor):  # which no mode sees
        monkeypatch.setattr(torch, original.__name__, functools.partial(made, original))
    with pretend_device.Makes():
        yield pretend_device.DEVICE


def outcome(name, sizes, device):
    """The gradients of each step; in place of the one that is refused, the words."""
    clipper, found = clipper_of(), []
    clipper.module.to(device)
    for number, size in enumerate(sizes):
        batch = Batch(size, number)
        for key, value in vars(batch).items():
            setattr(batch, key, value.to(device) if isinstance(value, Tensor) else value)
        try:
            found.append([one.cpu() for one in step(clipper, LOSSES[name], batch).values()])
        except UnsupportedGradientError as error:
            return [*found, str(error)]
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sizes", [(3, 3, 4), (1, 1, 5), (2, 5, 1)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_judged_as_on_the_cpu(name, sizes, device):
    torch.manual_seed(0)
    here = outcome(name, sizes, "cpu")
    torch.manual_seed(0)
    there = outcome(name, sizes, device)
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        if isinstance(one, str):
            assert other == one
        else:
            torch.testing.assert_close(other, one)
