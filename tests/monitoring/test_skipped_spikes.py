"""A step skipped as a finite spike is shown as such: in the record, the verdict, the findings and sinks."""

import json

import pytest
import torch
from synthetic import make_record

import gradguard as gg
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.signals import signals_of
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.show.sinks.sink import DashboardWindow


def recorded(path, blind=False):
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    spikes = gg.SkipSpikes(gg.SpikeDetector(window=16, warmup=5, alone=1))
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=layer, spikes=spikes)
    monitor = gg.Monitor(guard, path, model=layer)
    for size in [1.0] * 8 + [90.0, 1.0, float("inf"), 1.0]:
        layer.weight.grad = torch.full((1, 2), size)
        optimizer.step()
    monitor.close()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("blind", [False, True], ids=["host", "device"])
def test_the_record_tells_a_spike_from_a_step_that_was_not_finite(tmp_path, blind, monkeypatch):
    if blind:
        monkeypatch.setattr("gradguard.clip.guard.are_readable", lambda *_: False)
    lines = [line for line in recorded(tmp_path / "run.jsonl") if line["t"] == "step"]
    assert [(line["i"], line.get("spike")) for line in lines if line.get("skipped")] == [(8, True), (10, None)]
    assert lines[8]["norm"] == pytest.approx(90 * 2**0.5)
    judged = verdict(read_record(tmp_path / "run.jsonl"))
    assert (judged.skipped_steps, judged.skipped_spikes, judged.nonfinite_steps) == (2, 1, 1)
    assert "2 skipped (1 as finite spikes). 1 non-finite." in judged.sentence


class Own(torch.optim.SGD):
    """Of no library, so that its step is undone."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, Own], ids=["rehearsed", "undone"])
def test_a_spike_of_the_update_is_recorded_at_its_step(tmp_path, kind):
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = kind(layer.parameters(), lr=0.1)
    spikes = gg.SkipSpikes(gg.SpikeDetector(window=16, warmup=5, alone=1), updates=True)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=layer, spikes=spikes)
    monitor = gg.Monitor(guard, tmp_path / "run.jsonl", model=layer)
    for rate in [0.1] * 8 + [9.0, 0.1]:
        optimizer.param_groups[0]["lr"] = rate
        layer.weight.grad = torch.ones(1, 2)
        optimizer.step()
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["t"] == "step"]
    if kind is Own:
        told = [(line["i"], line["kind"], line["message"]) for line in lines if line["t"] == "event"]
        assert told == [(7, "rolled_back", "undid the step behind this one, because the norm of its update is a spike")]
        assert steps[8]["update"] == 0
    else:
        assert [(line["i"], line.get("spike")) for line in steps if line.get("skipped")] == [(8, True)]
    assert all(line["norm"] == pytest.approx(2**0.5) for line in steps)


def test_a_dashboard_gets_their_number():
    window = DashboardWindow()
    window.add({"t": "step", "i": 0, "norm": 1.0, "skipped": True})
    assert "skipped_spikes" not in window.scalars()
    window.add({"t": "step", "i": 1, "norm": 90.0, "skipped": True, "spike": True})
    assert (window.scalars()["skipped_steps"], window.scalars()["skipped_spikes"]) == (2, 1)


def test_a_spike_is_no_search_for_the_loss_scale():
    step = {"t": "step", "skipped": True, "amp_scale": 1024.0}
    steps = [step | {"i": 0}, step | {"i": 1, "spike": True}, {"t": "step", "i": 2, "skipped": True}]
    assert signals_of(make_record(steps=steps)).searched == [True, False, False]
