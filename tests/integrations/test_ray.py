"""A guard in Ray Train: the example runs on two real workers."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples/ray_guard.py"
START = f"""
import ray, runpy
ray.init(num_cpus=4, include_dashboard=False)  # 4 also where there is one: a worker wants a core of its own
print("Ray runs", flush=True)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_the_example_clips_alike_on_two_workers_and_skips_alike(tmp_path):
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_COLOR_PREFIX": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, **quiet, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    if "Ray runs" not in done.stdout:
        pytest.skip(f"Ray does not start on this machine: {done.stderr[-500:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(re.findall(r"rank (\d): (\{.*?\})", done.stdout + done.stderr))
    first, second = ast.literal_eval(said["0"]), ast.literal_eval(said["1"])
    assert first == second == ast.literal_eval(done.stdout.splitlines()[-1])
    assert 0.05 < first["norm"] < 50
    assert first["skipped"] == 1
    assert first["names"] == ("weight", "bias")
