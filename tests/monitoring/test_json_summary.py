"""`gradguard report --json`: what machines read, whatever the record is."""

import json
import math
import re
from pathlib import Path

import pytest
from synthetic import log_normal, make_record, steps_of, write_char_rnn, write_gan, write_sick

from gradguard.cli import main
from gradguard.monitoring.judge.conditions import QUANTITIES
from gradguard.monitoring.judge.diagnosis import diagnose
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.file import RecordWriter
from gradguard.monitoring.show.report import json_summary, text_summary

OF_EACH = [
    "verdict", "diagnosis", "decision", "regime", "steps", "taken_steps", "skipped_steps", "skipped_spikes",
    "nonfinite_steps", "faulty_steps", "recovery", "clip_share", "threshold", "median_coefficient", "median_norm",
    "max_norm", "spike_share", "drift", "lock_in_share", "final_loss", "best_loss", "overhead_share",
    "diverged", "clips",
]  # fmt: skip
KEYS = ["schema", "record", *OF_EACH, "errors", "warnings", "findings", "events", "notes", "optimizers"]
OF_DECISION = ["kind", "threshold", "rule", "rate_factor", "experiment", "headline", "reason"]
OF_FINDING = [
    "kind", "severity", "confidence", "first_step", "last_step", "params", "message", "advice", "value", "optimizer",
]  # fmt: skip
MEASURED = [
    "clip_share", "threshold", "median_coefficient", "median_norm", "max_norm", "spike_share", "final_loss",
    "best_loss", "overhead_share",
]  # fmt: skip
OF_DIAGNOSIS = ["cause", "certainty", "sentence", "advice", "evidence", "rules_out", "others"]

RECORDS = {
    "no step": lambda folder: make_record(),
    "one step": lambda folder: make_record(steps=steps_of([2.0], loss=1.0)),
    "not one finite number": lambda folder: make_record(steps=steps_of([None] * 300, nonfinite=4, loss=None)),
    "no norm": lambda folder: make_record(steps=[{"t": "step", "i": i, "loss": 1.0} for i in range(300)]),
    "clipped": lambda folder: write_char_rnn(folder / "run.jsonl", threshold=1.0),
    "sick": lambda folder: write_sick(folder / "run.jsonl"),
    "two optimizers": lambda folder: write_gan(folder / "run.jsonl"),
    "infinite end": lambda folder: make_record(
        steps=steps_of(log_normal(300)), end={"t": "end", "wall": 1e-300, "overhead_ms": 1e300}
    ),
    "names with escapes": lambda folder: make_record(
        meta={"t": "meta", "params": [{"name": "\x1b[31m\udcff\u202e"}]},
        steps=steps_of([1.0] * 20),
        tensors=[{"t": "tensors", "i": i, "norm": [0.0 if i > 5 else 1.0]} for i in range(20)],
        path=Path("\x1b.jsonl"),
    ),
}


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("name", RECORDS)
def test_every_key_is_there_and_every_number_is_the_one_of_the_text(name, tmp_path):
    record = RECORDS[name](tmp_path)
    text = json_summary([record])
    assert text.isascii()
    found = strict(text)
    judged, made = verdict(record), recommend(record)
    assert list(found) == KEYS
    assert [list(part) for part in found["optimizers"]] == [["optimizer", "name", *OF_EACH]] * len(judged.parts)
    assert list(found["decision"]) == OF_DECISION
    assert list(found["diagnosis"]) == OF_DIAGNOSIS
    assert found["diagnosis"]["cause"] == diagnose(record).cause.key
    assert all(list(one) == ["steps", "params", "words"] for one in found["diagnosis"]["evidence"])
    assert found["decision"] == {key: getattr(made, key) for key in OF_DECISION}
    assert [list(one) for one in found["findings"]] == [OF_FINDING] * len(findings(record))
    lines = dict(line.split(": ", 1) for line in text_summary(record).splitlines())
    for key in MEASURED:
        value = getattr(judged, key)
        assert found[key] == (value if value is not None and math.isfinite(value) else None)
        if found[key] is not None:
            assert lines[key] == f"{found[key]:.4g}"
    for key in ("verdict", "regime", "steps", "taken_steps", "skipped_steps", "nonfinite_steps"):
        assert lines.get(key, str(found[key])) == str(found[key])
    assert sum(key.startswith("findings_") and key.endswith("_kind") for key in lines) == len(found["findings"])


