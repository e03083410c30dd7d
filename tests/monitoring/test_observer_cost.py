"""What a record says that observing cost: our own time, each second once, and nothing of what the script does."""

import contextlib
import types

import pytest
import torch
from torch import nn

from gradguard import Monitor
from gradguard.monitoring.observe import observer
from gradguard.monitoring.observe.observer import Observer
from gradguard.script_events import listening

COMPILES = 1000.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless somebody moves it on."""
    now = [0.0]
    monkeypatch.setattr(observer, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def observed(optimizer, path):
    seen, block = Observer(path, {}), contextlib.ExitStack()
    block.callback(seen.close, 0, False)
    block.enter_context(listening(seen))
    return seen, block


def monitored(optimizer, path):
    monitor = Monitor(optimizer, sink=path)
    return monitor, contextlib.closing(monitor)


def plain(model, optimizer, scaler, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def with_closure(model, optimizer, scaler, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def scaled(model, optimizer, scaler, x):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.filterwarnings(  # all of the compiler
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:Profiler record function:UserWarning",
)
@pytest.mark.parametrize("watched", [observed, monitored])
@pytest.mark.parametrize("step", [plain, with_closure, scaled])
def test_what_a_script_compiles_is_not_what_observing_costs(step, watched, clock, tmp_path):
    def backend(graph, example_inputs):
        clock[0] += COMPILES
        return graph.forward

    torch.compiler.reset()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    compiled = torch.compile(step, backend=backend)
    watcher, block = watched(optimizer, tmp_path / "run.jsonl")
    with block:
        for _ in range(3):
            compiled(model, optimizer, scaler, torch.ones(3, 4))
        assert watcher.steps == 3
        assert clock[0] >= COMPILES
        assert watcher.overhead == 0
    torch.compiler.reset()


def test_a_call_within_another_one_is_counted_once(clock):
    class Nested(Observer):
        @observer.safely
        def outer(self):
            clock[0] += 1.0
            self.inner()
            self.fails()

        @observer.safely
        def inner(self):
            clock[0] += 10.0

        @observer.safely
        def fails(self):
            clock[0] += 100.0
            raise ZeroDivisionError

    nested = Nested(None, {})
    nested.inner()
    nested.outer()
    assert nested.overhead == 121.0
