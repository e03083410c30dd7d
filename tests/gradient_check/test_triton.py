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

REPORTS = """
import torch
import gradguard as gg
import triton_kernel
x = torch.arange({count}).mul(2.3).cos()
print(gg.gradcheck(triton_kernel.{name}, x{options}))
"""


def said_of(name: str, count: int, options: str = "") -> str:
    here = Path(__file__).parent
    command = [sys.executable, "-c", REPORTS.format(name=name, count=count, options=options)]
    paths = os.pathsep.join([str(here), *sys.path])  # Triton looks for its interpreter once, on import
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_right_kernel_passes():
    assert said_of("silu", 10).startswith("PASS")


def test_a_forgotten_last_tile_is_found():
    said = said_of("silu_without_the_last_tile", 10)
    assert said.startswith("FAIL")
    assert "only the last 2 of 10 elements" in said


def test_other_sizes_find_a_last_tile_that_is_full_at_the_size_given():
    assert said_of("silu_without_the_last_tile", 8).startswith("PASS")
    said = said_of("silu_without_the_last_tile", 8, ", sizes={8: 4}")
    assert said.startswith("FAIL")
    assert "with 5 in place of 8" in said
