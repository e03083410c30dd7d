"""The example of the error clip: what it says of gradients through time is true, and it draws it."""

import math
import re
import runpy
from pathlib import Path

import pytest
import torch

import gradguard as gg
from forked_python import run_python

SCRIPT = Path(__file__).parents[1] / "examples/exploding_rnn.py"
LENGTH, CLIP = 120, 1e-4


@pytest.fixture(scope="module")
def example() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_gradients_explode_on_their_way_through_time(example):
    norms = example["norms_through_time"](None, LENGTH, seed=0)
    assert len(norms) == LENGTH
    assert norms[-1] > 1e6 * norms[0]


def test_the_error_clip_bounds_them_at_each_step(example):
    norms = example["norms_through_time"](gg.ErrorClipByValue(CLIP), LENGTH, seed=0)
    assert len(norms) == LENGTH
    # A clipped gradient has at most the norm CLIP · sqrt(16 · 64); one more step, before the next clip, multiplies it
    # by at most the gain of 2.5. What the output layer adds is smaller than CLIP · sqrt(16 · 64) again.
    assert max(norms) < (2.5 + 1) * CLIP * math.sqrt(16 * 64)


@pytest.fixture
def _one_thread():
    """The matrices are small: two threads on a busy machine mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("rule", "max_norm", "losses"),
    [(None, None, 1), (None, 1.0, 1), (gg.ErrorClipByValue(CLIP), None, 3), (gg.ErrorClipByValue(CLIP), 1.0, 3)],
    ids=["plain", "norm clip", "error clip", "both"],
)
def test_over_800_steps_only_the_error_clip_survives(example, rule, max_norm, losses):
    found = example["train"](rule, max_norm, length=800, steps=3, seed=0)
    assert sum(map(math.isfinite, found)) == losses
    assert math.isnan(found[-1]) == (losses == 1)


@pytest.mark.slow
def test_it_prints_a_line_for_each_run_and_writes_one_page_with_both_plots(tmp_path):
    options = ["--length", "200", "--steps", "2", "--out", "made/page.html"]
    done = run_python(SCRIPT, *options, cwd=tmp_path)
    assert re.findall(r"^(plain|norm clip|error clip|both) +\d\.\d{3}$", done.stdout, flags=re.MULTILINE) == [
        "plain",
        "norm clip",
        "error clip",
        "both",
    ]
    page = (tmp_path / "made/page.html").read_text(encoding="utf-8")
    assert "Plotly.newPlot" in page
    assert "<script src=" not in page
    for words in ("Loss over training", "First backward", "no error clip: ", "error clip 0.0001: "):
        assert words in page
