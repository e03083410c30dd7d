"""Buffers that a forward writes: after a skipped step they are what they were before it, to the bit."""

import copy

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.state import step_buffers
from gradguard.state.step_buffers import StepBuffers

BAD = {"a spike": 1000.0, "NaN": float("nan")}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class Trained:
    """A network with BatchNorm that takes a step of as many micro-batches as it is told sizes."""

    def __init__(self, micro_batches=1, **options):
        self.model, self.micro_batches = network(), micro_batches
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        detector = gg.SpikeDetector(warmup=8, cap=5, alone=1)
        self.resilience = gg.SpikeRecovery(
            self.model, self.optimizer, gg.ClipByGlobalNorm(1.0), detector=detector, **options
        )

    def step(self, i, size=1.0):
        self.optimizer.zero_grad()
        for part in range(self.micro_batches):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(10 * i + part)) * size
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() / self.micro_batches
            self.resilience.record_loss(loss).backward()
            if part + 1 < self.micro_batches:
                assert self.resilience.step() is None
        self.optimizer.step()
        return self.resilience.step()

    def state(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Whether the host may look at whether a step was skipped; there is no accelerator, so the CPU passes for one."""
    if request.param == "device":
        skipped = gg.Guard.skipped.fget
        monkeypatch.setattr(gg.Guard, "skipped", property(lambda guard: torch.as_tensor(skipped(guard))))
        monkeypatch.setattr(step_buffers, "are_readable", lambda *tensors: False)


@pytest.mark.usefixtures("where")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_run_without_the_bad_batch_has_the_same_statistics(micro_batches, bad):
    ours, twin = Trained(micro_batches), Trained(micro_batches)
    for i in range(20):
        if i == 14:
            before = ours.state()
            ours.step(i, bad)
            same(ours.state(), before)
        else:
            ours.step(i)
            twin.step(i)
    assert ours.resilience.guard.skipped_steps == 1
    same(ours.state(), twin.state())


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("lag", [0, 2])
def test_a_roll_back_gives_back_statistics_from_before_the_burst(lag):
    ours = Trained(detection_delay=lag)
    told, usual = [], 0.0
    for i in range(40):
        event = ours.step(i, 1000.0 if 14 <= i < 23 else 1.0)
        told += [event.action] if event is not None and event.what == "burst" else []
        usual = usual if i >= 14 else max(usual, ours.model[1].running_var.max().item())
    assert told == ["adopted", "rolled back"]
    assert ours.model[1].running_var.max() < 2 * usual


def test_a_state_that_is_loaded_is_not_undone():
    ours, loaded = Trained(), Trained()
    for i in range(3):
        loaded.step(i)
    state = copy.deepcopy(loaded.model.state_dict())
    ours.model.load_state_dict(state)
    ours.step(3, float("nan"))
    same(ours.state(), state)


def test_a_layer_that_comes_later_is_given_back_too():
    ours = Trained()
    ours.step(0)
    new = nn.BatchNorm1d(1)
    ours.model.append(new)
    ours.optimizer.add_param_group({"params": new.parameters()})
    ours.step(1)
    before = ours.state()
    ours.step(2, float("nan"))
    same(ours.state(), before)


class Odd(nn.Module):
    """Writes its buffers in every way: in place, as new tensors, of another shape, none before, none after."""

    def __init__(self):
        super().__init__()
        for name in ("in_place", "replaced", "grows", "goes"):
            self.register_buffer(name, torch.ones(3))
        self.register_buffer("comes", None)
        self.register_buffer("expanded", self.in_place[:1].expand(3))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("whole", torch.arange(4).view(2, 2).t())
        self.register_buffer("constant", torch.ones(2))

    def forward(self):
        self.in_place.mul_(torch.nan)
        self.replaced = self.replaced * torch.nan
        self.grows = torch.cat([self.grows, self.grows])
        self.comes, self.goes = torch.ones(1), None
        self.sparse.mul_(3)
        self.whole.add_(1)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("skipped", [True, False])
def test_buffers_of_every_kind(skipped):
    module = Odd()
    kept = StepBuffers(module)
    for _ in range(2):
        before = {name: None if b is None else b.to_dense().clone() for name, b in module._buffers.items()}
        module()
        after = {name: None if b is None else b.to_dense().clone() for name, b in module._buffers.items()}
        kept.put_back(torch.tensor(skipped))
        expected = before if skipped else after
        for name, live in module._buffers.items():
            assert (live is None) == (expected[name] is None), name
            if live is not None:
                torch.testing.assert_close(live.to_dense(), expected[name], rtol=0, atol=0, equal_nan=True, msg=name)
        kept.keep()


def test_detached_it_holds_nothing():
    ours = Trained()
    ours.step(0)
    ours.resilience.detach()
    ours.model.load_state_dict(ours.model.state_dict())
    assert ours.resilience._buffers._kept == []
