"""`SpikeRecovery`: what it does on which step, told by a table of runs, and what that leaves of the weights."""

import copy

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard import SpikeRecovery
from gradguard.errors import InvalidTypeError, InvalidValueError, SpikeError
from gradguard.resilience import BadSamples
from gradguard.resilience.spike_event import SpikeEvent

CAP, WARMUP, LAG = 6, 8, 2


def network(**options):
    """A layer of one weight whose loss is what the batch says: 1 is usual, 20 is a spike."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = options.pop("optimizer", lambda p: torch.optim.AdamW(p, lr=1e-3))(model.parameters())
    options.setdefault("detector", gg.SpikeDetector(warmup=WARMUP, window=16, cap=CAP, alone=1))
    options.setdefault("snapshot_every", 10)
    return model, optimizer, SpikeRecovery(model, optimizer, gg.ClipByGlobalNorm(1.0), detection_delay=LAG, **options)


def train(model, optimizer, resilience, sizes, first_id=0):
    """Take a step for each size; return the weight after each."""
    weights = []
    for i, size in enumerate(sizes, first_id):
        optimizer.zero_grad()
        resilience.batch([i])
        loss = size * (1 + model.weight.square().sum() * 0.1)
        resilience.record_loss(loss).backward()
        optimizer.step()
        resilience.step()
        weights.append(model.weight.item())
    return weights


def told(resilience):
    return [(e.what, e.action, e.step) for e in resilience.events]


USUAL = [1.0] * 20
SPIKE = 20.0

SKIPPED = [("spike", "skipped", step) for step in range(21, 20 + CAP)]

RUNS = {
    "nothing happens": (USUAL * 3, []),
    "one spike": ([*USUAL, SPIKE, *USUAL], [("spike", "skipped", 21)]),
    "as many as the cap, less one": (
        [*USUAL, *[SPIKE] * (CAP - 1), *USUAL],
        SKIPPED,
    ),
    "a burst": (
        [*USUAL, *[SPIKE] * 10, *USUAL],
        [
            *SKIPPED,
            ("burst", "adopted", 21),
            ("burst", "rolled back", 21),
        ],
    ),
    "a shift": (
        [*USUAL, *[SPIKE] * 100],
        [
            *SKIPPED,
            ("burst", "adopted", 21),
            ("shift", "went on", 21),
        ],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_done_and_when(name):
    sizes, expected = RUNS[name]
    model, optimizer, resilience = network()
    train(model, optimizer, resilience, sizes)
    assert told(resilience) == expected


ADOPTED = [*SKIPPED, ("burst", "adopted", 21)]
GROWN = {  # after how many steps a group comes: what is told of a burst of 10 from step 21 on
    "before the burst": (20, [*ADOPTED, ("burst", "rolled back", 21)]),
    "in the row of spikes": (23, [*ADOPTED, ("burst", "rolled back", 21)]),
    "after the adoption": (30, [*ADOPTED, ("burst", "went on", 21)]),
    "in a trial": (35, [*ADOPTED, ("burst", "rolled back", 21)]),
    "after it": (60, [*ADOPTED, ("burst", "rolled back", 21)]),
}


@pytest.mark.parametrize("name", GROWN)
def test_a_group_that_comes_ends_no_run(name):
    """The trial raised the error of a snapshot that has other groups, and no loop could follow its advice."""
    at, expected = GROWN[name]
    model, optimizer, resilience = network()
    more = nn.Parameter(torch.ones(1))
    sizes = [*USUAL, *[SPIKE] * 10, *USUAL, *USUAL]
    train(model, optimizer, resilience, sizes[:at])
    optimizer.add_param_group({"params": [more]})
    train(model, optimizer, resilience, sizes[at:], first_id=at)
    assert told(resilience) == expected
    train(model, optimizer, resilience, [*USUAL, *USUAL])  # and the next burst is survived with new snapshots
    before = resilience.steps
    train(model, optimizer, resilience, [*[SPIKE] * 10, *USUAL, *USUAL])
    assert told(resilience)[-1] == ("burst", resilience.events[-1].action, before + 1)
    assert resilience.events[-1].action.startswith("rolled back")
    assert resilience.events[-1].to_step > at


def test_a_burst_that_a_group_ends_names_its_own_samples():
    model, optimizer, resilience = network()
    train(model, optimizer, resilience, [*USUAL, *[SPIKE] * 10])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    train(model, optimizer, resilience, [1.0], first_id=30)
    event = resilience.events[-1]
    assert (event.action, event.step, event.ids) == ("went on", 21, (20,))


def test_weights_that_are_tried_when_a_group_comes_stay():
    model, optimizer, resilience = network(optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    weights = train(model, optimizer, resilience, [*USUAL, *[SPIKE] * 10, *USUAL])
    first = next(i for i in range(31, len(weights)) if weights[i] > weights[i - 1])  # back at those from before
    model, optimizer, resilience = network(optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    again = train(model, optimizer, resilience, [*USUAL, *[SPIKE] * 10, *USUAL][: first + 1])
    assert again == weights[: first + 1]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    train(model, optimizer, resilience, [1.0])
    assert told(resilience)[-1] == ("burst", "rolled back", 21)
    assert model.weight.item() < again[-1]  # a step further from there
    assert again[-1] - model.weight.item() < 2e-3


def test_a_skipped_step_changes_no_bit():
    model, optimizer, resilience = network()
    train(model, optimizer, resilience, USUAL)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, resilience, [SPIKE] * (CAP - 1))
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_after_a_burst_the_run_is_the_one_without_it(fused):
    """The weights of the twin that never saw the burst, nor the good steps that a trial took to be sure."""
    make = lambda p: torch.optim.AdamW(p, lr=1e-3, fused=fused)  # noqa: E731
    model, optimizer, resilience = network(optimizer=make)
    train(model, optimizer, resilience, [*USUAL, *[SPIKE] * 10, *USUAL])
    event = resilience.events[-1]
    assert (event.action, event.to_step) == ("rolled back", 20)
    lost = CAP + LAG + 6  # the skipped ones, those until the trial, and what the lag adds before it
    twin, twins, other = network(optimizer=make)
    train(twin, twins, other, [1.0] * (50 - lost))
    assert twin.weight.item() == model.weight.item()
    torch.testing.assert_close(twins.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


def test_a_shift_leaves_the_newer_weights_in_spite_of_the_trials():
    """Steps that a trial takes are lost; no other is."""
    model, optimizer, resilience = network()
    weights = train(model, optimizer, resilience, [*USUAL, *[SPIKE] * 100])
    assert resilience.events[-1].what == "shift"
    assert model.weight.item() < weights[19] - 50 * 1e-3  # AdamW moves by some 1e-3 a step


class TestTheLearningRate:
    """Lower for a while, and no scheduler knows."""

    @pytest.mark.parametrize("tensor", [False, True])
    def test_it_is_lower_for_a_while_after_a_second_roll_back(self, tensor):
        rates = []

        class Noting(torch.optim.AdamW):
            def step(self, closure=None):
                rates.append(float(self.param_groups[0]["lr"]))
                return super().step(closure)

        rate = torch.tensor(1e-3, dtype=torch.float64) if tensor else 1e-3
        model, optimizer, resilience = network(optimizer=lambda p: Noting(p, lr=rate, foreach=False))
        train(model, optimizer, resilience, [*USUAL, *[SPIKE] * 10, *USUAL])
        assert set(rates) == {1e-3}
        train(model, optimizer, resilience, [*[SPIKE] * 10, *USUAL * 5])
        assert resilience.events[-1].action == "rolled back, slowed down"
        assert optimizer.param_groups[0]["lr"] == 1e-3
        slow = [i for i, rate in enumerate(rates) if rate == 1e-3 * resilience.lr_factor]
        assert slow == [*range(slow[0], slow[0] + 64)]
        assert set(rates) == {1e-3, 5e-4}

    def test_a_schedule_ends_where_it_would(self):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        detector = gg.SpikeDetector(warmup=WARMUP, window=16, cap=CAP, alone=1)
        resilience = SpikeRecovery(
            model, optimizer, gg.ClipByGlobalNorm(1e-3), detector=detector, extra_state=[scheduler], detection_delay=LAG
        )
        sizes = [*USUAL, *[SPIKE] * 10, *USUAL]
        for size in sizes:
            train(model, optimizer, resilience, [size])
            scheduler.step()
        assert resilience.events[-1].action == "rolled back"
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9 ** len(sizes))

    def test_a_step_that_raises_does_not_leave_it_low(self):
        class Raising(torch.optim.SGD):
            raises = False

            def step(self, closure=None):
                if self.raises:
                    raise ValueError("no")
                return super().step(closure)

        model, optimizer, resilience = network(optimizer=lambda p: Raising(p, lr=0.5))
        resilience._slow_down.factor = 0.5
        optimizer.raises = True
        with pytest.raises(ValueError, match="no"):
            train(model, optimizer, resilience, [1.0])
        optimizer.raises = False
        train(model, optimizer, resilience, [1.0])
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_burst_upon_burst_ends_with_the_story():
    model, optimizer, resilience = network(budget=1)
    train(model, optimizer, resilience, [*USUAL, *[SPIKE] * 10, *USUAL])
    with pytest.raises(
        SpikeError, match=r"2 roll-backs within 1,000 steps, but budget=1: [\s\S]* step 51: burst .*back"
    ):
        train(model, optimizer, resilience, [*[SPIKE] * 10, *USUAL])
    actions = [e.action for e in resilience.events]
    assert [a for a in actions if "back" in a] == ["rolled back", "rolled back, slowed down"]


def test_gradients_that_stay_nan_are_answered_by_going_back():
    bad = BadSamples()
    model, optimizer, resilience = network(bad_samples=bad)
    train(model, optimizer, resilience, USUAL)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    train(model, optimizer, resilience, USUAL[:19] * 2)
    assert told(resilience) == [("nonfinite", "rolled back", 21)]
    assert resilience.events[0].to_step == 11
    assert model.weight.isfinite().all()
    assert {one.reason for one in bad} == {"nonfinite"}  # no loss and no norm has a score


def test_the_samples_of_what_was_left_out_are_named():
    bad = BadSamples()
    model, optimizer, resilience = network(bad_samples=bad)
    train(model, optimizer, resilience, [*USUAL, SPIKE, *USUAL, *[SPIKE] * 10, *USUAL])
    assert resilience.events[0].ids == (20,)
    assert {*range(41, 51)} <= {*resilience.events[-1].ids}
    assert {20, *range(41, 51)} <= {one.id for one in bad}
    assert not {*range(20), *range(21, 41)} & {one.id for one in bad}


def test_micro_batches_are_one_step():
    model, optimizer, resilience = network()
    for _ in range(3):
        resilience.record_loss(model.weight.square().sum()).backward()
        assert resilience.step() is None
    optimizer.step()
    resilience.step()
    assert (resilience.steps, resilience.batches.step) == (1, 2)


def test_it_acts_at_the_same_lag_however_fast_the_device_is():
    model, optimizer, resilience = network()
    train(model, optimizer, resilience, [*USUAL, SPIKE])
    for _ in range(LAG - 1):
        train(model, optimizer, resilience, [1.0])
        assert resilience.events == []
    train(model, optimizer, resilience, [1.0])
    assert told(resilience) == [("spike", "skipped", 21)]


class TestSnapshots:
    def steps(self, sizes):
        model, optimizer, resilience = network()
        kept = []
        for i, size in enumerate(sizes):
            train(model, optimizer, resilience, [size], i)
            kept.append([one.step for one in resilience._shelf.kept])
        return kept

    def test_the_first_is_there_before_the_first_risk_and_two_are_kept(self):
        kept = self.steps([1.0] * 60)
        assert kept[0] == [1]
        assert all(len(steps) == 2 for steps in kept[10:])
        assert all(steps[-1] - steps[0] >= 10 for steps in kept[10:])

    def test_none_is_taken_while_spikes_are_near(self):
        kept = self.steps([*[1.0] * 20, *[1.0, 1.0, SPIKE] * 10])
        assert all(steps == kept[25] for steps in kept[25:])
        assert kept[25][-1] <= 22

    def test_the_one_of_a_row_that_ends_is_dropped_if_a_step_was_taken_in_it(self):
        kept = self.steps([*[1.0] * 20, SPIKE, SPIKE, *[1.0] * 3])
        assert kept[-1] == [11]  # the row of two ended before the lag did
        kept = self.steps([*[1.0] * 20, SPIKE, SPIKE, SPIKE, *[1.0] * 3])
        assert kept[-1] == [11]


def test_a_run_that_is_resumed_goes_on_counting():
    model, optimizer, resilience = network()
    train(model, optimizer, resilience, [*USUAL, SPIKE, *USUAL])
    state = copy.deepcopy(resilience.state_dict())
    other, its, again = network()
    other.load_state_dict(model.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(state)
    assert (again.steps, again.events) == (resilience.steps, resilience.events)
    rest = [*USUAL, *[SPIKE] * 10, *USUAL]
    assert train(other, its, again, rest, 41) == train(model, optimizer, resilience, rest, 41)
    assert again.events == resilience.events
    with pytest.raises(InvalidValueError, match=r"not the state of a SpikeRecovery: expected .* got \['a'\]"):
        again.load_state_dict({"a": 1})


def test_a_state_whose_events_are_none_changes_nothing():
    model, optimizer, resilience = network()
    train(model, optimizer, resilience, USUAL)
    other = network()[2]
    with pytest.raises(KeyError, match="ids"):
        other.load_state_dict({**resilience.state_dict(), "events": [{}]})
    assert (other.steps, other.guard.steps, other.events) == (0, 0, [])


def test_batches_that_count_other_steps_are_refused():
    model, optimizer, resilience = network()
    train(model, optimizer, resilience, USUAL)
    resilience.batches.load_state_dict({"step": 500})
    with pytest.raises(InvalidValueError, match=r"batches is at step 500 and resilience has taken 20 steps, so events"):
        train(model, optimizer, resilience, USUAL)
    assert resilience.steps == 20


def test_what_is_detached_does_nothing_more():
    model, optimizer, resilience = network()
    train(model, optimizer, resilience, USUAL)
    resilience.detach()
    before = model.weight.clone()
    model.weight.grad = torch.full_like(model.weight, 1e6)
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"lr_factor": 0.0}, InvalidValueError, r"lr_factor=0\.0: expected a number above 0"),
        ({"detection_delay": -1}, InvalidValueError, r"detection_delay=-1"),
        ({"snapshot_every": 0}, InvalidValueError, r"snapshot_every=0"),
        ({"extra_state": [torch.utils.data.DataLoader([1])]}, InvalidTypeError, r"extra_state has a DataLoader: going"),
        (
            {"extra_state": [torch.optim.SGD([torch.ones(1)])]},
            InvalidTypeError,
            r"extra_state has an optimizer, .* Pass one optimizer that steps all",
        ),
    ],
)
def test_arguments_that_cannot_be_meant(options, kind, words):
    model = nn.Linear(1, 1)
    with pytest.raises(kind, match=words):
        SpikeRecovery(model, torch.optim.SGD(model.parameters()), **options)


def test_optimizers_that_no_guard_can_follow_are_refused_in_words():
    """Such as an optimizer of Keras, which has no ``param_groups``."""
    model = nn.Linear(1, 1)
    with pytest.raises(InvalidTypeError, match=r"optimizer is object, whose step\(\) runs no hooks: expected a torch"):
        SpikeRecovery(model, object())
    with pytest.raises(InvalidTypeError, match=r"clipper is the class ClipByMedian: expected a clipper"):
        SpikeRecovery(model, torch.optim.SGD(model.parameters()), gg.ClipByMedian)


class MuonAndAdamW(torch.optim.Optimizer):
    """Several optimizers as one, as docs/resilience.md has it."""

    def __init__(self, matrices, others):
        self.muon, self.adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure=None):
        self.muon.step()
        self.adamw.step()


class InAList(torch.optim.Optimizer):
    """The same, with the optimizers in a list of a dict."""

    def __init__(self, matrices, others):
        self.parts = {"all": [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]}
        super().__init__([group for part in self.parts["all"] for group in part.param_groups], {})

    def step(self, closure=None):
        for part in self.parts["all"]:
            part.step()

    muon, adamw = property(lambda self: self.parts["all"][0]), property(lambda self: self.parts["all"][1])


def muon_run(sizes, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    by_shape = [[p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    optimizer = kind(*by_shape)
    detector = gg.SpikeDetector(warmup=WARMUP, window=16, cap=CAP, alone=1)
    clipper = gg.Groups({"*weight": gg.ClipByGlobalNorm(1.0)}, rest=gg.ClipByGlobalNorm(1.0))
    resilience = SpikeRecovery(model, optimizer, clipper, detector=detector, snapshot_every=10, detection_delay=LAG)
    after = []
    for size in sizes:
        optimizer.zero_grad()
        loss = size * (1 + 0.01 * model(torch.ones(2, 3)).square().mean())
        resilience.record_loss(loss).backward()
        optimizer.step()
        resilience.step()
        state = (model.state_dict(), optimizer.muon.state_dict(), optimizer.adamw.state_dict())
        after.append(copy.deepcopy(state))
    return after, resilience


@pytest.mark.parametrize("kind", [MuonAndAdamW, InAList])
def test_muon_beside_adamw_is_skipped_and_rolled_back_whole(kind):
    after, resilience = muon_run([*USUAL, *[SPIKE] * 10, *USUAL], kind)
    for step in range(20, 20 + CAP - 1):  # skipped
        torch.testing.assert_close(after[step], after[19], rtol=0, atol=0)
    event = resilience.events[-1]
    assert (event.action, event.to_step) == ("rolled back", 20)
    twin, _ = muon_run([1.0] * (50 - CAP - LAG - 6), kind)
    torch.testing.assert_close(after[-1], twin[-1], rtol=0, atol=0)


def test_several_optimizers_are_refused_and_told_of_the_way():
    model = nn.Linear(1, 1)
    both = [torch.optim.SGD([p]) for p in model.parameters()]
    with pytest.raises(
        InvalidTypeError,
        match=r"optimizer is a list, .* Pass one optimizer that steps all of them \(Muon .*`gradguard explain",
    ):
        SpikeRecovery(model, both)


def test_an_event_is_a_sentence():
    event = SpikeEvent(131, "burst", "rolled back, slowed down", "loss", 13.7, (4, 5), to_step=130, rank=0)
    assert str(event) == (
        "step 131: burst (loss 13.7 deviations above the median), rolled back to the weights after step 130, slowed "
        "down; samples 4, 5 of rank 0"
    )
