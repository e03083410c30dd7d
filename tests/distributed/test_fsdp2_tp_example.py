"""The example of FSDP2 and tensor parallelism: what it prints is what the same model in one piece does."""

import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import rendezvous

SCRIPT = Path(__file__).parents[2] / "examples/fsdp2_tp.py"
STEPS, MAX_NORM = 4, 0.5


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


def run_script(meeting):
    """Run the script in a process that exists, with what torchrun tells one; return what it prints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= meeting | {"RANK": str(rank), "WORLD_SIZE": str(world)}
    sys.argv = [str(SCRIPT), "--steps", str(STEPS), "--every", "1", "--check", "2"]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
def test_its_norms_are_those_of_the_model_in_one_piece(pool, expected):
    with pool.fresh(4) as processes, rendezvous() as meeting:
        printed, *others = processes.run(run_script, meeting)
    assert others == [""] * 3
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(STEPS))
    table = torch.tensor([list(map(float, row[1:])) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    said = re.search(r"norms of 2 steps, sharded and in one piece, differ by at most (\S+)", printed)
    assert said is not None, printed
    assert float(said[1]) < 1e-5


def test_the_steps_that_are_checked_clip(expected):
    assert all(coefficient < 1 for _, _, coefficient in expected)
