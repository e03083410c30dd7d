"""The example of wrong labels: what it says of per-sample clipping is true, and it draws it."""

import re
import runpy
from pathlib import Path

import pytest

from forked_python import run_python

SCRIPT = Path(__file__).parents[1] / "examples/noisy_labels.py"


@pytest.fixture(scope="module")
def example() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_wrong_labels_have_large_gradients(example):
    data = example["digits"](0.3, seed=0)
    _, norms = example["train"](data, example["ARMS"]["per-sample clip"], epochs=5, seed=0)
    assert len(norms) == len(data.labels)
    assert norms[data.wrong].quantile(0.05) > norms[~data.wrong].quantile(0.9)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_per_sample_clipping_does_not_learn_wrong_labels_by_heart(example):
    data = example["digits"](0.3, seed=0)
    ends = {name: example["train"](data, arm, epochs=60, seed=0)[0][-1] for name, arm in example["ARMS"].items()}
    assert ends["per-sample clip"] > 0.92
    assert max(ends["plain"], ends["batch clip"]) < 0.85


@pytest.mark.slow
def test_it_prints_a_line_for_each_run_and_writes_one_page_with_both_plots(tmp_path):
    options = ["--epochs", "2", "--out", "made/page.html"]
    done = run_python(SCRIPT, *options, cwd=tmp_path)
    rows = re.findall(r"^(\S.*?) +0\.\d{3} +0\.\d{3}$", done.stdout, flags=re.MULTILINE)
    assert rows == ["plain", "plain, learning rate 0.01", "batch clip", "per-sample clip"]
    page = (tmp_path / "made/page.html").read_text(encoding="utf-8")
    assert "Plotly.newPlot" in page
    assert "Accuracy on test images" in page
