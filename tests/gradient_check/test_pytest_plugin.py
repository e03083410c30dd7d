"""The fixture and the mark `gradcheck`, in a pytest of its own."""

import os
import subprocess
import sys

import pytest

from forked_python import run_python

pytestmark = pytest.mark.slow

FILE = """
import pytest, torch
import torch.nn.functional as F


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, v):
        (x,) = ctx.saved_tensors
        factor = torch.where(torch.arange(len(x)) < 4, 1.0, 0.5).to(x.dtype)[:, None]
        return v * x.cos() * factor


def sine(x):
    return Wrong.apply(x)


@pytest.mark.gradcheck(dtypes=[torch.float64, torch.float32, torch.bfloat16])
def test_silu(gradcheck):
    report = gradcheck(F.silu, torch.randn(3, 4))
    assert report.verdict == "PASS"


@pytest.mark.gradcheck(dtypes=[torch.float32])
def test_module(gradcheck):
    gradcheck(torch.nn.Linear(3, 2).double(), torch.randn(4, 3))


def test_without_a_mark(gradcheck):
    gradcheck(F.silu, torch.randn(3, 4))


def test_right_for_three_rows(gradcheck):
    gradcheck(sine, torch.randn(3, 2))


@pytest.mark.gradcheck(sizes={3: 4})
def test_wrong(gradcheck):
    gradcheck(sine, torch.randn(3, 2))
"""


def run(tmp_path, text, *options, anew=False):
    """What pytest says: started anew, or where PyTorch is imported already."""
    (tmp_path / "test_kernels.py").write_text(text)
    command = ["-m", "pytest", "-p", "gradguard.pytest_plugin", "-p", "no:cacheprovider", *options]
    if not anew:
        return run_python(*command, cwd=tmp_path, env={"PYTEST_ADDOPTS": ""}, check=False).stdout
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout


def test_a_failure_is_the_report(tmp_path):
    shown = run(tmp_path, FILE, "-v", "--strict-markers")
    assert "6 passed" in shown
    assert "1 failed" in shown
    for dtype in ("float64", "float32", "bfloat16"):
        assert f"test_silu[{dtype}] PASSED" in shown
    failure = shown.split("FAILURES")[1]
    assert "FAIL          x[4, 0]" in failure
    assert "with 5 in place of 3" in failure
    assert "def test_wrong" not in failure  # the table, no source


def test_the_mark_is_known_and_nothing_is_imported_for_it(tmp_path):
    assert "@pytest.mark.gradcheck(dtypes=None, **options)" in run(tmp_path, "", "--markers", anew=True)
    loaded = "import sys\n\ndef test():\n    assert 'torch' not in sys.modules\n"
    assert "1 passed" in run(tmp_path, loaded, anew=True)


def test_gradguard_does_not_import_pytest(tmp_path):
    code = "import gradguard, gradguard.testing, sys; print('pytest' in sys.modules, '_pytest' in sys.modules)"
    found = run_python("-c", code, cwd=tmp_path)
    assert found.stdout.split() == ["False", "False"]
