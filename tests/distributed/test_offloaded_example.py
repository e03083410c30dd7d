"""The example of gradients that wait on the CPU: its norms are those of the same model in one piece."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

SCRIPT = Path(__file__).parents[2] / "examples/offloaded_gradients.py"
WIDTH, DEPTH, STEPS = 24, 2, 3


@pytest.mark.slow
def test_the_norms_are_those_of_the_model_in_one_piece(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["offloaded_gradients.py", "--width", str(WIDTH), "--depth", str(DEPTH)])
    monkeypatch.delenv("RANK", raising=False)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    shown = capsys.readouterr().out
    found = [float(norm) for norm in re.findall(r"norm (\S+)", shown)]

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    expected = []
    for _ in range(STEPS):
        x = torch.randn(32, WIDTH)
        F.mse_loss(model(x), x.roll(1, 1)).backward()
        expected.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    assert found == pytest.approx(expected, abs=2e-6)
    assert "one clip of 0.0 M gradients on cpu" in shown
