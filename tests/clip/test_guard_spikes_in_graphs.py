"""A step that looks for spikes, in a CUDA graph: its replays decide as the plain run, or it is refused in words.

No GPU is needed: a graph is the list of operations that ran while it was recorded, and a replay runs them again on the
same memory, without Python. `test_gpu` has a real one, without spikes.
"""

from contextlib import contextmanager

import pytest
import torch
from test_guard_spikes import accelerator, put, small
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from gradguard.tensors import norms

assert accelerator  # the fixture

SIZES = [1.0] * 10 + [50.0, 1.0, float("nan"), 1.0, 60.0, 70.0, 80.0, 75.0, 80.0, 1.0]
LOSSES = [1.0, 1.1, 0.9, 1.0, 1.1, 1.0, 1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 30.0] + [1.0] * 8


class Graph(TorchDispatchMode):
    """Records operations and runs them again: what one returned is written where it was."""

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ != "_local_scalar_dense", "the host has read a number"
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self._calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old is not new and old.data_ptr() != new.data_ptr():
                    assert old.shape == new.shape, (func, args)
                    old.copy_(new)


@contextmanager
def recording():
    """Let what runs inside believe that a CUDA graph is recorded; yield it."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ("spikes.skip", "resilience.spike_recovery", "tensors.host_copy"):
            patch.setattr(f"gradguard.{place}.is_captured", lambda device: True)
        with Graph() as graph:
            yield graph


class Run:
    """A fused optimizer whose gradients and loss are written to the same memory at each step."""

    def __init__(self, clipper):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05, fused=True)
        self.guard = gg.Guard(self.optimizer, clipper, spikes=small(), max_consecutive_skips=None)
        self.loss = torch.zeros((), dtype=torch.float64)
        self.fill(0)
        for p in self.net.parameters():
            p.grad = p.grad.clone()

    def fill(self, step):
        static = [p.grad for p in self.net.parameters()]
        put(self.net, step, SIZES[step])
        for p, grad in zip(self.net.parameters(), static, strict=True):
            if grad is not None:
                p.grad = grad.copy_(p.grad)
        self.loss.fill_(LOSSES[step])

    def step(self):
        self.guard.record_loss(self.loss)
        self.optimizer.step()

    def now(self):
        state = [v.clone() for s in self.optimizer.state.values() for v in s.values()]
        detector = self.guard.spikes.detector.state_dict()
        return [p.detach().clone() for p in self.net.parameters()], state, detector, self.guard.clipper.state_dict()

    def told(self):
        return self.guard.last_skip, self.guard.skipped_steps, self.guard.spikes.seen


CLIPPERS = {"global norm": lambda: gg.ClipByGlobalNorm(0.5), "median": lambda: gg.ClipByMedian(warmup=2)}


@pytest.fixture
def device(accelerator, monkeypatch):
    """The CPU passes for a device, for losses too."""
    monkeypatch.setattr("gradguard.spikes.skip.are_readable", lambda *tensors: False)
    on_device = lambda values, p: norms._device_norms(values, p, torch.device("cpu"))  # noqa: E731
    monkeypatch.setattr(norms, "_host_norms", on_device)
    monkeypatch.setattr("gradguard.clip.guard_counts.LateReader.push", lambda self, values: None)


@pytest.mark.usefixtures("device", "without_kernels")  # which no graph records: a step inside one adds up as without
@pytest.mark.parametrize("make", CLIPPERS.values(), ids=CLIPPERS)
def test_replays_decide_as_the_plain_run(make):
    plain, recorded, graph = Run(make()), Run(make()), None
    reasons = []
    for step in range(len(SIZES)):
        for run in (plain, recorded):
            run.fill(step)
        plain.step()
        if step < 2:  # the memory is made
            recorded.step()
        elif step == 2:
            with recording() as graph:
                recorded.step()
        else:
            graph.replay()
        torch.testing.assert_close(recorded.now(), plain.now(), rtol=0, atol=0, equal_nan=True)
        assert recorded.told() == plain.told()
        reasons.append(plain.told()[0])
    assert reasons.count("spike") >= 4
    assert "nonfinite" in reasons
    assert reasons[-1] is None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            "outside",
            r"the step is recorded .* but the loss is not: .*as a tensor on the device, inside torch.cuda.graph",
        ),
        ("as a number", r"the step is recorded in a CUDA graph but the loss is not"),
    ],
)
def test_a_loss_that_replays_would_not_see_is_refused(told, words):
    run = Run(gg.ClipByGlobalNorm(0.5))
    run.step()
    if told == "outside":
        run.guard.record_loss(run.loss)
    with recording():
        if told == "as a number":
            run.guard.record_loss(1.0)
        with pytest.raises(UnsupportedGradientError, match=words):
            run.optimizer.step()


@pytest.mark.usefixtures("device")
def test_a_loss_in_a_graph_without_the_step_is_refused():
    run = Run(gg.ClipByGlobalNorm(0.5))
    run.step()
    with recording() as graph:
        run.guard.record_loss(run.loss)
    graph.replay()
    with pytest.raises(
        UnsupportedGradientError, match=r"the loss is recorded .* the step is not: .* after each replay"
    ):
        run.optimizer.step()


@pytest.mark.usefixtures("device")
def test_without_a_loss_the_norm_decides():
    run = Run(gg.ClipByGlobalNorm(0.5))
    for step in range(8):
        run.fill(step)
        run.optimizer.step()
    with recording() as graph:
        run.optimizer.step()
    run.fill(10)
    graph.replay()
    assert run.told() == ("spike", 1, 1)


@pytest.mark.usefixtures("device")
def test_resilience_is_refused():
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    resilience = gg.SpikeRecovery(net, optimizer)
    put(net, 0)
    optimizer.step()
    resilience.step()
    with recording(), pytest.raises(UnsupportedGradientError, match="SpikeRecovery counts steps on the host"):
        optimizer.step()
