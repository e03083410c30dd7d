"""Small training scripts with one fault each: the diagnosis names it, and no page says two opposite things.

The whole set is `benchmarks/diagnosis.py`; here are those of its runs that take a fraction of a second.
"""

import inspect
import json
import sys
from pathlib import Path

import pytest

import gradguard as gg
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.show.report.json_summary import json_summary

FOLDER = Path(__file__).parents[2] / "benchmarks"

RUNS = [
    ("exact_line", ""),
    ("poisson_counts", ""),
    ("curve_autoencoder", ""),
    ("completion", ""),
    ("poisson_counts", "nonfinite_data"),
    ("poisson_counts", "nonfinite_growth"),
    ("poisson_counts", "rate_decayed"),
    ("completion", "not_started"),
    ("completion", "rate_too_low"),
    ("curve_autoencoder", "rate_zero"),
    ("curve_autoencoder", "no_gradient"),
    ("curve_autoencoder", "clip_starves"),
    ("wheel_values", "clip_twice"),
    ("wheel_values", "accumulation"),
    ("half_tabular", "clip_before_unscale"),
    ("sensor_student", "rate_too_high"),
]


@pytest.fixture(scope="module")
def bench():
    sets = ("tasks", "more_tasks", "held_out", "fresh_tasks", "unseen_tasks", "optimizer_tasks", "new_fields_tasks")
    names = ("diagnosis", *(f"diagnosis_{name}" for name in sets))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import diagnosis
        import diagnosis_tasks

        yield diagnosis, diagnosis_tasks
        for name in names:
            sys.modules.pop(name, None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("task", "fault"), RUNS)
def test_fault_stands_in_first_place_on_a_page_without_contradictions(bench, tmp_path, task, fault):
    diagnosis, tasks = bench
    with gg.watch(tmp_path / "run.jsonl"):
        tasks.TASKS.by_name[task].script(tasks.Run(0, fault))
    shown = json.loads(json_summary([read_record(tmp_path / "run.jsonl")]))
    assert shown["diagnosis"]["cause"] == (fault or "healthy")
    assert diagnosis.contradictions(shown) == []


def page(cause, kind, *findings):
    found = [{"kind": name, "severity": severity} for name, severity in findings]
    return {"diagnosis": {"cause": cause}, "decision": {"kind": kind}, "findings": found}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (page("unknown", "keep", ("exploding", "error")), ["keep beside exploding"]),
        (page("unknown", "nothing", ("exploding", "error")), ["nothing beside exploding"]),
        (page("rate_zero", "nothing"), ["nothing beside rate_zero"]),
        (page("healthy", "fix"), ["healthy beside fix"]),
        (
            page("healthy", "constant", ("spike", "info"), ("clipped_twice", "warning")),
            ["healthy beside clipped_twice"],
        ),
        (page("bad_batches", "constant", ("recurring_spikes", "warning")), []),
    ],
)
def test_contradictions_are_seen(bench, shown, expected):
    assert bench[0].contradictions(shown) == expected


def test_every_fault_is_built_into_its_script(bench):
    for tasks in bench[0].SETS.values():
        for name, task in tasks.TASKS.by_name.items():
            body = inspect.getsource(task.script).partition("def ")[2]
            assert [fault for fault in task.faults if fault not in body] == [], name
