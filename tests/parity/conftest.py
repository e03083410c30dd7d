"""What other tests have left alive is not looked through, at each save, for schedulers: millions of objects."""

import gc

import pytest

from gradguard.parity import kept_tensors
from gradguard.parity import step_parity as steps


@pytest.fixture(autouse=True)
def _only_what_this_test_has_made(monkeypatch):
    gc.collect()
    gc.freeze()
    for module in (steps, kept_tensors):
        monkeypatch.setattr(module, "all_objects", gc.get_objects)  # which has none that the collector has frozen
