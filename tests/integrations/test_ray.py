"""A guard in Ray Train: the example runs on two real workers."""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples/ray_guard.py"
START = f"""
import os, ray, runpy
# 4 also where there is one: a worker wants its own
ray.init(address="local", num_cpus=4, include_dashboard=False, _temp_dir=os.environ["SHORT"])
print("Ray runs", flush=True)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""

PATIENCE = (
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S",
    "RAY_gcs_server_request_timeout_seconds",
    "RAY_worker_register_timeout_seconds",
)
"""Seconds after which Ray gives its own processes up; on a busy machine they take minutes to start."""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "began_at"),
    [([], 0), pytest.param(["60"], 50, marks=pytest.mark.exhaustive)],  # Ray takes a minute to begin again
)
def test_the_example_clips_and_skips_alike_and_goes_on_from_its_checkpoint(arguments, began_at, tmp_path):
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path)}
    variables |= dict.fromkeys(PATIENCE, "600")
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:  # a socket's path is 107 bytes
        done = subprocess.run(
            [sys.executable, "-c", START, *arguments],
            env={**os.environ, **variables, "SHORT": short},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
    if "Ray runs" not in done.stdout:
        pytest.skip(f"Ray does not start on this machine: {done.stderr[-500:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = ast.literal_eval(re.search(r"^result: (.*)$", done.stdout, re.MULTILINE)[1])
    (norm, skipped, steps), second = found["workers"]
    assert second == (norm, skipped, steps)
    assert 0.05 < norm < 50
    assert (skipped, steps) == (1, 100)
    assert found["began_at"] == began_at
    assert found["names"] == ("weight", "bias")
