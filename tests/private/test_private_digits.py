"""The example of private training: it learns, within its budget, and says both."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/private_digits.py"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_learns_within_its_budget_and_prints_both():
    options = ["--epochs", "6", "--epsilon", "8", "--batch-size", "128"]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=True)
    (accuracy,) = re.findall(r"^test accuracy (\d\.\d{3})$", done.stdout, flags=re.MULTILINE)
    (epsilon,) = re.findall(r"^epsilon (\d+\.\d{3}) at delta 0.0001$", done.stdout, flags=re.MULTILINE)
    assert float(accuracy) > 0.7
    assert 7.9 < float(epsilon) <= 8.0
    assert "66/66" in done.stderr  # the progress bar
