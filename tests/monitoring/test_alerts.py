"""`on_finding=` and ``--on-finding``: a fault is told to somebody while the run goes on, and harms nothing."""

import os
import threading

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError
from gradguard.monitoring.judge.health import Finding
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.show.alerts import Alerts

pytestmark = pytest.mark.usefixtures("others_unseen")
LONG = 60.0


def event(i=0, kind="exploding", **more):
    return {"t": "event", "i": i, "kind": kind, "severity": "error", "message": "up", "advice": "down"} | more


def train(steps=12, bad=(5, 6), watched=lambda optimizer, model: None):
    """A training whose gradients hold NaN on some steps; returns the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = watched(optimizer, model)
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        if i in bad:
            model.bias.grad[0] = float("nan")
        optimizer.step()
    if watcher is not None:
        watcher.close()
    return model.state_dict()


def watching(path, **options):
    return lambda optimizer, model: gg.watch(path, **options)


def monitoring(path, **options):
    return lambda optimizer, model: gg.Monitor(optimizer, sink=path, model=model, **options)


WATCHERS = {"watch": watching, "monitor": monitoring}


@pytest.mark.parametrize("watcher", WATCHERS.values(), ids=WATCHERS)
def test_each_fault_is_told_once_with_what_the_record_says_of_it(watcher, tmp_path):
    found, threads, path = [], [], tmp_path / "run.jsonl"

    def tell(finding):
        found.append(finding)
        threads.append(threading.current_thread().name)

    train(watched=watcher(path, on_finding=tell))
    lines = [line for line in read_record(path).events if line["kind"] == "nonfinite"]
    assert [(line["i"], line["params"]) for line in lines] == [(5, ["bias"]), (6, ["weight", "bias"])]
    assert found == [
        Finding("nonfinite", "error", line["message"], line["advice"], line["i"], line["i"], tuple(line["params"]))
        for line in lines
    ]
    assert threads == ["gradguard-findings"] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("watcher", WATCHERS.values(), ids=WATCHERS)
@pytest.mark.parametrize("raised", [ValueError("no network"), SystemExit(3), KeyboardInterrupt()])
def test_what_it_raises_is_one_event_and_changes_nothing(raised, watcher, tmp_path):
    def tell(finding):
        calls.append(finding.last_step)
        raise raised

    calls, path = [], tmp_path / "run.jsonl"
    weights = train(300, (5, 200), watched=watcher(path, on_finding=tell))
    torch.testing.assert_close(weights, train(300, (5, 200)), rtol=0, atol=0, equal_nan=True)
    record = read_record(path)
    (failed,) = [line for line in record.events if line["kind"] == "on_finding_failed"]
    assert calls[0] == 5
    assert len(calls) >= 2
    assert failed["message"] == f"on_finding raised {type(raised).__name__}: {raised}"
    assert record.end is not None
    assert len(record.steps) == 300


@pytest.mark.parametrize("watcher", WATCHERS.values(), ids=WATCHERS)
def test_only_rank_0_tells(watcher, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(watched=watcher(tmp_path / "run.jsonl", on_finding=pytest.fail))


@pytest.mark.parametrize("watcher", WATCHERS.values(), ids=WATCHERS)
def test_a_forked_child_tells_nothing(watcher, tmp_path):
    told = tmp_path / "told"

    def train_in_child(optimizer, model):
        watcher_of_parent = watcher(tmp_path / "run.jsonl", on_finding=lambda finding: told.touch())(optimizer, model)
        child = os.fork()
        if child == 0:
            for _ in range(60):
                model.weight.grad = torch.full_like(model.weight, float("nan"))
                optimizer.step()
            os._exit(0)
        os.waitpid(child, 0)
        return watcher_of_parent

    train(bad=(), watched=train_in_child)
    assert not told.exists()


def test_what_is_no_function_is_refused(tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(InvalidTypeError, match="on_finding is str: expected a function of one argument"):
        gg.watch(tmp_path, on_finding="print")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="on_finding is int: expected a function of one argument"):
        gg.Monitor(optimizer, sink=[], on_finding=3)  # type: ignore[arg-type]


# --- the thread -------------------------------------------------------------------------------------------------------


def test_telling_never_waits_and_keeps_the_order():
    goes_on, told = threading.Event(), []
    alerts = Alerts(lambda found: goes_on.wait(LONG) and told.append(found.first_step), pytest.fail)
    for i in range(20):
        alerts.tell(event(i))
    assert told == []
    goes_on.set()
    alerts.close(LONG)
    assert told == list(range(20))


@pytest.mark.parametrize("kind", ["amp_skip", "observer_failed", "on_finding_failed"])
def test_what_is_no_finding_is_not_told(kind):
    alerts = Alerts(pytest.fail, pytest.fail)
    alerts.tell({"t": "step", "i": 1})
    alerts.tell(event(kind=kind))
    alerts.close()


def test_the_end_waits_for_a_while_only():
    goes_on, failed = threading.Event(), []
    alerts = Alerts(lambda found: goes_on.wait(LONG), failed.append)
    alerts.tell(event(7))
    alerts.close(0.01)
    goes_on.set()
    assert [(line["kind"], line["i"]) for line in failed] == [("on_finding_failed", 7)]
    assert "had not returned 0.01 s after the end of the run" in failed[0]["message"]


def test_a_function_may_close_the_watch_itself(tmp_path):
    watches = []

    def watched(optimizer, model):
        watches.append(gg.watch(tmp_path / "run.jsonl", on_finding=lambda found: watches[0].close()))
        return watches[0]

    train(steps=200, watched=watched)
    assert read_record(tmp_path / "run.jsonl").end is not None


def test_where_no_thread_can_begin_it_is_called_at_once(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    told = []
    alerts = Alerts(told.append, pytest.fail)
    alerts.tell(event(value=float("inf")))
    alerts.close()
    assert [found.value for found in told] == [None]
