"""What other test files have left alive is not looked through for schedulers: millions of objects, at each save."""

import gc

import pytest

from gradguard.parity import kept_tensors
from gradguard.parity import step_parity as steps


@pytest.fixture(autouse=True)
def _only_what_this_file_has_made(monkeypatch):
    for module in (steps, kept_tensors):
        monkeypatch.setattr(module, "all_objects", gc.get_objects)  # which has none that the collector has frozen
