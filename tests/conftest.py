"""Fixed seeds, and the device path of every kernel run on the CPU."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when keras is imported, in doctests too

import pytest
import torch
from hypothesis import settings

from gradguard.tensors import layout

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(params=["host", "device"])
def path(request, monkeypatch) -> str:
    """Run a test twice: as on the CPU, and as on an accelerator, where Python may not look at values."""
    if request.param == "device":
        blind = lambda *tensors: False  # noqa: E731
        for name in ("norms", "scaling", "units", "nonfinite"):
            monkeypatch.setattr(f"gradguard.tensors.{name}.are_readable", blind)
        monkeypatch.setattr("gradguard.arguments.are_readable", blind)
    assert layout.are_readable(torch.zeros(1))
    return request.param
