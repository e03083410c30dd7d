"""The notebooks are the tutorials, and a run in one names no kernel."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import gradguard as gg
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.file import read_record
from test_docs import blocks

ROOT = Path(__file__).parents[1]
notebooks = runpy.run_path(str(ROOT / "docs/notebooks.py"))


@pytest.mark.parametrize("name", notebooks["TUTORIALS"])
def test_a_notebook_is_its_tutorial(name):
    page = ROOT / f"docs/tutorials/{name}.md"
    file = ROOT / f"examples/notebooks/{name}.ipynb"
    written = file.read_text(encoding="utf-8")
    assert written == notebooks["notebook"](page.read_text(encoding="utf-8")), "run docs/notebooks.py"
    cells = json.loads(written)["cells"]
    code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code == blocks(page, "python")  # which test_tutorials.py runs
    for cell in cells:
        compile("".join(cell["source"]) if cell["cell_type"] == "code" else "", name, "exec")
        for target in notebooks["_LINK"].findall("".join(cell["source"])):
            link = "".join(target).partition("#")[0]
            assert not link or (file.parent / link).exists(), link


def test_a_record_of_a_notebook_names_no_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/env/ipykernel_launcher.py", "-f", "/tmp/kernel.json"])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gg.Monitor(optimizer, sink=str(tmp_path / "run.jsonl"), model=model):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    record = read_record(tmp_path / "run.jsonl")
    assert record.meta["argv"] == []
    assert record.script == "train.py"
    assert "ipykernel" not in recommend(record).reason
