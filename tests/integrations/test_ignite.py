"""The page on PyTorch-Ignite runs, and an engine with a guard trains as a loop by hand does."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradguard as gg

pytest.importorskip("ignite")

from ignite.engine import Engine, create_supervised_trainer
from ignite.handlers import Checkpoint

PAGE = Path(__file__).parents[2] / "docs/trainers/ignite.md"
BOUND = 0.05


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, gg.Guard(optimizer, gg.ClipByMedian(ceiling=BOUND), model=model)


def data(batches, bad=()):
    torch.manual_seed(1)
    pairs = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(batches)]
    return [(x * (float("nan") if i in bad else 1.0), y) for i, (x, y) in enumerate(pairs)]


def by_hand(batches, parts):
    model, optimizer, guard = made()
    for number, (x, y) in enumerate(batches, 1):
        (nn.functional.mse_loss(model(x), y) / parts).backward()
        if number % parts == 0:
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


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("bad", [(), (4,)])
def test_an_engine_trains_as_a_loop_by_hand(parts, bad):
    batches = data(9, bad)
    model, optimizer, guard = made()
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=parts)
    trainer.run(batches, max_epochs=1)
    expected, twin = by_hand(batches, parts)
    same(model, expected)
    assert guard.steps == twin.steps == 9 // parts
    assert guard.skipped_steps == twin.skipped_steps == len(bad)


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
    expected, twin = by_hand(batches, 1)
    same(model, expected)
    assert float(guard.last.norm) == float(twin.last.norm)


def test_a_resumed_engine_goes_on_bit_by_bit():
    batches = data(8)
    whole, _ = by_hand(batches, 1)
    model, optimizer, guard = made()
    create_supervised_trainer(model, optimizer, nn.functional.mse_loss).run(batches[:5], max_epochs=1)
    saved = {"model": model, "optimizer": optimizer, "guard": guard}
    state = {name: one.state_dict() for name, one in saved.items()}
    again, optimizer, guard = made()
    Checkpoint.load_objects({"model": again, "optimizer": optimizer, "guard": guard}, state)
    create_supervised_trainer(again, optimizer, nn.functional.mse_loss).run(batches[5:], max_epochs=1)
    same(again, whole)
