"""The page of `gradguard parity`: everything that the report says is in it, and nothing of it is markup."""

import html
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from runs import drawn, rounded, saved

from gradguard.cli import main
from gradguard.errors import RecordError
from gradguard.parity.compare import compare
from gradguard.parity.page import _height, render, write_page
from gradguard.parity.saved import write

VOID = {"meta", "link", "line", "circle", "br"}


class Balanced(HTMLParser):
    """Fails where a tag is not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def two_runs(change=None, name="<b>up&", **about):
    gradients = {f"layer.{i}.weight": drawn((8, 4), i) for i in range(6)} | {name: drawn((8, 32), 9)}
    new = {n: rounded(g, 1e-6, 77 + i) for i, (n, g) in enumerate(gradients.items())}
    new |= {n: act(new[n]) for n, act in (change or {}).items()}
    return saved(gradients, facts={"world size": 4.0}), saved(new, seed=3, **about)


CHANGES = {
    "PASS": None,
    "FAIL": {"<b>up&": lambda g: 4 * g, "layer.2.weight": lambda g: g * math.nan, "layer.3.weight": torch.zeros_like},
    "INCONCLUSIVE": {"layer.1.weight": lambda g: g + drawn((8, 4), 50)},
}


@pytest.mark.parametrize("verdict", CHANGES)
def test_the_page_says_what_the_report_says(verdict):
    runs = two_runs(CHANGES[verdict], random=verdict == "INCONCLUSIVE")
    report = compare(*runs)
    assert report.verdict == verdict
    page = render(report, runs, ["ref", "new"])
    text = " ".join("".join(Balanced(page).text).split())
    assert verdict in text
    for finding in report.findings:
        assert finding.message in text
        assert all(name in text for name in finding.parameters)
    for note in report.notes:
        assert note in text
    for outcome in report.parameters:
        assert page.count(f'<th scope="row">{html.escape(outcome.name)}</th>') == 1
    assert "<b>up&" not in page
    assert "world size" in text


def test_points_lie_where_their_distance_is():
    heights = [_height(d) for d in (0.0, 1e-9, 0.01, 1.0, 3.0, 1e4, 1e9, math.inf)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == heights[2] != heights[3] != heights[4] != heights[5] == heights[7]
    runs = two_runs(CHANGES["FAIL"])
    page = render(compare(*runs), runs, ["ref", "new"])
    assert len(re.findall("<circle", page)) == 6  # all but the one that is not finite
    assert len(re.findall('class="wrong"', page)) == 2


def test_a_page_of_nothing(tmp_path):
    runs = saved({}), saved({})
    text = write_page(tmp_path / "page.html", compare(*runs), runs, ["a", "b"]).read_text(encoding="utf-8")
    assert "<svg" not in text
    assert "nothing was compared" in text


def test_what_cannot_be_written_is_said(tmp_path):
    runs = two_runs()
    with pytest.raises(RecordError, match=r"cannot write .*--output"):
        write_page(tmp_path / "nowhere" / "page.html", compare(*runs), runs, ["a", "b"])
    assert not list(tmp_path.iterdir())


def test_the_command_draws_it_in_the_style_of_reports(tmp_path, capsys):
    files = [tmp_path / "ref.safetensors", tmp_path / "new.safetensors"]
    for file, run in zip(files, two_runs(CHANGES["FAIL"]), strict=True):
        write(file, run)
    page = tmp_path / "page.html"
    assert main(["parity", *map(str, files), "--output", str(page)]) == 1
    assert "page.html" in capsys.readouterr().err
    text = page.read_text(encoding="utf-8")
    assert ".decision.bad" in text
    assert "<title>FAIL: ref and new" in text
    assert not re.search(r"(src|href)=\"(?!data:|#)|url\(", text)  # nothing from the network
    assert main(["parity", *map(str, files), "-o", str(files[0])]) == 2
    assert "a page would replace it" in capsys.readouterr().err
