"""Whom `SpikeRecovery` blames for a spike, and the evidence that it writes."""

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard import SpikeRecovery
from gradguard.resilience import BadSamples, Culprit, MicroBatch
from gradguard.resilience.culprit import to_leave_out
from gradguard.resilience.evidence import read_evidence
from gradguard.resilience.step_replay import replay_step

USUAL, SPIKE = 1.0, 20.0


def resilient(detection_delay=0, **options):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    detector = gg.SpikeDetector(warmup=8, window=16, cap=6, alone=1)
    options = {"snapshot_every": 10, "bad_samples": BadSamples(), **options}
    return (
        model,
        optimizer,
        SpikeRecovery(
            model, optimizer, gg.ClipByGlobalNorm(1.0), detector=detector, detection_delay=detection_delay, **options
        ),
    )


def loss_of(model, x):
    return (x * (1 + model.weight.square().sum() * 0.1)).mean()


def step(model, optimizer, resilience, sizes, number):
    """A step of some micro-batches; sample ids are 100 step + micro-batch."""
    optimizer.zero_grad()
    for k, size in enumerate(sizes):
        x = torch.tensor([size])
        resilience.batch([100 * number + k], x)
        resilience.record_loss(loss_of(model, x)).backward()
    optimizer.step()
    return resilience.step()


def test_the_micro_batch_that_stands_out_is_named_and_no_other():
    model, optimizer, resilience = resilient()
    for number in range(1, 21):
        step(model, optimizer, resilience, [USUAL, USUAL, USUAL], number)
    event = step(model, optimizer, resilience, [USUAL, 60.0, USUAL], 21)
    assert (event.what, event.ids, event.rank) == ("spike", (2101,), 0)
    assert str(event).endswith("skipped; samples 2101 of rank 0")
    assert [(one.id, one.step, one.rank) for one in resilience.bad_samples] == [(2101, 21, 0)]


def test_where_all_stand_out_the_whole_step_is_left_out():
    model, optimizer, resilience = resilient()
    for number in range(1, 21):
        step(model, optimizer, resilience, [USUAL, USUAL], number)
    event = step(model, optimizer, resilience, [SPIKE, SPIKE], 21)
    assert (event.ids, event.rank) == ((2100, 2101), None)
    assert {one.id for one in resilience.bad_samples} == {2100, 2101}


def test_of_a_burst_the_good_steps_before_the_trial_are_not_blamed():
    model, optimizer, resilience = resilient()
    for number in range(1, 61):
        step(model, optimizer, resilience, [SPIKE if 21 <= number <= 30 else USUAL, USUAL, USUAL], number)
    event = resilience.events[-1]
    assert (event.action, event.rank) == ("rolled back", 0)
    assert event.ids == tuple(100 * number for number in range(21, 31))
    assert {one.id for one in resilience.bad_samples} == {*event.ids}


def batch(number, loss=1.0):
    return MicroBatch(7, 0, number, (number,), loss)


TWO = (batch(0), batch(1))
TABLE = {
    "one is blamed": ([(TWO[:1], (9.0, 0.0))], [0], []),
    "most stand out": ([((), (9.0, 8.0))], [], [0, 1]),
    "none stands out": ([((), (1.0, 0.0))], [], [0, 1]),
    "nothing is known": ([((), (None, None))], [], [0, 1]),
    "none beside one that is blamed": ([(TWO[1:], (0.0, 9.0)), ((), (1.0, 0.0))], [1], []),
    "most beside one that is blamed": ([(TWO[1:], (0.0, 9.0)), ((), (9.0, 9.0))], [1], [0, 1]),
    "no step is remembered": ([], [], []),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_left_out_of_a_burst(name):
    culprits, blamed, unclear = TABLE[name]
    found = to_leave_out([Culprit(7, who, scores, TWO, "") for who, scores in culprits])
    assert [[one.number for one in part] for part in found] == [blamed, unclear]


def for_replay():
    model = nn.Linear(1, 1, bias=False)
    return model, lambda x: loss_of(model, x)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_burst_leaves_one_file_which_can_be_replayed(tmp_path, lag):
    model, optimizer, resilience = resilient(lag, evidence=tmp_path / "new")
    for number in range(1, 61):
        size = SPIKE if 41 <= number <= 44 else USUAL + number % 7 / 100
        step(model, optimizer, resilience, [size], number)
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "spike-41.pt"
    found = read_evidence(file)
    assert [one.ids for one in found.suspects] == [(4100,)]
    assert len(found.states) == 2
    report = replay_step(file, f"{__name__}:for_replay")
    assert (report.verdict, report.cause) == ("PASS", "data"), str(report)


def test_the_weights_of_the_spike_are_those_before_it(tmp_path):
    model, optimizer, resilience = resilient(evidence=tmp_path)
    for number in range(1, 41):
        step(model, optimizer, resilience, [USUAL], number)
    before = model.weight.detach().clone()
    step(model, optimizer, resilience, [SPIKE], 41)
    states = read_evidence(tmp_path / "spike-41.pt").states
    assert torch.equal(states.pop(41)["weight"], before)
    (older,) = states
    assert older <= 41 - 6  # a snapshot's, from before the detection delay
    assert not torch.equal(states[older]["weight"], before)


def test_what_cannot_be_written_is_a_warning_and_no_end(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    model, optimizer, resilience = resilient(evidence=tmp_path / "file")
    for number in range(1, 21):
        step(model, optimizer, resilience, [USUAL], number)
    with pytest.warns(RuntimeWarning, match="no evidence of step 21 was written: "):
        event = step(model, optimizer, resilience, [SPIKE], 21)
    assert event.action == "skipped"
    assert step(model, optimizer, resilience, [USUAL], 22) is None


def test_batches_that_were_not_told_are_a_warning(tmp_path):
    model, optimizer, resilience = resilient(evidence=tmp_path)
    for _ in range(20):
        optimizer.zero_grad()
        resilience.record_loss(loss_of(model, torch.ones(1))).backward()
        optimizer.step()
        resilience.step()
    resilience.record_loss(loss_of(model, 20 * torch.ones(1))).backward()
    optimizer.step()
    with pytest.warns(RuntimeWarning, match=r"was not kept"):
        resilience.step()
    assert [*tmp_path.iterdir()] == []


def test_a_snapshot_tells_its_weights(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    snapshot = gg.Snapshot(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(gg.errors.InvalidValueError, match="call take"):
        snapshot.weights()
    snapshot.take()
    then = {name: one.clone() for name, one in model.state_dict().items()}
    with torch.no_grad():
        for one in model.state_dict().values():
            one.add_(1)
    torch.testing.assert_close(snapshot.weights(), then, rtol=0, atol=0)
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(gg.errors.InvalidValueError, match=r"0\.weight is no longer that of the snapshot"):
        snapshot.weights()
