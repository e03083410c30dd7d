"""The page on PyTorch-Ignite runs, and so does an engine of one's own with a GradScaler; the rest is in the kit."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradguard as gg

pytest.importorskip("ignite")

from ignite.engine import Engine

PAGE = Path(__file__).parents[2] / "docs/trainers/ignite.md"
BOUND = 0.05


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, gg.Guard(optimizer, gg.ClipByMedian(ceiling=BOUND), model=model)


def data(batches):
    torch.manual_seed(1)
    return [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(batches)]


def by_hand(batches):
    model, optimizer, guard = made()
    for x, y in batches:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, guard


def same(ours, theirs):
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    namespace: dict = {}
    exec(block, namespace)
    guard = namespace["guard"]
    assert guard.steps == 8  # 16 batches, two for each step
    assert namespace["trainer"].state.metrics["grad_norm"] == float(guard.last.norm) > 0
    assert list((tmp_path / "checkpoints").glob("checkpoint_*.pt"))


def test_an_engine_of_ones_own_with_a_scaler():
    model, optimizer, guard = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update(engine, batch):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(batch[0]), batch[1])).backward()
        scaler.step(optimizer)
        scaler.update()

    batches = data(4)
    Engine(update).run(batches, max_epochs=1)
    expected, twin = by_hand(batches)
    same(model, expected)
    assert float(guard.last.norm) == float(twin.last.norm)
