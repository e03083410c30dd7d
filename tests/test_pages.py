"""`gradguard explain`, `skill` and `demo`: what a newcomer, or an assistant, types first."""

import json
import re
import runpy
from pathlib import Path

import pytest

from gradguard.cli import main
from gradguard.cli.pages import _page
from gradguard.monitoring.judge import diagnosis
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.file import read_record

ROOT = Path(__file__).parents[1]


def printed(capsys, *words):
    assert main([*words]) == 0
    return capsys.readouterr().out


def test_every_finding_and_every_cause_is_explained(capsys):
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    listed = printed(capsys, "explain")
    names = re.findall(r"^### `(\w+)`|^\| `(\w+)` \|", page, re.MULTILINE)
    assert len(names) > 40
    for name in {finding or cause for finding, cause in names}:
        assert f"`{name}`" in listed
        shown = printed(capsys, "explain", name)
        assert shown.startswith(f"# {name}\n")
        assert len(shown) > 40
        assert "](" not in shown  # neither a picture nor a link that leads nowhere


def test_an_unknown_name_gets_the_nearest_ones(capsys):
    assert main(["explain", "spik"]) == 2
    assert capsys.readouterr().err == "gradguard: error: 'spik' is no finding and no cause. Did you mean spike?\n"
    assert main(["explain", "zzz"]) == 2
    assert capsys.readouterr().err.endswith("`gradguard explain` lists all.\n")


def test_the_page_for_assistants_names_what_there_is(tmp_path, monkeypatch, capsys):
    text = printed(capsys, "skill")
    assert text == _page("skill.md")
    for command in re.findall(r"`gradguard (\w[\w-]*)", text):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    known = {"certain", "likely", "possible", "error", *re.findall(r"^(?:### |\| )`(\w+)`", page, re.MULTILINE)}
    known |= {"keep", "constant", "rule", "nothing", "fix", "unknown"}  # kinds of decisions
    monkeypatch.chdir(tmp_path)
    printed(capsys, "demo", "--no-open")
    known |= keys_of(json.loads(printed(capsys, "report", "--json", "gradguard-demo/unclipped")))
    assert set(re.findall(r"`([a-z_]+)`", text)) <= known


def keys_of(value):
    """All names in what was printed as JSON."""
    if isinstance(value, dict):
        return {*value, *(name for one in value.values() for name in keys_of(one))}
    return {name for one in value for name in keys_of(one)} if isinstance(value, list) else set()


def test_links_of_the_index_for_assistants_lead_somewhere():
    links = re.findall(r"\]\(([^)]*)\)", (ROOT / "docs/llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 10
    for link in links:
        assert (ROOT / "docs" / link).is_file()


def test_the_demo_tells_the_story_of_its_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = printed(capsys, "demo", "--no-open")
    sick, healed = read_record(Path("gradguard-demo/unclipped")), read_record(Path("gradguard-demo/clipped"))
    assert diagnosis.diagnose(sick).cause.key == "exploding_time"
    words = " ".join(told.split())
    assert diagnosis.diagnose(sick).sentence in words
    assert " it helped: " in diagnosis.diagnose(healed).sentence
    assert diagnosis.diagnose(healed).sentence in words
    assert f"gradguard run --clip {recommend(sick).rule} char_lm.py" in told
    before, after = re.search(r"ends at (\S+) instead of (\S+)\.", told).group(2, 1)
    assert float(after) < 0.9 * float(before)
    assert Path("gradguard-demo/demo.html").stat().st_size > 10_000
    assert len(told.splitlines()) < 20
    assert "gradguard run train.py" in told.splitlines()[-1]
    printed(capsys, "demo", "--no-open")  # again, over its own files


def test_the_demo_writes_over_nothing_of_the_users(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine/clipped").mkdir(parents=True)
    Path("runs/unclipped").mkdir(parents=True)
    Path("runs/unclipped/run.jsonl").write_text("a record of my own\n", encoding="utf-8")
    for folder in ("mine", "runs"):
        assert main(["demo", "--no-open", "--out", folder]) == 2
        assert "choose another --out" in capsys.readouterr().err
    assert Path("runs/unclipped/run.jsonl").read_text(encoding="utf-8") == "a record of my own\n"


def test_the_picture_of_the_demo_shows_what_it_prints(monkeypatch):
    picture = runpy.run_path(str(ROOT / "docs/demo_picture.py"))
    assert (ROOT / "docs/demo.svg").read_text(encoding="utf-8") == picture["drawn"]()
