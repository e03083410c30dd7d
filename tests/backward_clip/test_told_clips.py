"""What an error clip with statistics tells who listens: rule, threshold, how many of how many elements it changed."""

import json

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.listeners import Listener, announce, listen

X = torch.linspace(-2, 2, 20).view(5, 4)


class Told(Listener):
    """Keeps the events."""

    def __init__(self):
        self.events, self.announced = [], 0

    def on_clip(self, call, parameters):
        self.announced += 1

    def on_clipped(self, event):
        self.events.append(event)

    def numbers(self):
        return [(e.rule, e.threshold, int(e.clipped_elements), e.elements) for e in self.events]


@pytest.fixture
def told():
    listener = Told()
    end = listen(listener)
    yield listener
    end()


class HalveAbove(gg.BaseErrorClip):
    thresholds = ("bound",)

    def __init__(self, bound):
        self.bound = bound

    def clip(self, grad):
        return torch.where(grad.abs() > self.bound, grad / 2, grad)


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def totals(stats):
    rows = stats.rows()
    return sum(int(row.clipped) for row in rows), sum(row.elements for row in rows)


RULES = {
    "value": (gg.ErrorClipByValue(1e-2), "ErrorClipByValue", 1e-2),
    "value, two bounds": (gg.ErrorClipByValue(1e-2, -1e-3), "ErrorClipByValue", None),
    "norm": (gg.ErrorClipByNorm(0.05), "ErrorClipByNorm", 0.05),
    "sample norm": (gg.rules.ErrorClipBySampleNorm(0.01), "ErrorClipBySampleNorm", 0.01),
    "zero above": (gg.rules.ErrorClipZeroAbove(1e-2), "ErrorClipZeroAbove", 1e-2),
    "not finite": (gg.rules.ErrorClipNonfinite("zero"), "ErrorClipNonfinite", None),
    "own": (HalveAbove(1e-2), "HalveAbove", 1e-2),
}


def in_a_block(model, rule, stats):
    loss = model(X).square().mean()
    with gg.error_clip(loss, rule, stats=stats):
        loss.backward()


def attached(model, rule, stats):
    gg.attach_error_clip(model(X).square().mean(), rule, stats=stats).backward()


@pytest.mark.parametrize("clipped", [in_a_block, attached])
@pytest.mark.parametrize(("rule", "name", "threshold"), RULES.values(), ids=RULES)
def test_each_block_tells_what_its_statistics_count(told, clipped, rule, name, threshold):
    stats, model, before = gg.ErrorClipStats(), made(), (0, 0)
    for _ in range(2):
        clipped(model, rule, stats)
        now = totals(stats)
        assert told.numbers()[-1] == (name, threshold, now[0] - before[0], now[1] - before[1])
        before = now
    assert len(told.events) == 2
    assert told.announced == 0
    assert name == "ErrorClipNonfinite" or before[0] > 0
    for event in told.events:
        assert (list(event.parameters), event.norm, event.coefficient, event.skipped) == ([], None, None, False)


def test_counts_on_a_device_are_told_as_a_tensor_of_it(told, monkeypatch):
    from gradguard.backward_clip.statistics import NodeCounts

    def on_device(self, grad, apply, bounds):
        return self._on_device(grad, apply) if self.arrive(grad) else apply(grad)

    monkeypatch.setattr(NodeCounts, "clip", on_device)
    stats = gg.ErrorClipStats()
    in_a_block(made(), gg.ErrorClipByNorm(0.05), stats)
    (event,) = told.events
    assert isinstance(event.clipped_elements, torch.Tensor)
    assert (int(event.clipped_elements), event.elements) == totals(stats)


def test_blocks_that_share_statistics_tell_each_its_own(told):
    stats, model = gg.ErrorClipStats(), made()
    with gg.error_clip(model[4], gg.ErrorClipByNorm(1e-3), stats=stats):
        loss = model(X).square().mean()
        with gg.error_clip(loss, gg.ErrorClipByValue(1e-3), stats=stats):
            loss.backward()
    (inner, outer), counted = told.events, totals(stats)
    assert (inner.rule, outer.rule) == ("ErrorClipByValue", "ErrorClipByNorm")
    assert outer.elements == 10  # the output of the last layer
    assert (inner.elements + outer.elements, inner.clipped_elements + outer.clipped_elements) == (
        counted[1],
        counted[0],
    )


def test_a_backward_that_fails_does_not_count_in_the_next(told):
    stats, model = gg.ErrorClipStats(), made()
    hidden = model[:3](X)
    loss = gg.attach_error_clip(model[3:](hidden).square().mean(), gg.ErrorClipByValue(1e-2), stats=stats)

    def fail(grad):
        raise KeyError("no")

    hook = hidden.register_hook(fail)
    with pytest.raises(KeyError, match="no"):
        loss.backward(retain_graph=True)
    hook.remove()
    before = totals(stats)
    told.events.clear()
    loss.backward()
    now = totals(stats)
    assert told.numbers() == [("ErrorClipByValue", 1e-2, now[0] - before[0], now[1] - before[1])]


def test_what_counts_nothing_tells_nothing(told):
    loss = made()(X).square().mean()
    with gg.error_clip(loss, gg.ErrorClipByValue(1e-2)):
        loss.backward()
    with gg.error_clip(made()(X).square().mean(), gg.ErrorClipByValue(1.0), stats=gg.ErrorClipStats()):
        pass  # no backward
    assert told.events == []


@pytest.mark.parametrize(
    "watched", [gg.Monitor, lambda optimizer, path, model: gg.watch(path)], ids=["monitor", "watch"]
)
def test_who_watches_does_not_take_it_for_a_clip_of_the_step(tmp_path, watched):
    model, path = made(), tmp_path / "run.jsonl"
    optimizer, stats = torch.optim.SGD(model.parameters(), lr=0.1), gg.ErrorClipStats()
    with watched(optimizer, path, model=model):
        for _ in range(3):
            optimizer.zero_grad()
            in_a_block(model, gg.ErrorClipByValue(1e-2), stats)
            announce(list(model.parameters()))  # of a clip that raises an error, and so never tells
            in_a_block(model, gg.ErrorClipByValue(1e-2), stats)
            optimizer.step()
    steps = [line for line in map(json.loads, path.read_text().splitlines()) if line["t"] == "step"]
    assert len(steps) == 3
    assert "ErrorClip" not in path.read_text()
