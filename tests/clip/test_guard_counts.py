"""Numbers that a guard reads late: on the device that they come from, which need not be the current one."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from gradguard.clip.guard_counts import LateReader


class Accelerator:
    """Stands in for `torch.cuda`, with copies that land when ``landed`` says so."""

    def __init__(self, capturing):
        self.current, self.events, self.landed = torch.device("cuda:0"), [], False
        if capturing is not None:
            self.is_current_stream_capturing = lambda: capturing

    @contextmanager
    def device(self, wanted):
        before, self.current = self.current, wanted
        yield
        self.current = before

    def event(self, device):
        def record():
            self.events.append((device, self.current))

        return SimpleNamespace(record=record, query=lambda: self.landed)


@pytest.mark.parametrize("capturing", [False, True, None], ids=["runs", "is captured", "has no graphs"])
def test_the_event_stands_behind_the_copy_on_its_own_device(monkeypatch, capturing):
    backend, used, there = Accelerator(capturing), [], torch.device("cuda:1")
    values = SimpleNamespace(is_cpu=False, device=there, shape=(2,), dtype=torch.float32)
    copy = SimpleNamespace(copy_=lambda source, non_blocking: None, tolist=lambda: [3.0, 4.0])
    monkeypatch.setattr(torch, "get_device_module", lambda _: backend)
    monkeypatch.setattr(torch, "Event", backend.event)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: copy)
    reader = LateReader(used.append)
    reader.push(values)
    backend.landed = True
    reader.push(values)
    expected = [(there, there)] * 2 if not capturing else []
    assert backend.events == expected
    assert used == ([[3.0, 4.0]] if not capturing else [])
    assert backend.current == torch.device("cuda:0")


def test_what_lies_on_the_host_is_used_at_once():
    used = []
    LateReader(used.append).push(torch.tensor([1.0, 2.0]))
    assert used == [[1.0, 2.0]]
