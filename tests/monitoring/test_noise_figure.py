"""The noise scale from a clipper into a record, and from there onto the page."""

import math
import re

import pytest
import torch
from synthetic import make_record, steps_of

import gradguard as gg
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.show.report import write_report
from gradguard.monitoring.show.report.noise_figure import noise_scale, suggestion

MEASURED = {"noise_scale": 900.0, "noise_scale_low": 700.0, "noise_scale_high": 1200.0, "batch_size": 64}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((900.0, 700.0, 1200.0, 64.0), r"about 900 \(700 to 1,200\).*64, twice.* 47 % fewer steps; .* 3,600 on"),
        ((64.0, None, None, 64.0), r"about 64 samples at the end. At a batch of 64, twice .* 25.* % fewer"),
        ((10.0, 9.0, 11.0, 90.0), r"half the batch takes only about 10.* % more steps"),
        ((900.0, 700.0, 1200.0, None), r"about 900 \(700 to 1,200\) samples at the end\.$"),
        ((None, 300.0, None, 64.0), r"cannot be told from its noise.* not known; it is probably above 300 samples"),
        ((None, None, None, 64.0), r"cannot be told from its noise.* not known\.$"),
    ],
)
def test_what_it_says(values, words):
    assert re.search(words, suggestion(*values))


@pytest.mark.parametrize(
    ("steps", "trace"),
    [
        (steps_of([1.0] * 3, **MEASURED), [900.0] * 3),
        (steps_of([1.0] * 2, **(MEASURED | {"noise_scale": None, "noise_scale_high": None})), [None] * 2),
        (steps_of([1.0], noise_scale=5.0), [5.0]),
    ],
)
def test_what_is_drawn(steps, trace):
    chart = noise_scale(make_record(steps=steps), 100)
    named = {t.get("name"): t for t in chart.figure["data"]}
    assert named["noise scale"]["y"] == trace
    assert ("batch size" in named) == ("batch_size" in steps[0])
    assert len(chart.table.rows) == len(steps)


def test_a_long_run_is_thinned():
    chart = noise_scale(make_record(steps=steps_of([1.0] * 5000, **MEASURED)), 100)
    assert max(len(trace["x"]) for trace in chart.figure["data"]) <= 201


@pytest.mark.parametrize("fields", [{}, {"noise_scale": None}, {"noise_scale": 0.0}, {"noise_scale": "many"}])
def test_nothing_to_draw(fields):
    assert noise_scale(make_record(steps=steps_of([1.0] * 3, **fields)), 100) is None


def test_from_the_clipper_to_the_page(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), noise_scale=True)
    with gg.Monitor(optimizer, sink=tmp_path / "run.jsonl", model=model) as monitor:
        for _ in range(8):
            x = torch.randn(16, 4)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
            monitor.log(**clipper.noise_scale.scalars())
            optimizer.step()
    record = read_record(tmp_path / "run.jsonl")
    assert [step["batch_size"] for step in record.steps] == [16.0] * 8
    assert record.steps[-1]["noise_scale"] == pytest.approx(clipper.noise_scale.total, rel=1e-6)
    assert record.steps[0]["noise_scale_high"] is None
    assert math.isfinite(record.steps[-1]["noise_scale_high"])
    page = write_report([record], tmp_path / "report.html").read_text(encoding="utf-8")
    assert ">Gradient noise scale <a" in page
    assert "The noise scale is about" in page
