"""What `SpikeRecovery` did stands in the record, the report's summary, JSON and dashboards, and costs what it says."""

import json

import pytest
import torch
from synthetic import make_record, steps_of

import gradguard as gg
from gradguard.listeners import Listener, RecoveryEvent, tell_of
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.recoveries import recoveries
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.show.report import json_summary, text_summary
from gradguard.monitoring.show.sinks.sink import DashboardWindow
from gradguard.script_events import listening

USUAL, SPIKES = [1.0] * 20, [20.0] * 10


def train(sizes, watch, **options):
    """Train on batches whose loss is what the list says; return what was done."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    detector = gg.SpikeDetector(warmup=8, window=16, cap=6, alone=1)
    resilience = gg.SpikeRecovery(
        model, optimizer, gg.ClipByGlobalNorm(1.0), detector=detector, detection_delay=2, **options
    )
    with watch(resilience, model):
        for size in sizes:
            optimizer.zero_grad()
            resilience.record_loss(size * (1 + model.weight.square().sum() * 0.1)).backward()
            optimizer.step()
            resilience.step()
    return resilience


def by_monitor(path):
    return lambda resilience, model: gg.Monitor(resilience.guard, path, model=model)


def by_run(path):
    class Watch:
        def __init__(self, *_):
            self.observer = Observer(path, {})
            self.block = listening(self.observer)

        def __enter__(self):
            return self.block.__enter__()

        def __exit__(self, *exception):
            self.block.__exit__(*exception)
            self.observer.close(0, interrupted=False)

    return Watch


COUNTS = ("roll_backs", "slow_downs", "data_shifts", "lost_steps", "longest_recovery")
RUNS = {
    # The weights come from after step 20 and the first trial begins after step 34: 14 steps are gone. The other: six
    # skipped, and three trials of lag + 1 steps.
    "a roll-back": ([*USUAL, *SPIKES, *USUAL], [("burst", None, None), ("rolled_back", 14, 17)], (1, 0, 0, 14, 17)),
    "a shift": ([*USUAL, *SPIKES * 10], [("burst", None, None), ("data_shift", 15, 46)], (0, 0, 1, 15, 46)),
    "two roll-backs": (
        [*USUAL, *SPIKES, *USUAL, *SPIKES, *USUAL],
        [("burst", None, None), ("rolled_back", 14, 17)] * 2,
        (2, 1, 0, 28, 17),
    ),
    "calm": (USUAL * 2, [], None),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("watch", [by_monitor, by_run])
@pytest.mark.parametrize("name", RUNS)
def test_the_record_and_its_summaries_say_what_was_done(name, watch, tmp_path):
    sizes, told, counts = RUNS[name]
    path = tmp_path / "run.jsonl"
    resilience = train(sizes, watch(path), snapshot_every=10)
    record = read_record(path)
    assert record.dropped == 0
    events = [event for event in record.events if event["kind"] in ("burst", "rolled_back", "data_shift")]
    assert [(event["kind"], event.get("lost"), event.get("recovery")) for event in events] == told
    ended = [event for event in resilience.events if event.recovery is not None]
    assert [event["i"] + 1 for event in events if "recovery" in event] == [e.step + e.recovery for e in ended]
    found = recoveries(record)
    expected = None if counts is None else dict(zip(COUNTS, counts, strict=True))
    assert json.loads(json_summary([record]))["recovery"] == expected
    if counts is None:
        assert found is None
    else:
        assert verdict(record).sentence.endswith(str(found))
        assert f"recovery_lost_steps: {found.lost_steps}" in text_summary(record).splitlines()


def test_what_was_lost_is_what_the_weights_lack(tmp_path):
    """A run without the lost steps, and without the burst, has the same weights."""
    lost = train(RUNS["a roll-back"][0], by_monitor(tmp_path / "a.jsonl"), snapshot_every=10)
    (event,) = [event for event in lost.events if event.lost and event.what == "burst"]
    twin = train([1.0] * (50 - event.lost), by_monitor(tmp_path / "b.jsonl"), snapshot_every=10)
    one, other = (run.guard.optimizer.param_groups[0]["params"][0].item() for run in (lost, twin))
    assert one == other


WORDS = {
    "one": ([{"kind": "rolled_back", "lost": 14, "recovery": 16}],
        "The run went back to older weights 1 time. That cost 14 steps; the longest recovery took 16 steps."),
    "all": ([{"kind": "rolled_back", "lost": 1, "recovery": 9}, {"kind": "rolled_back", "lost": 1000,
        "recovery": 2, "slowed_down": True}, {"kind": "data_shift", "lost": 3, "recovery": 5}],
        "The run went back to older weights 2 times (after 1 of them with a lower learning rate) and treated 1 burst "
        "of spikes as a change of the data. That cost 1,004 steps; the longest recovery took 9 steps."),
    "open": ([{"kind": "burst"}], "A burst of spikes was accepted as the new level of norms, and the record "
        "ends before it was over."),
    "no snapshot": ([{"kind": "burst", "lost": 6}], "A burst of spikes was accepted as the new level of "
        "norms, which cost 6 steps."),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_it_is_told_in_words(name):
    events, words = WORDS[name]
    record = make_record(steps=steps_of([1.0] * 30), events=[{"t": "event", "i": 20, **event} for event in events])
    assert str(recoveries(record)) == words


def test_records_without_them_read_as_before():
    events = [{"t": "event", "i": 20, "kind": "amp_skip", "severity": "info"}]
    record = make_record(steps=steps_of([1.0] * 30), events=events)
    assert verdict(record).recovery is None
    assert verdict(record).sentence == verdict(make_record(steps=steps_of([1.0] * 30))).sentence


def test_what_was_logged_after_the_step_belongs_to_it(tmp_path):
    """A monitor waits with its newest step; what was done about it comes behind."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    monitor = gg.Monitor(optimizer, tmp_path / "run.jsonl", model=layer)
    for i in range(3):
        layer(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        tell_of(Listener.on_recover, RecoveryEvent(optimizer, "burst", "adopted"))
        tell_of(Listener.on_recover, RecoveryEvent(torch.optim.SGD(layer.parameters()), "burst", "another's"))
        monitor.log(loss=float(i))
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["loss"] for line in lines if line["t"] == "step"] == [0.0, 1.0, 2.0]
    assert [line["i"] for line in lines if line.get("kind") == "burst"] == [0, 1, 2]


def test_a_dashboard_gets_the_number_of_roll_backs():
    window = DashboardWindow()
    window.add({"t": "step", "i": 0, "norm": 1.0})
    assert "roll_backs" not in window.scalars()
    window.add({"t": "event", "i": 0, "kind": "rolled_back"})
    assert window.scalars()["roll_backs"] == 1
