"""The example of FSDP2 and tensor parallelism: what it prints is what the same model in one piece does."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples/fsdp2_tp.py"
STEPS, MAX_NORM = 4, 0.5
TIME_LIMIT = 240
"""Seconds after which a run counts as hanging; a quiet machine needs about 15."""


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, float, float]]:
    """Loss, norm and coefficient of each step, by PyTorch alone, on one process, in float64."""
    example, found = runpy.run_path(str(SCRIPT)), []
    torch.manual_seed(0)
    model = example["Transformer"]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        loss = model(*example["batch_of"](step))
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        coefficient = (MAX_NORM / (norm + 1e-6)).clamp(max=1)
        for p in model.parameters():
            p.grad.mul_(coefficient)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item(), coefficient.item()))
    return found


@pytest.mark.slow
def test_its_norms_are_those_of_the_model_in_one_piece(expected):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    options = ["--steps", str(STEPS), "--every", "1", "--check", "2"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), *options], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(STEPS))
    printed = torch.tensor([list(map(float, row[1:])) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(printed, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    said = re.search(r"norms of 2 steps, sharded and in one piece, differ by at most (\S+)", done.stdout)
    assert said is not None, done.stdout
    assert float(said[1]) < 1e-5


def test_the_steps_that_are_checked_clip(expected):
    assert all(coefficient < 1 for _, _, coefficient in expected)
