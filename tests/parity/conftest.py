"""Averages that other tests have left alive are not looked through at each save: millions of objects."""

import gc

import pytest

from gradguard.parity import kept_tensors


@pytest.fixture(autouse=True)
def _only_what_this_test_has_made(monkeypatch):
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(kept_tensors, "all_objects", gc.get_objects)  # which has none that the collector has frozen
