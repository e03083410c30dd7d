"""`gradguard run --resilient`: spikes are skipped in a script that knows nothing of it, and nothing else changes."""

import gc
import json
import re
from weakref import ref

import pytest
import torch

from gradguard.cli import main
from gradguard.resilience.recovery_of_a_script import GuardEachOptimizer
from gradguard.script_events import listening

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
SPIKES, CLIP, KIND = eval(sys.argv[1]), sys.argv[2] == "clip", sys.argv[3]
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
second = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
other = torch.optim.SGD(second.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", enabled="scale" in KIND)
draw = torch.Generator().manual_seed(3)
for step in range(60):
    x = torch.randn(32, 8, generator=draw)
    y = x[:, :1] + ((float("inf") if KIND == "nonfinite" else 500.0) if step in SPIKES else 0.0)
    if SPIKES == {-1} and step == 50:
        continue  # a twin that never sees this batch
    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss
    if KIND == "closure":
        optimizer.step(closure)
        continue
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    scaler.scale(loss).backward()
    if CLIP:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if "two" in KIND:
        other.zero_grad()
        second(x).square().mean().backward()
        other.step()
    scaler.step(optimizer)
    scaler.update()
torch.save(model.state_dict(), sys.argv[4])
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")

    def of(*options, spikes=(), clip="no", kind="plain"):
        words = ["run", *options, "--no-report", "--force", "--out", "out", "train.py"]
        assert main([*words, repr({*spikes}), clip, kind, "w.pt"]) == 0
        return torch.load("w.pt"), capsys.readouterr().err

    return of


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "clip"),
    [(kind, "no") for kind in ("plain", "scaler", "closure", "two")]
    + [(kind, "clip") for kind in ("plain", "scaler", "two")],  # the script does not clip in a closure
)
def test_a_spike_is_skipped_and_nothing_else(run, kind, clip):
    twin, _ = run(spikes=[-1], clip=clip, kind=kind)
    weights, words = run("--resilient", spikes=[50], clip=clip, kind=kind)
    assert equal(weights, twin)
    steps = 120 if kind == "two" else 60
    assert f"--resilient skipped 1 of {steps} steps as spikes." in words
    assert "It does not go back to older weights" in words
    spiked, _ = run(spikes=[50], clip=clip, kind=kind)
    assert not equal(spiked, twin)  # the spike does harm


@pytest.mark.parametrize("kind", ["plain", "scaler", "closure", "two"])
def test_without_a_spike_it_changes_no_bit(run, kind):
    twin, _ = run(kind=kind)
    weights, words = run("--resilient", kind=kind)
    assert equal(weights, twin)
    assert "skipped 0 of" in words


def test_beside_a_clip_it_judges_the_norm_before(run):
    twin, _ = run("--clip", "norm=0.1", spikes=[-1], kind="two")
    weights, words = run("--clip", "norm=0.1", "--resilient", spikes=[50], kind="two")
    assert equal(weights, twin)
    assert "skipped 1 of 120 steps" in words


def test_steps_that_are_not_finite_are_counted_apart(run):
    weights, words = run("--resilient", spikes=[20, 30], kind="nonfinite")
    assert "skipped 0 of 60 steps as spikes, 2 more were not finite" in words
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_an_optimizer_that_the_script_drops_is_freed(tmp_path):
    guards = GuardEachOptimizer()
    with listening(guards):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert len(guards._guards) == 1
        gone = ref(optimizer)
        del optimizer, model
        gc.collect()
        assert gone() is None


def test_where_nothing_can_be_judged_it_says_so(run):
    _, words = run("--resilient", clip="clip", kind="two scaled")
    assert "Adam was left alone: a GradScaler and the script's clip hide its norm" in words
    assert "SGD" not in words


def test_the_record_tells_it(run, tmp_path):
    run("--resilient", spikes=[50])
    lines = [json.loads(line) for line in (tmp_path / "out/run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["i"] for line in lines if line.get("skipped")] == [50]
    assert not [line for line in lines if line.get("rule")]  # a guard that only measures is no clip


def test_what_cannot_be_guarded_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch, gradguard as gg\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n",
        encoding="utf-8",
    )
    assert main(["run", "--resilient", "--no-report", "--out", "out", "train.py"]) == 0
    words = capsys.readouterr().err
    assert re.search(r"skipped 0 of 3 steps as spikes\. SGD was left alone: this SGD has a Guard already", words)


def test_several_processes_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 2)
    guards, model = GuardEachOptimizer(), torch.nn.Linear(2, 1)
    guards.on_stepped(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "SGD was left alone: several processes train together" in guards.report()
