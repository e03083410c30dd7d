"""The page for assistants leads to the cause: `benchmarks/skill.py`, held for two scripts and a record."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from gradguard.monitoring.judge.diagnosis import KEYS

ROOT = Path(__file__).parents[1]
skill = runpy.run_path(str(ROOT / "benchmarks/skill.py"))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the summary of the demo's run that is not clipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("demo"))
        skill["printed"]("demo", "--no-open")
        return json.loads(skill["printed"]("report", "--json", "gradguard-demo/unclipped"))


def test_the_fields_that_the_page_names_lead_from_a_record_to_its_cause(report):
    page = skill["printed"]("skill")
    assert skill["fields"](page)[0] == "diagnosis.cause"
    answer = skill["follow"](page, report)
    assert answer.cause == "exploding_time"
    assert "orthogonal_" in answer.said
    assert "orthogonal_" in answer.explained


def test_a_page_that_names_another_field_leads_nowhere(report):
    page = skill["printed"]("skill").replace("`diagnosis.cause`", "`diagnosis.reason`")
    with pytest.raises(KeyError, match="reason"):
        skill["follow"](page, report)


def test_every_sick_script_has_a_known_cause_and_no_gradguard():
    scripts = {script.stem: script.read_text(encoding="utf-8") for script in (ROOT / "benchmarks/sick").glob("*.py")}
    assert {*scripts} == {*skill["CAUSES"]}
    assert {cause for cause, _ in skill["CAUSES"].values()} <= {*KEYS}
    for text in scripts.values():
        assert "gradguard" not in text
        assert '"--well" in sys.argv' in text


@pytest.mark.slow
@pytest.mark.parametrize("script", ["houses", "schedule"])
def test_a_sick_script_is_named_and_its_twin_is_well(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["python"])
    cause, words = skill["CAUSES"][script]
    page = skill["printed"]("skill")
    path = ROOT / f"benchmarks/sick/{script}.py"
    sick = skill["follow"](page, skill["report_of"](path, tmp_path / "sick"))
    assert (sick.cause, words in sick.said, words in sick.explained) == (cause, True, True)
    assert skill["follow"](page, skill["report_of"](path, tmp_path / "well", "--well")).cause == "healthy"
