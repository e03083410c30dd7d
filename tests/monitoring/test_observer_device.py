"""What an accelerator would see of the observer: no read of a value before its copy has arrived.

Tensors on the meta device have shapes and no values: reading one raises. Copies and their events are ours.
"""

import sys
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from gradguard.monitoring.observe import record_buffer
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.observe.record_copy import AsyncHostCopy
from gradguard.monitoring.observe.step import Event
from gradguard.monitoring.record.file import read_record
from gradguard.script_events import listening

pytestmark = pytest.mark.usefixtures("others_unseen")


@dataclass
class FakeEvent:
    done: bool = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@dataclass
class FakeDevice:
    """Copies that arrive when the test says so, with ``value`` everywhere."""

    value: float = 2.0
    events: list[FakeEvent] = field(default_factory=list)
    copies: list[torch.Tensor] = field(default_factory=list)

    def copy(self, flat: torch.Tensor) -> tuple[torch.Tensor, FakeEvent]:
        assert flat.device.type == "meta"
        self.copies.append(torch.full(flat.shape, -1.0, dtype=torch.float64))
        self.events.append(FakeEvent())
        return self.copies[-1], self.events[-1]

    def arrive(self, k: int) -> None:
        self.copies[k].fill_(self.value)
        self.events[k].done = True


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.record_copy"], "copy_to_host", fake.copy)
    return fake


def test_a_parcel_of_two_devices(device):
    tensors = [torch.tensor([1.0, 3.0]), torch.empty(2, device="meta"), torch.empty((), device="meta")]
    event = Event(0, lambda *_: [], tensors)
    parcel = AsyncHostCopy([event])
    assert not parcel.arrived()
    device.arrive(0)
    assert parcel.arrived()
    [event] = parcel.with_numbers()
    assert event.numbers == [[1.0, 3.0], [2.0, 2.0], 2.0]
    assert len(device.copies) == 1


def train(steps: int, path, device: FakeDevice, each=lambda k: None) -> Observer:
    model = nn.Linear(3, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    observer = Observer(path, {}, every=1)
    with listening(observer):
        for k in range(steps):
            optimizer.zero_grad()
            model(torch.empty(4, 3, device="meta")).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            each(k)
    return observer


def test_steps_are_written_when_their_copy_has_arrived_and_in_order(device, tmp_path, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 4)
    monkeypatch.setattr(record_buffer, "FLUSH_SECONDS", 1e9)
    path, written = tmp_path / "run.jsonl", []

    def each(k: int) -> None:
        if k == 9:
            device.arrive(1)  # the second copy first: its rows wait for those before
        if k == 10:
            written.append(len(read_record(path).steps) if path.stat().st_size else 0)
            device.arrive(0)
        if k == 11:
            written.append(len(read_record(path).steps))

    observer = train(14, path, device, each)
    assert written == [0, 8]
    observer.close(0, False)
    record = read_record(path)
    assert record.events == []
    assert [step["i"] for step in record.steps] == list(range(14))
    assert record.steps[0]["norm"] == pytest.approx(8**0.5)  # two gradients of norm 2
    assert record.steps[0]["coefficient"] == pytest.approx(0.5)  # the clip's own norm is 2 as well
    assert record.steps[0]["loss"] == 2.0
    assert record.tensors[0]["weight"] == [2.0, 2.0]
    assert len(device.copies) == 4  # one for four steps, and one at the end


def test_a_read_would_be_caught(device, tmp_path):
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        float(model.weight.sum())


def test_our_own_thread_leaves_a_device_alone(device, tmp_path, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_SECONDS", 1e9)
    observer = train(1, tmp_path / "run.jsonl", device)
    monkeypatch.setattr(record_buffer, "FLUSH_SECONDS", 0.0)
    observer._buffer.write_late()
    assert device.copies == []
    observer.close(0, False)
    assert len(device.copies) == 1
