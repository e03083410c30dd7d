"""Random generators on accelerators that this machine lacks: whoever puts generators back puts those back too."""

import pytest
import torch

import gradguard as gg


class OneGenerator:
    """What `torch.get_device_module` returns for a device with one generator, whose state is a count of its draws."""

    def __init__(self, takes_a_device):
        self.drawn, self.takes_a_device = 0, takes_a_device

    def is_initialized(self):
        return True

    def get_rng_state(self, *device):
        assert len(device) == self.takes_a_device
        return torch.tensor([self.drawn], dtype=torch.uint8)

    def set_rng_state(self, state, *device):
        assert len(device) == self.takes_a_device
        self.drawn = int(state)


@pytest.fixture(params=["xpu", "mps"])
def accelerator(request, monkeypatch):
    """An accelerator of another maker that the program has used."""
    module = OneGenerator(takes_a_device=request.param != "mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(request.param))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_a_gradient_check_leaves_it_as_it_was(accelerator):
    accelerator.drawn = 3

    def noisy(x):
        accelerator.drawn += 1
        return x.sin() * torch.rand(())

    gg.gradcheck(noisy, torch.ones(2, dtype=torch.float64))
    assert accelerator.drawn == 3


def test_saved_gradients_leave_it_as_it_was_for_each_run(accelerator):
    accelerator.drawn, seen = 3, []
    model = torch.nn.Linear(2, 1)

    def step():
        seen.append(accelerator.drawn)
        accelerator.drawn += 1
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    saved = gg.save_gradients(None, model, step)
    assert set(seen) == {3}
    assert len(seen) > 2
    assert saved.random


@pytest.mark.parametrize("accelerator", ["mps"], indirect=True)  # of the others a snapshot wants events too
def test_a_snapshot_puts_it_back(accelerator):
    """Of weights that only say that they lie there."""
    there = type("There", (torch.nn.Parameter,), {"device": torch.accelerator.current_accelerator()})
    model = torch.nn.ParameterDict({"weight": there(torch.ones(2))})
    snapshot = gg.Snapshot(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.drawn = 3
    snapshot.take()
    accelerator.drawn = 5
    snapshot.restore(rewind_generators=False)
    assert accelerator.drawn == 5
    snapshot.restore()
    assert accelerator.drawn == 3
