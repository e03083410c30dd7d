"""docs/findings.md explains every finding, quotes what the code says, and its pictures show what they should."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from test_health import FAULTS

import gradguard as gg
from gradguard.monitoring.judge.causes import CAUSES
from gradguard.monitoring.judge.detectors import KINDS
from gradguard.monitoring.judge.detectors import loop_faults as loop_setup
from gradguard.monitoring.judge.findings import Episode
from gradguard.monitoring.judge.health import findings

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "findings.md").read_text(encoding="utf-8")
PARTS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
PICTURES = sorted((DOCS / "findings").iterdir())

spec = importlib.util.spec_from_file_location("finding_pictures", DOCS / "finding_pictures.py")
drawn = importlib.util.module_from_spec(spec)
spec.loader.exec_module(drawn)

ENCODER = ["encoder.weight", "encoder.bias"]
SET_UP = [  # of those that FAULTS leaves to the tests of loops
    loop_setup.setup_episode(loop_setup.NO_OPTIMIZER, 9, ENCODER, 10),
    loop_setup.setup_episode(loop_setup.NO_GRADIENT, 10, ["head.weight"], 10),
    Episode(loop_setup.SCALED_CLIP, None, 38, 40, 3, numbers={"threshold": 1.0, "scale": 65536.0, "acts": 1 / 65536}),
    Episode(loop_setup.KEPT, None, 1, 5, 5),
    Episode(loop_setup.EMPTY, None, 1, 1, numbers={"largest": 4.0}),
]


@pytest.fixture(scope="module")
def said():
    """What the code says of each kind, of all examples of the tests."""
    told = [episode.finding() for episode in SET_UP]
    told += [one for _, _, _, record in FAULTS for one in findings(record)]
    return {(one.kind, f"> **{one.severity}**: {one.message}") for one in told}


def test_the_guard_that_is_advised_can_be_typed():
    pages = {page: (DOCS / page).read_text(encoding="utf-8") for page in ("findings.md", "causes.md", "watching.md")}
    words = [*pages.values(), *(row.advice for row in CAUSES)]
    lines = {line for text in words for line in re.findall(r"gg\.Guard\((?:[^()]|\([^()]*\))*\)", text)}
    assert len(lines) >= 2
    for line in lines:
        names = {
            "gg": gg,
            "clipper": gg.ClipByMedian(),
            "optimizer": torch.optim.SGD(torch.nn.Linear(2, 1).parameters()),
        }
        eval(line, names).detach()


def test_every_kind_is_explained_once():
    headings = re.findall(r"^### `(\w+)`$", PAGE, flags=re.MULTILINE)
    assert sorted(headings) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_quoted_and_explained(kind, said):
    (quoted,) = re.findall(r"^> .*$", PARTS[kind], flags=re.MULTILINE)
    assert (kind, quoted) in said
    for heading in ("**What it means.**", "**How it looks.**", "**What to do.**"):
        assert heading in PARTS[kind]
    assert f"(#{kind})" in PAGE.split("\n## ")[0]  # the list of what one sees


def test_the_pictures_are_shown_and_small():
    shown = re.findall(r"!\[[^]]+\]\(findings/([^)]+)\)", PAGE)
    assert sorted(shown) == [picture.name for picture in PICTURES]
    sizes = [picture.stat().st_size for picture in PICTURES]
    assert max(sizes) < 60_000
    assert sum(sizes) < 1_000_000


def test_each_picture_is_one_that_the_script_draws():
    assert {picture.stem.removesuffix("_sick").removesuffix("_healthy") for picture in PICTURES} == {*drawn.CASES}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", drawn.CASES)
def test_the_sick_run_has_the_finding_and_the_healthy_one_has_none(kind, tmp_path, others_unseen):
    _, sick, healthy = drawn.CASES[kind]
    assert kind in {one.kind for one in findings(drawn.train(tmp_path / "sick.jsonl", **sick))}
    if healthy is not None:
        assert findings(drawn.train(tmp_path / "healthy.jsonl", **healthy)) == []
