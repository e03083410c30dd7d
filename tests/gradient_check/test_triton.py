"""Kernels of Triton, in its interpreter: checked like any other function, and a forgotten last tile is found."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

REPORT = """
import torch
import gradguard as gg
import triton_kernel
x = torch.arange({count}).mul(2.3).cos()
print(gg.gradcheck(triton_kernel.{name}, x{options}), end="\\0")
"""
CASES = [
    {"name": "silu", "count": 10, "options": ""},
    {"name": "silu_without_the_last_tile", "count": 10, "options": ""},
    {"name": "silu_without_the_last_tile", "count": 8, "options": ""},
    {"name": "silu_without_the_last_tile", "count": 8, "options": ", sizes={8: 4}"},
    {"name": "silu", "count": 8, "options": ", sizes={8: 4}"},
]


@pytest.fixture(scope="module")
def said() -> list[str]:
    """The report of each case: from one process, whose start takes longer than they do."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", "".join(REPORT.format(**case) for case in CASES)]
    paths = os.pathsep.join([str(here), *sys.path])  # Triton looks for its interpreter once, on import
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split("\0")


def test_a_right_kernel_passes(said):
    assert said[0].startswith("PASS")


def test_a_forgotten_last_tile_is_found(said):
    assert said[1].startswith("FAIL")
    assert "only the last 2 of 10 elements" in said[1]


def test_other_sizes_find_a_last_tile_that_is_full_at_the_size_given(said):
    assert said[2].startswith("PASS")
    assert said[3].startswith("FAIL")
    assert "with 5 in place of 8" in said[3]


def test_a_right_kernel_passes_at_other_sizes_also_one_element_whose_bits_contiguous_leaves(said):
    assert said[4].startswith("PASS")