def test_conditions_compare_what_the_summary_names():
    assert set(QUANTITIES) <= set(KEYS)


def test_the_page_of_the_documentation_has_every_key():
    page = (Path(__file__).parents[2] / "docs/report.md").read_text(encoding="utf-8")
    table = page.split("## For machines")[1].split("## ")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    assert [key for head, _ in rows for key in re.findall(r"`(\w+)`", head)] == KEYS
    cells = {head.strip(" `"): value for head, value in rows}
    assert set(OF_DIAGNOSIS) <= set(re.findall(r"`(\w+)`", cells["diagnosis"]))
    assert set(OF_DECISION) <= set(re.findall(r"\w+", cells["decision"]))
    assert set(OF_FINDING) <= set(re.findall(r"`(\w+)`", cells["findings"]))


def test_two_clips_and_two_optimizers(tmp_path):
    clips = [["norm", 1.0, 0.5], ["norm", 4.0, 1.0]]
    steps = [
        {"t": "step", "i": i, "norm": 2.0, "coefficient": 0.5, "threshold": 1.0, "rule": "norm", "clips": clips}
        for i in range(9)
    ]
    found = strict(json_summary([make_record(meta={"t": "meta", "clip": "norm=4"}, steps=steps)]))
    assert found["clips"] == [
        {"name": "the script's own norm=1.0", "threshold": 1.0, "acted_steps": 9, "bound_steps": 9},
        {"name": "--clip norm=4.0", "threshold": 4.0, "acted_steps": 9, "bound_steps": 0},
    ]
    gan = strict(json_summary([write_gan(tmp_path / "run.jsonl")]))
    assert [(part["optimizer"], part["name"], part["steps"]) for part in gan["optimizers"]] == [
        (0, "optimizer 0 (Adam)", 300),
        (1, "optimizer 1 (SGD)", 300),
    ]
    assert gan["steps"] == 600
    assert gan["optimizers"][0]["median_norm"] > 20 * gan["optimizers"][1]["median_norm"]


@pytest.fixture
def written(tmp_path):
    for name, norms in (("a", [1.0] * 30), ("b", [math.nan] * 30)):
        with RecordWriter(tmp_path / name / "run.jsonl") as writer:
            writer.write("meta", optimizers=["SGD"])
            for i, norm in enumerate(norms):
                writer.write("step", i=i, norm=norm)
    return tmp_path


def test_the_command_prints_an_object_or_a_list_and_no_page(written, capsys):
    assert main(["report", str(written / "a"), "--json"]) == 0
    assert strict(capsys.readouterr().out)["median_norm"] == 1.0
    assert main(["report", str(written / "a"), str(written / "b"), "--json"]) == 0
    assert [found["nonfinite_steps"] for found in strict(capsys.readouterr().out)] == [0, 30]
    assert not (written / "a/report.html").exists()


def test_a_condition_that_holds_goes_to_stderr(written, capsys):
    assert main(["report", str(written / "b"), "--json", "--fail-on", "nonfinite"]) == 1
    captured = capsys.readouterr()
    assert strict(captured.out)["findings"][0]["kind"] == "nonfinite"
    assert "failed" in captured.err


def test_a_file_to_draw_into_does_not_go_with_it(written, capsys):
    assert main(["report", str(written / "a"), "--json", "-o", "page.html"]) == 2
    assert "--json prints: redirect it to a file instead of -o page.html" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(written / "a"), "--json", "--text"])
    assert "not allowed with argument" in capsys.readouterr().err
