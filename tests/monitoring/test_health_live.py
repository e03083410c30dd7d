"""Health while a run is recorded: each fault is one event, and the report tells it once."""

import math

import pytest
import torch
from synthetic import make_record, steps_of
from torch import nn

from gradguard import Monitor
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.live import Judge
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.record.file import RecordWriter, read_record
from gradguard.monitoring.show.report import text_summary
from gradguard.monitoring.show.report.summary import untold
from gradguard.script_events import listening

pytestmark = pytest.mark.usefixtures("others_unseen")


def step(i, **fields):
    return {"t": "step", "i": i, "norm": 1.0, "loss": None, "optimizer": None} | fields


def bad(i, names, **fields):
    words = {"severity": "error", "message": "", "advice": ""}
    event = {"t": "event", "i": i, "kind": "nonfinite", "params": names} | words
    return [step(i, norm=math.nan, nonfinite=1, **fields), event]


def told(lines):
    judge = Judge({"params": [{"name": "a"}, {"name": "b"}]})
    return [out for line in lines for out in judge.follow(dict(line)) if out["t"] == "event"]


CASES = {
    "calm": ([step(i) for i in range(300)], []),
    "an explosion, once": ([step(i, norm=1.0 if i < 300 else 50.0) for i in range(360)], [("exploding", 309, 50.0)]),
    "a scale below 1": ([step(i, amp_scale=0.5) for i in range(9)], [("amp_scale_collapse", 0, 0.5)]),
    "not finite, once": ([*bad(3, ["a"]), *bad(4, ["a"]), *bad(5, ["a"])], [("nonfinite", 3, None)]),
    "and again for others": ([*bad(3, ["a"]), *bad(4, ["b", "a"])], [("nonfinite", 3, None), ("nonfinite", 4, None)]),
    "and again much later": ([*bad(3, ["a"]), *bad(200, ["a"])], [("nonfinite", 3, None), ("nonfinite", 200, None)]),
    "no norms in a line of extras": ([step(0), {"t": "tensors", "i": 0, "norm": None, "max": [1.0, 1.0]}], []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_one_event(name):
    lines, expected = CASES[name]
    assert [(event["kind"], event["i"], event.get("value")) for event in told(lines)] == expected


def test_a_skipped_step_is_a_warning():
    assert [event["severity"] for event in told(bad(3, ["a"], skipped=True))] == ["warning"]


def test_an_event_has_what_a_person_needs(tmp_path):
    with RecordWriter(tmp_path / "run.jsonl") as writer:
        writer.write("meta", params=[])
        judge = Judge({})
        for i in range(360):
            for line in judge.follow({"t": "step", "i": i, "norm": 1.0 if i < 300 else 50.0, "optimizer": 1}):
                writer.write(line.pop("t"), **line)
    (event,) = read_record(tmp_path / "run.jsonl").events
    assert event.keys() == {"t", "i", "kind", "severity", "message", "advice", "value", "confidence", "optimizer"}
    assert (event["severity"], event["optimizer"]) == ("error", 1)


def test_a_judge_that_fails_takes_no_line_with_it(monkeypatch):
    judge = Judge({})
    monkeypatch.setattr(judge._monitor, "see", lambda line: 1 / 0)
    lines = [line for i in range(3) for line in judge.follow(step(i))]
    assert [line["t"] for line in lines] == ["step", "event", "step", "step"]
    assert "ZeroDivisionError" in lines[1]["message"]


def train(model, optimizer):
    for i in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        if i in (2, 3):
            model.bias.grad.fill_(math.inf)
        optimizer.step()


def observed(path):
    model = nn.Linear(3, 1)
    optimizer, observer = torch.optim.SGD(model.parameters(), lr=0.0), Observer(path, {}, every=1)
    with listening(observer):
        train(model, optimizer)
    observer.close(0, False)


def monitored(path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=path, model=model, every=1):
        train(model, optimizer)


@pytest.mark.parametrize("watch", [observed, monitored])
def test_a_record_names_the_culprit_once_and_so_does_the_report(watch, tmp_path):
    watch(tmp_path / "run.jsonl")
    record = read_record(tmp_path / "run.jsonl")
    assert [(event["kind"], event["i"], event["params"]) for event in record.events] == [("nonfinite", 2, ["bias"])]
    (found,) = findings(record)
    assert (found.kind, found.params) == ("nonfinite", ("bias",))
    assert untold(record.events, findings(record)) == []


def test_events_that_no_finding_tells_stay():
    record = make_record(steps=steps_of([1.0] * 9), events=[{"t": "event", "i": 1, "kind": "amp_skip"}])
    assert untold(record.events, findings(record)) == record.events


@pytest.mark.parametrize(("end", "words"), [
    ({"t": "end", "steps": 0, "clips": 12}, "Clip calls were seen (12), but no step of a torch.optim optimizer"),
    ({"t": "end", "steps": 0}, "No step of a torch.optim optimizer was seen"),
])  # fmt: skip
def test_a_script_that_steps_by_hand_is_told_so(end, words):
    assert words in text_summary(make_record(steps=[], end=end))


def test_clips_of_a_script_that_steps_by_hand_are_counted(tmp_path):
    p, observer = nn.Parameter(torch.ones(2)), Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        for _ in range(3):
            p.grad = torch.ones(2)
            nn.utils.clip_grad_norm_([p], 1.0)
    observer.close(0, False)
    assert read_record(observer.path).end["clips"] == 3


def test_a_disabled_scaler_is_left_alone(tmp_path):
    observer = Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        torch.amp.GradScaler("cpu", enabled=False).update()
    observer.close(0, False)
    assert read_record(observer.path).events == []


def test_no_minus_zero_in_a_record(tmp_path):
    with RecordWriter(tmp_path / "run.jsonl") as writer:
        writer.write("tensors", i=0, norm=[-0.0, 1.0], max=-0.0)
    assert "-0" not in (tmp_path / "run.jsonl").read_text(encoding="utf-8")


def test_the_text_says_what_is_only_likely():
    steps = [one | {"loss": 1.0 if one["i"] < 300 else 9.0} for one in steps_of([1.0] * 600)]
    text = text_summary(make_record(steps=steps))
    assert "findings_1_kind: diverging_loss\n" in text
    assert "findings_1_confidence: medium\n" in text
