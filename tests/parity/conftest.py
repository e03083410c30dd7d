"""Averages that earlier tests have left alive are not those of the next one."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _only_what_this_test_has_made():
    gc.collect()
    gc.freeze()
