"""`kind=`: each kind of step is judged by its own past, and by nothing of the others."""

import random

import pytest
import torch

import gradguard as gg
from gradguard import SpikeDetector
from gradguard.errors import InvalidTypeError, InvalidValueError

SIZES = {"a": 1.0, "b": 1000.0, None: 30.0}


class OnDevice(SpikeDetector):
    """Judges on the CPU as on an accelerator."""

    _judge = SpikeDetector._judge_tensors


def on_host(spikes, norm):
    return spikes.judge_numbers([norm], bad=False)


def on_device(spikes, norm):
    norms, bad = torch.tensor([norm], dtype=torch.float64), torch.tensor(False)
    return bool(spikes._observe(*spikes._values(norms, bad)))  # what `judge` does where the host cannot read


WAYS = {"on the host": (SpikeDetector, on_host), "on a device": (OnDevice, on_device)}


def drawn(seed, steps=400):
    """Steps of three kinds in random order: of one of 40, 20 times the usual loss and norm of its kind."""
    rng = random.Random(seed)
    for step in range(steps):
        kind = rng.choice([*SIZES])
        size = SIZES[kind] * rng.lognormvariate(0, 0.05)
        yield kind, size * (20 if step % 40 == 39 else 1), size * (20 if step % 40 == 39 else 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_each_kind_is_judged_as_if_there_were_no_other(way, seed):
    detector, judged = WAYS[way]
    together = gg.SkipSpikes(detector(alone=1))
    apart = {kind: gg.SkipSpikes(SpikeDetector(alone=1)) for kind in SIZES}
    found, expected = [], []
    for kind, loss, norm in drawn(seed):
        together.record_loss(loss, kind=kind)
        found.append(judged(together, norm))
        apart[kind].record_loss(loss)
        expected.append(apart[kind].judge_numbers([norm], bad=False))
    assert found == expected
    assert sum(found) >= 5  # or it proves nothing


def test_without_kinds_the_larger_one_stands_out():
    spikes = gg.SkipSpikes(SpikeDetector(alone=1))
    told = []
    for step in range(200):
        loss = 100.0 if step % 25 == 24 else 1.0 + step % 7 / 100
        spikes.record_loss(loss)
        told.append(spikes.judge_numbers([loss], bad=False))
    assert sum(told) > 2
    kinds = gg.SkipSpikes(SpikeDetector(alone=1))
    for step in range(200):
        loss = 100.0 if step % 25 == 24 else 1.0 + step % 7 / 100
        kinds.record_loss(loss, kind="rare" if loss > 50 else None)
        assert not kinds.judge_numbers([loss], bad=False)


def test_a_step_of_several_kinds_has_a_scale_of_its_own_whatever_their_order():
    spikes = gg.SkipSpikes(SpikeDetector(alone=1))
    for step in range(120):
        both = ["a", "b"] if step % 2 else ["b", "a"]
        for kind in both if step % 3 else ["a"]:
            spikes.record_loss(1000.0 if step % 3 else 1.0, kind=kind)
        assert not spikes.judge_numbers([1.0 + step % 5 / 100], bad=False)
    assert spikes.signal_names(["norm"]) == [
        *("loss", "norm", "loss of a", "norm of a", "loss of a + b", "norm of a + b")
    ]


@pytest.mark.parametrize("cut", [1, 90, 250])
def test_a_run_that_is_resumed_decides_as_the_other(cut):
    whole = gg.SkipSpikes(SpikeDetector(alone=1))
    resumed = gg.SkipSpikes(SpikeDetector(alone=1))
    for step, (kind, loss, norm) in enumerate(drawn(7)):
        whole.record_loss(loss, kind=kind)
        expected = whole.judge_numbers([norm], bad=False)
        resumed.record_loss(loss, kind=kind)
        assert resumed.judge_numbers([norm], bad=False) == expected, step
        if step == cut:
            state, resumed = resumed.state_dict(), gg.SkipSpikes(SpikeDetector(alone=1))
            resumed.load_state_dict(state)
    assert (resumed.seen, resumed.skipped) == (whole.seen, whole.skipped)
    assert whole.seen >= 5


def test_what_is_no_kind_is_refused():
    spikes = gg.SkipSpikes()
    with pytest.raises(InvalidTypeError, match=r"kind=3: expected text, such as the name of a task, got int"):
        spikes.record_loss(1.0, kind=3)
    for number in range(64):
        spikes.record_loss(1.0, kind=f"task {number}")
        spikes.judge_numbers([1.0], bad=False)
    spikes.record_loss(1.0, kind="one more")
    with pytest.raises(InvalidValueError, match=r"kind='one more' would be the 65th kind of step"):
        spikes.judge_numbers([1.0], bad=False)
